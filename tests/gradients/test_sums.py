"""Gradient sums: the same bits in any order, an error within the promised bits, overflow and nan told."""

import math
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.allreduce import create
from torusgd.comm.exact_sum import MOST_ADDENDS, gradient_integers
from torusgd.gradients.float_sum import FloatGradientSum
from torusgd.gradients.integer_sum import HEADROOM, LIMITS, IntegerGradientSum, SumReport, power_of_two_scale
from torusgd.gradients.layout import Slot, lay_out_slots, plan_buckets
from torusgd.gradients.reducer import Channel, Reducer, parameter_slots
from torusgd.models import MODELS

INT32_MAX = LIMITS[torch.int32]
CPU = torch.device("cpu")
SIZES = (5, 3000, 1, 700)
NUMEL, MANY_STEPS, DISTINCT = 512, 20, 64
ERRORS = {2048: 1e-5, 8191: 1e-5, 8192: 1e-5, 65536: 1e-5, MOST_ADDENDS: 1e-4}
"""relative L2 error of the mean, by virtual workers"""


def gradients(workers: int, seed: int, scale: float = 1.0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(n, generator=generator) * scale * 10.0 ** (i - 3) for i, n in enumerate(SIZES)]
        for _ in range(workers)
    ]


def accepted(status: SumReport) -> bool:
    return not status.overflow and not status.nonfinite


def fill(total, workers: list[list[torch.Tensor]]) -> None:
    total.clear()
    for worker in workers:
        for index, bucket in enumerate(total.buckets):
            for slot in range(bucket.first, bucket.stop):
                total.add(index, slot, worker[slot])
            total.end_worker(index)


def messages_of(total, workers: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Of a 'rank' that has these virtual workers."""
    fill(total, workers)
    return [total.message(index).clone() for index in range(len(total.buckets))]


def run(total, by_rank: list[list[list[torch.Tensor]]]):
    """Sums messages of several 'ranks' as an all-reduce would; returns the status and the mean."""
    for index, messages in enumerate(zip(*[messages_of(total, workers) for workers in by_rank], strict=True)):
        total.message(index).copy_(reduce(torch.add, messages))
    status = total.finish().read()
    out = [torch.zeros(n) for n in SIZES]
    if accepted(status):
        total.mean(out, sum(map(len, by_rank)))
    return status, out


def times(factor: float, workers: list[list[torch.Tensor]], slot: int | None = None) -> list[list[torch.Tensor]]:
    """The gradients of all slots, or of one, so many times as large."""
    return [[g * (factor if slot in (None, number) else 1) for number, g in enumerate(w)] for w in workers]


def exact_mean(workers: list[list[torch.Tensor]], slot: int) -> torch.Tensor:
    return torch.stack([w[slot] for w in workers]).double().mean(dim=0)


def exact(workers: int, limit: int = 2048) -> IntegerGradientSum:
    return IntegerGradientSum(plan_buckets(SIZES, limit), workers, CPU)


def measured(total, workers: list[list[torch.Tensor]]):
    total.set_maxima(torch.stack([torch.stack([w[i].abs().max() for w in workers]).max() for i in range(len(SIZES))]))
    return total


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_bits_are_equal_for_any_sharing_and_order(seed: int, workers: int, ranks: int) -> None:
    grads, ranks = gradients(workers, seed), min(ranks, workers)
    _, alone = run(measured(exact(workers), grads), [grads])
    _, shared = run(measured(exact(workers, limit=100), grads), [grads[::-1][r::ranks] for r in range(ranks)])
    assert all(map(torch.equal, alone, shared))


@pytest.mark.parametrize("workers", [1, 12, 600, pytest.param(2048, marks=pytest.mark.slow)])
def test_error_against_float64_is_within_the_promised_bits(workers: int) -> None:
    grads = gradients(workers, seed=1)
    _, mean = run(measured(exact(workers), grads), [grads])
    bits = 31 - math.log2(HEADROOM) - 1 - math.log2(workers)  # the scale is rounded down to a power of two
    for slot, got in enumerate(mean):
        right = exact_mean(grads, slot)
        # Each addend is rounded by half a unit; the unit is max / 2**bits.
        largest = max(float(worker[slot].abs().max()) for worker in grads)
        assert (got.double() - right).abs().max() <= largest * 0.5 / 2**bits + right.abs().max() * 2**-23


def test_growth_within_headroom_is_accepted_beyond_is_told_and_a_refused_step_changes_no_scale() -> None:
    grads = gradients(4, seed=2)
    status, mean = run(measured(exact(4), grads), [times(7.9, grads)])
    assert accepted(status)
    torch.testing.assert_close(mean[1].double(), 7.9 * exact_mean(grads, 1), rtol=1e-5, atol=1e-9)
    total = measured(exact(4), grads)
    before = total.state()
    for grown, overflow in ((times(70, grads, slot=1), [1]), (times(3e9, grads), [0, 1, 2, 3])):  # the last would wrap
        status, _ = run(total, [grown[:2], grown[2:]])
        assert (status.overflow, status.nonfinite) == (overflow, [])
        assert torch.equal(total.state(), before)
    assert all(map(torch.equal, run(total, [grads])[1], run(measured(exact(4), grads), [grads])[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_is_told_by_slot_even_beside_overflow(bad: float) -> None:
    grads = gradients(3, seed=3)
    total = measured(exact(3), grads)
    grads[1][3][17] = bad
    grads[2][0] *= 1e9
    status, _ = run(total, [grads[:1], grads[1:]])
    assert (status.overflow, status.nonfinite) == ([0], [3])


def test_a_zero_gradient_takes_the_largest_scale_and_a_state_restores_scales_with_other_buckets() -> None:
    grads = gradients(2, seed=6)
    for worker in grads:
        worker[2].zero_()
    first = measured(exact(2), grads)
    grads[0][2].fill_(grads[0][3].abs().max().item())
    status, mean = run(first, [grads])
    assert accepted(status)
    assert mean[2].item() == pytest.approx(grads[0][2].item() / 2, rel=1e-6)
    second, following = exact(2, limit=50), gradients(2, seed=8)
    second.load_state(first.state())
    assert all(map(torch.equal, run(first, [following])[1], run(second, [following])[1]))


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_scale_is_the_largest_power_of_two_that_fits(bounds: list[float]) -> None:
    scales = power_of_two_scale(torch.tensor(bounds, dtype=torch.float64), INT32_MAX).tolist()
    largest = max(bounds)
    for bound, scale in zip(bounds, scales, strict=True):
        assert math.frexp(scale)[0] == 0.5
        value = bound or largest
        if value and 2.0**-100 < scale < 2.0**100:
            assert HEADROOM * value * scale <= INT32_MAX < 2 * HEADROOM * value * scale * (1 + 1e-12)


class RoughPowers(TorchDispatchMode):
    """A GPU's library: its powers may be off in the last bits."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        is_power = function.overloadpacket.__name__ in ("pow", "exp2", "exp", "ldexp")
        return result * (1 + 2.0**-22) if is_power else result


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scales_are_powers_of_two_whatever_a_device_makes_of_powers(device: str) -> None:
    exact = [2.0**n for n in range(100, -101, -1)]
    bounds = torch.tensor([0.75 * INT32_MAX / HEADROOM / scale for scale in exact], dtype=torch.float64, device=device)
    with RoughPowers():
        found = power_of_two_scale(bounds, INT32_MAX)
    assert found.tolist() == exact


@pytest.mark.parametrize("scale", [1e-9, 1e4, 1e9])
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16, torch.float32])
def test_float_wires_are_close_and_scaled(wire: torch.dtype, scale: float) -> None:
    grads = gradients(6, seed=9, scale=scale)
    total = FloatGradientSum(plan_buckets(SIZES, 2048), 6, CPU, wire)
    if total.needs_measure:
        measured(total, grads)
    status, mean = run(total, [grads[:2], grads[2:4], grads[4:]])
    assert accepted(status)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[wire]
    for slot in (1, 3):
        expected = exact_mean(grads, slot)
        torch.testing.assert_close(mean[slot].double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_a_wide_bucket_travels_as_float32_beside_16_bit_ones() -> None:
    grads = gradients(6, seed=9)
    layout = plan_buckets(SIZES, 2048)
    narrow, mixed = (
        measured(FloatGradientSum(layout, 6, CPU, torch.float16, wide=wide), grads) for wide in ((), (len(layout) - 1,))
    )
    assert [mixed.message(bucket).dtype for bucket in range(len(layout))] == [
        *[torch.float16] * (len(layout) - 1), torch.float32,
    ]  # fmt: skip
    means = [run(total, [grads[:2], grads[2:4], grads[4:]])[1] for total in (narrow, mixed)]
    for slot in range(len(SIZES)):
        exact = exact_mean(grads, slot)
        errors = [float((mean[slot] - exact).abs().max() / exact.abs().max()) for mean in means]
        if slot < layout[-1].first:
            assert torch.equal(means[0][slot], means[1][slot])
        else:
            assert errors[1] < 1e-6 < errors[0]


def test_batch_norms_gradients_leave_alone_and_groups_are_counted_over_all_tensors() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3))
    slots = parameter_slots(model, wide_norms=True)
    assert [slot.name for slot in slots] == ["3.bias", "3.weight", "0.bias", "0.weight", "1.bias", "1.weight"]
    layout = lay_out_slots(slots, 4.0)
    assert [(b.first, b.stop) for b in layout.buckets] == [(0, 4), (4, 6)]
    assert not any(slot.is_wide for slot in parameter_slots(model))
    # Fujitsu's 3, 21, 57 and 80 of ResNet-50, as published without batch norm's 106, which are one more message.
    with torch.device("meta"):
        slots = parameter_slots(MODELS["resnet50"](classes=1000, channels=3), wide_norms=True)
    for rule in ("cubic", (3, 21, 57)):
        layout = lay_out_slots(slots, rule)
        assert [b.stop - b.first for b in layout.buckets] == [2, 7, 19, 27, 106]
        assert [slot.is_wide for slot in slots] == [False] * 55 + [True] * 106
        assert [slot.tensor.numel() for slot in slots] == [n for b in layout.buckets for n in b.numels]
    # A size holds for the wide ones too.
    wide = lay_out_slots(slots, 0.01).buckets[28:]
    assert len(lay_out_slots(slots, 4.0).buckets[-1].numels) == 106 > max(len(b.numels) for b in wide)


def test_float16_wire_tells_overflow_nonfinite_and_underflow() -> None:
    grads = gradients(2, seed=10)
    wire = plan_buckets(SIZES, 2048)

    def fresh() -> FloatGradientSum:
        return measured(FloatGradientSum(wire, 2, CPU, torch.float16), grads)

    assert run(fresh(), [times(1e3, grads)])[0].overflow == [bucket.first for bucket in wire]
    small = times(1e-15, grads, slot=1)
    for by_rank in ([small], [small[:1], small[1:]]):
        assert run(fresh(), by_rank)[0].underflow == pytest.approx(SIZES[1] / sum(SIZES), rel=1e-3)
    grads[1][1][5] = math.nan
    assert run(fresh(), [grads[:1], grads[1:]])[0].nonfinite == [1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_elements_that_become_zero_are_counted_exactly_on_any_ranks(ranks: int) -> None:
    """Also beyond 65,536, where the count needs its second value."""
    numel, workers = 90_000, 3
    total = IntegerGradientSum(plan_buckets([numel, 7], 10**6), workers, CPU)
    total.set_maxima(torch.tensor([1.0, 0.5]))
    draw = torch.Generator().manual_seed(11)
    large = [torch.randn(numel, generator=draw).div(30).pow(11) for _ in range(workers)]
    grads = [[each, torch.full((7,), 0.5 * number)] for number, each in enumerate(large)]
    large[1][::7] = 0.0
    large[2][::5] = -0.0
    pairs = [pair for worker in grads for pair in zip(worker, total._scales.double(), strict=True)]
    lost = sum(int(((g != 0) & ((g.double() * scale).abs() <= 0.5)).sum()) for g, scale in pairs)
    messages = [messages_of(total, grads[rank::ranks])[0] for rank in range(ranks)]
    total.message(0).copy_(torch.stack(messages).sum(dim=0, dtype=torch.int32))
    assert lost > 2 * 65_536
    assert total.finish().read().underflow == lost / ((numel + 7) * workers)


@pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trouble", [None, "nan", "overflow"])
def test_shards_with_trailers_say_what_whole_messages_say(wire: torch.dtype | None, trouble: str | None) -> None:
    grads, layout = gradients(2, seed=12), plan_buckets(SIZES, 2048)
    one, *ranks = (
        measured(exact(2) if wire is None else FloatGradientSum(layout, 2, CPU, wire), grads) for _ in range(3)
    )
    if trouble == "nan":
        grads[1][1][5] = math.nan
    if trouble == "overflow":
        grads[0][3][7] = grads[1][3][7] = 3e38 if wire == torch.float32 else 1e6
    whole, mean = run(one, [grads[:1], grads[1:]])
    for total, worker in zip(ranks, grads, strict=True):
        fill(total, [worker])
    payloads = [[total.payload(index) for index in range(len(layout))] for total in ranks]
    trailers = [total.trailers() for total in ranks]
    # Each rank has its half of each bucket of the sum, and rubbish in the other.
    sums = [first + second for first, second in zip(*payloads, strict=True)]
    spans = [[(0, n // 2) for n in SIZES], [(n // 2, n) for n in SIZES]]
    found = []
    for total, body, own, rest in zip(ranks, payloads, spans, reversed(spans), strict=True):
        for index, bucket in enumerate(layout):
            body[index].copy_(sums[index])
            for slot, offset in zip(range(bucket.first, bucket.stop), bucket.offsets, strict=True):
                body[index][offset + rest[slot][0] : offset + rest[slot][1]] = -77
        found.append(total.finish(trailers[0] + trailers[1]).read())
        if accepted(found[-1]):
            parts = [torch.zeros(high - low) for low, high in own]
            total.mean(parts, 2, own)
            for part, (low, high), expected in zip(parts, own, mean, strict=True):
                torch.testing.assert_close(part, expected[low:high], rtol=0, atol=0)
        assert [total.scratch(index).shape for index in range(len(layout))] == [(b.length,) for b in layout]
        assert total.scratch(0).dtype == torch.float32
    assert found[0] == found[1]
    assert accepted(found[0]) == accepted(whole)
    assert accepted(whole) == (trouble is None or (trouble == "overflow" and wire == torch.bfloat16))
    assert found[0].nonfinite == whole.nonfinite
    assert bool(found[0].overflow) == bool(whole.overflow)
    torch.testing.assert_close(ranks[0].state(), ranks[1].state(), rtol=0, atol=0)


@pytest.mark.parametrize("by_rank", [[[0, 1]], [[0], [1]]])
def test_a_gradient_that_is_not_finite_leaves_the_measured_maxima_of_the_others(by_rank: list[list[int]]) -> None:
    """On any number of ranks alike; the reducers of several ranks take turns here."""
    assert torch.stack([measured_maxima(workers) for workers in by_rank]).amax(dim=0).tolist() == [5.0]


def measured_maxima(workers: list[int]) -> torch.Tensor:
    gradients_of = [torch.tensor([5.0, 1.0]), torch.tensor([math.nan, 2.0])]
    parameter, seen = torch.nn.Parameter(torch.zeros(2)), list[torch.Tensor]()
    reducer = Reducer(
        [Slot("w", "w", parameter)], "exact", 2, {1: Channel(create("native"))},
        lambda maxima: seen.append(maxima.clone()), rule=4.0,
    )  # fmt: skip

    def backward() -> None:
        for worker in workers:
            reducer.begin_worker(last=worker == workers[-1])
            reducer.add(0, gradients_of[worker])
            reducer.end_worker()

    reducer.reduce(backward)
    return seen[0]


def error_of_step(total: IntegerGradientSum, gradients: torch.Tensor, workers: int) -> float:
    """A step of so many virtual workers that have these gradients in turn; the error of its mean against float64."""
    times, rest = divmod(workers, len(gradients))
    # Ranks with equal gradients have equal messages.
    whole, part = (messages_of(total, [[gradient] for gradient in some])[0] for some in (gradients, gradients[:rest]))
    total.message(0).copy_(times * whole + part)
    status = total.finish().read()
    assert accepted(status), status
    mean = torch.zeros(NUMEL)
    total.mean([mean], workers)
    exact = (times * gradients.double().sum(dim=0) + gradients[:rest].double().sum(dim=0)) / workers
    return float((mean - exact).norm() / exact.norm())


@pytest.mark.parametrize("workers", ERRORS)
def test_the_mean_is_near_that_of_float64_step_after_step(workers: int) -> None:
    draw = torch.Generator().manual_seed(workers)
    mean = torch.randn(NUMEL, generator=draw)

    def gradients(count: int) -> torch.Tensor:
        return mean + 10 * torch.randn(count, NUMEL, generator=draw)

    total = IntegerGradientSum(plan_buckets([NUMEL], NUMEL), workers, CPU)
    total.set_maxima(gradients(DISTINCT).abs().max().reshape(1))
    # Of 32 bits the error is one of rounding, which fewer distinct gradients average less; of 64 it is none.
    fewer = math.sqrt(workers / DISTINCT) if gradient_integers(workers) == torch.int32 else 1.0
    for _ in range(MANY_STEPS):
        assert error_of_step(total, gradients(DISTINCT), workers) <= fewer * ERRORS[workers]
    if gradient_integers(workers) == torch.int32:
        assert error_of_step(total, gradients(workers), workers) <= ERRORS[workers]

"""Triton's kernels, on the GPU that is here or else under Triton's interpreter: the bits of torch's own operators."""

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.sgd import sgd

# Earlier interpreters fuse, and fail on NumPy 2.4; a GPU needs none.
pytest.importorskip("triton", None if torch.cuda.is_available() else "3.9", reason="needs the extra triton")

from torusgd.comm.exact_sum import NARROW
from torusgd.cuda import sums, triton_kernels
from torusgd.cuda.flat_weights import FlatUpdate, Update
from torusgd.cuda.sums import Verdict
from torusgd.data import to_device
from torusgd.gradients.integer_sum import LIMITS
from torusgd.optim import Lars, Sgd
from torusgd.optim.lars import VARIANTS, lars
from torusgd.optim.norms import BLOCK, norms_by_lanes, norms_from_blocks
from torusgd.step.control_vector import add_statistics

pytestmark = [pytest.mark.usefixtures("device"), *([pytest.mark.gpu] if torch.cuda.is_available() else [])]


@pytest.fixture
def device() -> Iterator[torch.device]:
    """New tensors lie where the kernels run."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield device


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


SHAPES = [(5,), (4, 3, 3, 3), (7, 300), (1,)]
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
LENGTH = sum(NUMELS)
SLOTS = [[5, 1500], [3]]
"""elements of those of two buckets"""
WIDTH = 1027
TENSORS = [(BLOCK + 77,), (9, 5), (3,), (1,)]
RATES, DECAYS, PEAK = [0.3, 0.1], [1e-2, 0.0], 3.0


def added(kernels: ModuleType, dtype: torch.dtype, bad: float | None = None) -> tuple[Tensor, Tensor]:
    """Adds gradients of two virtual workers, in the layouts that autograd leaves, with halves of a unit,
    zeros and elements that vanish; the message, and what was found before the second bounds."""
    scales = torch.tensor([2.0**9, 2.0**12, 2.0**10, 2.0**20])
    message = torch.zeros(LENGTH + 2 * len(SHAPES) + 2, dtype=dtype)
    found = torch.zeros(len(SHAPES) + 1, dtype=torch.int32)
    for worker in range(2):
        generator = seeded(worker)
        drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
        drawn[1] = drawn[1].contiguous(memory_format=torch.channels_last)
        drawn[2][:3] = torch.stack([torch.arange(300) / 2**11 - 0.07, torch.full((300,), 1e-30), torch.zeros(300)])
        if bad is not None:
            drawn[2][3, 4] = bad
        kernels.add_gradients(drawn, scales, message, found)
        before = found.clone()
        kernels.add_bounds(found, scales, message, LENGTH, 8.0, 2.0**27)
        assert not found.any()
    return message, before


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [None, float("nan"), -float("inf")])
def test_the_integers_bounds_and_counts_are_those_of_torch(dtype: torch.dtype, bad: float | None) -> None:
    ours, theirs = (added(kernels, dtype, bad) for kernels in (triton_kernels, sums))
    assert bad is not None or all(map(torch.equal, ours, theirs)), "nan has no integer"
    assert torch.equal(ours[0][LENGTH:-2], theirs[0][LENGTH:-2])
    assert ours[0][LENGTH + len(SHAPES) : -2].tolist() == [0, 0, 0 if bad is None else 2, 0]


def test_a_gradient_in_another_layout_is_taken_in_logical_order() -> None:
    """As `torch.autograd.grad` gives those of tensors that a network transposes."""
    scales = torch.tensor([2.0**12])
    gradient = torch.randn(6, 8, generator=seeded(0)).t()
    messages = [torch.zeros(52, dtype=torch.int32) for _ in range(2)]
    for kernels, message in zip((triton_kernels, sums), messages, strict=True):
        kernels.add_gradients([gradient], scales, message, torch.zeros(2, dtype=torch.int32))
    assert messages[1].any()
    assert torch.equal(*messages)


def messages(dtype: torch.dtype) -> list[Tensor]:
    """Of two buckets, in one piece of memory: sums, bounds, counts of what is not finite, elements lost."""
    lengths = [sum(each) + 2 * len(each) + 2 for each in SLOTS]
    drawn = torch.randint(-(2**30), 2**30, (sum(lengths),), generator=seeded(0), dtype=dtype)
    found = list(drawn.split(lengths))
    found[0][1505:] = torch.tensor([2**20 + 1, 2**27, 0, 0, 77, 1])
    found[1][3:] = torch.tensor([0, 0, 5, 3])  # a slot whose gradient was zero
    return found


def control_of(add: Any, value: float) -> Tensor:
    """The sums of a few passes, then the counts."""
    limbs = torch.full((NARROW.rows, WIDTH), 2**62)  # of a step before
    statistics = torch.randn(WIDTH - 1, generator=seeded(1))
    statistics[1025] = value
    for number, factor in enumerate((1.0, -3.7e-9, 2.0**40)):
        add(limbs, statistics * factor, torch.tensor(1.7 * factor), is_first=number == 0)
    return torch.cat([limbs.view(-1), torch.tensor([4, 1, 9])])


@pytest.mark.parametrize("value", [1.0, float("nan"), -float("inf"), 2.0**57, -(2.0**56)])
def test_statistics_have_the_same_limbs(value: float) -> None:
    assert torch.equal(control_of(triton_kernels.add_statistics, value), control_of(add_statistics, value))


def decided(kernels: ModuleType, dtype: torch.dtype, fault: str) -> list[Tensor]:
    """All that a verdict writes."""
    found = messages(dtype)
    if fault == "out of range":
        found[0][1506] = LIMITS[dtype] // 8 + 1
    if fault == "not finite":
        found[1][4] = 1
    given = Verdict(
        trailers=[message[sum(each) :] for message, each in zip(found, SLOTS, strict=True)],
        control=control_of(add_statistics, float("inf") if fault == "statistics" else 1.0),
        ordinary=torch.tensor([4, 1, 8 if fault == "counts" else 9]),
        addends=3, shift=8.0, limit=LIMITS[dtype], elements=1508,
        going=torch.tensor([0.0 if fault == "earlier" else 1.0]),
        bounds=torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64),
        scales=torch.tensor([2.0**9, 2.0**12, 2.0**10]), factors=torch.zeros(3),
        running=torch.randn(WIDTH - 1, generator=seeded(2)), momenta=torch.full((WIDTH - 1,), 0.1),
        report=torch.zeros(sums.REPORT, dtype=torch.float64),
    )  # fmt: skip
    kernels.verdict(given)
    return [given.going, given.bounds, given.scales, given.factors, given.running, given.report]


@pytest.mark.parametrize(("fault", "dtype"), [
    *((fault, torch.int32) for fault in ("", "earlier", "out of range", "not finite", "statistics", "counts")),
    ("", torch.int64),
])  # fmt: skip
def test_the_verdict_and_what_follows_are_the_same(fault: str, dtype: torch.dtype) -> None:
    ours, theirs = (decided(kernels, dtype, fault) for kernels in (triton_kernels, sums))
    assert all(map(torch.equal, ours, theirs))
    assert bool(ours[0]) == (not fault)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_mean_is_the_same(dtype: torch.dtype) -> None:
    payloads = [m[: sum(each)].clone() for m, each in zip(messages(dtype)[::-1], SLOTS[::-1], strict=True)][::-1]
    sizes = [numel for each in SLOTS for numel in each]
    means = [[torch.zeros(numel) for numel in sizes] for _ in range(2)]
    for kernels, out in zip((triton_kernels, sums), means, strict=True):
        kernels.mean(payloads, torch.tensor([0.3, 1e-9, 7.0]), 2.0**-16, out)
    assert all(map(torch.equal, *means))


def drawn(seed: int) -> list[Tensor]:
    generator = seeded(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in TENSORS]
    if seed == 0:
        tensors[1].zero_()  # its ratio is 1 by every variant
    return tensors


def updated(rule: str, going: float, eps: float = 0.0, momentum: float = 0.9) -> tuple[list[Tensor], list[Tensor]]:
    """Two updates by the kernels, of two groups of two tensors: weights and momentum of each tensor."""
    tensors = drawn(0)
    groups = [
        {"params": tensors[mine], "lr": rate, "weight_decay": decay}
        for mine, rate, decay in zip((slice(0, 2), slice(2, 4)), RATES, DECAYS, strict=True)
    ]
    optimizer: Sgd | Lars
    if rule in VARIANTS:
        groups[0]["trust"], groups[1]["trust"] = 0.01, None
        optimizer = Lars(groups, lr=0.3, momentum=momentum, eps=eps, variant=rule, peak_lr=PEAK)
    else:
        optimizer = Sgd(groups, lr=0.3, momentum=momentum, nesterov=rule == "nesterov")
    flat = FlatUpdate(optimizer, tensors)
    for seed in (1, 2):
        flat.write_values()
        given = Update(
            flat.weights, flat.momenta, drawn(seed), torch.tensor([going]), flat._values, flat._offsets,
            *flat.constants(),
        )  # fmt: skip
        triton_kernels.update(given)
    return tensors, [run.view_as(tensor) for run, tensor in zip(flat._runs(flat.momenta), tensors, strict=True)]


def layer_norms(tensors: Sequence[Tensor]) -> Tensor:
    """As `optim.norms` has them on a GPU, on any device."""
    return norms_from_blocks([norms_by_lanes([tensor.reshape(-1)]) for tensor in tensors])


@pytest.mark.parametrize(
    ("rule", "momentum"), [("sgd", 0.9), ("nesterov", 0.9), ("sgd", 0.0), *((variant, 0.9) for variant in VARIANTS)]
)
def test_updates_have_the_bits_of_foreach_and_lars_with_the_norms_of_a_gpu(rule: str, momentum: float) -> None:
    eps = 1e-3 if rule in VARIANTS and VARIANTS[rule].eps else 0.0
    weights, momenta = drawn(0), [torch.zeros(shape) for shape in TENSORS]
    for seed in (1, 2):
        for group, mine in enumerate((slice(0, 2), slice(2, 4))):
            given: Any = (weights[mine], drawn(seed)[mine], momenta[mine])
            how: Any = {"lr": RATES[group], "momentum": momentum, "weight_decay": DECAYS[group], "foreach": True}
            if rule in VARIANTS:
                how |= {"trust": None if group else 0.01, "eps": eps, "variant": rule, "peak_lr": PEAK}
                lars(*given, **how, norms=layer_norms)
            else:
                sgd(*given, **how, dampening=0.0, nesterov=rule == "nesterov", maximize=False)
    for ours, theirs in zip(updated(rule, going=1.0, eps=eps, momentum=momentum), (weights, momenta), strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("rule", ["sgd", "paper"])
def test_a_refused_step_changes_nothing(rule: str) -> None:
    weights, momenta = updated(rule, going=0.0)
    assert all(map(torch.equal, weights, drawn(0)))
    assert not any(buffer.any() for buffer in momenta)


@pytest.mark.parametrize("count", [1, 3, 1024, 2500])
def test_a_layers_norm_is_the_tree_over_all_of_its_blocks(count: int) -> None:
    """By way of a rate: lr * trust * |w| / |g| with |g| = 1."""
    norms = torch.rand(2 * count, generator=seeded(count))
    norms[count:] = 0.0
    norms[count] = 1.0
    values = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    triton_kernels._rates[(1,)](
        values, torch.tensor([[0, count]]), norms, count, THRESHOLD=False, ZERO_IS_PLAIN=True, CLIP=False
    )
    assert values[0, 0] == norms_from_blocks([norms[:count]])[0]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(5, 3, 11, 13), (2, 1, 40, 16), (1, 4, 1, 1), (3, 3, 1, 7)])
def test_every_value_of_an_image_stands_where_torchs_look_up_puts_it(
    shape: tuple[int, int, int, int], memory_format: torch.memory_format
) -> None:
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(1))
    table = torch.randn(shape[1], 256, generator=seeded(2))
    made = [torch.empty(shape, memory_format=memory_format).fill_(torch.nan) for _ in range(2)]
    for kernels, out in zip((triton_kernels, to_device), made, strict=True):
        kernels.look_up(pixels, table, out)
    assert torch.equal(*made)
    assert made[0].is_contiguous(memory_format=memory_format)

"""Triton's update, on a GPU or under its interpreter: the bits of torch's foreach operators and of float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.sgd import sgd

pytest.importorskip("triton", reason="needs the extra triton")

from tests.triton_device import ON_TRITON_DEVICE, seeded

from torusgd.cuda import triton_update
from torusgd.optim.flat import offsets_of, rows_of
from torusgd.optim.lars import VARIANTS, lars
from torusgd.optim.norms import BLOCK, block_norms, norms_from_blocks

pytestmark = ON_TRITON_DEVICE

SHAPES = [(BLOCK + 77,), (9, 5), (3,), (1,)]
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
GROUPS, SCALED = [0, 0, 1, 1], [True, True, False, False]
RATES, DECAYS, TRUSTS, MOMENTUM, PEAK = [0.3, 0.1], [1e-2, 0.0], [0.01, 0.0], 0.9, 3.0


def drawn(seed: int) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def updated(
    rule: str, going: float, eps: float = 0.0, momentum: float = MOMENTUM, is_written: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Two updates by the kernels: weights and momentum of each tensor; or with rates that were written before."""
    *offsets, length = offsets_of(NUMELS)
    flats = torch.zeros(2, length)
    runs = [
        [flat[at : at + numel].view(shape) for at, numel, shape in zip(offsets, NUMELS, SHAPES, strict=True)]
        for flat in flats
    ]
    for weights, given in zip(runs[0], start(), strict=True):
        weights.copy_(given)
    for seed in (1, 2):
        rows = rows_of(GROUPS, SCALED, RATES, DECAYS, TRUSTS, rule, eps, PEAK)
        values = torch.tensor(rows, dtype=torch.float64) if is_written else None
        given = ([0.0, 0.0], [0.0, 0.0]) if is_written else (RATES, DECAYS)
        triton_update.update(
            flats[0], flats[1], drawn(seed), torch.tensor([going]), offsets, GROUPS, SCALED, *given, TRUSTS,
            momentum, rule, eps, PEAK, None, values,
        )  # fmt: skip
    return runs[0], runs[1]


def start() -> list[Tensor]:
    weights = drawn(0)
    weights[1].zero_()  # its ratio is 1 by every variant
    return weights


def own_norms(tensors: Sequence[Tensor]) -> Tensor:
    return norms_from_blocks([triton_update.block_norms([tensor]) for tensor in tensors])


@pytest.mark.parametrize(("rule", "momentum"), [("sgd", MOMENTUM), ("nesterov", MOMENTUM), ("sgd", 0.0)])
def test_sgd_has_the_bits_of_foreach(rule: str, momentum: float) -> None:
    weights, momenta = start(), [torch.zeros(shape) for shape in SHAPES]
    for seed in (1, 2):
        for group, mine in enumerate((slice(0, 2), slice(2, 4))):
            sgd(
                weights[mine], drawn(seed)[mine], list(momenta[mine]), foreach=True, lr=RATES[group],
                weight_decay=DECAYS[group], momentum=momentum, dampening=0.0, nesterov=rule == "nesterov",
                maximize=False,
            )  # fmt: skip
    ours = updated(rule, going=1.0, momentum=momentum)
    assert all(map(torch.equal, ours[0], weights))
    assert all(map(torch.equal, ours[1], momenta))


@pytest.mark.parametrize("variant", VARIANTS)
def test_lars_has_the_bits_of_foreach_with_the_same_norms(variant: str) -> None:
    eps = 1e-3 if VARIANTS[variant].eps else 0.0
    weights, momenta = start(), [torch.zeros(shape) for shape in SHAPES]
    for seed in (1, 2):
        for group, mine in enumerate((slice(0, 2), slice(2, 4))):
            lars(
                weights[mine], drawn(seed)[mine], momenta[mine], lr=RATES[group], momentum=MOMENTUM,
                weight_decay=DECAYS[group], trust=TRUSTS[group] or None, eps=eps, variant=variant, peak_lr=PEAK,
                foreach=True, norms=own_norms,
            )  # fmt: skip
    ours = updated(variant, going=1.0, eps=eps)
    assert all(map(torch.equal, ours[0], weights))
    assert all(map(torch.equal, ours[1], momenta))


@pytest.mark.parametrize("rule", ["nesterov", *VARIANTS])
def test_rates_that_were_written_have_the_bits_of_those_given(rule: str) -> None:
    written, given = (updated(rule, going=1.0, is_written=is_written) for is_written in (True, False))
    for ours, theirs in zip(written, given, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("rule", ["sgd", "paper"])
def test_a_refused_step_changes_nothing(rule: str) -> None:
    weights, momenta = updated(rule, going=0.0)
    assert all(map(torch.equal, weights, start()))
    assert not any(buffer.any() for buffer in momenta)


def test_norms_are_near_the_cpus_and_those_of_their_definition() -> None:
    tensor = drawn(5)[0]
    ours = triton_update.block_norms([tensor]).cpu()
    torch.testing.assert_close(ours, block_norms(tensor.cpu()), rtol=1e-6, atol=0)
    padded = np.zeros(2 * BLOCK)
    padded[: len(tensor)] = tensor.cpu().numpy()
    lanes = np.zeros((2, 256))
    for chunk in range(0, BLOCK, 256):
        lanes += padded.reshape(2, BLOCK)[:, chunk : chunk + 256] ** 2
    while lanes.shape[1] > 1:
        low, high = np.split(lanes, 2, axis=1)
        lanes = low + high
    assert np.array_equal(ours.numpy(), np.sqrt(lanes[:, 0]).astype(np.float32))


def test_shards_have_the_norms_of_the_whole() -> None:
    tensor, other = drawn(6)[:2]
    whole = triton_update.block_norms([other, tensor])
    shards = triton_update.block_norms([tensor[BLOCK:], tensor[:0], tensor[:BLOCK], other])
    assert torch.equal(whole, shards.flip(0))


@pytest.mark.parametrize("count", [1, 3, 1024, 2500])
def test_a_layers_norm_is_the_tree_over_all_of_its_blocks(count: int) -> None:
    """By way of a rate: lr * trust * |w| / |g| with |g| = 1."""
    norms = torch.rand(2 * count, generator=seeded(count))
    norms[count:] = 0.0
    norms[count] = 1.0
    values = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    triton_update._rates[(1,)](
        values, torch.tensor([[0, count]]), norms, count, WIDTH=1024, STAGES=10, THRESHOLD=False, ZERO_IS_PLAIN=True,
        CLIP=False,
    )  # fmt: skip
    assert values[0, 0] == norms_from_blocks([norms[:count]])[0]

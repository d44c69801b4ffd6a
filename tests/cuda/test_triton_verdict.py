"""Triton's kernels of a step, on a GPU or under its interpreter: the bits of torch's own operators."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the extra triton")

from tests.triton_device import ON_TRITON_DEVICE, seeded

from torusgd.comm.exact_sum import NARROW
from torusgd.cuda import operators, triton_verdict
from torusgd.gradients.integer_sum import LIMITS

pytestmark = ON_TRITON_DEVICE

NUMELS = [[5, 1500], [3]]
"""of the slots of two buckets"""
SLOTS, WIDTH = 3, 1027
ADDENDS, SHIFT, ELEMENTS = 3, 8.0, 1508


def messages(dtype: torch.dtype) -> list[Tensor]:
    """Of two buckets, in one piece of memory: sums, bounds, counts of what is not finite, elements lost."""
    lengths = [sum(numels) + 2 * len(numels) + 2 for numels in NUMELS]
    drawn = torch.randint(-(2**30), 2**30, (sum(lengths),), generator=seeded(0), dtype=dtype)
    found = list(drawn.split(lengths))
    found[0][1505:] = torch.tensor([2**20 + 1, 2**27, 0, 0, 77, 1])
    found[1][3:] = torch.tensor([0, 0, 5, 3])  # a slot whose gradient was zero
    return found


def control_of(kernels: ModuleType, statistics: Tensor) -> Tensor:
    """The sums of a few passes, then the counts."""
    sums = torch.full((NARROW.rows, WIDTH), 2**62)  # of a step before
    for number, factor in enumerate((1.0, -3.7e-9, 2.0**40)):
        kernels.add_statistics(sums, statistics * factor, torch.tensor(1.7 * factor), is_first=number == 0)
    return torch.cat([sums.view(-1), torch.tensor([4, 1, 9])])


def statistics() -> Tensor:
    return torch.randn(WIDTH - 1, generator=seeded(1))


@pytest.mark.parametrize("value", [1.0, float("nan"), -float("inf"), 2.0**57, -(2.0**56)])
def test_statistics_have_the_same_limbs(value: float) -> None:
    given = statistics()
    given[1025] = value
    assert torch.equal(control_of(triton_verdict, given), control_of(operators, given))


def decided(kernels: ModuleType, dtype: torch.dtype, fault: str) -> list[Tensor]:
    """All that a verdict writes."""
    found, given = messages(dtype), statistics()
    if fault == "out of range":
        found[0][1506] = LIMITS[dtype] // int(SHIFT) + 1
    if fault == "not finite":
        found[1][4] = 1
    if fault == "statistics":
        given[1025] = float("inf")
    control = control_of(operators, given)
    ordinary = torch.tensor([4, 1, 8 if fault == "counts" else 9])
    written = [
        torch.tensor([0.0 if fault == "earlier" else 1.0]),
        torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64),
        torch.tensor([2.0**9, 2.0**12, 2.0**10]),
        torch.zeros(SLOTS),
        torch.randn(WIDTH - 1, generator=seeded(2)),
    ]
    report = torch.zeros(operators.REPORT, dtype=torch.float64)
    trailers = [message[sum(numels) :] for message, numels in zip(found, NUMELS, strict=True)]
    kernels.verdict(
        trailers, control, ordinary, ADDENDS, SHIFT, LIMITS[dtype], ELEMENTS, *written, torch.full((WIDTH - 1,), 0.1),
        report,
    )  # fmt: skip
    return [*written, report]


@pytest.mark.parametrize("fault", ["", "earlier", "out of range", "not finite", "statistics", "counts"])
def test_the_verdict_and_what_follows_are_the_same(fault: str) -> None:
    ours, theirs = (decided(kernels, torch.int32, fault) for kernels in (triton_verdict, operators))
    assert all(map(torch.equal, ours, theirs))
    assert bool(ours[0]) == (not fault)


def test_the_verdict_on_wide_sums_is_the_same() -> None:
    assert all(map(torch.equal, *(decided(kernels, torch.int64, "") for kernels in (triton_verdict, operators))))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_mean_is_the_same(dtype: torch.dtype) -> None:
    sums = [message[: sum(numels)] for message, numels in zip(messages(dtype), NUMELS, strict=True)]
    sizes = [numel for numels in NUMELS for numel in numels]
    means = [[torch.zeros(numel) for numel in sizes] for _ in range(2)]
    for kernels, out in zip((triton_verdict, operators), means, strict=True):
        kernels.mean(sums, torch.tensor(sizes), torch.tensor([0.3, 1e-9, 7.0]), 2.0**-16, out)
    assert all(map(torch.equal, *means))

"""Sums by a bucket at a time: the integers, trailers, status and mean of the sums by one gradient after another."""

import pytest
import torch
from torch import Tensor

from torusgd.cuda.sums import DeviceGradientSum
from torusgd.gradients.integer_sum import IntegerGradientSum
from torusgd.gradients.layout import plan_buckets

SHAPES = [(5,), (4, 3, 3, 3), (7, 11), (1,), (300,)]
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
BUCKETS = plan_buckets(NUMELS, limit=200)
CPU = torch.device("cpu")


def gradients(worker: int, dtype: torch.dtype) -> list[Tensor]:
    """Of all slots by one virtual worker; filters lie in memory as channels-last networks leave them."""
    generator = torch.Generator().manual_seed(worker)
    drawn = [torch.randn(shape, generator=generator).to(dtype) * 3.0**-i for i, shape in enumerate(SHAPES)]
    drawn[1] = drawn[1].contiguous(memory_format=torch.channels_last)
    drawn[2][0] = 1e-30  # rounded to zero, and counted
    return drawn


def summed(
    make: type[IntegerGradientSum], workers: list[list[Tensor]], addends: int, missing: int | None = None
) -> IntegerGradientSum:
    total = make(BUCKETS, addends, CPU)
    total.set_maxima(torch.tensor([4.0] * len(SHAPES)))
    total.clear()
    for number, worker in enumerate(workers):
        for index, bucket in enumerate(BUCKETS):
            for slot in range(bucket.first, bucket.stop):
                if (number, slot) != (0, missing):
                    total.add(index, slot, worker[slot] if make is DeviceGradientSum else worker[slot].float())
            total.end_worker(index)
    return total


@pytest.mark.parametrize("missing", [None, 3])
@pytest.mark.parametrize("addends", [3, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_status_and_mean_are_those_of_one_gradient_after_another_or_of_zero_for_one_that_does_not_come(
    addends: int, dtype: torch.dtype, missing: int | None
) -> None:
    workers = [gradients(worker, dtype) for worker in range(3)]
    one_by_one, at_once = (summed(make, workers, addends, missing) for make in (IntegerGradientSum, DeviceGradientSum))
    for bucket in range(len(BUCKETS)):
        assert torch.equal(one_by_one.message(bucket), at_once.message(bucket))
    reports = [total.finish().read() for total in (one_by_one, at_once)]
    assert reports[0] == reports[1]
    assert reports[0][:2] == ([], [])
    assert (reports[0].underflow > 0) == (dtype is not torch.float16), "1e-30 is zero there"
    means = [[torch.zeros(shape) for shape in SHAPES] for _ in reports]
    for total, out in zip((one_by_one, at_once), means, strict=True):
        total.mean(out, 3)
    assert all(map(torch.equal, *means))
    assert torch.equal(one_by_one.state(), at_once.state())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_out_of_range_or_not_finite_is_found_in_its_slot(bad: float) -> None:
    workers = [gradients(worker, torch.float32) for worker in range(2)]
    workers[1][2][3, 4] = bad
    reports = [summed(make, workers, 2).finish().read() for make in (IntegerGradientSum, DeviceGradientSum)]
    assert [report.overflow for report in reports] == [[2] if bad == 1e30 else []] * 2
    assert [report.nonfinite for report in reports] == [[] if bad == 1e30 else [2]] * 2

"""Sums by a bucket at a time: the integers, trailers, status and mean of the sums by one gradient after another."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torusgd.cuda.sums import DeviceGradientSum, KernelSum
from torusgd.gradients.integer_hash import IntegerHash
from torusgd.gradients.integer_sum import BucketedSum, IntegerGradientSum
from torusgd.gradients.layout import plan_buckets

SHAPES = [(5,), (4, 3, 3, 3), (7, 11), (1,), (300,)]
NUMELS = [torch.Size(shape).numel() for shape in SHAPES]
BUCKETS = plan_buckets(NUMELS, limit=200)  # all but the last, and the last
CPU = torch.device("cpu")
KINDS = (IntegerGradientSum, BucketedSum, KernelSum, DeviceGradientSum)


def gradients(worker: int) -> list[Tensor]:
    """Of all slots by one virtual worker; filters lie in memory as channels-last networks leave them."""
    generator = torch.Generator().manual_seed(worker)
    drawn = [torch.randn(shape, generator=generator) * 3.0**-i for i, shape in enumerate(SHAPES)]
    drawn[1] = drawn[1].contiguous(memory_format=torch.channels_last)
    drawn[2][0] = 1e-30  # rounded to zero, and counted
    return drawn


def add_all(
    total: IntegerGradientSum, workers: list[list[Tensor]], missing: int | None = None, hashed: int | None = None
) -> int:
    """Adds all gradients but one of the first worker's; the hash of one worker's integers."""
    found = IntegerHash(CPU)
    for number, worker in enumerate(workers):
        for index, bucket in enumerate(BUCKETS):
            for slot in range(bucket.first, bucket.stop):
                if (number, slot) != (0, missing):
                    total.add(index, slot, worker[slot], found if number == hashed else None)
            total.end_worker(index)
    return found.value()


def begun(make: type[IntegerGradientSum], addends: int, given_up: bool = False) -> IntegerGradientSum:
    """A sum at the begin of a step, perhaps after one that came as far as one bucket and a gradient of the other."""
    total = make(BUCKETS, addends, CPU)
    total.set_maxima(torch.tensor([4.0] * len(SHAPES)))
    total.clear()
    if given_up:
        total.add(1, 4, gradients(7)[4])
        total.end_worker(1)
        total.add(0, 3, gradients(7)[3])
        total.clear()
    return total


@pytest.mark.parametrize("how", [{}, {"missing": 3}, {"hashed": 1}, {"hashed": 0, "missing": 3}])
@pytest.mark.parametrize(("addends", "given_up"), [(3, False), (3, True), (10_000, False)])
def test_messages_status_and_mean_are_those_of_one_gradient_after_another(
    addends: int, given_up: bool, how: dict[str, Any]
) -> None:
    """Zero for a gradient that does not come, whatever a step that was given up has left."""
    sums, workers = [begun(make, addends, given_up) for make in KINDS], [gradients(worker) for worker in range(3)]
    assert len({add_all(total, workers, **how) for total in sums}) == 1
    messages = [torch.cat([total.message(bucket) for bucket in range(len(BUCKETS))]) for total in sums]
    reports = [total.finish().read() for total in sums]
    assert reports[0][:2] == ([], [])
    assert reports[0].underflow > 0
    means = [[torch.zeros(shape) for shape in SHAPES] for _ in sums]
    for total, message, report, out in zip(sums, messages, reports, means, strict=True):
        total.mean(out, 3)
        assert report == reports[0]
        assert all(map(torch.equal, (message, total.state(), *out), (messages[0], sums[0].state(), *means[0])))


@pytest.mark.parametrize("make", [IntegerGradientSum, BucketedSum, KernelSum])
def test_until_a_steps_first_gradient_its_memory_is_left_alone(make: type[IntegerGradientSum]) -> None:
    """There a sharded update still has weights under way."""
    total = begun(make, 3)
    add_all(total, [gradients(0)], missing=3)
    messages = [total.message(bucket).clone() for bucket in range(len(BUCKETS))]
    weights = [total.scratch(bucket).fill_(0.1).clone() for bucket in range(len(BUCKETS))]
    total.clear()
    assert all(torch.equal(total.scratch(bucket), each) for bucket, each in enumerate(weights))
    add_all(total, [gradients(0)], missing=3)
    assert all(torch.equal(total.message(bucket), each) for bucket, each in enumerate(messages))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_out_of_range_or_not_finite_is_found_in_its_slot(bad: float) -> None:
    workers = [gradients(worker) for worker in range(2)]
    workers[1][2][3, 4] = bad
    for total in [begun(make, 2) for make in KINDS]:
        add_all(total, workers)
        report = total.finish().read()
        assert (report.overflow, report.nonfinite) == (([2], []) if bad == 1e30 else ([], [2]))

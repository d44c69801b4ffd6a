"""Exact sums of many virtual workers: as near to float64 as promised, step after step, also in 64-bit messages."""

import math

import pytest
import torch

from torusgd.comm.exact_sum import MOST_ADDENDS, gradient_integers
from torusgd.gradients.integer_sum import IntegerGradientSum
from torusgd.gradients.layout import plan_buckets

NUMEL, STEPS, DISTINCT = 512, 50, 64
ERRORS = {2048: 1e-5, 8191: 1e-5, 8192: 1e-5, 65536: 1e-5, MOST_ADDENDS: 1e-4}
"""relative L2 error of the mean, by virtual workers"""


def sum_of(workers: int) -> IntegerGradientSum:
    return IntegerGradientSum(plan_buckets([NUMEL], NUMEL), workers, torch.device("cpu"))


def message_of(total: IntegerGradientSum, gradients: torch.Tensor) -> torch.Tensor:
    """A rank's message with a virtual worker for each row."""
    total.clear()
    for gradient in gradients:
        total.add(0, 0, gradient)
        total.end_worker(0)
    return total.message(0).clone()


def step(total: IntegerGradientSum, gradients: torch.Tensor, workers: int) -> float:
    """A step of so many virtual workers that have these gradients in turn; the error of its mean against float64."""
    times, rest = divmod(workers, len(gradients))
    # Ranks with equal gradients have equal messages.
    summed = times * message_of(total, gradients) + message_of(total, gradients[:rest])
    total.message(0).copy_(summed)
    status = total.finish().read()
    assert status.accepted, status
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

    total = sum_of(workers)
    total.set_maxima(gradients(DISTINCT).abs().max().reshape(1))
    # Of 32 bits the error is one of rounding, which fewer distinct gradients average less; of 64 it is none.
    fewer = math.sqrt(workers / DISTINCT) if gradient_integers(workers) == torch.int32 else 1.0
    for _ in range(STEPS):
        assert step(total, gradients(DISTINCT), workers) <= fewer * ERRORS[workers]
    if gradient_integers(workers) == torch.int32:
        assert step(total, gradients(workers), workers) <= ERRORS[workers]

"""Exact sums of gradients: their error, what they round to zero, and what it costs to count that and to find drift.

    .venv/bin/python -m benchmarks step exact-sums

One rank, one thread. Errors are of the mean over V virtual workers against float64, relative in L2; a cost stands
beside the forward and backward pass of one virtual worker, of 8 images.

Needs: nothing.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from torusgd.comm.groups import Group
from torusgd.gradients.integer_hash import IntegerHash
from torusgd.gradients.integer_sum import IntegerGradientSum
from torusgd.gradients.layout import Slot, plan_buckets
from torusgd.models import model_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schedule import Schedule
from torusgd.step.corruption import DriftWatch
from torusgd.step.membership import even_shares
from torusgd.step.watch import StepView

from ..record import sample

CPU = torch.device("cpu")
ROUNDS = 5


def summed(gradients: Callable[[], Iterator[Tensor]], workers: int) -> tuple[Tensor, Tensor, float]:
    """The mean, that of float64, and the share of all elements that was rounded to zero; after a first, equal step."""
    numel, largest, exact = 0, torch.zeros(()), torch.zeros((), dtype=torch.float64)
    for gradient in gradients():
        numel, largest, exact = (
            gradient.numel(),
            torch.maximum(largest, gradient.abs().max()),
            exact + gradient.double(),
        )
    total, mean = IntegerGradientSum(plan_buckets([numel], numel), workers, CPU), torch.zeros(numel)
    total.set_maxima(largest.reshape(1))
    for _ in range(2):
        total.clear()
        for gradient in gradients():
            total.add(0, 0, gradient)
            total.end_worker(0)
        lost = total.finish().read().underflow
        total.mean([mean], workers)
    return mean, exact / workers, lost


def error(workers: int, seed: int) -> float:
    """Of gradients that are a mean and noise of 10 times its size, at another place between two powers of two each."""

    def gradients() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        mean = torch.randn(512, generator=draw)
        for _ in range(workers):
            yield 2 ** (seed / ROUNDS) * (mean + 10 * torch.randn(512, generator=draw))

    mean, exact, _ = summed(gradients, workers)
    return float((mean - exact).norm() / exact.norm())


def heavy_tail(workers: int, sigma: float, seed: int) -> list[float]:
    """Sizes of elements are lognormal. Shares that became zero, of all gradients and of the mean; and its errors."""

    def gradients() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(seed)
        size = (sigma * torch.randn(20_000, generator=draw)).exp()
        mean = size * torch.randn(20_000, generator=draw)
        for _ in range(workers):
            yield mean + size * torch.randn(20_000, generator=draw)

    mean, exact, lost = summed(gradients, workers)
    relative, by_size = (mean - exact).abs() / exact.abs(), exact.abs().argsort()
    smallest, larger = by_size[: len(by_size) // 10], by_size[len(by_size) // 2 :]
    whole = float((mean - exact).norm() / exact.norm())
    return [
        lost,
        float((mean == 0).double().mean()),
        whole,
        *(float(relative[part].median()) for part in (smallest, larger)),
    ]


def best(function: Callable[[], object]) -> float:
    """Milliseconds of the quickest of some calls."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times[1:])


def costs(name: str) -> str:
    """Of a recipe's network."""
    recipe = load_recipe(name).recipe
    model = model_of(recipe, 10)
    side = recipe.data.image_size if isinstance(recipe.data.image_size, int) else recipe.data.image_size[0]
    images = torch.randn(8, recipe.data.channels, side, side)
    gradients = [torch.randn(p.shape) for p in model.parameters()][::-1]
    total = IntegerGradientSum(plan_buckets([g.numel() for g in gradients], 2**20), recipe.virtual_workers, CPU)
    total.set_maxima(torch.ones(len(gradients)))

    def add() -> None:
        for index, bucket in enumerate(total.buckets):
            for slot in range(bucket.first, bucket.stop):
                total.add(index, slot, gradients[slot])
            total.end_worker(index)

    counted = plain = float("inf")
    for _ in range(ROUNDS):  # in turn, so that other work on the machine disturbs both alike
        counted = min(counted, best(add))
        with patch("torusgd.gradients.integer_sum._count_nonzero", lambda values: 0):
            plain = min(plain, best(add))
    watch = DriftWatch([Slot("", "", g) for g in gradients], [], Group(None, range(2), 0, CPU, None, 1.0), every=1)
    membership = even_shares(range(2), 0, recipe.virtual_workers)
    view = StepView(Schedule(recipe, 10_000)[0], membership, recompute=lambda worker: IntegerHash(CPU))
    return (
        f"{name}: pass of 8 images {best(lambda: model(images).sum().backward()):.1f} ms, its sum {plain:.2f} ms and "
        f"with the count {counted:.2f} ms; a fingerprint {best(lambda: watch.before_send(view)):.2f} ms"
    )


def main() -> None:
    """Prints all of it."""
    torch.set_num_threads(1)
    for workers in (2048, 8191, 8192):
        errors = [error(workers, seed) for seed in range(ROUNDS)]
        sample(f"V {workers}, relative error", errors)
        print(f"V {workers}: relative error {min(errors):.1e} to {max(errors):.1e}, n {ROUNDS}", flush=True)
    for sigma in (2.0, 3.0):
        found = zip(*(heavy_tail(2048, sigma, seed) for seed in range(3)), strict=True)
        medians = [f"{statistics.median(values):.2g} ({min(values):.2g} to {max(values):.2g})" for values in found]
        print(f"V 2048, lognormal sigma {sigma:g}: zeros in gradients {medians[0]}, in the mean {medians[1]}")
        print(f"  relative error {medians[2]}; median of the smallest tenth of the elements {medians[3]}")
        print(f"  and of the larger half {medians[4]}", flush=True)
    for name in ("digits", "fashion", "resnet50"):
        print(costs(name), flush=True)


if __name__ == "__main__":
    main()

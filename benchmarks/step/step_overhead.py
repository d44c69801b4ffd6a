"""What exactness and the trainer cost: one training step, in turn in one run, on one rank.

    python -m benchmarks step step-overhead --case resnet50 --rounds 5

For each case: a bare hand-written loop (same model, batch, precision, memory format; torch's fused SGD), our step with
reduction float32, and our step with reduction exact. Prints the median, the spread and two ratios: exact against
float32 reduction, and our exact step against the bare loop. The images are ready in memory in all three.

    python -m benchmarks step step-overhead --noise-scale --case fashion --images 64 --workers 4 --rounds 20

compares exact steps with and without the gradient noise scale, which is measured in every tenth step: in processor time
of this process, since the difference is smaller than what other work on a machine adds to the clock's.

Needs: nothing.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch.nn import functional as F
from typer import Option

from torusgd.comm.base import Liveness
from torusgd.comm.groups import alone
from torusgd.data.loader import Loader, Share
from torusgd.data.pipeline import Batch
from torusgd.models import build_model
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe
from torusgd.run.build import build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.runtime import resolve_auto
from torusgd.step.journal import synchronous
from torusgd.step.measures import EVERY, NoiseWatch

from ..record import sample


@dataclass(frozen=True)
class Case:
    """A network and what it is trained with."""

    model: str
    size: int
    """pixels a side"""
    channels: int
    classes: int
    images: int
    """of a virtual worker"""
    precision: str = "auto"


CASES = {
    "resnet50": Case("resnet50", size=224, channels=3, classes=1000, images=16),
    "resnet50-64px": Case("resnet50", size=64, channels=3, classes=1000, images=16),
    "fashion": Case("fashion-net", size=28, channels=1, classes=10, images=256, precision="bfloat16"),
    "resnet18-32px": Case("resnet18", size=32, channels=3, classes=10, images=16),
}


class Ready(Loader):
    """A loader whose images are ready, the same batch for every share."""

    def __init__(self, batch: Batch) -> None:
        self.wait_seconds = 0.0
        self._batch = batch

    def take(self, share: Share, following: Iterable[Share] = ()) -> Batch:
        """See `torusgd.data.loader.Loader.take`."""
        return self._batch


def make_recipe(case: Case, reduction: str, workers: int) -> Recipe:
    channels = case.channels
    overrides = [
        f"data={{source: synthetic, train_images: 4096, eval_images: 16, image_size: {case.size}, "
        f"channels: {channels}, classes: {case.classes}, mean: {[0.5] * channels}, std: {[0.25] * channels}}}",
        f"model={{name: {case.model}}}",
        f"virtual_workers={workers}",
        f"stages=[{{until: 1000st, images_per_worker: {case.images}}}]",
        "rate={lr: 0.01}",
        "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
        f"reduction={reduction}",
        f"precision={case.precision}",
        "label_smoothing=0.1",
        "polish=null",
    ]
    return resolve_auto(load_recipe("digits", overrides).recipe, "cpu")


def our_step(
    case: Case, reduction: str, batch: Batch, workers: int, noise_scale: bool = True
) -> Callable[[int], object]:
    """The trainer's own step, put together as `torusgd train` does, but for the loader and maybe the noise scale."""
    nowhere = Path()  # a step writes nothing
    job = Job(make_recipe(case, reduction, workers), RuntimeOptions(), "cpu", nowhere)
    world, liveness = alone(), Liveness()
    data = replace(open_data(job, world.device, liveness), loader=Ready(batch))
    trainer = build(job, data, world, liveness)
    watchers = [each for each in trainer.step.watchers if noise_scale or not isinstance(each, NoiseWatch)]
    step = replace(trainer.step, watchers=watchers)
    return lambda index: step.run(trainer.membership, synchronous(index, workers))


def bare_step(case: Case, batch: Batch, workers: int) -> Callable[[int], None]:
    """What one writes by hand, without torusgd."""
    recipe = make_recipe(case, "float32", workers)
    form = torch.channels_last if recipe.memory_format == "channels_last" else torch.contiguous_format
    model = build_model(
        recipe.model,
        classes=case.classes,
        channels=case.channels,
        image_size=case.size,
        seed=0,
    )
    model.to(memory_format=form)  # type: ignore[call-overload]  # torch does not declare memory_format here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[recipe.precision]

    def step(index: int) -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(workers):
            images = batch.images.contiguous(memory_format=form)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                loss = F.cross_entropy(model(images).float(), batch.targets, label_smoothing=0.1) / workers
            loss.backward()
        loss.item()
        optimizer.step()

    return step


def main(
    case: Annotated[str, Option(help=", ".join(CASES))] = "resnet50",
    rounds: Annotated[int, Option(help="timed rounds of each, in turn")] = 5,
    steps: Annotated[int, Option(help="steps of a round")] = 2,
    workers: Annotated[int, Option(help="virtual workers of a step, all on this rank")] = 1,
    images: Annotated[int | None, Option(help="of a virtual worker; default: the case's")] = None,
    noise_scale: Annotated[
        bool, Option("--noise-scale", help="compare steps with and without the noise scale")
    ] = False,
) -> None:
    if noise_scale and workers < 2:
        raise typer.BadParameter("--noise-scale needs --workers of 2 at least")
    torch.set_num_threads(1)
    chosen = replace(CASES[case], images=images or CASES[case].images)
    count, size = chosen.images, chosen.size
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        torch.randn(count, chosen.channels, size, size, generator=generator),
        torch.randint(0, chosen.classes, (count,), generator=generator),
        np.arange(count),
        0,
    )
    if noise_scale:
        steps, clock = EVERY, time.process_time
        rivals = {
            f"{word} noise scale": our_step(chosen, "exact", batch, workers, word == "with")
            for word in ("without", "with")
        }
        ratios = [("with noise scale", "without noise scale")]
    else:
        clock = time.perf_counter
        rivals = {
            "bare loop": bare_step(chosen, batch, workers),
            "torusgd float32": our_step(chosen, "float32", batch, workers),
            "torusgd exact": our_step(chosen, "exact", batch, workers),
        }
        ratios = [("torusgd exact", "torusgd float32"), ("torusgd exact", "bare loop")]
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for round_number in range(rounds + 1):
        for name, step in list(rivals.items())[:: 1 if round_number % 2 else -1]:
            started = clock()
            for i in range(steps):
                step(round_number * steps + i)
            if round_number:  # the first round warms up
                times[name].append((clock() - started) / steps)
    print(
        f"{chosen}: {count} images of {size} px, {workers} virtual workers, {chosen.precision}, 1 thread, "
        f"n = {rounds} rounds of {steps} steps"
    )
    for name, values in times.items():
        sample(f"{case}, {name}, ms", [1e3 * value for value in values])
        low, middle, high = min(values), statistics.median(values), max(values)
        rate = count * workers / middle
        print(f"  {name:19} {1e3 * middle:9.2f} ms a step ({1e3 * low:.2f} to {1e3 * high:.2f}), {rate:,.1f} images/s")
    for name, base in ratios:
        found = [a / b for a, b in zip(times[name], times[base], strict=True)]
        print(f"  {name} / {base}: {statistics.median(found):.4f} ({min(found):.4f} to {max(found):.4f})")


if __name__ == "__main__":
    typer.run(main)

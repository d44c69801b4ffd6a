"""What benchmarks of slow ranks share: one rank's part in a run of a small recipe, whose steps are timed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.job import Job
from torusgd.run.run import Run
from torusgd.rundir.run_dir import RunDir
from torusgd.runtime import resolve_auto
from torusgd.signals import StopFlag

RECIPE = (
    "data={source: synthetic, train_images: 8192, eval_images: 8, image_size: 8, channels: 1, classes: 4, "
    "mean: [0.5], std: [0.25]}",
    "rate={lr: 0.01}",
    "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
    "precision=float32",
    "polish=null",
)


def timed_run(
    sizes: tuple[int, int, int], options: dict[str, Any], out: str, rank: Sequence[Any],
    shared: Callable[[Any, Any], Any] = lambda membership, entry: membership,
) -> tuple[Run, list[float]]:  # fmt: skip
    """A run, and a list to which it adds the seconds of each step, the first of which takes its passes twice.

    `sizes` are its virtual workers, the images of each, and its steps; `rank` is what a supervisor gives a rank;
    `shared` makes the membership of a step out of the run's.
    """
    world: Group
    stop: StopFlag
    live: Liveness
    (workers, images, steps), (world, stop, restarts, live) = sizes, rank
    given = [
        *RECIPE,
        f"virtual_workers={workers}",
        f"stages=[{{until: {steps}st, images_per_worker: {images}}}]",
        f"evaluate.every={steps}st",
    ]
    recipe = resolve_auto(load_recipe("digits", given).recipe, "cpu")
    if world.rank == 0:
        RunDir(Path(out)).claim(recipe, fresh=False)
    world.barrier()
    job = Job(recipe, RuntimeOptions(drift_every=0, **options), "cpu", Path(out))
    run, seconds = Run(job, world, stop, restarts, live), list[float]()

    def timed(take: Callable[..., Any], membership: Any, entry: Any) -> Any:
        membership, begin = shared(membership, entry), time.perf_counter()
        stats = take(membership, entry)
        seconds.append(time.perf_counter() - begin)
        return stats

    timed_steps: Any = SimpleNamespace(run=partial(timed, run.trainer.step.run))
    run.trainer = replace(run.trainer, ahead=timed_steps)
    return run, seconds

"""Jobs of the tiny recipe in float32, and the trainers and runs that tests of steps take them with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.run.runs import TINY, before_steps

from torusgd.comm.base import Done, Liveness
from torusgd.comm.groups import Group, group_of
from torusgd.errors import CorruptionError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe
from torusgd.run.build import Trainer, build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.run.run import Run
from torusgd.rundir.run_dir import RunDir
from torusgd.signals import StopFlag
from torusgd.step.journal import synchronous
from torusgd.step.stats import StepStats
from torusgd.weights import weights_sha256


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe("digits", [*TINY, *overrides]).recipe.resolve(precision="float32", memory_format="contiguous")


def job_of(
    *overrides: str, options: RuntimeOptions | None = None, out: Path = Path("nowhere"), recipe: Recipe | None = None,
    **more: Any,
) -> Job:  # fmt: skip
    return Job(recipe or recipe_of(*overrides), options or RuntimeOptions(), "cpu", out, **more)


def trainer_of(job: Job, world: Group | None = None, liveness: Liveness | None = None, **more: Any) -> Trainer:
    world, liveness = world or group_of(), liveness or Liveness()
    return build(job, open_data(job, world.device, liveness), world, liveness, **more)


def take(trainer: Trainer, index: int) -> StepStats:
    """One step, which is taken."""
    stats = trainer.step.run(trainer.membership, synchronous(index, trainer.step.recipe.virtual_workers))
    assert stats is not None
    return stats


def take_all(trainer: Trainer) -> list[StepStats]:
    return [take(trainer, index) for index in range(len(trainer.step.schedule))]


def weights_of(trainer: Trainer) -> str:
    """The hash of the network's state after the schedule's last step."""
    trainer.step.state.write_to_model(len(trainer.step.schedule))
    return weights_sha256(trainer.step.state.model.state_dict())


def run_of(job: Job, world: Group | None = None, fresh: bool = False, stop: StopFlag | None = None, **more: Any) -> Run:
    """A run on these ranks whose folder is claimed."""
    world = world or group_of()
    if world.rank == 0:
        job.out.mkdir(parents=True, exist_ok=True)
        RunDir(job.out).claim(job.recipe, fresh)
    world.barrier()
    return Run(job, world, stop or StopFlag(), restarts=0, **more)


def train_on_ranks(out: Path, recipe: Recipe, options: RuntimeOptions | None = None, **more: Any) -> dict[str, Any]:
    """Trains on the ranks of this process' group, each of which calls it; the summary. `more`: fields of `Job`."""
    summary = run_of(job_of(recipe=recipe, options=options, out=out, **more)).run().summary
    group_of().barrier()  # before another run in the same folder
    return summary


def end_of(run: Run, meanwhile: Callable[[int], object]) -> str:
    """What the corruption says that ends a run, of which `meanwhile` is called before each step; "": it was done."""
    before_steps(run, meanwhile)
    try:
        run.run()
    except CorruptionError as error:
        run.trainer.close()
        return str(error)
    return ""


class Sent:
    """An all-reduce that brings a message that was summed before, or leaves a tensor as it is."""

    name = "sent"

    def __init__(self, message: torch.Tensor | None = None) -> None:
        self.message = message

    def start(self, tensor: torch.Tensor) -> Done:
        if self.message is not None:
            tensor.copy_(self.message)
        return Done()

    def close(self) -> None:
        """Nothing is open."""

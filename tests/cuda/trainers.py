"""Trainers of the tiny recipe, plain or in the GPU form on the CPU, and what their steps leave."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.step.trainers import recipe_of

from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group, alone
from torusgd.data.loader import Loader
from torusgd.data.order import StreamOrder
from torusgd.data.to_device import BytePipeline, can_normalise_later
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer, build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.step.journal import synchronous
from torusgd.step.stats import StepStats
from torusgd.step.watch import Requests, StepWatch
from torusgd.weights import weights_sha256

STEPS = 7
LONG = f"stages=[{{until: 3st, images_per_worker: 3}}, {{until: {STEPS}st, images_per_worker: 4}}]"
AVERAGED = "average={half_life: 2st, every: 3}"
SGD = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-3}"
SMALL_BUCKETS = RuntimeOptions(buckets=0.002)


def never() -> bool:
    return False


def make_trainer(
    cuda_graphs: bool,
    *overrides: str,
    world: Group | None = None,
    stop: Callable[[], bool] = never,
    options: RuntimeOptions | None = None,
    watchers: Sequence[StepWatch] = (),
) -> Trainer:
    """A trainer whose weights nobody looks at before its end."""
    recipe = recipe_of(LONG, "rate={lr: 0.05}", *overrides)
    world, liveness = world or alone(), Liveness()
    options = (options or RuntimeOptions()).model_copy(update={"cuda_graphs": cuda_graphs})
    job = Job(recipe, options, world.device.type, Path("nowhere"))
    data = open_data(job, world.device, liveness)
    if cuda_graphs and can_normalise_later(recipe.data.augment):  # as on a GPU, which normalises the images itself
        pipeline = BytePipeline(data.training.source, recipe.data, recipe.seed, data.training.allocate)
        data.loader.close()
        data = replace(
            data, training=pipeline, loader=Loader(pipeline, StreamOrder(96, recipe.seed), threads=1, ahead=4)
        )
    return build(job, data, world, liveness, Requests(stop, liveness), watchers)


def take(trainer: Trainer, index: int) -> StepStats | None:
    workers = trainer.step.recipe.virtual_workers
    return (trainer.ahead or trainer.step).run(trainer.membership, synchronous(index, workers))


def all_steps(trainer: Trainer) -> list[dict[str, Any]]:
    """What each step reported but its times."""
    taken = [stats for index in range(len(trainer.step.schedule)) if (stats := take(trainer, index)) is not None]
    return [{key: value for key, value in vars(stats).items() if key not in ("times", "entry")} for stats in taken]


def left(trainer: Trainer) -> str:
    """A hash of all that the next step needs."""
    return weights_sha256(trainer.step.state.state_dict(STEPS, keep=True))


def steps_of_all(trainers: Sequence[Trainer]) -> list[dict[str, Any]]:
    """What each step reported, of all trainers alike, as is what they leave."""
    reports = [all_steps(trainer) for trainer in trainers]
    assert all(report == reports[0] for report in reports)
    assert len({left(trainer) for trainer in trainers}) == 1
    return reports[0]


def plain_bits(*changes: str) -> str:
    trainer = make_trainer(False, *changes)
    all_steps(trainer)
    return left(trainer)


def grow_once(trainer: Trainer, by: float) -> None:
    """The fifth step's gradients are so many times as large, however often it is taken."""
    passes: Any = trainer.step.forward_backward
    forward = passes.forward

    def larger(step: Any, *arguments: Any) -> torch.Tensor:
        loss = forward(step, *arguments) * (by if step.index == 4 else 1.0)
        passes._loss = loss
        return loss

    passes.forward = larger


def launches(trainer: Trainer, take_step: Callable[[int], object]) -> list[int]:
    """Of each step, how many the device is given when it is taken."""
    ahead: Any = trainer.ahead
    launch, counts = ahead._launch, [0] * STEPS

    def counted_launch(*arguments: Any) -> None:
        counts[now] += 1
        launch(*arguments)

    ahead._launch = counted_launch
    for now in range(STEPS):
        take_step(now)
    return counts


LAUNCHES = [0, 1, 0, 2, 0, 0, 0]
"""of several virtual workers: steps 1, then 3 and 4; one by one are taken 0, which is measured, and 2, 5 and 6, in
which the noise scale is due"""

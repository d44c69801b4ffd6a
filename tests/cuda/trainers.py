"""Trainers of the tiny recipe, plain or in the GPU form on the CPU, and what their steps leave."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from tests.step.trainers import job_of

from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group, alone
from torusgd.data.loader import Loader
from torusgd.data.order import StreamOrder
from torusgd.data.to_device import BytePipeline, can_normalise_later
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer, build
from torusgd.run.open_data import open_data
from torusgd.step.journal import synchronous
from torusgd.step.stats import StepStats
from torusgd.step.watch import Requests, StepWatch
from torusgd.weights import weights_sha256

STEPS = 7
LONG = f"stages=[{{until: 3st, images_per_worker: 3}}, {{until: {STEPS}st, images_per_worker: 4}}]"
SGD = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-3}"


def make_trainer(
    cuda_graphs: bool, *overrides: str, world: Group | None = None, stop: Callable[[], bool] = lambda: False,
    options: RuntimeOptions | None = None, watchers: Sequence[StepWatch] = (), by_kernels: bool = False,
) -> Trainer:  # fmt: skip
    """A trainer whose weights nobody looks at before its end; a plain one sums by torch's operators unless asked."""
    world, liveness = world or alone(), Liveness()
    options = (options or RuntimeOptions()).model_copy(update={"cuda_graphs": cuda_graphs})
    job = replace(job_of(LONG, "rate={lr: 0.05}", *overrides, options=options), device=world.device.type)
    data, recipe = open_data(job, world.device, liveness), job.recipe
    if cuda_graphs and can_normalise_later(recipe.data.augment):  # as on a GPU, which normalises the images itself
        pipeline = BytePipeline(data.training.source, recipe.data, recipe.seed, data.training.allocate)
        data.loader.close()
        loader = Loader(pipeline, StreamOrder(96, recipe.seed), threads=1, ahead=4)
        data = replace(data, training=pipeline, loader=loader)
    with nullcontext() if cuda_graphs or by_kernels else patch("torusgd.run.build._on_gpu", lambda *_: (None, None)):
        return build(job, data, world, liveness, Requests(stop, liveness), watchers)


@contextmanager
def on_gpu() -> Iterator[Group]:
    """One rank with a GPU; afterwards torch's switches are as they were."""
    try:
        yield alone(torch.device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)


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

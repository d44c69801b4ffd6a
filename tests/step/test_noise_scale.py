"""The gradient noise scale: what it estimates, the same number on any number of ranks, and where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.run.runs import TINY, events, run_here

from torusgd.comm.base import Done, NoLiveness
from torusgd.comm.groups import Group, alone, group_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import Schedule
from torusgd.run.build import Trainer, build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.step.journal import synchronous
from torusgd.step.membership import even_shares
from torusgd.step.noise_scale import EVERY, NoiseScale
from torusgd.step.watch import StepView

LONG = ("stages=[{until: 30st, images_per_worker: 4}]", "evaluate.every=30st", "polish=null")
MEASURED = [step for step in range(30) if step % EVERY == EVERY // 2]


class OneRank:
    """An all-reduce of one rank."""

    name = "one"

    def start(self, tensor: torch.Tensor) -> Done:
        return Done()

    def close(self) -> None:
        """Nothing is open."""


def recipe_of(*overrides: str) -> Any:
    return load_recipe("digits", [*TINY, *LONG, *overrides]).recipe.resolve(
        precision="float32", memory_format="contiguous"
    )


def test_it_is_the_variance_of_a_gradient_over_the_square_of_its_mean() -> None:
    """Known noise: gradients of 64 elements, true gradient of norm 2, standard deviation 3 an image and element."""
    draw = torch.Generator().manual_seed(0)
    schedule, workers, images = Schedule(recipe_of("virtual_workers=32"), 96), 32, 4
    true = torch.full((64,), 2.0 / 8)
    mean = torch.zeros(64)
    watch = NoiseScale(schedule, workers, torch.device("cpu"), OneRank(), lambda: float(mean.norm()), lambda: 1.0)
    membership = even_shares([0], 0, workers)
    for step in range(EVERY // 2, 4000 * EVERY, EVERY):
        gradients = true + 3.0 / images**0.5 * torch.randn(workers, 64, generator=draw)
        mean = gradients.mean(0)
        for worker, gradient in enumerate(gradients):
            take = watch.gradients_of(step, worker)
            assert take is not None
            take(0, gradient[:40])  # two slots
            take(1, gradient[40:])
        view = StepView(schedule[5], membership, recompute=lambda worker: pytest.fail("nothing is recomputed"))
        watch.after_passes(view)
        watch.with_mean(view)
        if step == 3 * EVERY + EVERY // 2:
            early = watch.state()["averages"].clone()
    assert watch.value is not None
    assert watch.value == pytest.approx(64 * 9 / 4, rel=0.35)  # the average forgets all but some ten measurements
    again = NoiseScale(schedule, workers, torch.device("cpu"), OneRank(), lambda: 0.0, lambda: 1.0)
    again.load_state({"averages": early})
    assert torch.equal(again.state()["averages"], early)


def trainer_of(world: Group, *overrides: str, options: RuntimeOptions | None = None) -> Trainer:
    job, liveness = Job(recipe_of(*overrides), options or RuntimeOptions(), "cpu", Path("nowhere")), NoLiveness()
    return build(job, open_data(job, world.device, liveness), world, liveness)


def figures(trainer: Trainer, steps: int = 30) -> list[float]:
    workers = trainer.step.recipe.virtual_workers
    found = [trainer.step.run(trainer.membership, synchronous(index, workers)) for index in range(steps)]
    return [stats.figures["noise_scale"] for stats in found if stats is not None and "noise_scale" in stats.figures]


def figures_on_ranks() -> list[list[float]]:
    world = group_of()
    kinds = (RuntimeOptions(), RuntimeOptions(update="sharded", buckets=0.001), RuntimeOptions(work_stealing=True))
    return [figures(trainer_of(world, options=options)) for options in kinds]


def test_it_is_the_same_number_on_any_number_of_ranks_sharded_or_not() -> None:
    found = figures(trainer_of(alone()))
    assert len(found) >= 2
    assert run_ranks(3, figures_on_ranks) == [[found] * 3] * 3


def test_it_is_part_of_the_state_and_of_the_report_of_a_run(tmp_path: Path) -> None:
    trainer, other = trainer_of(alone()), trainer_of(alone())
    figures(trainer, 16)
    state = trainer.step.state.state_dict(16, keep=True)
    assert state["watchers/noise scale/averages"].count_nonzero() == 2
    other.step.state.load_state_dict(iter(state.items()))
    assert figures_from(trainer, 16) == figures_from(other, 16)
    run_here(tmp_path, *LONG)
    assert [event["step"] - 1 for event in events(tmp_path) if "noise_scale" in event] == MEASURED


def figures_from(trainer: Trainer, first: int) -> list[float]:
    found = [trainer.step.run(trainer.membership, synchronous(index, 4)) for index in range(first, 30)]
    return [stats.figures["noise_scale"] for stats in found if stats is not None and "noise_scale" in stats.figures]


@pytest.mark.parametrize("change", ["virtual_workers=1", "column_blocks=2"])
def test_there_is_none_with_one_virtual_worker_or_shared_gradients(change: str) -> None:
    trainer = trainer_of(alone(), change)
    assert not any(isinstance(watcher, NoiseScale) for watcher in trainer.step.watchers)


def test_there_is_none_in_a_step_that_was_redone() -> None:
    trainer = trainer_of(alone())
    (watch,) = (watcher for watcher in trainer.step.watchers if isinstance(watcher, NoiseScale))
    figures(trainer, 5)
    before = watch.state()["averages"].clone()
    trainer.step.reducer.sum.set_maxima(torch.full((len(trainer.step.reducer.names),), 1e-30))
    stats = trainer.step.run(trainer.membership, synchronous(5, 4))
    assert stats is not None
    assert stats.redone == 1
    assert torch.equal(watch.state()["averages"], before)

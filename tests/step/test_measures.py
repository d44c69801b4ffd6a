"""The gradient noise scale: what it estimates, the same number on any number of ranks, and where there is none."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.comm.gloo_world import on_ranks
from tests.run.runs import events, run_here
from tests.step.test_corruption import NOTHING_SENT
from tests.step.trainers import Sent, job_of, recipe_of, take, trainer_of

from torusgd.comm.base import ConnectionLost
from torusgd.comm.groups import Group, alone, group_of
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import Schedule
from torusgd.run.build import Trainer
from torusgd.step.measures import EVERY, NoiseWatch
from torusgd.step.membership import even_shares
from torusgd.step.watch import StepView

LONG = ("stages=[{until: 30st, images_per_worker: 4}]", "evaluate.every=30st", "polish=null")
MEASURED = [step for step in range(30) if step % EVERY == EVERY // 2]


def test_it_is_the_variance_of_a_gradient_over_the_square_of_its_mean() -> None:
    """Known noise: gradients of 64 elements, true gradient of norm 2, standard deviation 3 an image and element."""
    draw = torch.Generator().manual_seed(0)
    schedule, workers, images = Schedule(recipe_of(*LONG, "virtual_workers=32"), 96), 32, 4
    true = torch.full((64,), 2.0 / 8)
    mean = torch.zeros(64)
    watch = NoiseWatch(schedule, workers, torch.device("cpu"), Sent(), lambda: 8 * float(mean.norm()), lambda: 8.0)
    membership = even_shares([0], 0, workers)
    for step in range(EVERY // 2, 1000 * EVERY, EVERY):
        gradients = true + 3.0 / images**0.5 * torch.randn(workers, 64, generator=draw)
        mean = gradients.mean(0)
        for worker, gradient in enumerate(gradients):
            take = watch.gradients_of(step, worker)
            assert take is not None
            take(0, 8 * gradient[:40])  # two slots
            take(1, 8 * gradient[40:])
        view = StepView(schedule[5], membership, recompute=lambda worker: pytest.fail("nothing is recomputed"))
        watch.after_passes(view)
        watch.before_accept(view, NOTHING_SENT)
        watch.with_mean(view)
        if step == 3 * EVERY + EVERY // 2:
            early = watch.state()["averages"].clone()
    assert watch._estimate.value == pytest.approx(64 * 9 / 4, rel=0.35)  # of the last ten or so
    watch.load_state({"averages": early})
    assert torch.equal(watch.state()["averages"], early)


def long_trainer(world: Group | None = None, *overrides: str, **options: Any) -> Trainer:
    return trainer_of(job_of(*LONG, *overrides, options=RuntimeOptions(**options)), world)


def test_a_rank_lost_beside_its_message_leaves_the_scales_of_the_last_step() -> None:
    trainer = long_trainer()
    for index in range(EVERY // 2):
        take(trainer, index)
    before, lost = trainer.step.reducer.sum.state(), Mock(wait=Mock(side_effect=ConnectionLost("rank 1 is lost")))
    (watch,) = (each for each in trainer.step.watchers if isinstance(each, NoiseWatch))
    watch._allreduce = Mock(start=Mock(return_value=lost))
    with pytest.raises(ConnectionLost):
        take(trainer, EVERY // 2)
    assert torch.equal(trainer.step.reducer.sum.state(), before)


def figures(trainer: Trainer, first: int = 0, stop: int = 30) -> list[float]:
    found = [take(trainer, index).figures for index in range(first, stop)]
    return [float(each["noise_scale"]) for each in found if "noise_scale" in each]


@on_ranks(3)
def test_it_is_the_same_number_on_any_number_of_ranks_sharded_or_not() -> None:
    found = figures(long_trainer(alone()), stop=16)
    assert len(found) == 2
    options: dict[str, Any]
    for options in ({}, {"update": "sharded", "buckets": 0.001}, {"work_stealing": True}):
        assert figures(long_trainer(group_of(), **options), stop=16) == found


def test_it_is_part_of_the_state_and_of_the_report_of_a_run(tmp_path: Path) -> None:
    trainer, other = long_trainer(), long_trainer()
    figures(trainer, stop=16)
    state = trainer.step.state.state_dict(16, keep=True)
    assert state["watchers/noise scale/averages"].count_nonzero() == 2
    other.step.state.load_state_dict(iter(state.items()))
    assert figures(trainer, 16) == figures(other, 16)
    run_here(tmp_path, *LONG)
    assert [event["step"] - 1 for event in events(tmp_path) if "noise_scale" in event] == MEASURED


@pytest.mark.parametrize("change", ["virtual_workers=1", "column_blocks=2"])
def test_there_is_none_with_one_virtual_worker_or_shared_gradients(change: str) -> None:
    assert not any(isinstance(watcher, NoiseWatch) for watcher in long_trainer(None, change).step.watchers)


def test_there_is_none_in_a_step_that_was_redone() -> None:
    trainer = long_trainer()
    (watch,) = (watcher for watcher in trainer.step.watchers if isinstance(watcher, NoiseWatch))
    figures(trainer, stop=5)
    before = watch.state()["averages"].clone()
    trainer.step.reducer.sum.set_maxima(torch.full((len(trainer.step.reducer.names),), 1e-30))
    assert take(trainer, 5).redone == 1
    assert torch.equal(watch.state()["averages"], before)

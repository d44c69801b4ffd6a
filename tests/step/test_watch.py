"""Watchers: each sees every step at the same points, sends a section of its own, and changes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.run.runs import TINY, run_here
from torch import Tensor

from torusgd.comm.base import NoLiveness
from torusgd.comm.groups import Group, alone, group_of
from torusgd.errors import RunError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer, build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.step.control_vector import ControlVector
from torusgd.step.journal import synchronous
from torusgd.step.watch import NO_WORDS, StepView, StepWatch
from torusgd.weights import weights_sha256


class OddSteps(StepWatch):
    """Is due at odd steps, in which each rank sends its index."""

    name, words = "odd steps", 2

    def __init__(self, rank: int, fails_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.seen: dict[int, list[int]] = {}
        self._rank, self._fails_at = rank, fails_at

    def due(self, step: int) -> bool:
        return step % 2 == 1

    def before_send(self, view: StepView) -> Tensor:
        self.calls.append(("before_send", view.step.index))
        return torch.tensor([self._rank, 1]) if self.due(view.step.index) else NO_WORDS

    def after_passes(self, view: StepView) -> None:
        self.calls.append(("after_passes", view.step.index))

    def check(self, view: StepView, control: ControlVector) -> None:
        self.calls.append(("check", view.step.index))
        if view.step.index == self._fails_at:
            raise RunError("odd")

    def before_accept(self, view: StepView, control: ControlVector) -> None:
        self.calls.append(("before_accept", view.step.index))

    def with_mean(self, view: StepView) -> None:
        self.calls.append(("with_mean", view.step.index))

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        self.calls.append(("after", view.step.index))
        self.seen[view.step.index] = control.words(self.name)
        return {"audited": 7 if self.due(view.step.index) else 0}


def watched(watch: StepWatch, world: Group) -> Trainer:
    recipe = load_recipe("digits", TINY).recipe.resolve(precision="float32", memory_format="contiguous")
    job, liveness = Job(recipe, RuntimeOptions(), "cpu", Path("nowhere")), NoLiveness()
    return build(job, open_data(job, world.device, liveness), world, liveness, watchers=[watch])


def steps_with_a_watcher() -> tuple[Any, ...]:
    world = group_of()
    watch = OddSteps(world.rank)
    trainer = watched(watch, world)
    found = [trainer.step.run(trainer.membership, synchronous(index, 4)) for index in range(4)]
    trainer.step.state.write_to_model(4)
    return (
        [stats.audited for stats in found if stats is not None],
        watch.seen,
        [name for name, step in watch.calls if step == 1],
        weights_sha256(trainer.step.state.model.state_dict()),
    )


def test_a_watcher_is_called_in_each_step_sends_its_section_when_due_and_changes_no_bit(tmp_path: Path) -> None:
    one, two = run_ranks(2, steps_with_a_watcher)
    assert one == two
    reported, seen, calls, weights = one
    assert reported == [0, 7, 0, 7]
    assert seen == {0: [], 1: [1, 2], 2: [], 3: [1, 2]}
    assert calls == ["before_send", "after_passes", "check", "before_accept", "with_mean", "after"]
    plain = watched(StepWatch(), alone())
    for index in range(4):
        plain.step.run(plain.membership, synchronous(index, 4))
    plain.step.state.write_to_model(4)
    assert weights == weights_sha256(plain.step.state.model.state_dict())


def test_what_a_watcher_raises_ends_the_step_before_anything_changes() -> None:
    trainer = watched(OddSteps(0, fails_at=1), alone())
    trainer.step.run(trainer.membership, synchronous(0, 4))
    before = [parameter.detach().clone() for parameter in trainer.step.state.model.parameters()]
    with pytest.raises(RunError):
        trainer.step.run(trainer.membership, synchronous(1, 4))
    assert all(map(torch.equal, before, trainer.step.state.model.parameters()))


def test_a_step_can_not_be_changed_from_outside(tmp_path: Path) -> None:
    trainer = watched(StepWatch(), alone())
    with pytest.raises(AttributeError):
        trainer.step.requests = None  # type: ignore[misc,assignment]
    assert run_here(tmp_path)[0]["steps"] == 4

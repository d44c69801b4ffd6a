"""Watchers: each sees every step at the same points, sends a section of its own, and changes nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import on_ranks
from tests.step.trainers import job_of, take, take_all, trainer_of, weights_of
from torch import Tensor

from torusgd.comm.groups import alone, group_of
from torusgd.errors import RunError
from torusgd.step.control_vector import NO_WORDS, ControlVector
from torusgd.step.watch import StepView, StepWatch

HOOKS = ["before_send", "after_passes", "check", "before_accept", "with_mean", "after"]


class OddSteps(StepWatch):
    """Is due at odd steps, in which each rank sends its index."""

    name, words = "odd steps", 2

    def __init__(self, rank: int, fails_at: int = -1) -> None:
        self.calls: list[tuple[str, int]] = []
        self.seen: dict[int, list[int]] = {}
        self._rank, self._fails_at = rank, fails_at
        for name in HOOKS:
            setattr(self, name, self._noted(name, getattr(self, name)))

    def _noted(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(view: StepView, *control: ControlVector) -> Any:
            self.calls.append((name, view.step.index))
            return hook(view, *control)

        return call

    def due(self, step: int) -> bool:
        return step % 2 == 1

    def before_send(self, view: StepView) -> Tensor:
        return torch.tensor([self._rank, 1]) if self.due(view.step.index) else NO_WORDS

    def check(self, view: StepView, control: ControlVector) -> None:
        if view.step.index == self._fails_at:
            raise RunError("odd")

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        self.seen[view.step.index] = control.words(self.name)
        return {"audited": 7 if self.due(view.step.index) else 0}


@on_ranks(2)
def test_a_watcher_is_called_in_each_step_sends_its_section_when_due_and_changes_no_bit() -> None:
    watch = OddSteps(group_of().rank)
    trainer, plain = trainer_of(job_of(), watchers=[watch]), trainer_of(job_of(), alone())
    assert [stats.audited for stats in take_all(trainer)] == [0, 7, 0, 7]
    assert watch.seen == {0: [], 1: [1, 2], 2: [], 3: [1, 2]}
    assert [name for name, step in watch.calls if step == 1] == HOOKS
    take_all(plain)
    assert weights_of(trainer) == weights_of(plain)


def test_what_a_watcher_raises_ends_the_step_before_anything_changes_and_nobody_changes_a_step_from_outside() -> None:
    trainer = trainer_of(job_of(), watchers=[OddSteps(0, fails_at=1)])
    take(trainer, 0)
    before = [parameter.detach().clone() for parameter in trainer.step.state.model.parameters()]
    with pytest.raises(RunError):
        take(trainer, 1)
    assert all(map(torch.equal, before, trainer.step.state.model.parameters()))
    step: Any = trainer.step
    with pytest.raises(AttributeError):
        step.requests = None

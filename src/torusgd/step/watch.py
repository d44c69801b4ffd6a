"""What watches a step: it may look at what the step does, and end the run, and never changes what the step computes.

A step calls all its watchers at the same points, on every rank, in one fixed order:

    due            whether this step concerns the watcher; a GPU is never given such a step in advance
    reads_too      virtual workers whose images the watcher needs besides this rank's own
    before_worker  a pass begins; one watcher may give a hash that takes the integers of its gradients
    gradients_of   likewise; one watcher may give what takes the gradients themselves
    with_batch     the images of a virtual worker that takes part have been read
    before_send    the watcher's section of the control vector, which is summed over ranks
    after_passes   this rank's last backward pass is done, and the messages are under way
    check          all sums have arrived and nothing has changed yet
    before_accept  the step is about to change the weights, or to be skipped
    with_mean      the mean gradient is there, and is not clipped yet; only a sharded update waits for others now
    after          the weights are updated; what the watcher found becomes fields of StepStats, or figures of the event

`check` and `before_accept` may raise, on all ranks alike: what a watcher decides follows from the step's number and the
control vector, never from its own clock.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.base import Liveness
from ..data.pipeline import Batch
from ..gradients.integer_hash import IntegerHash
from ..recipe.schedule import Step
from .control_vector import NO_WORDS, ControlVector
from .membership import Membership


@dataclass(frozen=True)
class StepView:
    """A step as its watchers see it."""

    step: Step
    membership: Membership
    recompute: Callable[[int], IntegerHash]  # a virtual worker's hash anew; OSError or RunError if it can't be read
    is_stopping: bool = False  # whether this rank was requested to stop, so that no rank will use what the step finds
    is_redone: bool = False  # whether the passes were repeated, since a sum had left its range
    is_skipped: bool = False  # whether a gradient is not finite, so that the weights stay (float16)


class StepWatch:
    """A watcher that does nothing; the real ones override what they need."""

    name = ""  # name of the watcher's section of the control vector; empty: it has none
    words = 0  # highest number of int64 words in that section, the same on all ranks

    def due(self, step: int) -> bool:
        return False

    def reads_too(self, step: int, membership: Membership) -> Sequence[int]:
        return ()

    def before_worker(self, step: int, worker: int, membership: Membership) -> IntegerHash | None:
        return None

    def gradients_of(self, step: int, worker: int) -> Callable[[int, Tensor], object] | None:
        """What takes (slot index, float32 gradient times the loss scale, valid during the call only); None: nothing."""
        return None

    def with_batch(self, step: int, worker: int, batch: Batch) -> None:
        pass

    def before_send(self, view: StepView) -> Tensor:
        """This rank's section, int64, of one length on all ranks."""
        return NO_WORDS

    def after_passes(self, view: StepView) -> None:
        """Also called if the passes are repeated, as `check` is."""

    def check(self, view: StepView, control: ControlVector) -> None:
        pass

    def before_accept(self, view: StepView, control: ControlVector) -> None:
        pass

    def with_mean(self, view: StepView) -> None:
        """Not called in a step that is skipped."""

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        return {}

    def state(self) -> Mapping[str, Tensor]:
        """Tensors that the next step's watcher needs, for checkpoints; the same on all ranks."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave; without a tensor the watcher begins anew."""

    def close(self) -> None:
        """Ends what the watcher began beside the steps; every rank calls it after the last one."""


class Requests(StepWatch):
    """What somebody wants of a run between two steps: to stop, to save, to copy the state, to change its ranks.

    One rank learns of it first, and the control vector tells all. `stop_requested` is called before each virtual
    worker, `save_due` and `copy_due` (into nodes' memory) once a step; after `looks` steps the weights are looked at.
    """

    name, words = "requests", 4

    def __init__(
        self,
        stop_requested: Callable[[], bool],
        liveness: Liveness,
        looks: Collection[int] = (),
        save_due: Callable[[int], bool] = lambda steps: False,
        copy_due: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop_requested, self._liveness, self._looks = stop_requested, liveness, frozenset(looks)
        self._save_due, self._copy_due = save_due, copy_due
        self.is_stopping = self._is_changing = False

    def look(self) -> bool:
        """Before a virtual worker: whether to begin no further one (`is_stopping`)."""
        self._is_changing = self._liveness.ranks_change()
        self.is_stopping = self._stop_requested()
        return self.is_stopping

    def due(self, step: int) -> bool:
        # Somebody looks at the weights just before this step: then a GPU must not be ahead of the host.
        return step in self._looks

    def before_send(self, view: StepView) -> Tensor:
        wants_save, wants_copy = self._save_due(view.step.index + 1), self._copy_due()
        return torch.tensor([self.is_stopping, wants_save, wants_copy, self._is_changing], dtype=torch.int64)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        return dict(zip(("stop", "save", "keep", "change"), map(bool, control.words(self.name)), strict=True))

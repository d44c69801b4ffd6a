"""What somebody wants of a run between two steps: to stop, to save, to copy the state, to change its ranks.

One rank learns of it first. It travels in the control vector, so that all ranks do it after the same step.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm.base import Liveness
from .control_vector import ControlVector
from .watch import StepView, StepWatch


class Requests(StepWatch):
    """Collects this rank's requests; those of any rank hold for all.

    Args:
        stop_requested: Whether this rank was requested to stop; called before each virtual worker.
        liveness: Knows whether ranks are to join or to leave.
        looks: Counts of steps after which the weights are evaluated or saved.
        save_due: Whether rank 0 wants a checkpoint after so many steps; called once a step.
        copy_due: Whether rank 0 wants each node to copy the state into its memory; called once a step.
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
        self._stop_requested, self._liveness = stop_requested, liveness
        self._looks, self._save_due, self._copy_due = frozenset(looks), save_due, copy_due
        self.is_stopping = False
        """whether this rank was requested to stop at the last `look`"""
        self._is_changing = False

    def look(self) -> bool:
        """Looks for requests before a virtual worker; True if this rank shall begin no further one."""
        self._is_changing = self._liveness.ranks_change()
        self.is_stopping = self._stop_requested()
        return self.is_stopping

    def due(self, step: int) -> bool:
        """Whether somebody looks at the weights just before this step: then a GPU must not be ahead of the host."""
        return step in self._looks

    def before_send(self, view: StepView) -> Tensor:
        wants_save, wants_copy = self._save_due(view.step.index + 1), self._copy_due()
        return torch.tensor([self.is_stopping, wants_save, wants_copy, self._is_changing], dtype=torch.int64)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        return dict(zip(("stop", "save", "keep", "change"), map(bool, control.words(self.name)), strict=True))


def wants_stop(control: ControlVector) -> bool:
    """Whether any rank was requested to stop."""
    return control.words(Requests.name)[0] > 0

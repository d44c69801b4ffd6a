"""Counts, in portable arithmetic, the pairs of factors that multiply to nothing, of one virtual worker now and then.

`arithmetic.scales` says which these are. Their share stands in the event of the step after, as `lost_pairs`.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import counting
from ..arithmetic.scales import Pairs
from ..gradients.integer_hash import IntegerHash
from .control_vector import NO_WORDS, ControlVector
from .membership import Membership
from .watch import StepView, StepWatch

# Steps from one count to the next; those of the first one are there after two steps.
EVERY = 20
_WORKER = 0


class LostPairsWatch(StepWatch):
    """Counts in the passes of virtual worker 0; every rank has one."""

    name, words = "lost pairs", 2

    def __init__(self) -> None:
        self._inside = ExitStack()
        self._pairs = Pairs()

    def due(self, step: int) -> bool:
        # The control vector of a step may leave before its last backward pass has ended: the next one takes the count.
        return step % EVERY in (0, 1)

    def before_worker(self, step: int, worker: int, membership: Membership) -> IntegerHash | None:
        self._inside.close()
        if step % EVERY == 0 and worker == _WORKER:
            self._pairs = self._inside.enter_context(counting())
        return None

    def after_passes(self, view: StepView) -> None:
        self._inside.close()

    def before_send(self, view: StepView) -> Tensor:
        if view.step.index % EVERY != 1:
            return NO_WORDS
        pairs, self._pairs = self._pairs, Pairs()
        return torch.tensor([pairs.lost, pairs.all], dtype=torch.int64)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        if view.step.index % EVERY != 1 or not (words := control.words(self.name)) or not words[1]:
            return {}
        return {"lost_pairs": words[0] / words[1]}

    def close(self) -> None:
        self._inside.close()

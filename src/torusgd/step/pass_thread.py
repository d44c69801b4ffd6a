"""Passes in a thread of their own, so that a rank whose passes are late still takes part in every step.

The step's own thread gives it one virtual worker at a time, sums what it has finished, and goes on to the messages when
the step is closed, whatever the thread is doing: computing, waiting for images, or asleep. What the thread brings later
belongs to a step that is over, and is dropped; from then on it computes for the step that is on.

So that a late pass may go on with the weights that it began with, the thread has a copy of the network, which gets the
new weights before a step's first virtual worker. A pass that is not wanted any more ends at the next gradient.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..comm.monitor import SLICE
from ..data.pipeline import Batch
from ..errors import RunError
from ..recipe.schedule import Step
from ..synchrony.limits import Limit
from .batchnorm import BatchNormStatistics
from .closing import Arrivals, StepClosing
from .forward_backward import ForwardBackward
from .membership import Membership

END_SECONDS = 10.0
"""that `close` waits for a pass that is under way"""


@dataclass(frozen=True)
class Passed:
    """What the passes of one virtual worker gave."""

    step: int
    worker: int
    loss: Tensor
    """float32 []"""
    statistics: Tensor
    """float32 [width]: the batch statistics, as `BatchNormStatistics.batch` has them"""
    gradients: list[tuple[int, Tensor]]
    """by slot; slots without a gradient are missing"""
    replaced: int
    """images that could not be decoded"""


class _Unwanted(Exception):
    """The step of these passes is closed."""


@dataclass(frozen=True)
class _Work:
    step: Step
    worker: int
    membership: Membership
    take: Callable[[], Batch]


class PassThread:
    """Runs the passes of one virtual worker after the other on a copy of the network.

    Args:
        model: The copy; its parameters are this thread's.
        source: The network whose weights it gets.
        slots: Names of the parameters whose gradients are wanted, in slot order.
        forward_backward: Of the copy.
        batch_norm: Of the copy.
        arrivals: Over all ranks.
        delay: Seconds to sleep before the passes of (step, virtual worker).
        arithmetic: The context of the thread.
    """

    def __init__(
        self,
        model: nn.Module,
        source: nn.Module,
        slots: Sequence[str],
        forward_backward: ForwardBackward,
        batch_norm: BatchNormStatistics,
        arrivals: Arrivals,
        delay: Callable[[int, int], float],
        arithmetic: AbstractContextManager[object],
    ) -> None:
        self._parameters: list[Tensor] = list(model.parameters())
        self._sources: list[Tensor] = list(source.parameters())
        named = dict(model.named_parameters())
        self._slots = [named[name] for name in slots]
        self._forward_backward, self._batch_norm = forward_backward, batch_norm
        self._arrivals, self._delay, self._arithmetic = arrivals, delay, arithmetic
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Passed | Exception] = queue.SimpleQueue()
        self._unwanted = threading.Event()
        self._version = -1
        self.is_idle = True
        """nothing was given that has not come back"""
        for parameter in self._slots:
            parameter.register_post_accumulate_grad_hook(lambda _: self._check())
        self._thread = threading.Thread(target=self._run, daemon=True, name="torusgd-passes")
        self._thread.start()

    def begin(self, step: Step, worker: int, membership: Membership, take: Callable[[], Batch]) -> None:
        """Gives an idle thread a virtual worker of a step; `take` reads its images."""
        assert self.is_idle
        if self._version != step.index:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._sources)
            self._version = step.index
        self.is_idle = False
        self._unwanted.clear()
        self._work.put(_Work(step, worker, membership, take))

    def poll(self, seconds: float) -> Passed | None:
        """What has been finished, for which it waits so long; None: nothing, or what was not wanted any more.

        Raises:
            Exception: Whatever the passes raised, such as OSError where images can't be read.
        """
        try:
            done = self._done.get(timeout=seconds) if seconds > 0 else self._done.get_nowait()
        except queue.Empty:
            return None
        self.is_idle = True
        if isinstance(done, _Unwanted):
            return None
        if isinstance(done, Exception):
            raise done
        return done

    def in_time(
        self,
        step: Step,
        membership: Membership,
        limit: Limit,
        take: Callable[[int], Batch],
        is_stopped: Callable[[int], bool],
    ) -> Iterator[tuple[Passed, float]]:
        """This rank's virtual workers of a step that finish before it is closed, each with the seconds until then.

        Args:
            step: Whose.
            membership: Who computes which.
            limit: What closes it.
            take: Reads the images of a virtual worker; called in the thread.
            is_stopped: Called at least every SLICE seconds with the next virtual worker; true closes the step.
        """
        closing = StepClosing(step.index, limit, sum(map(len, membership.shares)), self._arrivals)
        left = list(reversed(membership.mine))
        is_mine = False
        while (left or is_mine) and not closing.is_closed():
            if self.is_idle:
                self.begin(step, left[-1], membership, partial(take, left.pop()))
                is_mine = True
            if is_stopped(left[-1] if left else membership.mine[-1]):
                closing.close()
            passed = self.poll(closing.pause(SLICE))
            if passed is None or passed.step != step.index:
                continue
            seconds = closing.seconds()
            if not closing.takes_one():
                break
            is_mine = bool(left)
            if left:  # the thread goes on while this one is summed
                self.begin(step, left[-1], membership, partial(take, left.pop()))
            yield passed, seconds
        self.abandon()

    def wait_idle(self) -> None:
        """Returns when nothing is under way any more."""
        self.abandon()
        while not self.is_idle:
            with suppress(OSError, RunError):  # of a step that is over
                self.poll(SLICE)

    def abandon(self) -> None:
        """Nobody wants what is under way: the thread ends it as soon as it can."""
        self._unwanted.set()

    def close(self) -> None:
        """Ends the thread, unless it sleeps on."""
        self.abandon()
        self._work.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        with self._arithmetic:
            while (work := self._work.get()) is not None:
                try:
                    self._done.put(self._passes(work))
                except Exception as error:
                    self._done.put(error)

    def _passes(self, work: _Work) -> Passed:
        if self._unwanted.wait(self._delay(work.step.index, work.worker)):
            raise _Unwanted
        batch = work.take()
        self._check()
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._forward_backward.forward(work.step, work.worker, batch, work.membership)
        statistics = self._batch_norm.batch.clone()
        self._check()
        self._forward_backward.backward()
        return Passed(work.step.index, work.worker, loss.detach(), statistics, list(self._gradients()), batch.replaced)

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        for slot, parameter in enumerate(self._slots):
            if parameter.grad is not None:
                yield slot, parameter.grad
                parameter.grad = None

    def _check(self) -> None:
        if self._unwanted.is_set():
            raise _Unwanted

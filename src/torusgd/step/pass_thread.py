"""Passes in a thread of their own, so that a rank whose passes are late still takes part in every step.

The step's own thread gives it one virtual worker at a time, sums what it has finished, and goes on to the messages at
the step's deadline, whatever the thread is doing: computing, waiting for images, or asleep. What the thread brings
later belongs to a step that is over, and is dropped; from then on it computes for the step that is on.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

import torch
from torch import Tensor, nn

from ..comm import store_keys as keys
from ..comm.groups import Group
from ..comm.monitor import SLICE
from ..data.pipeline import Batch
from ..errors import RunError
from ..precision import arithmetic_of
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..synchrony.delays import delay_model
from ..synchrony.limits import Limit
from .batchnorm import BatchNormStatistics
from .forward_backward import WholeNetwork
from .membership import Membership
from .model_state import StepState
from .work_stealing import GroupStore

# Seconds that `close` waits for a pass that is under way.
END_SECONDS = 10.0
# Seconds of a unit of `--delays`: one or two passes of the small recipes; a delay may name another by @SECONDS.
DELAY_UNIT = 0.05
# Seconds after which a rank queries the store again.
POLL = 2e-3
# Steps whose counters stay in the store: ranks are at most one step apart.
_STEPS_IN_STORE = 2


class Arrivals:
    """Counts the arrivals of a step over the ranks of a group; all ranks make one at the same time.

    >>> from torusgd.comm.groups import alone
    >>> arrivals = Arrivals(alone())
    >>> arrivals.begin(step=7)
    >>> arrivals.add(), arrivals.add(), arrivals.total()
    (1, 2, 2)
    """

    # The ranks' common store adds to a counter and answers with its new value, one rank after the other. So the order
    # of the answers is an order of arrivals that nobody disputes, whatever the ranks' clocks say, and no rank waits for
    # another: a rank that sleeps adds nothing. An answer takes one round trip to the store.

    def __init__(self, group: Group) -> None:
        self._store = GroupStore(group, keys.ARRIVALS, keys.ARRIVALS_OF)
        self._deletes = group.rank == 0
        self._step = 0

    def begin(self, step: int) -> None:
        """Counts from 0 for a step; every rank calls it with the same steps."""
        self._step = step
        if self._deletes and step >= _STEPS_IN_STORE:
            old = keys.ARRIVED.format(step=step - _STEPS_IN_STORE)
            self._store.query(lambda store: store.delete_key(old))

    def add(self, count: int = 1) -> int:
        """Adds so many arrivals, and returns the number of the last one, from 1 on over all ranks."""
        return self._store.query(lambda store: store.add(keys.ARRIVED.format(step=self._step), count))

    def total(self) -> int:
        """How many have arrived so far."""
        return self.add(0)


class StepWindow:
    """Whether a step still takes what is finished, as one rank learns of it; made when the rank begins the step.

    By count the step takes the first so many virtual workers in the order of `Arrivals`. By seconds each rank closes it
    for itself.
    """

    def __init__(self, step: int, limit: Limit, virtual_workers: int, arrivals: Arrivals) -> None:
        self._limit, self._workers, self._arrivals = limit, virtual_workers, arrivals
        self._is_counted = limit.count < virtual_workers
        self._began = time.perf_counter()
        self._is_closed = False
        arrivals.begin(step)

    def takes_one(self) -> bool:
        """One more virtual worker has finished here: whether it is among those that the step takes."""
        if self._is_counted and not self._is_closed:
            number = self._arrivals.add()
            if number >= self._limit.count:
                self.close()
            return number <= self._limit.count
        return not self._is_closed

    def is_closed(self) -> bool:
        """Whether the step takes nothing more."""
        if not self._is_closed:
            is_full = self._is_counted and self._arrivals.total() >= self._workers
            self._is_closed = is_full or self.seconds() >= self._limit.seconds
        return self._is_closed

    def close(self) -> None:
        """Closes it, if it counts on all ranks."""
        if self._is_counted:
            self._arrivals.add(self._workers)
        self._is_closed = True

    def seconds(self) -> float:
        """Since this rank has begun the step."""
        return time.perf_counter() - self._began

    def pause(self, longest: float) -> float:
        """Seconds that this rank may wait before it looks again, at most `longest`."""
        until = max(0.0, self._limit.seconds - self.seconds())
        return min(longest, until, POLL if self._is_counted else inf)


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
    """gradients by slot; slots without one are missing"""
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
    """Runs the passes of one virtual worker after the other on `copy`, whose parameters are this thread's.

    `delays` is a model of delays to sleep before passes, in units of DELAY_UNIT; empty: none.
    """

    def __init__(self, recipe: Recipe, copy: nn.Module, state: StepState, world: Group, delays: str) -> None:
        self._parameters: list[Tensor] = list(copy.parameters())
        self._sources: list[Tensor] = list(state.model.parameters())
        named = dict(copy.named_parameters())
        self._slots = [named[name] for name in state.reducer.names]
        self._batch_norm = BatchNormStatistics(copy)
        self._passes = WholeNetwork(copy, recipe, state.precision, self._batch_norm, world.device)
        self._arrivals, self._arithmetic = Arrivals(world), arithmetic_of(recipe)
        self._delays = delay_model(delays, recipe.seed, DELAY_UNIT) if delays else None
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Passed | Exception] = queue.SimpleQueue()
        self._unwanted = threading.Event()
        self._version = -1
        # Whether nothing was given that has not come back.
        self.is_idle = True
        # A pass that is not wanted any more ends at the next gradient.
        for parameter in self._slots:
            parameter.register_post_accumulate_grad_hook(lambda _: self._check())
        self._thread = threading.Thread(target=self._run, daemon=True, name="torusgd-passes")
        self._thread.start()

    def begin(self, step: Step, worker: int, membership: Membership, take: Callable[[], Batch]) -> None:
        """Gives an idle thread a virtual worker of a step; `take` reads its images."""
        assert self.is_idle
        # So that a late pass may go on with the weights that it began with, the thread has a copy of the network, which
        # gets the new weights before a step's first virtual worker.
        if self._version != step.index:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._sources)
            self._version = step.index
        self.is_idle = False
        self._unwanted.clear()
        self._work.put(_Work(step, worker, membership, take))

    def poll(self, seconds: float) -> Passed | None:
        """What has been finished, for which it waits so long; None: nothing, or what was not wanted any more.

        Raises whatever the passes raised, such as OSError if images can't be read.
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

        `take` reads the images of a virtual worker, in the thread. `is_stopped` is called at least every SLICE seconds
        with the next virtual worker; if it is true, the step is closed.
        """
        window = StepWindow(step.index, limit, sum(map(len, membership.shares)), self._arrivals)
        left = list(reversed(membership.mine))
        is_mine = False
        while (left or is_mine) and not window.is_closed():
            if self.is_idle:
                self.begin(step, left[-1], membership, partial(take, left.pop()))
                is_mine = True
            if is_stopped(left[-1] if left else membership.mine[-1]):
                window.close()
            passed = self.poll(window.pause(SLICE))
            if passed is None or passed.step != step.index:
                continue
            seconds = window.seconds()
            if not window.takes_one():
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
                    self._done.put(self._pass(work))
                except Exception as error:
                    self._done.put(error)

    def _pass(self, work: _Work) -> Passed:
        delay = self._delays.seconds(work.worker, work.step.index, 0) if self._delays is not None else 0.0
        if self._unwanted.wait(delay):
            raise _Unwanted
        batch = work.take()
        self._check()
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._passes.forward(work.step, work.worker, batch, work.membership)
        statistics = self._batch_norm.batch.clone()
        self._check()
        self._passes.backward()
        return Passed(work.step.index, work.worker, loss.detach(), statistics, list(self._gradients()), batch.replaced)

    def _gradients(self) -> Iterator[tuple[int, Tensor]]:
        for slot, parameter in enumerate(self._slots):
            if parameter.grad is not None:
                yield slot, parameter.grad
                parameter.grad = None

    def _check(self) -> None:
        if self._unwanted.is_set():
            raise _Unwanted

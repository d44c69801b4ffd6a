"""Steps that leave out late work: whose gradients they take, their deadlines, and passes in a thread of their own.

A step takes the gradients of all, of a journal, or of whoever meets its deadline: the first so many virtual workers to
finish, on whichever ranks, or what each rank has finished so many seconds after its own beginning of the step. With a
model of delays in the recipe no clock is read: a virtual worker takes a second of virtual time and its delay.

So that a rank whose passes are late still takes part in every step, they run in a thread (`PassThread`). The step's own
thread gives it one virtual worker at a time, sums what it has finished, and goes on to the messages at the deadline.
What the thread brings later is dropped.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf

import numpy as np
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
from ..synchrony.limits import Limit, Limits, VirtualSteps
from .batchnorm import BatchNormStatistics
from .forward_backward import WholeNetwork
from .journal import Journaled, JournalEntry, synchronous
from .membership import Membership
from .model_state import StepState
from .watch import StepView
from .work_stealing import GroupStore

# Virtual seconds of a virtual worker without its delay.
PASS = 1.0
_MICRO = 1_000_000
# Seconds that `close` waits for a pass that is under way.
END_SECONDS = 10.0
# Seconds of a unit of `--delays`: one or two passes of the small recipes; a delay may name another by @SECONDS.
DELAY_UNIT = 0.05
# Seconds after which a rank queries the store again.
POLL = 2e-3
# Steps whose counters stay in the store: ranks are at most one step apart.
_STEPS_IN_STORE = 2


@dataclass(frozen=True)
class StepDeadline:
    """An update that takes what meets a limit, whose seconds run on each rank from its own beginning of the step."""

    step: int
    limit: Limit


class Deadlines:
    """Chooses, step by step, what the next one waits for; every rank has one and gives it the same times."""

    def __init__(
        self, recipe: Recipe, shares: Sequence[Sequence[int]], first_step: int, progress: Callable[[int], object]
    ) -> None:
        form, workers = recipe.synchrony, recipe.virtual_workers
        delays = None if form.delays is None else delay_model(form.delays, recipe.seed)
        if delays is not None:
            shares, first_step = [[worker] for worker in range(workers)], 0  # the same steps in a run that is resumed
        count, warm = form.count_of(workers), first_step + form.warmup
        self._limits = Limits(shares, recipe.seed, count=count, threshold=form.threshold, warmup=form.warmup, warm=warm)
        self._virtual = None if delays is None else VirtualSteps(self._limits, workers, delays, PASS, progress)

    def next(self, step: int) -> JournalEntry | StepDeadline:
        if self._virtual is not None:
            return JournalEntry(step, frozenset(self._virtual.at(step).workers))
        return StepDeadline(step, self._limits.next(step))

    def observe(self, microseconds: Sequence[int], seconds: float) -> str:
        """Learns from a step; returns a line if it has measured a threshold. `microseconds`: see `arrived`."""
        times = np.array(microseconds, dtype=np.float64)
        found = self._limits.observe(np.where(times > 0, times / _MICRO, np.nan), seconds) if len(times) else None
        if found is None:
            return ""
        so_far = f"left out {found.dropped:.1%} of the work, and brought {found.gain:+.1%} gradients a second"
        now = f"from now on a step takes what a rank finishes in {found.seconds:.3f} s"
        return f"{now}; so far that would have {so_far}"


@dataclass(frozen=True)
class JournalReplay:
    """Used like `Deadlines` if time decides nothing: steps take all virtual workers, or those of a journal."""

    virtual_workers: int
    journal: Journaled | None

    def next(self, step: int) -> JournalEntry:
        return synchronous(step, self.virtual_workers) if self.journal is None else self.journal.entry(step)

    def observe(self, microseconds: Sequence[int], seconds: float) -> str:
        return ""


def deadlines_of(
    recipe: Recipe, replay: Journaled | None, shares: Sequence[Sequence[int]], first_step: int,
    progress: Callable[[int], object] = lambda step: None,
) -> Deadlines | JournalReplay:  # fmt: skip
    """What decides whose gradients the steps take, from `first_step` on; `shares` are the virtual workers by rank.

    With a model of delays all steps before `first_step` are decided anew, and `progress` hears of each.
    """
    if recipe.synchrony.leaves_out and replay is None:
        return Deadlines(recipe, shares, first_step, progress)
    return JournalReplay(recipe.virtual_workers, replay)


def arrived(step: int, microseconds: Sequence[int]) -> JournalEntry:
    """The update that all ranks have reported: when each virtual worker had finished, 0 if it was left out."""
    # Ranks need not agree beforehand. Each reports in its control vector which virtual workers it has summed; the sum
    # of these reports alone decides what is in the update. If ranks chose differently, or their clocks ran differently,
    # the update and the journal would still be the same on all of them.
    return JournalEntry(step, frozenset(worker for worker, when in enumerate(microseconds) if when > 0))


class StepWindow:
    """Whether a step takes what is finished, by all ranks' order of arrival or this rank's seconds; all make one."""

    # The ranks' common store adds to a counter and answers with its new value, one rank after the other. So the order
    # of the answers is an order of arrivals that nobody disputes, whatever the ranks' clocks say, and no rank waits for
    # another: a rank that sleeps adds nothing. An answer takes one round trip to the store.

    def __init__(self, group: Group, virtual_workers: int) -> None:
        self._store = GroupStore(group, keys.ARRIVALS, keys.ARRIVALS_OF)
        self._deletes, self._workers = group.rank == 0, virtual_workers

    # Counts from 0; every rank calls it for the same steps.
    def begin(self, step: int, limit: Limit) -> None:
        self._step, self._limit, self._is_counted = step, limit, limit.count < self._workers
        self._began, self._is_closed = time.perf_counter(), False
        if self._deletes and step >= _STEPS_IN_STORE:
            self._store.query(lambda store: store.delete_key(keys.ARRIVED.format(step=step - _STEPS_IN_STORE)))

    def takes_one(self) -> bool:
        """One more virtual worker has finished here: whether it is among those that the step takes."""
        if self._is_counted and not self._is_closed:
            number = self._add(1)
            if number >= self._limit.count:
                self.close()
            return number <= self._limit.count
        return not self._is_closed

    def is_closed(self) -> bool:
        if not self._is_closed:
            is_full = self._is_counted and self._add(0) >= self._workers
            self._is_closed = is_full or self.seconds() >= self._limit.seconds
        return self._is_closed

    def close(self) -> None:
        """Closes it, if it counts on all ranks."""
        if self._is_counted:
            self._add(self._workers)
        self._is_closed = True

    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def pause(self, longest: float) -> float:
        """Seconds that this rank may wait before it looks again, at most `longest`."""
        return min(longest, max(0.0, self._limit.seconds - self.seconds()), POLL if self._is_counted else inf)

    def _add(self, count: int) -> int:
        """Adds so many arrivals, and returns how many have arrived by then over all ranks."""
        return self._store.query(lambda store: store.add(keys.ARRIVED.format(step=self._step), count))


@dataclass(frozen=True)
class Passed:
    step: int
    worker: int
    loss: Tensor
    statistics: Tensor  # as `BatchNormStatistics.batch` has them
    gradients: list[tuple[int, Tensor]]  # by slot; slots without one are missing
    batch: Batch


class _Unwanted(Exception):
    """The step of these passes is closed."""


class PassThread:
    """Runs passes on `copy`, whose parameters are this thread's; it sleeps by a model of `delays` before them."""

    def __init__(self, recipe: Recipe, copy: nn.Module, state: StepState, world: Group, delays: str) -> None:
        self._copy, self._model = copy, state.model
        named = dict(copy.named_parameters())
        self._slots = [named[name] for name in state.reducer.names]
        self._batch_norm = BatchNormStatistics(copy)
        self._passes = WholeNetwork(copy, recipe, state.precision, self._batch_norm, world.device)
        self._window, self._arithmetic = StepWindow(world, recipe.virtual_workers), arithmetic_of(recipe)
        self._delays = delay_model(delays, recipe.seed, DELAY_UNIT) if delays else None
        self._work: queue.SimpleQueue[Callable[[], Passed] | None] = queue.SimpleQueue()
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
        # So that a late pass may go on with the weights that it began with, the thread has a copy of the network, which
        # gets the new weights before a step's first virtual worker.
        if self._version != step.index:
            with torch.no_grad():
                # Buffers too: a frozen batch norm normalises with them.
                mine, theirs = ([*each.parameters(), *each.buffers()] for each in (self._copy, self._model))
                torch._foreach_copy_(mine, theirs)
            self._version = step.index
        self.is_idle = False
        self._unwanted.clear()
        self._work.put(partial(self._pass, step, worker, membership, take))

    def poll(self, seconds: float) -> Passed | None:
        """What has been finished, waiting so long; None: nothing wanted. Raises whatever the passes raised."""
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
        self, view: StepView, limit: Limit, take: Callable[[int], Batch], is_stopped: Callable[[int], bool]
    ) -> Iterator[tuple[Passed, float]]:
        """This rank's virtual workers that finish before the step is closed, with the seconds; a stop closes it."""
        step, membership, window = view.step, view.membership, self._window
        window.begin(step.index, limit)
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
        self._unwanted.set()  # the thread ends what is under way as soon as it can

    def wait_idle(self) -> None:
        self._unwanted.set()
        while not self.is_idle:
            with suppress(OSError, RunError):  # of a step that is over
                self.poll(SLICE)

    def close(self) -> None:
        """Ends the thread, unless it sleeps on."""
        self._unwanted.set()
        self._work.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        with self._arithmetic:
            while (work := self._work.get()) is not None:
                try:
                    self._done.put(work())
                except Exception as error:
                    self._done.put(error)

    def _pass(self, step: Step, worker: int, membership: Membership, take: Callable[[], Batch]) -> Passed:
        if self._unwanted.wait(self._delays.seconds(worker, step.index, 0) if self._delays is not None else 0.0):
            raise _Unwanted
        batch = take()
        self._check()
        self._copy.zero_grad()
        loss = self._passes.forward(step, worker, batch, membership)
        statistics = self._batch_norm.batch.clone()
        self._check()
        self._passes.backward()
        gradients = [(slot, each.grad) for slot, each in enumerate(self._slots) if each.grad is not None]
        self._copy.zero_grad()
        return Passed(step.index, worker, loss.detach(), statistics, gradients, batch)

    def _check(self) -> None:
        if self._unwanted.is_set():
            raise _Unwanted

"""When a step is closed: what it waits for, chosen from the times of earlier steps, and how a rank learns of it.

    count        the step is closed when so many virtual workers have finished, on whichever ranks
    seconds      each rank closes it for itself, so long after it has begun it

By count the first so many are taken, in the order of the ranks' common store (`Arrivals`). By seconds no rank
asks another. In both cases each rank reports in its control vector which virtual workers it has summed, and when
they had finished. The sum of these reports alone decides what is in the update, and the journal holds it. So ranks need
not agree beforehand: if they chose differently, or their clocks ran differently, the update and the journal
would still be the same on all of them.

With a model of delays in the recipe no clock is read: each virtual worker takes a second of virtual time and the delay
that the model gives it.

First come, first served: a number for each thing that arrives in a step, in one order over all ranks.

The ranks' common store adds to a counter and answers with its new value, one rank after the other. So the order of the
answers is an order of arrivals that nobody disputes, whatever the ranks' clocks say, and no rank has to wait for
another: a rank that sleeps adds nothing. An answer takes one round trip to the store.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import store_keys as keys
from ..comm.base import ConnectionLost
from ..comm.groups import Group
from ..recipe.schema import Recipe
from ..synchrony.delays import F64, delay_model
from ..synchrony.limits import Limit, Limits, VirtualSteps, each_alone
from .journal import Journaled, JournalEntry, entry_of, synchronous

_KEPT = 2
"""steps whose counters stay in the store: ranks are at most one step apart"""


class Arrivals:
    """Counts the arrivals of a step over the ranks of a group; all ranks make one at the same time.

    Args:
        group: Its members' store counts; a rank alone counts by itself.

    >>> from torusgd.comm.groups import alone
    >>> arrivals = Arrivals(alone())
    >>> arrivals.begin(step=7)
    >>> arrivals.add(), arrivals.add(), arrivals.total()
    (1, 2, 2)
    """

    def __init__(self, group: Group) -> None:
        assert group.store is not None or group.size == 1, "ranks without a common store can't count together"
        self._store: Store | None = None
        if group.store is not None:
            # Counters of its own: a store outlives the runs of a group.
            number = group.broadcast_text(str(group.store.add(keys.ARRIVALS, 1)) if group.rank == 0 else "")
            self._store = PrefixStore(keys.ARRIVALS_OF.format(number=number), group.store)
        self._deletes = group.rank == 0
        self._step = self._alone = 0

    def begin(self, step: int) -> None:
        """Counts from 0 for a step; every rank calls it with the same steps."""
        self._step, self._alone = step, 0
        if self._store is not None and self._deletes and step >= _KEPT:
            self._ask(lambda store: store.delete_key(keys.ARRIVED.format(step=step - _KEPT)))

    def add(self, count: int = 1) -> int:
        """Adds so many arrivals, and gives the number of the last one, from 1 on over all ranks.

        Raises:
            ConnectionLost: The store is out of reach.
        """
        if self._store is None:
            self._alone += count
            return self._alone
        return self._ask(lambda store: store.add(keys.ARRIVED.format(step=self._step), count))

    def total(self) -> int:
        """How many have arrived so far."""
        return self.add(0)

    def _ask(self, question: Callable[[Store], int]) -> int:
        assert self._store is not None
        try:
            return int(question(self._store))
        except RuntimeError as error:
            raise ConnectionLost(f"the store that all ranks share can't be reached ({error})") from error


PASS = 1.0
"""virtual seconds of a virtual worker without its delay"""
POLL = 2e-3
"""seconds after which a rank asks the store again whether the step is closed"""
_MICRO = 1_000_000


@dataclass(frozen=True)
class Open:
    """An update whose contributions are decided while it is computed."""

    step: int
    limit: Limit
    """its seconds run on each rank from that rank's own beginning of the step"""


class Closing:
    """Chooses, step by step, what the next one waits for; every rank has one and gives it the same times.

    Args:
        recipe: With `synchrony.form` backup or cutoff.
        shares: Of each rank its virtual workers.
        first_step: The run's next; the first `synchrony.warmup` steps from it wait for all.
    """

    def __init__(self, recipe: Recipe, shares: Sequence[Sequence[int]], first_step: int) -> None:
        form, workers = recipe.synchrony, recipe.virtual_workers
        if form.delays is not None:
            shares, first_step = each_alone(workers), 0  # the same steps in a run that is resumed
        self._limits = Limits(
            shares,
            recipe.seed,
            count=form.count_of(workers),
            threshold=form.threshold,
            warmup=form.warmup,
            warm=first_step + form.warmup,
        )
        self._virtual: VirtualSteps | None = None
        if form.delays is not None:
            self._virtual = VirtualSteps(self._limits, workers, delay_model(form.delays, recipe.seed), PASS)

    def next(self, step: int) -> JournalEntry | Open:
        """What the step of this number takes, or waits for."""
        if self._virtual is not None:
            return entry_of(step, self._virtual.at(step).workers)
        return Open(step, self._limits.next(step))

    def observe(self, finished: F64, seconds: float) -> str:
        """Takes the times of a step that was taken; gives what it has found by them, for people, or nothing.

        Args:
            finished: Of each virtual worker the seconds from the step's beginning until it had finished, nan where it
                was left out; empty where nobody looked at a clock.
            seconds: Of the whole step on this rank.
        """
        found = self._limits.observe(finished, seconds) if len(finished) else None
        if found is None:
            return ""
        return (
            f"from now on a step takes what a rank finishes in {found.seconds:.3f} s; so far that would have left out "
            f"{found.dropped:.1%} of the work, and brought {found.gain:+.1%} gradients a second"
        )


class AsWritten:
    """In the place of `Closing` where no time decides: all virtual workers take part, or those of a journal."""

    def __init__(self, virtual_workers: int, replay: Journaled | None) -> None:
        self._workers, self._replay = virtual_workers, replay

    def next(self, step: int) -> JournalEntry:
        """What the step of this number takes."""
        return synchronous(step, self._workers) if self._replay is None else self._replay.entry(step)

    def observe(self, finished: F64, seconds: float) -> str:
        """Learns nothing."""
        return ""


def closing_of(
    recipe: Recipe, replay: Journaled | None, shares: Sequence[Sequence[int]], first_step: int
) -> Closing | AsWritten:
    """What says whose gradients the steps of a run take; see `Closing`.

    Args:
        recipe: Of the run.
        replay: The journal that is taken again, if any.
        shares: Of each rank its virtual workers.
        first_step: The run's next.
    """
    if recipe.synchrony.leaves_out and replay is None:
        return Closing(recipe, shares, first_step)
    return AsWritten(recipe.virtual_workers, replay)


class StepClosing:
    """Whether a step is closed, as one rank learns of it; made when the rank begins the step.

    Args:
        step: Its number.
        limit: What closes it.
        virtual_workers: V.
        arrivals: Shared by all ranks.
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
        """Closes it; where it is closed by count, on all ranks."""
        if self._is_counted:
            self._arrivals.add(self._workers)
        self._is_closed = True

    def seconds(self) -> float:
        """Since this rank has begun the step."""
        return time.perf_counter() - self._began

    def pause(self, longest: float) -> float:
        """Seconds that this rank may wait before it asks again, at most `longest`."""
        until = max(0.0, self._limit.seconds - self.seconds())
        return min(longest, until, POLL if self._is_counted else inf)


def arrived(step: int, microseconds: Sequence[int]) -> JournalEntry:
    """The update that all ranks have reported: when each virtual worker had finished, 0 if it was left out."""
    return entry_of(step, (worker for worker, when in enumerate(microseconds) if when > 0))


def as_microseconds(seconds: float) -> int:
    """A time as it travels, at least 1.

    >>> as_microseconds(0.25), as_microseconds(0.0)
    (250000, 1)
    """
    return max(1, round(seconds * _MICRO))


def as_seconds(microseconds: Sequence[int]) -> F64:
    """Times that have travelled: float64, nan for 0."""
    times = np.array(microseconds, dtype=np.float64)
    return np.where(times > 0, times / _MICRO, np.nan)

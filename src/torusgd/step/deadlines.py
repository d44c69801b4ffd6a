"""Whose gradients each step of a run takes: those of all, of a journal, or of whoever meets the step's deadline.

    count        the step takes the first so many virtual workers to finish, on whichever ranks
    seconds      it takes what each rank has finished so long after its own beginning of the step

With a model of delays in the recipe no clock is read: each virtual worker takes a second of virtual time and the delay
that the model gives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..recipe.schema import Recipe
from ..synchrony.delays import F64, delay_model
from ..synchrony.limits import Limit, Limits, VirtualSteps, each_alone
from .journal import Journaled, JournalEntry, entry_of, synchronous

# Virtual seconds of a virtual worker without its delay.
PASS = 1.0
_MICRO = 1_000_000


@dataclass(frozen=True)
class StepDeadline:
    """An update that takes what meets a limit, whose seconds run on each rank from its own beginning of the step."""

    step: int
    limit: Limit


class Deadlines:
    """Chooses, step by step, what the next one waits for; every rank has one and gives it the same times.

    See `deadlines_of`; the first `synchrony.warmup` steps from `first_step` wait for all.
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

    def next(self, step: int) -> JournalEntry | StepDeadline:
        """What the step of this number takes, or waits for."""
        if self._virtual is not None:
            return entry_of(step, self._virtual.at(step).workers)
        return StepDeadline(step, self._limits.next(step))

    def observe(self, finished: F64, seconds: float) -> str:
        """Learns from a step that took so many seconds on this rank; returns a line if it has measured a threshold.

        `finished` are the seconds until each virtual worker had finished, nan if it was left out; empty if no clock
        was read.
        """
        found = self._limits.observe(finished, seconds) if len(finished) else None
        if found is None:
            return ""
        return (
            f"from now on a step takes what a rank finishes in {found.seconds:.3f} s; so far that would have left out "
            f"{found.dropped:.1%} of the work, and brought {found.gain:+.1%} gradients a second"
        )


@dataclass(frozen=True)
class JournalReplay:
    """Used like `Deadlines` if time decides nothing: steps take all virtual workers, or those of a journal."""

    virtual_workers: int
    journal: Journaled | None

    def next(self, step: int) -> JournalEntry:
        return synchronous(step, self.virtual_workers) if self.journal is None else self.journal.entry(step)

    def observe(self, finished: F64, seconds: float) -> str:
        return ""


def deadlines_of(
    recipe: Recipe, replay: Journaled | None, shares: Sequence[Sequence[int]], first_step: int
) -> Deadlines | JournalReplay:
    """What decides whose gradients the steps of a run take, from `first_step` on.

    `shares` are the virtual workers of each rank; `replay` is the journal that is replayed, if any.
    """
    if recipe.synchrony.leaves_out and replay is None:
        return Deadlines(recipe, shares, first_step)
    return JournalReplay(recipe.virtual_workers, replay)


def arrived(step: int, microseconds: Sequence[int]) -> JournalEntry:
    """The update that all ranks have reported: when each virtual worker had finished, 0 if it was left out."""
    # Ranks need not agree beforehand. Each reports in its control vector which virtual workers it has summed; the sum
    # of these reports alone decides what is in the update. If ranks chose differently, or their clocks ran differently,
    # the update and the journal would still be the same on all of them.
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

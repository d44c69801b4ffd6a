"""Shares that follow the ranks' speed: a slow rank computes fewer virtual workers, and the others wait less for it.

Any rank can compute any virtual worker with the same bits, so this is free to change between two steps. Each rank
measures how long a virtual worker takes it, without what it waits for messages. Every so many steps all of these times
travel in the step's control vector, and every rank computes the same new shares from the same numbers.

Noise must not move work to and fro. So each rank sends two times, of the earlier and of the later half of the steps
since the last message, and work moves only if the new sizes (`recipe.schedule` finds the best ones) would have made the
steps of both halves shorter, and clearly so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..recipe.compatibility import BY_SPEED, Setup, obstacle
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schedule import best_counts, even_counts, slowest_rank
from ..recipe.schema import Recipe
from .control_vector import ControlVector
from .membership import Membership, with_counts
from .stragglers import UNIT, steps_between_notes
from .watch import NO_WORDS, StepView, StepWatch

LEAST_GAIN = 0.05
"""share of the time that the slowest rank computes; for less nothing is moved"""
_MOST_SHOWN = 16
"""ranks whose shares stand in a line"""
_FEWEST = 6
"""steps since the last comparison, of which a rank's speed can be measured in two halves"""
SLOW = 1.2
"""times the median of the ranks; from there on a rank counts as slow"""


@dataclass(frozen=True)
class Move:
    """Other shares, from the next step on."""

    membership: Membership
    moved: int
    """virtual workers that change their rank"""
    gain: float
    """share of the time that the slowest rank computed, which should be saved"""

    def __str__(self) -> str:
        """As the console shows it."""
        counts = self.membership.counts
        shown = "/".join(map(str, counts)) if len(counts) <= _MOST_SHOWN else f"{min(counts)} to {max(counts)}"
        return f"shares follow the ranks' speed: now {shown} virtual workers, compute {self.gain:.0%} shorter"


@dataclass(frozen=True)
class Balance:
    """What all ranks know of their speed at a time, and what follows; the same on every rank."""

    seconds: dict[int, float]
    """by rank, that a virtual worker has taken lately"""
    saved: float
    """seconds that the present shares have saved in these steps, against even ones"""
    move: Move | None

    @property
    def slow(self) -> dict[int, float]:
        """The slow ranks, and how many times the median a virtual worker takes them."""
        middle = median(self.seconds.values())
        return {rank: round(each / middle, 2) for rank, each in self.seconds.items() if each >= SLOW * middle}


class SpeedWatch(StepWatch):
    """Measures how fast the ranks are, and finds the shares that fit.

    Args:
        index: Of this rank among all.
        size: Number of ranks.
        speed: Gives what measures the seconds that a virtual worker of the step's passes took this rank.
    """

    name = "speeds"

    def __init__(self, index: int, size: int, speed: Callable[[], Callable[[], float]]) -> None:
        self._index, self._size, self._speed = index, size, speed
        self._every, self.words = steps_between_notes(size), size * 2
        self._seconds: list[Callable[[], float]] = []

    def due(self, step: int) -> bool:
        """Whether the ranks compare their speeds in this step."""
        return self._size > 1 and step % self._every == 0

    def after_passes(self, view: StepView) -> None:
        if self._size > 1:
            self._seconds.append(self._speed())

    def before_send(self, view: StepView) -> Tensor:
        """This rank's seconds in the earlier and in the later half of the steps since the last time, at its index."""
        # After a resume there are no steps yet, on no rank.
        if not self._seconds or not self.due(view.step.index):
            return NO_WORDS
        # Read only now, when a GPU has surely done those passes.
        seconds, self._seconds = [each() for each in self._seconds], []
        notes = torch.zeros(self._size, 2, dtype=torch.int64)
        if len(seconds) >= _FEWEST:
            half = len(seconds) // 2
            # A median: a pause in one step says nothing of the rank's speed.
            halves = median(seconds[:half]), median(seconds[half:])
            notes[self._index] = torch.tensor([int(each / UNIT) for each in halves])
        return notes.reshape(-1)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        section = control.section(self.name)
        if not section.numel() or int(section.min()) == 0:  # a rank has not been measured
            return {}
        earlier, later = (section.view(-1, 2).double() * UNIT).T.tolist()
        return {"balance": balance(view.membership, earlier, later, self._every)}


def balance(membership: Membership, earlier: Sequence[float], later: Sequence[float], steps: int) -> Balance:
    """Compares the ranks' speeds, and finds better shares.

    Args:
        membership: With the present shares.
        earlier: Of each place the seconds that a virtual worker took in the earlier half of the last steps.
        later: The same of the later half.
        steps: So many they were.

    >>> from torusgd.step.membership import even_shares
    >>> found = balance(even_shares([0, 1, 2], me=0, virtual_workers=12), [1, 1, 2], [1, 1, 2], steps=10)
    >>> found.move.membership.counts, found.move.gain
    ((5, 5, 2), 0.375)
    """
    now, workers = membership.counts, sum(membership.counts)
    even = even_counts(workers, len(now))
    best = best_counts(workers, later)
    move = None
    if all(slowest_rank(best, pace) <= (1 - LEAST_GAIN) * slowest_rank(now, pace) for pace in (earlier, later)):
        moved = sum(max(0, new - old) for old, new in zip(now, best, strict=True))
        move = Move(with_counts(membership, best), moved, 1 - slowest_rank(best, later) / slowest_rank(now, later))
    seconds = dict(zip(membership.ranks, later, strict=True))
    return Balance(seconds, steps * (slowest_rank(even, later) - slowest_rank(now, later)), move)


def follows_speed(options: RuntimeOptions, recipe: Recipe) -> bool:
    """Whether the shares of a run follow the ranks' speed."""
    return options.shares == "speed" and not obstacle(BY_SPEED, Setup(recipe))

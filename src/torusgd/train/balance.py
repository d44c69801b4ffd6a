"""Shares that follow the ranks' speed: a slow rank computes fewer virtual workers, and the others wait less for it.

Any rank can compute any virtual worker with the same bits, so this is free to change between two steps. Each rank
measures how long a virtual worker takes it, without what it waits for messages. Now and then all of these times travel
in the step's control vector (`stragglers`), and every rank computes the same new shares from the same numbers.

A step is as long as its slowest rank, so the best shares are found by handing each next virtual worker to the rank that
would be done first (ours; list scheduling goes back to Graham, 1969). Noise must not move work to and fro. So each
rank sends two times, of the earlier and of the later half of the steps since the last message, and work moves only if
that would have made the steps of both halves shorter, and clearly so.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..errors import UserError
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from .membership import Membership, even_shares, with_counts

LEAST_GAIN = 0.05
"""share of the time that the slowest rank computes; for less nothing is moved"""
_MOST_SHOWN = 16
"""ranks whose shares stand in a line"""
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


def balance(membership: Membership, earlier: Sequence[float], later: Sequence[float], steps: int) -> Balance:
    """Compares the ranks' speeds, and finds better shares.

    Args:
        membership: With the present shares.
        earlier: Of each place the seconds that a virtual worker took in the earlier half of the last steps.
        later: The same of the later half.
        steps: So many they were.

    >>> found = balance(even_shares([0, 1, 2], me=0, virtual_workers=12), [1, 1, 2], [1, 1, 2], steps=10)
    >>> found.move.membership.counts, found.move.gain
    ((5, 5, 2), 0.375)
    """
    now, workers = membership.counts, sum(membership.counts)
    even = even_shares(membership.ranks, membership.me, workers).counts
    best = best_counts(workers, later)
    move = None
    if all(_slowest(best, pace) <= (1 - LEAST_GAIN) * _slowest(now, pace) for pace in (earlier, later)):
        moved = sum(max(0, new - old) for old, new in zip(now, best, strict=True))
        move = Move(with_counts(membership, best), moved, 1 - _slowest(best, later) / _slowest(now, later))
    seconds = dict(zip(membership.ranks, later, strict=True))
    return Balance(seconds, steps * (_slowest(even, later) - _slowest(now, later)), move)


def best_counts(virtual_workers: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """How many virtual workers each rank takes so that the last one is done as early as can be; each takes one.

    Args:
        virtual_workers: At least as many as ranks.
        seconds: That one of them takes on each rank.

    >>> best_counts(12, [1.0, 1.0, 2.0])
    (5, 5, 2)
    """
    counts = [1] * len(seconds)
    ends = [(2 * each, place) for place, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(virtual_workers - len(seconds)):
        _, place = ends[0]
        counts[place] += 1
        heapq.heapreplace(ends, ((counts[place] + 1) * seconds[place], place))
    return tuple(counts)


def follows_speed(options: RuntimeOptions, recipe: Recipe) -> bool:
    """Whether the shares of a run follow the ranks' speed.

    Raises:
        UserError: It is asked for where other shares would give other weights, or can't be.
    """
    why = ""
    if recipe.reduction != "exact":
        why = f"sums in {recipe.reduction} depend on who computes what"
    elif recipe.column_blocks > 1:
        why = "ranks that share layers in column blocks take as many virtual workers each"
    elif recipe.synchrony.form != "synchronous":
        why = f"with synchrony.form = {recipe.synchrony.form} time decides other things than shares"
    if why and options.shares == "speed" and "shares" in options.model_fields_set:
        raise UserError(f"shares = speed: {why}; leave it out, and the shares are even")
    return options.shares == "speed" and not why


def _slowest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * each for count, each in zip(counts, seconds, strict=True))

"""Shares that follow the ranks' speed: a slow rank computes fewer virtual workers, and the others wait less for it.

Any rank can compute any virtual worker with the same bits, so this is free to change between two steps. Each rank
measures how long a virtual worker takes it, without what it waits for messages. Now and then all of these times travel
in the step's control vector (`stragglers`), and every rank computes the same new shares from the same numbers.

Noise must not move work to and fro. So each rank sends two times, of the earlier and of the later half of the steps
since the last message, and work moves only if the new sizes (`recipe.shares` finds the best ones) would have made the
steps of both halves shorter, and clearly so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..errors import UserError
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..recipe.shares import best_counts, even_counts, slowest_rank, why_even
from .membership import Membership, with_counts

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
    """Whether the shares of a run follow the ranks' speed.

    Raises:
        UserError: It is asked for where other shares would give other weights, or can't be.
    """
    why = why_even(recipe)
    if why and options.shares == "speed" and "shares" in options.model_fields_set:
        raise UserError(f"shares = speed: {why}; leave it out, and the shares are even")
    return options.shares == "speed" and not why

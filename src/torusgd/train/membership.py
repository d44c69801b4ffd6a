"""Who takes part in a step, and which virtual workers each rank computes: a value, handed to each step.

What computes, sums and loads takes the shares from here. The virtual workers of a step may be shared out in any way,
and in another way at the next step, without a bit of difference in the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Membership:
    """The ranks of one generation of a run's groups."""

    generation: int
    """counts the groups that the run has built: a message of an earlier one reaches nobody"""
    ranks: tuple[int, ...]
    """in the order of the group's places"""
    me: int
    """this process' place among them"""
    shares: tuple[tuple[int, ...], ...]
    """of each place its virtual workers"""

    @property
    def mine(self) -> tuple[int, ...]:
        """The virtual workers of this rank, in the order in which it computes them."""
        return self.shares[self.me]


def even_shares(ranks: Sequence[int], me: int, virtual_workers: int, generation: int = 0) -> Membership:
    """Shares of neighbouring virtual workers whose sizes differ by one at most.

    >>> even_shares(ranks=[0, 1, 2], me=1, virtual_workers=8).shares
    ((0, 1), (2, 3, 4), (5, 6, 7))
    """
    edges = [place * virtual_workers // len(ranks) for place in range(len(ranks) + 1)]
    shares = tuple(tuple(range(low, high)) for low, high in pairwise(edges))
    return Membership(generation, tuple(ranks), me, shares)

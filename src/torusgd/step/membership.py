"""Who takes part in a step, and which virtual workers each rank computes: a value, handed to each step.

What computes, sums and loads takes the shares from here. The virtual workers of a step may be shared out in any way,
and in another way at the next step, without a bit of difference in the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

from ..recipe.schedule import even_counts


@dataclass(frozen=True)
class Membership:
    """The ranks of one generation of a run's groups."""

    generation: int  # counts the groups that the run has built: a message of an earlier one reaches nobody
    ranks: tuple[int, ...]
    me: int  # index of this process among them
    shares: tuple[tuple[int, ...], ...]

    @property
    def mine(self) -> tuple[int, ...]:
        """The virtual workers of this rank, in the order in which it computes them."""
        return self.shares[self.me]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of virtual workers of each rank, by index."""
        return tuple(map(len, self.shares))

    @property
    def by_rank(self) -> dict[int, int]:
        """The number of virtual workers of each rank."""
        return dict(zip(self.ranks, self.counts, strict=True))


def even_shares(ranks: Sequence[int], me: int, virtual_workers: int, generation: int = 0) -> Membership:
    """Shares of neighbouring virtual workers whose sizes differ by one at most.

    >>> even_shares(ranks=[0, 1, 2], me=1, virtual_workers=8).shares
    ((0, 1), (2, 3, 4), (5, 6, 7))
    """
    edges = accumulate(even_counts(virtual_workers, len(ranks)), initial=0)
    shares = tuple(tuple(range(low, high)) for low, high in pairwise(edges))
    return Membership(generation, tuple(ranks), me, shares)


def with_counts(membership: Membership, counts: Sequence[int]) -> Membership:
    """Shares of these sizes; no more virtual workers change their rank than must, since images are read in advance.

    >>> with_counts(even_shares([0, 1, 2], me=0, virtual_workers=12), [5, 5, 2]).shares
    ((0, 1, 2, 3, 10), (4, 5, 6, 7, 11), (8, 9))
    """
    pairs = list(zip(membership.shares, counts, strict=True))
    freed = iter(sorted(each for share, count in pairs for each in share[count:]))
    shares = tuple((*share[:count], *islice(freed, max(0, count - len(share)))) for share, count in pairs)
    return replace(membership, shares=shares)

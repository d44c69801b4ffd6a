"""Who computes which piece of a step, settled while it is computed: claims in the ranks' common store.

Each member of a group has a row of pieces, and takes them from the front. Another member that has nothing to do may
take one from the back of a row whose owner is late. Both claim a piece before they begin it, so that each is taken
exactly once (ours; work stealing by deques goes back to Blumofe and Leiserson, 1999).

A member's row has one number in the store: its low half counts the pieces that the owner has claimed, its high half
those that others have. The store adds to it and answers with the new value, one claim after the other. A claim holds
as far as both counts together are no more than the row has pieces. So the owner's pieces and the others' can't meet.

The owner claims a quarter of what it has left at a time (guided self-scheduling: Polychronopoulos and Kuck, 1987), and
its first quarter needs no claim. So it asks the store O(log pieces) times a round, and one by one near the end, where
it matters.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm.base import ConnectionLost
from ..comm.groups import Group

LOOKS = 8
"""members at most whose rows a member looks at, those that follow it: the store answers N members in O(N)"""
_OTHERS = 1 << 32
"""what a claim by another than the owner adds"""
_ROUNDS = 3
"""rounds whose numbers are in the store: the one that is on, the one before, and the next, which is set to 0"""
_PART = 4

T = TypeVar("T")


class Claims:
    """One member's claims; all members make one at the same time, and begin the same rounds.

    Args:
        group: Of several members, whose store is asked.

    Whatever asks the store raises ConnectionLost where it is out of reach.
    """

    def __init__(self, group: Group) -> None:
        assert group.store is not None, "members without a common store can't settle who takes what"
        # Numbers of its own: a store outlives the runs of a group.
        number = group.broadcast_text(str(group.store.add("claims", 1)) if group.rank == 0 else "")
        self._store: Store = PrefixStore(f"claims{number}", group.store)
        self._me, self._size, self._round = group.rank, group.size, -1
        for turn in range(_ROUNDS):
            self._store.add(f"{turn}/{self._me}", 0)
        group.barrier()  # from now on all numbers are there: to ask for one that is not would wait for it

    def begin(self, counts: Sequence[int]) -> None:
        """Begins a round; `counts`: of each member the pieces of its row, at least one, the same on all members."""
        self._round += 1
        self._counts = counts
        self._begun, self._claimed, self._taken = 0, _unclaimed(counts[self._me]), 0
        # It has arrived before this round ends anywhere, since `looks` or `claim_own` wait for an answer after it.
        self.ask(lambda store: store.set(f"{(self._round + 1) % _ROUNDS}/{self._me}", "0"))

    @property
    def may_have_own(self) -> bool:
        """Whether this member may have a piece of its own left: others may have taken it since it last asked."""
        return self._begun < self._claimed or self._claimed + self._taken < self._count

    def claim_own(self) -> int | None:
        """The place in its row of the next piece that this member computes; None: nothing of its own is left."""
        if self._begun == self._claimed:
            left = self._count - self._claimed - self._taken
            if left <= 0:
                return None
            self._claimed += self._claim(max(1, left // _PART))
            if self._begun == self._claimed:
                return None
        self._begun += 1
        return self._begun - 1

    def claim_rest(self) -> None:
        """Claims all that this member has left, which nobody will compute."""
        self._begun = self._claimed = self._claimed + self._claim(self._count)

    def looks(self) -> dict[int, int]:
        """Of some other members, by place, the pieces that nobody has claimed yet."""
        places = [(self._me + n) % self._size for n in range(1, min(LOOKS, self._size - 1) + 1)]
        values = self.ask(lambda store: store.multi_get([self._name(place) for place in places]))
        return {place: max(0, self._open(place) - sum(_split(int(v)))) for place, v in zip(places, values, strict=True)}

    def claim_of(self, place: int) -> int | None:
        """The place in another member's row of a piece that this one computes now; None: it has none left."""
        own, others = _split(self.ask(lambda store: store.add(self._name(place), _OTHERS)))
        return self._counts[place] - others if own + others <= self._open(place) else None

    @property
    def _count(self) -> int:
        return self._counts[self._me]

    def _open(self, place: int) -> int:
        """Pieces of a row that must be claimed."""
        return self._counts[place] - _unclaimed(self._counts[place])

    def _claim(self, pieces: int) -> int:
        """Claims so many of this member's own; those that it gets."""
        own, others = _split(self.ask(lambda store: store.add(self._name(self._me), pieces)))
        beyond = max(0, own + others - self._open(self._me))
        self._taken = self._count if beyond else others  # no more to ask for
        return max(0, pieces - beyond)

    def _name(self, place: int) -> str:
        return f"{self._round % _ROUNDS}/{place}"

    def ask(self, question: Callable[[Store], T]) -> T:
        """What the store answers; all that is sent to it passes here."""
        try:
            return question(self._store)
        except RuntimeError as error:
            raise ConnectionLost(f"the store that all ranks share can't be reached ({error})") from error


def _unclaimed(pieces: int) -> int:
    """Pieces at the front of a row that its owner computes without a claim."""
    return max(1, pieces // _PART)


def _split(value: int) -> tuple[int, int]:
    """The pieces that the owner has claimed, and those that others have."""
    return value % _OTHERS, value // _OTHERS

"""An idle rank takes over virtual workers that a late one has not begun, in the middle of a step.

A step is as long as its slowest rank, and a rank that pauses makes all others wait. Any rank can compute any virtual
worker with the same bits, so those that have nothing left to do take some of its work (work stealing). Who computes
which is settled by claims (`Claims`): each virtual worker is computed exactly once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import store_keys as keys
from ..comm.base import ConnectionLost
from ..comm.groups import Group
from ..recipe.runtime_options import RuntimeOptions
from .membership import Membership

# Members at most whose rows a member looks at, those that follow it: the store answers N members in O(N).
LOOKS = 8
# What a claim by another than the owner adds.
_OTHERS = 1 << 32
# Rounds whose numbers are in the store: the one that is on, the one before, and the next, which is set to 0.
_ROUNDS = 3
_PART = 4
# A rank is late if what it has not begun takes it as long as the rank that decides needs to finish its own pass and to
# compute one more.
_LATE = 2
_FIELDS = 4
# Seconds: reports travel as integers.
_UNIT = 1e-6

T = TypeVar("T")


class GroupStore:
    """The store of a group's members under a prefix of its own; all members make one at the same time."""

    def __init__(self, group: Group, counter: keys.Key, prefix: keys.Key) -> None:
        assert group.store is not None or group.size == 1, "members without a common store can't settle who takes what"
        store = group.store if group.store is not None else HashStore()  # of a member alone
        # A number for each use, which `counter` counts: a store outlives the runs of a group.
        number = group.broadcast_text(str(store.add(counter, 1)) if group.rank == 0 else "")
        self._store: Store = PrefixStore(prefix.format(number=number), store)

    def query(self, query: Callable[[Store], T]) -> T:
        """The store's answer; ConnectionLost if it is out of reach."""
        try:
            return query(self._store)
        except RuntimeError as error:
            raise ConnectionLost(f"the store that all ranks share can't be reached ({error})") from error


class Claims:
    """One member's claims of pieces of a step, before it begins them (ours; deques: Blumofe and Leiserson, 1999)."""

    # A row has one number in the store: its low half counts the pieces that the owner has claimed, its high half those
    # that others have. The store adds to it and answers with the new value, one claim after the other. A claim holds as
    # far as both counts together are no more than the row has pieces. So the owner's pieces and the others' can't meet.

    def __init__(self, group: Group) -> None:
        self._store = GroupStore(group, keys.CLAIMS, keys.CLAIMS_OF)
        self._me, self._size, self._round = group.rank, group.size, -1
        for turn in range(_ROUNDS):
            self._add(keys.CLAIMED.format(turn=turn, member=self._me), 0)
        group.barrier()  # from now on all numbers are there; a query of one that is not would wait for it

    def begin(self, counts: Sequence[int]) -> None:
        """Begins a round; `counts`: of each member the pieces of its row, at least one, the same on all members."""
        self._round += 1
        self._counts, self._count = counts, counts[self._me]
        self._begun, self._claimed, self._taken = 0, _unclaimed(self._count), 0
        # It has arrived before this round ends anywhere, since `looks` or `claim_own` wait for an answer after it.
        following = keys.CLAIMED.format(turn=(self._round + 1) % _ROUNDS, member=self._me)
        self._store.query(lambda store: store.set(following, "0"))

    @property
    def may_have_own(self) -> bool:
        """Whether this member may have a piece of its own left: others may have taken it since its last query."""
        return self._begun < self._claimed or self._claimed + self._taken < self._count

    def claim_own(self) -> int | None:
        """The index in its row of the next piece that this member computes; None: nothing of its own is left."""
        if self._begun == self._claimed:
            # A quarter of what is left at a time (guided self-scheduling: Polychronopoulos and Kuck, 1987): so the
            # owner queries the store O(log pieces) times a round, and piece by piece near the end, when it matters.
            left = self._count - self._claimed - self._taken
            if left > 0:
                self._claimed += self._claim(max(1, left // _PART))
            if self._begun == self._claimed:
                return None
        self._begun += 1
        return self._begun - 1

    def claim_rest(self) -> None:
        """Claims all that this member has left, which nobody will compute."""
        self._begun = self._claimed = self._claimed + self._claim(self._count)

    def looks(self) -> dict[int, int]:
        """Of some other members the pieces that nobody has claimed yet."""
        members = [(self._me + n) % self._size for n in range(1, min(LOOKS, self._size - 1) + 1)]
        values = self._store.query(lambda store: store.multi_get([self._name(each) for each in members]))
        claimed = [sum(divmod(int(value), _OTHERS)) for value in values]
        return {each: max(0, self._open(each) - count) for each, count in zip(members, claimed, strict=True)}

    def claim_of(self, member: int) -> int | None:
        """The index in another member's row of a piece that this one computes now; None: it has none left."""
        others, own = divmod(self._add(self._name(member), _OTHERS), _OTHERS)
        return self._counts[member] - others if own + others <= self._open(member) else None

    def _open(self, member: int) -> int:
        """Pieces of a row that must be claimed."""
        return self._counts[member] - _unclaimed(self._counts[member])

    def _claim(self, pieces: int) -> int:
        """Claims so many of this member's own; those that it gets."""
        others, own = divmod(self._add(self._name(self._me), pieces), _OTHERS)
        beyond = max(0, own + others - self._open(self._me))
        self._taken = self._count if beyond else others  # nothing is left to claim
        return max(0, pieces - beyond)

    def _name(self, member: int) -> str:
        return keys.CLAIMED.format(turn=self._round % _ROUNDS, member=member)

    def _add(self, name: str, count: int) -> int:
        return self._store.query(lambda store: store.add(name, count))


def _unclaimed(pieces: int) -> int:
    """Pieces at the front of a row that its owner computes without a claim."""
    return max(1, pieces // _PART)


class OwnShare:
    """The virtual workers of a rank's share, one after the other; `own` counts those that were begun."""

    is_helping = False  # whether this rank waits for work of others, or has it

    def __init__(self, workers: Sequence[int]) -> None:
        self._workers, self.own = workers, 0

    def next(self) -> int | None:
        """The next virtual worker; None: there is none left."""
        if self.own == len(self._workers):
            return None
        self.own += 1
        return self._workers[self.own - 1]

    def is_last(self) -> bool:
        """Whether the one that `next` gave is the last; called after its forward pass."""
        return self.own == len(self._workers)

    def leave(self) -> None:
        """This rank computes nothing more, and nobody else does it instead."""

    def report(self) -> list[int]:
        """What travels in the step's control vector, to be summed over ranks: nothing."""
        return []


class StealingShare:
    """As `OwnShare`, without what others have taken over, and then the virtual workers of late ranks."""

    def __init__(self, membership: Membership, claims: Claims, wait: Callable[[], object]) -> None:
        self._membership, self._claims, self._wait = membership, claims, wait
        claims.begin(membership.counts)
        self.own, self.is_helping, self._shortest = 0, False, inf
        self._from = [0] * len(membership.ranks)
        self._began = self._last = time.perf_counter()

    def next(self) -> int | None:
        self._wait()
        now = time.perf_counter()
        if self.own and not self.is_helping:
            self._shortest = min(self._shortest, now - self._last)
        self._last = now
        index = self._claims.claim_own()
        if index is not None:
            self.own += 1
            return self._membership.mine[index]
        self.is_helping = True
        while (late := self._late(1)) is not None:
            taken = self._claims.claim_of(late)
            if taken is not None:
                self._from[late] += 1
                return self._membership.shares[late][taken]
        return None

    def is_last(self) -> bool:
        # Gradients leave during a rank's last backward pass, so a rank must know which one is its last. It decides
        # after the forward pass of its last own virtual worker: if no other rank is late, it will take over nothing in
        # this step, and its messages leave as they always do. Otherwise they wait until nothing is left that is worth
        # taking over. It may turn out later that the one before was the last, since others have taken the rest: what
        # happens after the decision can't be helped.
        return not self._claims.may_have_own and self._late(1 if self.is_helping else _LATE) is None

    def leave(self) -> None:
        self._claims.claim_rest()

    def report(self) -> list[int]:
        ready = time.perf_counter() - self._began
        rows = np.zeros((len(self._from), _FIELDS), dtype=np.int64)
        rows[:, 0], quickest = self._from, min(self._shortest, ready)
        rows[self._membership.me, 1:] = sum(self._from), round(ready / _UNIT), round(quickest / _UNIT)
        return rows.ravel().tolist()

    def _late(self, least: int) -> int | None:
        """The index of the rank that is furthest behind, by at least so many of this rank's virtual workers."""
        # Shares are sized by speed, so a virtual worker of a rank with n of them counts as m / n of a rank's with m.
        counts, mine = self._membership.counts, len(self._membership.mine)
        behind = {index: left * mine / counts[index] for index, left in self._claims.looks().items()}
        latest = max(behind, key=lambda each: behind[each])
        return latest if behind[latest] >= least else None


@dataclass(frozen=True)
class TakenOver:
    """What was taken over in a step; the same on every rank."""

    late: dict[int, int]  # number of its virtual workers that others have computed, by rank
    helpers: dict[int, int]  # number of others' virtual workers that it has computed, by rank
    saved: float

    @classmethod
    def read(cls, reports: Tensor, ranks: Sequence[int]) -> "TakenOver | None":
        """From the reports of all ranks, summed, int64 [4 N]; None if nothing was taken over.

        Of each rank: virtual workers lost, those taken, and the microseconds until its last forward pass had ended and
        of its quickest own virtual worker.
        """
        if not reports.numel() or not (rows := reports.view(-1, _FIELDS))[:, 0].any():
            return None
        lost, taken, ready, each = rows.unbind(1)
        # As if a late rank had needed for each that it lost as long as for the quickest of its own.
        saved = (ready + lost * each).max() - ready.max()
        counts = [dict(zip(ranks, column.tolist(), strict=True)) for column in (lost, taken)]
        late, helpers = ({rank: count for rank, count in found.items() if count} for found in counts)
        return cls(late, helpers, float(saved) * _UNIT)


def one_pass_behind(device: torch.device) -> Callable[[], object]:
    """To be called before each pass; on a GPU it waits until all passes but the last one have ended."""
    # A GPU's host launches passes far faster than they are computed. If it claimed them as fast, a late rank's work
    # would all be claimed by itself before another rank could help.
    if device.type != "cuda":
        return lambda: None
    ended: list[torch.cuda.Event] = []

    def wait() -> None:
        for event in ended:
            event.synchronize()
        ended[:] = [torch.cuda.current_stream(device).record_event()]

    return wait


WorkStealing = partial[StealingShare]  # gives this rank's work in a step's passes; all ranks call it for the same ones


def work_stealing(options: RuntimeOptions, world: Group) -> WorkStealing | None:
    """What a run's options say; None: each rank computes its own share."""
    if not options.work_stealing or world.size == 1:
        return None
    return partial(StealingShare, claims=Claims(world), wait=one_pass_behind(world.device))

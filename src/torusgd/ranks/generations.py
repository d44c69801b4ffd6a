"""Generations: which ranks make up a run by now, announced by the launcher, and the group that they form.

The launcher writes one record into the store of an attempt: the number of the generation, its ranks, those that were
lost, and whether it can wait for a step to end. When ranks are lost, join or shall leave, it writes the next one. Ranks
that join say first that they are ready, and take part from the generation on that names them; one that a generation no
longer names leaves. The others follow in their living processes: they fail what is under way, meet under a prefix that
no earlier generation has used (addresses of dead ranks would be found under an old one), and connect anew. A rank may
be lost at any moment of that; then the launcher announces another generation, and whoever waits for ranks of an old one
gives it up.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import groups
from ..comm.base import CommTimeout, ConnectionLost, Liveness
from ..comm.groups import Group
from ..text import named
from .gpus import compare_gpus, tell_gpu


class Released(Exception):
    """This rank is not needed any more: the others go on without it."""


GROUP_SECONDS = 7 * 24 * 3600.0
"""timeout of a run's groups: no message is given up for its age, since liveness knows which ranks are late"""
_KEY = "generation"
_POLL_SECONDS = 0.01
_NEXT_SECONDS = 5.0
"""for which a rank that joins waits for another one to send it the state, when the first is lost"""
_LOOK_SECONDS = 0.1
"""from one question whether ranks were lost to the next, while a rank computes"""


def ranks_do(ranks: Sequence[int], verb: str) -> str:
    """For people.

    >>> ranks_do([2], "go"), ranks_do([0, 3], "join")
    ('rank 2 goes', 'ranks 0, 3 join')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb}{'es' if verb.endswith('o') else 's'}"
    return f"{named('rank', ranks)} {verb}"


Follow = Callable[[Group, Callable[[], object]], object]
"""takes the state from the rank at place 0 of a group, and calls its second argument once it has"""


class _Record(NamedTuple):
    """What the launcher has written of the newest generation; as JSON in the store."""

    number: int
    ranks: tuple[int, ...]
    """in the order of the group's places; none: those that are left shall end"""
    lost: tuple[int, ...]
    """all ranks that were lost until then"""
    is_planned: bool
    """the ranks of the generation before are well, and shall end their step first"""
    waits: bool
    """its ranks are too few, and shall take no step"""
    joining: tuple[int, ...] = ()
    """ranks that are to take part in the next generation, and ask for the state meanwhile"""

    def source(self, rank: int) -> int:
        """The rank that sends the state to one that asks for it."""
        return self.ranks[rank % len(self.ranks)]

    def write(self, store: Store) -> None:
        store.set(_KEY, json.dumps(self))

    @staticmethod
    def read(store: Store) -> "_Record":
        number, ranks, lost, is_planned, waits, joining = json.loads(store.get(_KEY))
        return _Record(number, tuple(ranks), tuple(lost), is_planned, waits, tuple(joining))

    def has_lost(self, generation: int) -> bool:
        """Whether ranks of an earlier generation are lost, so that its work is in vain."""
        return self.number > generation and not self.is_planned


class Generations:
    """The generations of an attempt, as the launcher announces them and as a rank follows them.

    Args:
        store: Of the attempt, common to the launcher and all ranks; it outlives every rank.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.number = -1
        """of the generation that this process has announced, or has joined"""
        self.lost: tuple[int, ...] = ()
        """the ranks that were lost until then"""
        self.waits = False
        """its ranks are too few, and wait for others"""
        self.is_planned = False
        """there is a next generation, to be joined after the step under way"""
        self.asking: tuple[int, ...] = ()
        """the ranks that want this one to send them the state"""
        self._rank = -1
        self._looked = 0.0

    def announce(
        self, ranks: Sequence[int], lost: Iterable[int] = (), planned: bool = False, waits: bool = False
    ) -> None:
        """The launcher says which ranks make up the next generation; none: those that are left shall end.

        Args:
            ranks: In the order of the group's places.
            lost: Ranks that were lost since the generation before.
            planned: The ranks of the generation before are well, and shall end their step first.
            waits: They are too few, and shall take no step.
        """
        self.number += 1
        self.lost = (*self.lost, *lost)
        _Record(self.number, tuple(ranks), self.lost, planned, waits).write(self._store)

    def invite(self, ranks: Iterable[int]) -> None:
        """The launcher says which ranks are to join; those that ask for the state are sent it from now on."""
        newest = _Record.read(self._store)
        asking = tuple(rank for rank in ranks if self._store.check([f"asks/{rank}"]))
        if asking != newest.joining:
            newest._replace(joining=asking).write(self._store)

    def are_ready(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks wait to take part; asked by the launcher."""
        return all(self._store.check([f"ready/{rank}"]) for rank in ranks)

    def wait_for_admission(self, rank: int, follow: Follow | None = None) -> None:
        """A rank that joins says that it is ready, and waits for the generation from which on it takes part.

        Args:
            rank: Of this process.
            follow: Called with the group of a rank that sends the state and this one, and with what is to be called
                once this rank is ready. None: it is ready as it is, and so it is where nobody can send the state.

        Raises:
            ConnectionLost: All ranks shall end.
        """
        if follow is not None:
            self._store.set(f"asks/{rank}", "")
        tried, until = -1, 0.0
        while rank not in (newest := _Record.read(self._store)).ranks:
            if not newest.ranks:
                raise ConnectionLost("ranks were lost, and the others do not go on")
            if follow is not None and newest.number > tried and rank in newest.joining:
                tried = newest.number
                with suppress(ConnectionLost):
                    follow(self._meet_for_state(newest, rank, rank, lambda: False), partial(self._say_ready, rank))
                until = time.monotonic() + _NEXT_SECONDS
            elif follow is None or newest.waits or (newest.number == tried and time.monotonic() > until):
                self._say_ready(rank)
            time.sleep(_POLL_SECONDS)

    def meet_joiner(self, rank: int, is_given_up: Callable[[], bool]) -> Group:
        """The group of this rank and one of those `asking`; in any thread.

        Raises:
            ConnectionLost: It is given up, or the rank asks no more.
        """
        return self._meet_for_state(_Record.read(self._store), self._rank, rank, is_given_up)

    def join(self, rank: int, device: torch.device, ranks_per_gpu: int, liveness: Liveness) -> Group:
        """The group of the newest generation, once all of its ranks have come; a later one where some never come.

        Args:
            rank: Of this process.
            device: Where its tensors live, see `gpus.device_of`.
            ranks_per_gpu: Consecutive ranks that share a GPU; above 1 nothing goes by NCCL.
            liveness: Learns that this rank waits for others.

        Raises:
            UserError: Ranks share a GPU without knowing.
            ConnectionLost: The ranks that are left shall end.
            Released: The others go on without this rank.
        """
        while True:
            newest = _Record.read(self._store)
            self.number, self.lost, self.waits, self.is_planned = newest.number, newest.lost, newest.waits, False
            self._rank, self.asking = rank, ()
            if not newest.ranks:
                raise ConnectionLost("ranks were lost, and the others do not go on")
            if rank not in newest.ranks:
                raise Released
            try:
                return self._meet(rank, newest.ranks, device, ranks_per_gpu, liveness)
            except ConnectionLost:
                if not self.is_followed(liveness):
                    raise

    def is_followed(self, liveness: Liveness, seconds: float = 30.0) -> bool:
        """Whether the launcher announces another generation, which it does as soon as a lost rank is known.

        Args:
            liveness: Learns that this rank waits.
            seconds: For which this rank waits for it.
        """
        end = time.monotonic() + seconds
        while not (is_over := self._is_over()) and time.monotonic() < end and not liveness.late():
            time.sleep(_POLL_SECONDS)
        return is_over

    def check(self) -> bool:
        """Asked by a rank between two pieces of its work, which is in vain once ranks of its generation are lost.

        It also finds out whether another generation `is_planned`. It looks into the store now and then only: while one
        thread waits for an answer the others of its process take their turn, which took a tenth of short steps.

        Returns:
            Whether it has looked.

        Raises:
            ConnectionLost: They are.
        """
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        newest = _Record.read(self._store)
        self.is_planned = newest.number > self.number and newest.is_planned
        mine = [each for each in newest.joining if newest.source(each) == self._rank]
        self.asking = tuple(mine) if newest.number == self.number else ()
        if newest.has_lost(self.number):
            raise ConnectionLost("ranks were lost, says the launcher")
        return True

    def is_forsaken(self, store: Store) -> bool:
        """Whether ranks of this generation are lost, asked in another connection to the attempt's store.

        Whoever waits for a message must ask: of a machine that is cut off no connection closes.
        """
        return self.number >= 0 and _Record.read(store).has_lost(self.number)

    def _say_ready(self, rank: int) -> None:
        self._store.set(f"ready/{rank}", "")

    def _meet_for_state(self, record: _Record, me: int, joiner: int, is_given_up: Callable[[], bool]) -> Group:
        def is_over() -> bool:
            newest = _Record.read(self._store)
            return is_given_up() or newest.number != record.number or joiner not in newest.joining

        return groups.build(
            PrefixStore(f"state-{record.number}-{joiner}", self._store),
            (record.source(joiner), joiner),
            me,
            device=torch.device("cpu"),
            timeout=GROUP_SECONDS,
            is_given_up=is_over,
        )

    def _is_over(self) -> bool:
        return _Record.read(self._store).number > self.number

    def _meet(
        self, rank: int, ranks: Sequence[int], device: torch.device, ranks_per_gpu: int, liveness: Liveness
    ) -> Group:
        store = PrefixStore(f"{_KEY}-{self.number}", self._store)
        tell_gpu(store, rank, device, ranks_per_gpu)
        # One counter and one key for all: a key for each rank would be asked for N^2 times.
        if store.add("here", 1) == len(ranks):
            store.set("all here", "")
        while not store.check(["all here"]):
            if self._is_over():
                raise ConnectionLost("the ranks have changed before all came")
            if late := liveness.late():
                raise CommTimeout("; ".join(map(str, late)), late)
            time.sleep(_POLL_SECONDS)
        compare_gpus(store, len(ranks), device, ranks_per_gpu)
        is_gpu = device.type == "cuda"
        return groups.build(
            PrefixStore("world", store),
            ranks,
            rank,
            device=device,
            timeout=GROUP_SECONDS,
            nccl=is_gpu and ranks_per_gpu == 1,
            # Ranks with GPUs don't go on without the lost ones, so they form no group but the first.
            is_given_up=None if is_gpu else self._is_over,
        )

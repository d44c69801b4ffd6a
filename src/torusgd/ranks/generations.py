"""Generations: which ranks make up a run by now, announced by the launcher, and the group that they form.

The launcher writes one record into the store of an attempt, and the next one when ranks are lost, join or shall leave.
Ranks that join say first that they are ready, and take part from the generation on that names them; one that is no
longer named leaves. The others follow in their living processes: they end what is under way, meet and connect anew. If
a rank is lost meanwhile the launcher announces another generation, and whoever waits for an old one gives up waiting.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import groups
from ..comm import store_keys as keys
from ..comm.base import CommError, CommTimeout, ConnectionLost, Liveness
from ..comm.groups import Group
from .gpus import check_shared_gpus, claim_gpu, device_of

# Timeout of a run's groups: no message is given up for its age, since liveness knows which ranks are late.
GROUP_SECONDS = 7 * 24 * 3600.0
_POLL_SECONDS = 0.01
# Seconds for the launcher to find out that a rank is lost, and to announce the next generation.
_ANNOUNCE_SECONDS = 30.0
# Seconds for which a rank that joins waits for another one to send it the state, when the first is lost.
_SOURCE_SECONDS = 5.0
# Seconds from one question whether ranks were lost to the next, while a rank computes.
_LOOK_SECONDS = 0.1


class Released(Exception):
    """This rank is not needed any more: the others go on without it."""


class RanksChange:
    """What a rank's function returns in place of a result once ranks are to join or leave: it is called again."""


Wait = Callable[[Store], object]  # returns once the key `ALL_HERE` is there
# Takes the state from the first rank of a group, and calls its second argument once it has.
Follow = Callable[[Group, Callable[[], object]], object]


class _Record(NamedTuple):
    """What the launcher has written of the newest generation; as JSON in the store."""

    number: int
    ranks: tuple[int, ...]  # in the order of the group; none: those that are left shall end
    lost: tuple[int, ...]  # until then
    last_loss: int  # the newest generation that is of a loss; of later ones all ranks were well, and end their step
    waits: bool  # its ranks are too few, and shall take no step
    joining: tuple[int, ...] = ()  # ranks that are to take part in the next generation, and want the state meanwhile

    def source(self, rank: int) -> int:
        """The rank that sends the state to one that joins: another one for each, so that none sends to all."""
        return self.ranks[rank % len(self.ranks)]

    def write(self, store: Store) -> None:
        store.set(keys.GENERATION, json.dumps(self))

    @staticmethod
    def read(store: Store) -> "_Record":
        number, ranks, lost, last_loss, waits, joining = json.loads(store.get(keys.GENERATION))
        return _Record(number, tuple(ranks), tuple(lost), last_loss, waits, tuple(joining))

    def has_lost(self, generation: int) -> bool:
        """Whether ranks of an earlier generation are lost, so that its work is in vain."""
        # A planned change waits for the end of the step; a loss does not, since this step can't end. A rank may
        # learn of it only once a change was planned for those that are left.
        return self.last_loss > generation


class Generations:
    """The generations of an attempt, as the launcher announces them and as a rank follows them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.number = -1  # generation that this process has announced, or has joined
        self.lost: tuple[int, ...] = ()
        self.waits = False
        self.is_planned = False  # there is a next generation, to be joined after the step under way
        self.joiners: tuple[int, ...] = ()  # ranks that join and want the state from this one
        self._sending: list[Group] = []  # by which it sends them the state
        self._rank, self._looked, self._last_loss = -1, 0.0, 0

    def announce(
        self, ranks: Sequence[int], lost: Iterable[int] = (), planned: bool = False, waits: bool = False
    ) -> None:
        """The launcher says which ranks make up the next generation, and which were `lost` since; see `_Record`."""
        # SIGKILL 4: the others read this record whenever they wait, and between two pieces of work.
        self.number += 1
        self.lost = (*self.lost, *lost)
        self._last_loss = self._last_loss if planned else self.number
        _Record(self.number, tuple(ranks), self.lost, self._last_loss, waits).write(self._store)

    def invite(self, ranks: Iterable[int]) -> None:
        """The launcher says which ranks are to join; those that want the state are sent it from now on."""
        newest = _Record.read(self._store)
        joining = tuple(rank for rank in ranks if self._store.check([keys.WANTS_STATE.format(rank=rank)]))
        if joining != newest.joining:
            newest._replace(joining=joining).write(self._store)

    def are_ready(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks wait to take part; for the launcher."""
        return all(self._store.check([keys.READY.format(rank=rank)]) for rank in ranks)

    def wait_for_admission(self, rank: int, follow: Follow | None = None) -> None:
        """A rank that joins says it is ready, maybe after `follow`, and waits to take part; ConnectionLost: all end."""
        if follow is not None:
            self._store.set(keys.WANTS_STATE.format(rank=rank), "")
        tried, until, say_ready = -1, 0.0, partial(self._store.set, keys.READY.format(rank=rank), "")
        while rank not in (newest := self._newest()).ranks:
            if follow is not None and newest.number > tried and rank in newest.joining:
                # Once a generation: a source that is lost is followed by another generation with another source.
                tried = newest.number
                with suppress(ConnectionLost):
                    follow(self._meet_for_state(newest, rank, rank, lambda: False), say_ready)
                until = time.monotonic() + _SOURCE_SECONDS
            elif follow is None or newest.waits or (newest.number == tried and time.monotonic() > until):
                say_ready()
            time.sleep(_POLL_SECONDS)

    def meet_joiner(self, rank: int, is_given_up: Callable[[], bool]) -> Group:
        """The group of this rank and one of the `joiners`, in any thread, aborted once ranks are lost."""
        record = _Record.read(self._store)
        group = self._meet_for_state(record, self._rank, rank, is_given_up)
        self._sending.append(group)
        # Before this line `run` could not abort it, and the rank at the other end would wait for ever.
        if _Record.read(self._store).has_lost(record.number):
            group.abort()
            raise ConnectionLost(f"ranks were lost, and rank {rank} is sent no state")
        return group

    def run(
        self, function: Callable[[Group], Any], rank: int, device: torch.device, ranks_per_gpu: int, liveness: Liveness
    ) -> Any:
        """Calls a function with the group of each generation, one after the other, until it returns a result.

        After a planned change (`RanksChange`) or a loss the ranks of the next generation meet. UserError if ranks share
        a GPU without knowing, CommError if ranks were lost and all shall end, Released if the others go on without it.
        """
        while True:
            world = self.join(rank, device, ranks_per_gpu, liveness)
            try:
                result = function(world)
                if not isinstance(result, RanksChange):
                    world.barrier()
                    return result
                world.abort()
            except CommError:
                # SIGKILL 7: a rank that has noticed closes all its connections, so that those who wait for it notice
                # too, even if no connection to the dead rank was theirs.
                for group in (world, *self._sending):
                    group.abort()
                if not self._is_followed(liveness):
                    raise

    def join(self, rank: int, device: torch.device, ranks_per_gpu: int, liveness: Liveness) -> Group:
        """The group of the newest generation, once all of its ranks have come; a later one if some never come."""
        while True:
            # SIGKILL 8: the ranks that are left meet, under a prefix of their generation, since addresses of dead ranks
            # would be found under an old one.
            newest = self._newest()
            self.number, self.lost, self.waits, self.is_planned = newest.number, newest.lost, newest.waits, False
            self._rank, self.joiners, self._sending = rank, (), []
            if rank not in newest.ranks:
                raise Released
            try:
                own = PrefixStore(keys.MEETING.format(generation=self.number), self._store)
                wait = partial(self._wait_for_all, liveness)
                return meet(own, newest.ranks, rank, device, ranks_per_gpu, wait, is_given_up=self._is_over)
            except CommError:  # also one that is late just as the launcher announces that it is lost
                if not self._is_followed(liveness):
                    raise

    def check(self) -> bool:
        """Between two pieces of work: looks now and then for changes, and says whether it has; ConnectionLost: lost."""
        # While one thread waits for an answer of the store the others of its process take their turn, which took a
        # tenth of short steps.
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return False
        self._looked, newest = time.monotonic(), _Record.read(self._store)
        self.is_planned = newest.number > self.number and not newest.has_lost(self.number)
        mine = [each for each in newest.joining if newest.source(each) == self._rank]
        self.joiners = tuple(mine) if newest.number == self.number else ()
        if newest.has_lost(self.number):
            raise ConnectionLost("the launcher reports lost ranks")
        return True

    def has_lost_ranks(self, store: Store) -> bool:
        """Whether ranks of this generation are lost, as another connection to the attempt's store knows."""
        # Whoever waits for a message must look: of a machine that is cut off no connection closes.
        return self.number >= 0 and _Record.read(store).has_lost(self.number)

    def _newest(self) -> _Record:
        newest = _Record.read(self._store)
        if not newest.ranks:
            raise ConnectionLost("ranks were lost, and the others do not go on")
        return newest

    def _is_over(self) -> bool:
        return _Record.read(self._store).number > self.number

    def _is_followed(self, liveness: Liveness) -> bool:
        """Whether the launcher announces another generation, which it does as soon as a lost rank is known."""
        end = time.monotonic() + _ANNOUNCE_SECONDS
        while not (is_over := self._is_over()) and time.monotonic() < end and not liveness.late():
            time.sleep(_POLL_SECONDS)
        return is_over

    def _wait_for_all(self, liveness: Liveness, store: Store) -> None:
        while not store.check([keys.ALL_HERE]):
            if self._is_over():
                raise ConnectionLost("the ranks have changed before all came")
            # A rank that was lost after the launcher announced it here is late before it is known to be lost.
            if late := liveness.late():
                raise CommTimeout("; ".join(map(str, late)), late)
            time.sleep(_POLL_SECONDS)

    def _meet_for_state(self, record: _Record, me: int, joiner: int, is_given_up: Callable[[], bool]) -> Group:
        def is_over() -> bool:
            newest = _Record.read(self._store)
            return is_given_up() or newest.number != record.number or joiner not in newest.joining

        store = PrefixStore(keys.STATE_GROUP.format(generation=record.number, rank=joiner), self._store)
        ranks, cpu = (record.source(joiner), joiner), torch.device("cpu")
        return groups.build(store, ranks, me, device=cpu, timeout=GROUP_SECONDS, is_given_up=is_over)


def meet(
    store: Store, ranks: Sequence[int], rank: int, device: torch.device, ranks_per_gpu: int, wait: Wait, **how: Any
) -> Group:
    """The group of these ranks; each calls it once, with a store's prefix; `how`: more arguments of `groups.build`."""
    is_gpu = device.type == "cuda"
    if is_gpu:
        claim_gpu(store, rank, device, ranks_per_gpu)
    # They meet here and not in the group's own rendezvous, whose timeout would be that of every message too. One
    # counter and one key serve all: N ranks would read a key of each rank N^2 times.
    if store.add(keys.HERE, 1) == len(ranks):
        store.set(keys.ALL_HERE, "")
    wait(store)
    if is_gpu:
        check_shared_gpus(store, ranks, ranks_per_gpu)
    world, nccl = PrefixStore(keys.WORLD, store), is_gpu and ranks_per_gpu == 1
    return groups.build(world, ranks, rank, device=device, nccl=nccl, **{"timeout": GROUP_SECONDS, **how})


def meet_within(
    store: Store, rank: int, size: int, device: str, ranks_per_gpu: int, seconds: float, timeout: float = GROUP_SECONDS
) -> Group:
    """The group of `size` ranks that come within so many seconds; UserError for shared GPUs, DistError if late."""
    target, limit = device_of(device, ranks_per_gpu), timedelta(seconds=seconds)
    here: list[str] = [keys.ALL_HERE]
    return meet(store, range(size), rank, target, ranks_per_gpu, lambda own: own.wait(here, limit), timeout=timeout)

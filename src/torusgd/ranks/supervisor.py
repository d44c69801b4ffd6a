"""Ranks of our own on this machine: started from the fork server, met in one store, and watched until they end.

The launcher owns the store, so it outlives every rank. The store listens on a loopback address that the launcher has
bound itself; ranks are told its port when they are started, so nothing is looked up in the network and nothing that
comes from there is unpickled. `Supervisor.wait` gives what happens to ranks as events; what to do about them is the
caller's business. By the rule of `Supervisor.run` ranks that are lost leave the others to go on, in the same processes
and as the next generation, where the function can; any other failure ends all ranks. Where other numbers of ranks are
asked for in mid-run, or a machine joins (`listener`), ranks are started beside those at work, or let go, which is a new
generation as well.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore

from ..comm.base import LateRank
from ..signals import held_back, how_it_ended
from .failures import Failure, FailureChannel, FailureKind, cause_of
from .forkserver import start_forkserver
from .generations import Generations, ranks_do
from .join import JoinedNode, Listener, RemoteRank
from .liveness import BEAT_SECONDS, Limits, Watch
from .rank import JOINING, LOOPBACK_INTERFACE, RankFunction, RankSpec, serve_store, start_rank

EXPLAIN_SECONDS = 5.0
"""for the other ranks to say why they end as well, before they are killed"""


@dataclass(frozen=True)
class Exit:
    """A rank's process has ended."""

    rank: int
    code: int
    """minus the signal's number where a signal ended it"""
    remote: RemoteRank | None = None
    """of a rank on another machine"""

    @property
    def how(self) -> str:
        """For people."""
        if self.remote is not None:
            return self.remote.why
        return how_it_ended(self.code)


class RankFailed(Exception):
    """The ranks have ended without a result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Supervisor:
    """Starts ranks on this machine and watches them; leaving it as a context kills those that still run.

    Args:
        size: Number of ranks.
        device: `cpu` or `cuda` (rank i has GPU i, or i // ranks_per_gpu).
        limits: See `Limits`.
        ranks_per_gpu: Consecutive ranks that share a GPU.
        tell: Called with a line for people while ranks run, such as what all of them wait for.
    """

    def __init__(
        self,
        size: int,
        device: str,
        limits: Limits,
        ranks_per_gpu: int = 1,
        tell: Callable[[str], object] = lambda line: None,
    ) -> None:
        start_forkserver()
        self._tell = tell
        self.size, self._device, self._limits, self._ranks_per_gpu = size, device, limits, ranks_per_gpu
        self._root = serve_store()
        self.port: int = self._root.port
        """of the store, on loopback"""
        self.listener: Listener | None = None
        """where other machines join; None: nobody does"""
        self._wanted, self._most = 1, size
        self._processes: dict[int, BaseProcess | RemoteRank] = {}
        self._open_attempt(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def run(
        self,
        function: RankFunction,
        attempt: int = 0,
        fewest: int | None = None,
        asked: Callable[[], int | None] = lambda: None,
        wanted: int = 1,
        most: int | None = None,
    ) -> list[Any]:
        """Runs `function` on all ranks.

        Args:
            function: Found by its name in a module, or a `functools.partial` of such; pickled between our own
                processes, through a pipe.
            attempt: Its third argument; another one than any time before.
            fewest: Ranks with which it can go on when others die, freeze or hang: as many are called again, in the same
                processes, with the group of those that are left. None: all of them are needed.
            asked: Asked now and then for another number of ranks to go on with; None: for no other. Of later attempts
                it is the number too (`size`).
            wanted: Ranks with fewer of which it takes no step, but waits for more.
            most: Ranks in all, with those of other machines; None: no more than at the beginning.

        Returns:
            What it returned, by rank, without those that were lost or let go.

        Raises:
            RankFailed: A rank has failed; none runs any more.
        """
        self._wanted, self._most = wanted, self.size if most is None else most
        self._open_attempt(attempt)
        fewest = self.size if fewest is None else fewest
        for rank in range(self.size):
            self.start(rank, function)
        exits: list[Exit] = []
        while self._processes:
            events = self.wait()
            late = [event for event in events if isinstance(event, LateRank)]
            ended = self._without_joiners([event for event in events if isinstance(event, Exit)])
            self._watch.forget(exit.rank for exit in ended if exit.rank in self._let_go)
            exits += [exit for exit in ended if exit.rank not in self._let_go]
            failed = [exit for exit in exits if exit.code or not self._has_result(exit.rank)]
            if not late and not failed:
                if exits and (self._generations.number or self._joining):  # some may wait for more ranks, in vain
                    self._generations.announce([])
                    self._end_within(EXPLAIN_SECONDS)
                    break
                self._resize(function, None if self._joining else asked())
                continue
            if any(map(self._has_result, range(self._count))):
                break  # the last barrier has been passed: what was lost had nothing left to do
            if all(map(self._is_lost, failed)) and self._go_on(failed, late, fewest, function):
                exits = []
                continue
            self._generations.announce([])  # who waits for another generation ends, and may say why
            if not late and all(exit.code >= 0 for exit in failed):
                exits += self._end_within(EXPLAIN_SECONDS)
            self.kill()
            raise RankFailed(self._explain(failed, late))
        self.kill()
        found = filter(self._has_result, range(self._count))
        return [json.loads(self._store.get(f"result/{rank}")) for rank in found]

    def start(self, rank: int, function: RankFunction, joins: bool = False) -> None:
        """Starts the process of a rank in the attempt that is open; it `joins` those that are at work already."""
        interface = self.listener.interface if self.listener is not None else LOOPBACK_INTERFACE
        per_gpu, limits = self._ranks_per_gpu, self._limits
        spec = RankSpec(
            rank, self.size, self.port, self._attempt, self._device, per_gpu, limits, function, joins, interface
        )
        with held_back():  # else a signal could come between the two
            self._processes[rank] = start_rank(spec)

    def wait(self) -> list[Exit | LateRank]:
        """What happens within a second: processes that have ended, each reported once, or ranks that are late."""
        if ended := self._ended(BEAT_SECONDS):
            return [*ended]
        if late := self._watch.look():
            return [*late]
        if told := self._watch.outside_wait():
            self._tell(told)
        return []

    def ask_to_stop(self) -> None:
        """Asks the ranks to stop after their step, those of later attempts too."""
        self._root.set("stop", "")

    def kill(self) -> None:
        """Ends all ranks as they are."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._processes = {}

    def _open_attempt(self, attempt: int) -> None:
        # A prefix of its own, since addresses of dead ranks would be found under an old one.
        self._attempt, self._store = attempt, PrefixStore(f"attempt-{attempt}", self._root)
        self._watch = Watch(self._store, range(self.size), self._limits)
        self._generations = Generations(self._store)
        self._members = list(range(self.size))
        self._joining, self._joining_since = list[int](), 0.0
        self._let_go: set[int] = set()
        self._called_in_at = -1  # the step of the last rank that was called in
        self._count = self.size  # ranks that were ever started: each has a number of its own
        self._announce()
        if len(self._members) < self._wanted:
            self._tell(self._next())

    def _announce(self, lost: list[int] | None = None, planned: bool = False) -> None:
        self._generations.announce(self._members, lost or (), planned, waits=len(self._members) < self._wanted)

    def _next(self) -> str:
        """What the members do now, for people."""
        if len(self._members) >= self._wanted:
            return f"{ranks_do(self._members, 'go')} on"
        more = self._wanted - len(self._members)
        return f"{ranks_do(self._members, 'wait')} for {more} more, of {self._wanted} that the run wants at least"

    def _resize(self, function: RankFunction, asked: int | None) -> None:
        """Lets ranks go, or starts some here or elsewhere, which take part as soon as all of them are ready."""
        self._generations.invite(self._joining)
        if asked is not None and asked != len(self._members):
            leaving, self._members = self._members[asked:], self._members[:asked]
            if leaving:
                self._let_go.update(leaving)
                self._announce(planned=True)
                self._tell(f"{ranks_do(leaving, 'leave')}; {self._next()}")
            self.size = max(1, asked - sum(map(self._is_remote, self._members)))
            for rank in self._new_ranks(asked - len(self._members)):
                self.start(rank, function, joins=True)
        elif self._joining and self._generations.are_ready(self._joining):
            self._watch.follow(self._joining)
            # Ranks of this machine first: the first of all writes the run's folder, which is here.
            self._members = sorted([*self._members, *self._joining], key=lambda rank: (self._is_remote(rank), rank))
            self._announce(planned=True)
            self._tell(f"{ranks_do(self._joining, 'join')}; {self._next()}")
            self._joining = []
        elif self._joining and time.monotonic() - self._joining_since > self._limits.start:
            self._let_go.update(self._joining)
            for rank in self._joining:
                self._processes[rank].kill()
            who = ", ".join(map(str, self._joining))
            self._tell(f"rank {who} has not begun in {self._limits.start:g} s; {self._next()}")
            self._joining = []
        elif not self._joining and self.listener and (node := self.listener.waiting(self._attempt)):
            self._admit(node)

    def _admit(self, node: JoinedNode) -> None:
        """Has a machine that wants to join start as many of its ranks as there is room for."""
        room = self._most - len(self._members)
        if room <= 0:
            node.end(1, f"has {len(self._members)} ranks, and takes no more")
            return
        ranks = self._new_ranks(min(room, node.workers))
        self._processes |= zip(ranks, node.start(ranks, self.size, self._attempt), strict=True)

    def _new_ranks(self, count: int) -> list[int]:
        """Numbers that no rank has had, for ranks that are to join."""
        self._joining = [*range(self._count, self._count + count)]
        self._count += len(self._joining)
        self._joining_since = time.monotonic()
        return self._joining

    def _is_remote(self, rank: int) -> bool:
        return self._node_of(rank) is not None

    def _without_joiners(self, ended: list[Exit]) -> list[Exit]:
        """The exits without those of ranks that have not taken part yet, which hurt nobody; a line tells why."""
        early = {exit.rank: exit for exit in ended if exit.rank in self._joining}
        for exit in early.values():
            if exit.rank not in self._joining:
                continue  # it has gone with another one of its machine
            failure = self._told_early().get(exit.rank)
            gone = [exit.rank]
            if exit.remote is not None and (failure is not None or exit.remote.node.gone):
                node = exit.remote.node
                gone = [rank for rank in self._joining if rank == exit.rank or self._node_of(rank) in (node, None)]
                if failure is not None:
                    node.end(failure.kind.exit_code, failure.text)
            for rank in gone:
                self._joining.remove(rank)
                if (process := self._processes.pop(rank, None)) is not None:
                    process.kill()
                    process.join()
            self._tell(f"{ranks_do(gone, 'do')} not join: {failure.text if failure else exit.how}; {self._next()}")
        return [exit for exit in ended if exit.rank not in early]

    def _told_early(self) -> dict[int, Failure]:
        """What ranks have failed of before they took part."""
        return FailureChannel(PrefixStore(JOINING, self._store), self._count).reported()

    def _node_of(self, rank: int) -> JoinedNode | None:
        process = self._processes.get(rank)
        return process.node if isinstance(process, RemoteRank) else None

    def _go_on(self, failed: list[Exit], late: list[LateRank], fewest: int, function: RankFunction) -> bool:
        """Ends the ranks that are lost for good, and tells the others to go on; False if they are too few."""
        lost = {exit.rank for exit in failed} | {each.rank for each in late if each.rank is not None}
        left = [rank for rank in self._members if rank in self._processes and rank not in lost]
        failure = self._explain(failed, late)
        lost_members = [rank for rank in self._members if rank not in left]
        self._joining = [rank for rank in self._joining if rank not in lost]
        is_elsewhere = all(map(self._is_remote, left))
        if len(left) + is_elsewhere < fewest or not failure.is_loss:
            return False
        if is_elsewhere:
            if (first := self._call_in(function, needs_state=not left)) is None:
                return False
            left = [first, *left]
            failure = replace(failure, text=f"{failure.text}; rank {first} takes its place on this machine")
        for rank in self._processes.keys() & lost:
            process = self._processes.pop(rank)
            process.kill()
            process.join()
        self._watch.forget(lost)
        self._members = left
        if lost_members:  # and not only some that have not taken part yet
            self._announce(lost_members)
        self._tell(f"{failure.text}; {self._next()}")
        return True

    def _call_in(self, function: RankFunction, needs_state: bool) -> int | None:
        """A rank of this machine, where none is left, for the others to meet: the first of all writes the run's folder.

        It is one that is about to join, or else a new one. Where no others are left either it `needs_state`, which it
        has once it is ready. None: there is no such rank, or the last one that was started so was lost before any step.
        """
        here = [rank for rank in self._joining if rank in self._processes and not self._is_remote(rank)]
        here.sort(key=lambda rank: not self._generations.are_ready([rank]))
        if here and (self._generations.are_ready(here[:1]) or not needs_state):
            rank = here[0]
            self._joining.remove(rank)
        elif needs_state:
            return None
        else:
            self._watch.look()
            step = max((beat.step for beat in self._watch.beats.values() if beat is not None), default=0)
            if step <= self._called_in_at:
                return None
            rank, self._count, self._called_in_at = self._count, self._count + 1, step
            self.start(rank, function, joins=True)
        self._watch.follow([rank])
        return rank

    def _ended(self, seconds: float) -> list[Exit]:
        ready = connection.wait([process.sentinel for process in self._processes.values()], seconds)
        exits = []
        for rank, process in [*self._processes.items()] if ready else []:
            remote = process if isinstance(process, RemoteRank) else None
            # A lost machine's ranks have all ended before the first of them is told.
            if process.sentinel in ready or (remote is not None and remote.exitcode is not None):
                del self._processes[rank]
                process.join()
                exits.append(Exit(rank, process.exitcode or 0, remote))
        return exits

    def _end_within(self, seconds: float) -> list[Exit]:
        exits, end = [], time.monotonic() + seconds
        while self._processes and time.monotonic() < end:
            exits += self._ended(max(0.0, end - time.monotonic()))
        return exits

    def _is_lost(self, exit: Exit) -> bool:
        """Whether a rank was ended, by a signal or, on another machine, by a cut of its way to the store: without a
        word. What is wrong with a run its ranks tell."""
        told = FailureChannel(self._store, self._count)
        return exit.code < 0 or (exit.remote is not None and not told.has_reported(exit.rank))

    def _has_result(self, rank: int) -> bool:
        return self._store.check([f"result/{rank}"])

    def _explain(self, failed: list[Exit], late: list[LateRank]) -> Failure:
        """Why the ranks end: what one of them reported, or what became of its process."""
        early = self._told_early()  # by ranks that were called in, and so are not among those that join
        reported = {exit.rank: early[exit.rank] for exit in failed if exit.rank in early}
        reported |= FailureChannel(self._store, self._count).reported()
        cause = cause_of(reported.values())
        if cause is not None:
            return cause
        silent = [exit for exit in failed if exit.rank not in reported]
        kind = FailureKind.RANK_LOST
        if late:
            rank, text = late[0].rank or 0, "; ".join(map(str, late))
        elif silent and self._is_lost(silent[0]):
            killed = [exit for exit in silent if self._is_lost(exit)]
            rank = silent[0].rank
            text = "; ".join(f"rank {exit.rank} {exit.how}" for exit in killed)
        elif silent:
            # It ended itself, in code that is not ours, and would do so again.
            kind = FailureKind.RUN_ERROR
            rank, text = silent[0].rank, f"rank {silent[0].rank} ended with exit code {silent[0].code} and no result"
        else:
            rank = min(reported)
            text = f"the ranks lost each other ({reported[rank].text})"
        return Failure(kind, rank, socket.gethostname(), text)

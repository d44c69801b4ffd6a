"""Ranks of our own on this machine: started from the fork server, met in one store, and watched until they end."""

import json
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Self

from torch.distributed.distributed_c10d import PrefixStore

from ..comm import store_keys as keys
from ..comm.base import LateRank
from ..comm.groups import allow_files
from ..signals import MemoryKills, held_back, how_it_ended
from ..text import named
from .failures import Exit, Failure, FailureChannel, FailureKind, explain
from .forkserver import forkserver_has_ended, forkserver_process, start_forkserver
from .generations import Generations
from .gpus import free_local_rank
from .join import RANKS_LOST, JoinedNode, Listener, RemoteRank
from .liveness import BEAT_SECONDS, Limits, Report, Unchanged, Watch
from .rank import LOOPBACK_INTERFACE, RankFunction, RankSpec, serve_store, start_rank

# Seconds for the other ranks to say why they end as well, before they are killed.
EXPLAIN_SECONDS = 5.0
# Files of a launcher: of each rank pipes and its connections to the store (7 of 12 ranks), and all others (19).
_FILES_OF_RANK, _FILES = 8, 20
FOR_MEMORY = "perhaps by the kernel, which has ended a process for lack of memory"
# Exit code that multiprocessing gives to a process whose fork server has gone before it.
_WITHOUT_PARENT = 255


class Quorum(NamedTuple):
    """How many ranks a run needs, and takes."""

    fewest: int  # with which it goes on when others are lost; with fewer all end
    wanted: int = 1  # with fewer of which it takes no step, but waits for more
    most: int | None = None  # in all, with those of other machines; None: no more than at the beginning


class Part(Enum):
    """What a rank does in the run."""

    JOINS = "joins"  # has been started, and takes part as soon as all that join are ready
    MEMBER = "member"
    LEAVES = "leaves"  # is let go, and ends by itself
    GONE = "gone"  # was lost, or never took part


@dataclass
class RankEntry:
    """A row of the table; the row stays when the process ends, since numbers of ranks are never used again."""

    number: int
    process: BaseProcess | RemoteRank
    part: Part
    local: int = 0  # number among the ranks that run on its machine
    runs: bool = True
    server: int = 0  # the fork server's process, without which its end can't be told

    @property
    def node(self) -> JoinedNode | None:
        """The machine that has joined with it; None: it is on this one."""
        return self.process.node if isinstance(self.process, RemoteRank) else None

    @property
    def is_remote(self) -> bool:
        return self.node is not None


class RankFailed(Exception):
    """The ranks have ended without a result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Supervisor:
    """Starts ranks on this machine (rank i has GPU i // ranks_per_gpu) and watches them; a context that kills them."""

    def __init__(
        self, size: int, device: str, limits: Limits, ranks_per_gpu: int = 1, report: Report = lambda line: None
    ) -> None:
        start_forkserver(size)
        self._report = report
        self.size, self._device, self._limits, self._ranks_per_gpu = size, device, limits, ranks_per_gpu
        # Without a file the store would wait for itself for five minutes, deaf to signals, or torch abort the process.
        allow_files(size, _FILES_OF_RANK, _FILES)
        self._root = serve_store()  # of the launcher, so that it outlives every rank
        self.port: int = self._root.port  # of the store, on loopback
        self.listener: Listener | None = None  # where other machines join; None: nobody does
        self._table = dict[int, RankEntry]()
        self._memory_kills = MemoryKills()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def run(
        self,
        function: RankFunction,
        attempt: int = 0,
        quorum: Quorum | None = None,
        requested: Callable[[], int | None] = lambda: None,
    ) -> list[Any]:
        """Runs `function`, pickled through a pipe between our own processes, on all ranks.

        Gives what it returned, by rank, without those that were lost or let go. RankFailed if one has failed: then none
        runs any more. With a `quorum` (None: all ranks are needed) it is called again in the processes of those that
        are left when others die, freeze or hang. `attempt`, the function's third argument, is another one each time;
        `requested` gives another number of ranks to go on with, and for later attempts.
        """
        self._quorum = quorum or Quorum(self.size)
        self._open_attempt(attempt)
        for _ in range(self.size):
            self._start(Part.MEMBER, function)
        if len(self._in(Part.MEMBER)) < self._quorum.wanted:
            self._report(self._next())
        ended: list[Exit] = []  # exits of members in this generation
        while any(rank.runs for rank in self._table.values()):
            exits, late = self.wait()
            # Kept from one turn to the next: the ranks of one loss may end one after the other.
            ended += self._of_members(exits)
            failed = [exit for exit in ended if exit.code or not self._has_result(exit.rank)]
            # Three ways: nothing is wrong, ranks were lost and the others go on, or all end with one reason.
            if not late and not failed:
                if ended and (self._generations.number or self._in(Part.JOINS)):
                    # Members have results, so the run is over; those that are about to join would wait in vain.
                    self._generations.announce([])
                    self._end_within(EXPLAIN_SECONDS)
                    break
                if lasting := self._outlasting():
                    who = ranks_do(lasting, "end")
                    self._report(f"{who} only now, killed {self._limits.beat:g} s after the result was there")
                    break
                self._resize(function, None if self._in(Part.JOINS) else requested())
                continue
            if any(map(self._has_result, self._table)):
                break  # the last barrier has been passed: what was lost had nothing left to do
            failure, are_lost = explain(self._store, len(self._table), failed, late)
            if are_lost and (why := self._go_on(failure, failed, late, function)):
                self._report(f"{why}; {self._next()}")
                ended = []
                continue
            # Who waits for another generation ends, and may say why: a report explains more than an exit code.
            self._generations.announce([])
            if not late and all(exit.code >= 0 for exit in failed):
                self._end_within(EXPLAIN_SECONDS)
            self.kill()
            raise RankFailed(explain(self._store, len(self._table), failed, late)[0])
        self.kill()
        ranks = filter(self._has_result, self._table)
        return [json.loads(self._store.get(keys.RESULT.format(rank=rank))) for rank in ranks]

    def ask_to_stop(self) -> None:
        """After their step, those of later attempts too."""
        self._root.set(keys.STOP, "")

    def kill(self) -> None:
        self._end(rank.number for rank in self._table.values())

    def _open_attempt(self, attempt: int) -> None:
        # A prefix of its own, since addresses of dead ranks would be found under an old one.
        self._attempt, self._store = attempt, PrefixStore(keys.ATTEMPT.format(attempt=attempt), self._root)
        self._table = {}
        self._watch, self._over = Watch(self._store, range(self.size), self._limits), Unchanged()
        # Step of the last rank that was called in.
        self._joining_since, self._called_in_at = 0.0, -1
        self._generations = Generations(self._store)
        self._generations.announce(range(self.size), waits=self.size < self._quorum.wanted)

    def _start(self, part: Part, function: RankFunction) -> int:
        number = len(self._table)
        local = free_local_rank({rank.local for rank in self._table.values() if rank.runs and not rank.is_remote})
        interface = self.listener.interface if self.listener is not None else LOOPBACK_INTERFACE
        spec = RankSpec(
            number, self.size, self.port, self._attempt, self._device, self._ranks_per_gpu, self._limits, function,
            part is Part.JOINS, interface, local,
        )  # fmt: skip
        with held_back():  # else a signal could come between the two
            self._table[number] = RankEntry(number, start_rank(spec), part, local, server=forkserver_process())
        return number

    def _in(self, part: Part) -> list[int]:
        """The ranks with this part, in the order of their group."""
        found = [rank for rank in self._table.values() if rank.part is part]
        # Ranks of this machine are first: the first of all writes the run's folder, which is here.
        return [rank.number for rank in sorted(found, key=lambda rank: (rank.is_remote, rank.number))]

    def _turn(self, ranks: Iterable[int], part: Part) -> None:
        for rank in ranks:
            self._table[rank].part = part

    def _end(self, ranks: Iterable[int]) -> None:
        running = [self._table[rank] for rank in ranks if self._table[rank].runs]
        # First all of them, else one that is left would report the loss of another.
        for rank in running:
            rank.process.kill()
        for rank in running:
            rank.process.join()
            rank.runs = False

    def _end_lost(self, ranks: Collection[int]) -> None:
        """Ends ranks, and the agents of machines that have none left, which would wait for the end of the run."""
        self._end(ranks)
        for node in (self._table[rank].node for rank in ranks):
            if node is not None and not node.ranks and not node.gone:
                node.end(1, RANKS_LOST)

    def _announce(self, lost: Iterable[int] = (), planned: bool = False) -> None:
        members = self._in(Part.MEMBER)
        self._generations.announce(members, lost, planned, waits=len(members) < self._quorum.wanted)

    def _next(self) -> str:
        members, wanted = self._in(Part.MEMBER), self._quorum.wanted
        if (more := wanted - len(members)) <= 0:
            return f"{ranks_do(members, 'go')} on"
        return f"{ranks_do(members, 'wait')} for {more} more, of {wanted} that the run wants at least"

    def _resize(self, function: RankFunction, requested: int | None) -> None:
        """Lets ranks go, or starts some here or elsewhere, which take part as soon as all of them are ready."""
        members, joining = self._in(Part.MEMBER), self._in(Part.JOINS)
        self._generations.invite(joining)
        if requested is not None and requested != len(members):
            # The last ones leave, so that rank 0, which writes, stays.
            if leaving := members[requested:]:
                self._turn(leaving, Part.LEAVES)
                self._announce(planned=True)
                self._report(f"{ranks_do(leaving, 'leave')}; {self._next()}")
            self.size = max(1, requested - sum(self._table[rank].is_remote for rank in self._in(Part.MEMBER)))
            for _ in range(requested - len(members)):
                self._start(Part.JOINS, function)
            self._joining_since = time.monotonic()
        # All at once: each change of ranks costs every rank a new start of its groups.
        elif joining and self._generations.are_ready(joining):
            self._watch.follow(joining)
            self._turn(joining, Part.MEMBER)
            self._announce(planned=True)
            self._report(f"{ranks_do(joining, 'join')}; {self._next()}")
        elif joining and time.monotonic() - self._joining_since > self._limits.start:
            self._turn(joining, Part.GONE)
            self._end_lost(joining)
            who = ", ".join(map(str, joining))
            self._report(f"rank {who} has not begun in {self._limits.start:g} s; {self._next()}")
        elif not joining and self.listener and (node := self.listener.waiting(self._attempt)):
            self._admit(node)

    def _admit(self, node: JoinedNode) -> None:
        """Has a machine that wants to join start as many of its ranks as there is room for."""
        members, most = len(self._in(Part.MEMBER)), self._quorum.most or self.size
        if members >= most:
            node.end(1, f"has {members} ranks, and takes no more")
            return
        # Numbers of ranks that are gone are not used again: their keys still stand in the store.
        count = min(most - members, node.workers)
        if count < node.workers:
            self._report(f"{node.host} joins with {count} of its {node.workers} ranks: the run takes {most} at most")
        numbers = [*range(len(self._table), len(self._table) + count)]
        for number, process in zip(numbers, node.start(numbers, self.size, self._attempt), strict=True):
            self._table[number] = RankEntry(number, process, Part.JOINS)
        self._joining_since = time.monotonic()

    def _of_members(self, exits: list[Exit]) -> list[Exit]:
        """The exits that concern the others; those of ranks that were let go, or have not taken part yet, do not."""
        parts = {exit.rank: self._table[exit.rank].part for exit in exits}
        for exit in exits:
            if self._table[exit.rank].part is Part.JOINS:  # unless it has gone with another one of its machine
                self._lose_joiner(exit)
        if leaving := [rank for rank, part in parts.items() if part is Part.LEAVES]:
            self._watch.forget(leaving)
        return [exit for exit in exits if parts[exit.rank] is Part.MEMBER]

    def _lose_joiner(self, exit: Exit) -> None:
        """A rank has ended before it took part: it goes alone, or with those of its machine; a line says why."""
        early = FailureChannel(PrefixStore(keys.JOINING, self._store), len(self._table)).reported()
        # What it has reported, such as other data, holds for all ranks of its machine.
        failure, node, gone = early.get(exit.rank), self._table[exit.rank].node, [exit.rank]
        if node is not None and (failure is not None or node.gone):
            gone = [rank for rank in self._in(Part.JOINS) if self._table[rank].node is node]
            if failure is not None:
                node.end(failure.kind.exit_code, failure.text)
        why = failure.text if failure else f"rank {exit.rank} {exit.how}"
        self._turn(gone, Part.GONE)
        self._end(gone)
        self._report(f"{ranks_do(gone, 'do')} not join: {why}; {self._next()}")

    def _go_on(self, failure: Failure, failed: list[Exit], late: list[LateRank], function: RankFunction) -> str | None:
        """Ends the ranks that are lost for good, and has the others go on; a line, or None if they are too few."""
        # SIGKILL 3: lost are the ranks that have ended, and those that are frozen or hang, which are killed now.
        lost = {exit.rank for exit in failed} | {each.rank for each in late if each.rank is not None}
        members = self._in(Part.MEMBER)
        left = [rank for rank in members if self._table[rank].runs and rank not in lost]
        lost_members = [rank for rank in members if rank not in left]
        is_elsewhere = all(self._table[rank].is_remote for rank in left)
        if len(left) + is_elsewhere < self._quorum.fewest or failure.kind is not FailureKind.RANK_LOST:
            return None
        self._turn([*lost, *lost_members], Part.GONE)
        text = failure.text
        if is_elsewhere:
            if (first := self._call_in(function, needs_state=not left)) is None:
                return None
            text += f"; rank {first} takes its place on this machine"
        self._end_lost(lost)
        self._watch.forget(lost)
        if lost_members:  # and not only some that have not taken part yet
            self._announce(lost_members)
        return text

    def _call_in(self, function: RankFunction, needs_state: bool) -> int | None:
        """A rank of this machine, about to join or new, if none is left here; it `needs_state` if nobody has one."""
        here = [rank for rank in self._in(Part.JOINS) if self._table[rank].runs and not self._table[rank].is_remote]
        here.sort(key=lambda rank: not self._generations.are_ready([rank]))
        if here and (self._generations.are_ready(here[:1]) or not needs_state):
            rank = here[0]
        elif needs_state:
            return None
        else:
            # No second one for the same step: whatever ended the last would end it too.
            self._watch.look()
            step = max((beat.step for beat in self._watch.beats.values() if beat is not None), default=0)
            if step <= self._called_in_at:
                return None
            self._called_in_at, rank = step, self._start(Part.JOINS, function)
        self._turn([rank], Part.MEMBER)
        self._watch.follow([rank])
        return rank

    def wait(self) -> tuple[list[Exit], list[LateRank]]:
        """What happens within a second: processes that have ended, each once, and else ranks that are late."""
        if exits := self._exits(BEAT_SECONDS):
            return exits, []
        if late := self._watch.look():
            return [], late
        if line := self._watch.outside_wait():
            self._report(line)
        return [], []

    def _exits(self, seconds: float) -> list[Exit]:
        running = {rank.process.sentinel: rank for rank in self._table.values() if rank.runs}
        # SIGKILL 1: the kernel closes the dead process' end of a pipe, which ends this wait at once.
        ready = connection.wait([*running], seconds)
        exits = []
        for sentinel, rank in running.items() if ready else ():
            # A lost machine's ranks have all ended before the first of them is reported.
            if sentinel in ready or (rank.node is not None and rank.process.exitcode is not None):
                rank.process.join()
                rank.runs, code = False, rank.process.exitcode or 0
                how = rank.process.why if isinstance(rank.process, RemoteRank) else how_it_ended(code)
                if rank.node is None and code == -signal.SIGKILL and self._memory_kills():
                    how += f", {FOR_MEMORY}"
                if rank.node is None and code == _WITHOUT_PARENT and forkserver_has_ended(rank.server):
                    code, how = -signal.SIGKILL, "ended with the fork server"
                exits.append(Exit(rank.number, code, how, rank.is_remote))
        return exits

    def _end_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(rank.runs for rank in self._table.values()) and time.monotonic() < end:
            self._exits(max(0.0, end - time.monotonic()))

    def _outlasting(self) -> list[int]:
        """Ranks whose processes still run, though all ranks have ended for so long that one without a beat was lost."""
        # After its last beat a process may still wait for a thread or a child of its own, and nobody would notice.
        is_over = all(beat is not None and beat.ended for beat in self._watch.beats.values())
        is_late = self._over.seconds(is_over) > self._limits.beat and is_over
        return [rank.number for rank in self._table.values() if rank.runs and is_late]

    def _has_result(self, rank: int) -> bool:
        return self._store.check([keys.RESULT.format(rank=rank)])


def ranks_do(ranks: Sequence[int], verb: str) -> str:
    """For people."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {verb}{'es' if verb.endswith('o') else 's'}"
    return f"{named('rank', ranks)} {verb}"

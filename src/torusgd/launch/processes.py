"""Ranks of our own on this machine: started from the fork server, met in one store, and watched until they end.

The launcher owns the store, so it outlives every rank. The store listens on a loopback address that the launcher has
bound itself; ranks are told its port when they are started, so nothing is looked up in the network and nothing that
comes from there is unpickled. `Supervisor.wait` gives what happens to ranks as events; what to do about them is the
caller's business. By the rule of `Supervisor.run` ranks that are lost leave the others to go on, in the same processes
and as the next generation, where the function can; any other failure ends all ranks. Where other numbers of ranks are
asked for in mid-run, ranks are started beside those at work, or let go, which is a new generation as well.
"""

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from signal import Signals
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import groups
from ..comm.base import CommError
from ..comm.groups import Group
from ..comm.liveness import LateRank, Liveness
from ..signals import StopFlag, die_with_launcher, held_back
from .failures import Failure, FailureChannel, FailureKind, cause_of
from .forkserver import start_forkserver
from .generations import GROUP_SECONDS, Generations, Released, ranks_do
from .gpus import compare_gpus, device_of, tell_gpu
from .heartbeat import Heartbeat
from .roll_call import BEAT_SECONDS, Limits, Watch

RankFunction = Callable[[Group, StopFlag, int, Liveness], Any]
"""what a rank does, whoever started it: (all ranks, whether to stop, restarts so far, liveness) -> a JSON value"""

EXPLAIN_SECONDS = 5.0
"""for the other ranks to say why they end as well, before they are killed"""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Exit:
    """A rank's process has ended."""

    rank: int
    code: int
    """minus the signal's number where a signal ended it"""


class RankFailed(Exception):
    """The ranks have ended without a result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass(frozen=True)
class RankSpec:
    """What the process of a rank is started with."""

    rank: int
    size: int
    port: int
    attempt: int
    device: str
    ranks_per_gpu: int
    limits: Limits
    function: RankFunction
    joins: bool
    """beside ranks that are at work already"""


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
        self._processes: dict[int, BaseProcess] = {}
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

        Returns:
            What it returned, by rank, without those that were lost or let go.

        Raises:
            RankFailed: A rank has failed; none runs any more.
        """
        self._open_attempt(attempt)
        fewest = self.size if fewest is None else fewest
        for rank in range(self.size):
            self.start(rank, function)
        exits: list[Exit] = []
        while self._processes:
            events = self.wait()
            late = [event for event in events if isinstance(event, LateRank)]
            ended = [event for event in events if isinstance(event, Exit)]
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
            if all(exit.code < 0 for exit in failed) and self._go_on(failed, late, fewest):
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
        port, device, per_gpu = self._root.port, self._device, self._ranks_per_gpu
        spec = RankSpec(rank, self.size, port, self._attempt, device, per_gpu, self._limits, function, joins)
        process = multiprocessing.get_context("forkserver").Process(target=_be_rank, args=(spec,))
        with held_back():  # else a signal could come between the two
            process.start()
            self._processes[rank] = process

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
        self._count = self.size  # ranks that were ever started: each has a number of its own
        self._generations.announce(self._members)

    def _resize(self, function: RankFunction, asked: int | None) -> None:
        """Lets ranks go, or starts some, which take part as soon as all of them are ready."""
        if asked is not None and asked != len(self._members):
            self.size = asked
            leaving, self._members = self._members[asked:], self._members[:asked]
            if leaving:
                self._let_go.update(leaving)
                self._generations.announce(self._members, planned=True)
                self._tell(f"{ranks_do(leaving, 'leave')}; {ranks_do(self._members, 'go')} on")
            self._joining = [*range(self._count, self._count + asked - len(self._members))]
            self._count += len(self._joining)
            self._joining_since = time.monotonic()
            for rank in self._joining:
                self.start(rank, function, joins=True)
        elif self._joining and self._generations.are_ready(self._joining):
            self._watch.follow(self._joining)
            self._members += self._joining
            self._generations.announce(self._members, planned=True)
            self._tell(f"{ranks_do(self._joining, 'join')}; {ranks_do(self._members, 'go')} on")
            self._joining = []
        elif self._joining and time.monotonic() - self._joining_since > self._limits.start:
            self._let_go.update(self._joining)
            for rank in self._joining:
                self._processes[rank].kill()
            who = ", ".join(map(str, self._joining))
            self._tell(f"rank {who} has not begun in {self._limits.start:g} s; {ranks_do(self._members, 'go')} on")
            self._joining = []

    def _go_on(self, failed: list[Exit], late: list[LateRank], fewest: int) -> bool:
        """Ends the ranks that are lost for good, and tells the others to go on; False if they are too few."""
        lost = {exit.rank for exit in failed} | {each.rank for each in late if each.rank is not None}
        left = [rank for rank in self._members if rank in self._processes and rank not in lost]
        failure = self._explain(failed, late)
        if len(left) < fewest or not failure.is_loss:
            return False
        lost_members = [rank for rank in self._members if rank not in left]
        self._joining = [rank for rank in self._joining if rank not in lost]
        for rank in self._processes.keys() & lost:
            process = self._processes.pop(rank)
            process.kill()
            process.join()
        self._watch.forget(lost)
        self._members = left
        if lost_members:  # and not only some that have not taken part yet
            self._generations.announce(left, lost_members)
        self._tell(f"{failure.text}; {ranks_do(left, 'go')} on")
        return True

    def _ended(self, seconds: float) -> list[Exit]:
        ranks = {process.sentinel: rank for rank, process in self._processes.items()}
        exits = []
        for sentinel in connection.wait(list(ranks), seconds):
            assert isinstance(sentinel, int)
            process = self._processes.pop(ranks[sentinel])
            process.join()
            exits.append(Exit(ranks[sentinel], process.exitcode or 0))
        return exits

    def _end_within(self, seconds: float) -> list[Exit]:
        exits, end = [], time.monotonic() + seconds
        while self._processes and time.monotonic() < end:
            exits += self._ended(max(0.0, end - time.monotonic()))
        return exits

    def _has_result(self, rank: int) -> bool:
        return self._store.check([f"result/{rank}"])

    def _explain(self, failed: list[Exit], late: list[LateRank]) -> Failure:
        """Why the ranks end: what one of them reported, or what became of its process."""
        reported = FailureChannel(self._store, self._count).reported()
        cause = cause_of(reported.values())
        if cause is not None:
            return cause
        silent = [exit for exit in failed if exit.rank not in reported]
        kind = FailureKind.RANK_LOST
        if late:
            rank, text = late[0].rank or 0, "; ".join(map(str, late))
        elif silent and silent[0].code < 0:
            killed = [exit for exit in silent if exit.code < 0]
            rank = silent[0].rank
            text = "; ".join(f"rank {exit.rank} was ended by {Signals(-exit.code).name}" for exit in killed)
        elif silent:
            # It ended itself, in code that is not ours, and would do so again.
            kind = FailureKind.RUN_ERROR
            rank, text = silent[0].rank, f"rank {silent[0].rank} ended with exit code {silent[0].code} and no result"
        else:
            rank = min(reported)
            text = f"the ranks lost each other ({reported[rank].text})"
        return Failure(kind, rank, socket.gethostname(), text)


def serve_store() -> TCPStore:
    """A store for processes of this machine, on a loopback port that nobody else can have taken meanwhile."""
    listener = socket.socket()
    listener.bind((_LOOPBACK, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(_LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def meet(
    store: Store,
    rank: int,
    size: int,
    device: str,
    *,
    seconds: float,
    timeout: float = GROUP_SECONDS,
    ranks_per_gpu: int = 1,
) -> Group:
    """The group of all ranks of an attempt; each of them calls it once, with the attempt's store.

    Args:
        store: See above.
        rank: Of this process.
        size: Ranks in all.
        device: `cpu`, or `cuda` (see `gpus.own_gpu`).
        seconds: For all ranks to come.
        timeout: Of the group's messages.
        ranks_per_gpu: Consecutive ranks that share a GPU; above 1 nothing goes by NCCL.

    Raises:
        UserError: Ranks share a GPU, or there are too few.
        torch.distributed.DistError: They did not meet in time.
    """
    target = device_of(device, ranks_per_gpu)
    # Ranks meet here and not in the group's own rendezvous, whose timeout would be that of every message too.
    tell_gpu(store, rank, target, ranks_per_gpu)
    # One counter and one key for all: a key for each rank would be asked for N^2 times.
    if store.add("here", 1) == size:
        store.set("all here", "")
    store.wait(["all here"], timedelta(seconds=seconds))
    compare_gpus(store, size, target, ranks_per_gpu)
    nccl = device == "cuda" and ranks_per_gpu == 1
    return groups.build(PrefixStore("world", store), range(size), rank, device=target, timeout=timeout, nccl=nccl)


def _run_through_generations(spec: RankSpec, generations: Generations, stop: StopFlag, heartbeat: Heartbeat) -> Any:
    """Calls the function of a rank, and again with the others of the next generation each time that ranks change."""
    device = device_of(spec.device, spec.ranks_per_gpu)
    if spec.joins:
        generations.wait_for_admission(spec.rank)
    while True:
        world = generations.join(spec.rank, device, spec.ranks_per_gpu, heartbeat)
        try:
            result = spec.function(world, stop, spec.attempt, heartbeat)
            world.barrier()
            return result
        except CommError:
            world.abort()  # so that those who wait for this rank learn of it too
            if not generations.is_followed(heartbeat):
                raise


def _be_rank(spec: RankSpec) -> None:
    """The process of a rank. It ends with exit code 0 only when all is well: else it reports why."""
    rank = str(spec.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(spec.size), LOCAL_WORLD_SIZE=str(spec.size))
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    die_with_launcher()
    root = TCPStore(_LOOPBACK, spec.port, None, False, wait_for_workers=False)
    store = PrefixStore(f"attempt-{spec.attempt}", root)
    generations = Generations(store)

    def is_asked_to_stop() -> bool:
        generations.check()
        return root.check(["stop"])

    stop = StopFlag(also=is_asked_to_stop)
    stop.install()
    heartbeat = Heartbeat(store, spec.rank, spec.limits, generations=generations)
    try:
        result = _run_through_generations(spec, generations, stop, heartbeat)
        store.set(f"result/{spec.rank}", json.dumps(result))
    except Released:
        heartbeat.close()
        os._exit(0)  # the groups that this rank was in are aborted, and nothing waits for it
    except (Exception, SystemExit) as error:
        with suppress(RuntimeError):  # the launcher is gone, and this process with it in a moment
            FailureChannel(store, spec.size).report(Failure.of(error, spec.rank))
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)  # closes all connections, so that the other ranks notice at once
    heartbeat.close()

"""Connects the ranks of a group for all-reduces, and times what they do together: one clock, a start agreed in time."""

import hashlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from ..errors import UserError
from .base import Engine
from .gloo import GlooEngine, StagedEngine
from .groups import AnyGroup, Group, group_of
from .nccl import NcclEngine

# a message tag above all of an engine's sums
_TAG = 1 << 30
# round trips to a rank of another machine, and to one of the same, where only an offset has to be ruled out
_TRIPS, _TRIPS_HERE = 8, 2
# Seconds a second by which two clocks part: RFC 5905 allows each 15 millionths.
_DRIFT = 3e-5
# seconds before the start in which ranks no longer sleep, and that they have beyond the time the agreement takes
_AWAKE = 1e-3


class Span(NamedTuple):
    """What one rank did, from begin to end in seconds of the group's clock."""

    begin: float
    end: float


class Elapsed(NamedTuple):
    """What all ranks did together: from the last rank's begin to the last rank's end."""

    seconds: float
    skew: float = 0.0  # seconds from the first rank's begin to the last one's: by so much the time may be too short
    bound: float = 0.0  # seconds by which clocks that differ may have changed the time or the skew; 0 on one machine
    end: float = 0.0  # when it ended, in seconds of the group's clock

    @property
    def is_doubtful(self) -> bool:
        """Skew and bound are more than 5 % of the time."""
        return self.skew + self.bound > 0.05 * self.seconds

    def __str__(self) -> str:
        apart = f"{1e3 * self.seconds:.3g} ms (began {1e3 * self.skew:.2g} ms apart, clocks +- {1e3 * self.bound:.2g})"
        return apart + " doubtful" * self.is_doubtful


def typical(taken: Iterable[Elapsed]) -> Elapsed:
    """The median of each figure.

    >>> typical([Elapsed(3.0, 0.1), Elapsed(1.0, 0.3), Elapsed(2.0, 0.2)])
    Elapsed(seconds=2.0, skew=0.2, bound=0.0, end=0.0)
    """
    return Elapsed(*map(median, zip(*taken, strict=True)))


class Clock:
    """The monotonic clock of a group's first rank, as every rank reads it; all ranks call its methods together."""

    # Offsets are measured as NTP does (RFC 5905, section 8): a message leaves the first rank at a, reaches another one
    # at b of its clock, whose answer leaves at c and is back at d. Then the other clock is ahead by ((b - a) + (c - d))
    # / 2, wrong by ((d - a) - (c - b)) / 2 at most; of several trips the one with the least error counts. Processes of
    # one machine have one clock unless they are in different time namespaces: if two run on one kernel, and the
    # measured offset may be zero, it is.

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreement = 0.0  # a wait for the others is agreed on in advance by so many seconds and half as many again
        self._measure()

    def now(self) -> float:
        return time.perf_counter() + self.offset

    def start(self) -> float:
        """Returns on all ranks at one moment: the time at which it did on this one."""
        # A barrier is no start: ranks leave an all-reduce of one element up to 75 ms apart over 16 hosts at 5 ms, and
        # that would count as time of whatever follows. So they agree on a moment later than that by which all know it.
        moment = self._agree()
        # Clocks that part: measured again before the drift has doubled the error. All ranks know the same moment.
        if self.bound and moment - self._measured > self.bound / (2 * _DRIFT):
            self._measure()
            moment = self._agree()
        while (left := moment - self.now()) > 0:
            # Sleeps end late by a tenth of a millisecond; but ranks that share cores have to let each other run.
            time.sleep(left - _AWAKE if left > _AWAKE else 0)
        return self.now()

    def span(self, run: Callable[[], object]) -> Span:
        """What `run()` takes on this rank from a common start on, until the device has done all that it was given."""
        begin = self.start()
        run()
        if self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)
        return Span(begin, self.now())

    def elapsed(self, spans: Sequence[Span]) -> list[Elapsed]:
        """The times of the spans over all ranks: the same list everywhere."""
        own = [(-begin, begin, end) for begin, end in spans]
        agreed = torch.tensor(own, dtype=torch.float64, device=self._group.small_device)
        self._group.all_reduce(agreed, maximum=True)
        # Twice the bound: until they are measured again, drift may double the error.
        bound = 2 * self.bound
        return [Elapsed(end - last, last + minus_first, bound, end) for minus_first, last, end in agreed.tolist()]

    def _agree(self) -> float:
        # The moment of the next start: after the last rank has come, and all can know that.
        agreed = _tensor(self._group, [self.now(), self._agreement])
        self._group.all_reduce(agreed, maximum=True)
        last, seconds = agreed.tolist()
        self._agreement = max(self.now() - last, self._agreement / 2)
        return last + 1.5 * seconds + _AWAKE

    def _measure(self) -> None:
        # Down the tree, if there is one: the first rank of a mesh knows how far it is from the root's.
        known = _tensor(self._group, [0.0, 0.0])
        for mesh in reversed(self._group.meshes):
            mesh.broadcast(known)
            known += _distance(mesh)
        self.offset = float(known[0])  # seconds to add to this rank's time.perf_counter()
        # Seconds by which the difference of two ranks' readings may be wrong, in opposite directions.
        self.bound = sum(sorted(self._group.all_gather(known[1]).tolist())[-2:])
        self._agree()  # takes as long as the next one
        self._measured = self._agree()


def _distance(mesh: Group) -> torch.Tensor:
    # The clock of the mesh's first rank minus this rank's, and the largest error of that: float64 [2].
    machines = mesh.all_gather(torch.tensor(machine_number(), device=mesh.small_device)).tolist()
    found = torch.zeros(mesh.size, 2, dtype=torch.float64, device=mesh.small_device)
    for place in range(1, mesh.size):
        is_here = machines[place] == machines[0]
        trips = range(_TRIPS_HERE if is_here else _TRIPS)
        if mesh.rank == 0:
            offset, error = _offset_of(mesh, place, trips)
            found[place] = _tensor(mesh, [0.0, 0.0] if is_here and abs(offset) <= error else [offset, error])
        elif mesh.rank == place:
            # All are announced before the first comes: Gloo holds a message back until then.
            requests = [mesh.receive(_tensor(mesh, [0.0]), 0, _TAG + trip) for trip in trips]
            for trip, request in enumerate(requests):
                request.wait()
                b = time.perf_counter()
                mesh.send(_tensor(mesh, [b, time.perf_counter()]), 0, _TAG + trip).wait()
    mesh.broadcast(found)
    return found[mesh.rank]


def _offset_of(mesh: Group, place: int, trips: range) -> tuple[float, float]:
    # This, the first rank's, clock minus that of another rank, and the largest error of that.
    offset, error = 0.0, float("inf")
    for trip in trips:
        answer = _tensor(mesh, [0.0, 0.0])
        pending = mesh.receive(answer, place, _TAG + trip)
        a = time.perf_counter()
        mesh.send(_tensor(mesh, [0.0]), place, _TAG + trip).wait()
        pending.wait()
        b, c = answer.tolist()
        d = time.perf_counter()
        if (d - a) - (c - b) < 2 * error:
            offset, error = ((a - b) + (d - c)) / 2, ((d - a) - (c - b)) / 2
    return offset, error


def _tensor(group: Group, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=group.small_device)


def machine_number(further: str = "") -> int:
    """A number of 56 bits for the kernel that this process runs on, and for what else separates processes."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        machine = socket.gethostname()
    return int.from_bytes(hashlib.sha256((machine + further).encode()).digest()[:7], "big")


T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """An engine, and the group of its own that it sends in; small CPU tensors may use the group between its calls."""

    engine: Engine
    group: Group
    streams: int = 1

    def zeros(self, size: int) -> torch.Tensor:
        """`size` bytes of int32 (at least one element), as exact sums travel, where the engine's tensors live."""
        return torch.zeros(max(1, size // 4), dtype=torch.int32, device=self.engine.device)

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks: the same list everywhere."""
        agreed = torch.tensor(values, dtype=torch.float64)
        self.group.all_reduce(agreed, maximum=True)
        return agreed.tolist()

    @cached_property
    def clock(self) -> Clock:
        """Of the ranks together; it is measured when it is first needed."""
        return Clock(self.group)

    def close(self) -> None:
        """Ends the engine and the group; every rank calls it, with nothing on its way."""
        self.engine.close()
        self.group.close()


def connect(group: AnyGroup | None = None, timeout: float | None = None, streams: int = 1) -> Connection:
    """Connects the ranks of a group (None: all ranks, two at least), each of which calls it, by a group of their own.

    Gloo carries CPU tensors, in so many `streams`. CUDA tensors go over NCCL where the group has it, else over Gloo by
    way of the host. UserError for several streams over NCCL, CommTimeout if the ranks did not meet in time.
    """
    ranks = group_of(group)
    is_nccl = ranks.device.type == "cuda" and ranks.has_nccl
    if streams > 1 and is_nccl:
        raise UserError(f"streams = {streams}: NCCL opens its own; set NCCL_NSOCKS_PERTHREAD, and leave this out")
    own = ranks.duplicate(timeout)
    if is_nccl:
        return Connection(NcclEngine(own), own)
    engine = GlooEngine(own, [ranks.duplicate(timeout, torch.device("cpu")) for _ in range(streams - 1)])
    return Connection(engine if own.device.type == "cpu" else StagedEngine(engine, own.device), own, streams)


def shuffled(rivals: Sequence[T], turn: int) -> list[T]:
    """The order in which rivals are timed in a turn, the same on all ranks."""
    # After a pause TCP sends slowly at first, so that who comes after one that used other connections, such as Gloo's
    # own, is up to a seventh slower: in each turn that has to be another one.
    return random.Random(turn).sample(rivals, len(rivals))


def hosts_of(group: Group) -> tuple[int, ...]:
    """The host of each rank, numbered by first appearance; network namespaces count as hosts of their own."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    name = machine_number(f" {socket.gethostname()} {namespace}")
    names = group.all_gather(torch.tensor(name)).tolist()
    order = list(dict.fromkeys(names))
    return tuple(order.index(name) for name in names)


def ranks_a_core(group: Group, count: int) -> float:
    """Of the first `count` ranks, on the machine that has most of them for its cores; network namespaces share one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    everyone = group.all_gather(torch.tensor([machine_number(), cores])).tolist()
    machines = [machine for machine, _ in everyone[:count]]
    return max(machines.count(machine) / its_cores for machine, its_cores in everyone[:count])

"""Connects the ranks of a group for all-reduces, and times what they do together."""

import os
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch.distributed import ProcessGroup

from ..errors import UserError
from .base import Engine
from .clock import Clock, Elapsed, Span, machine_number
from .gloo import GlooEngine, StagedEngine
from .groups import Group, group_of
from .nccl import NcclEngine

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """An engine, and the group of its own that it sends in; small CPU tensors may use the group between its calls."""

    engine: Engine
    group: Group
    streams: int = 1
    """TCP connections between each two ranks"""

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

    def stopwatch(self, run: Callable[[], object]) -> Span:
        """When this rank began and ended `run()`, from a start that all agreed on; `elapsed` makes one time of all."""
        return self.clock.span(run)

    def elapsed(self, spans: Sequence[Span]) -> list[Elapsed]:
        """The times of the spans over all ranks: the same list everywhere."""
        return self.clock.elapsed(spans)

    def close(self) -> None:
        """Ends the engine and the group; every rank calls it, with nothing on its way."""
        self.engine.close()
        self.group.close()


def connect(
    group: Group | ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    timeout: float | None = None,
    streams: int = 1,
) -> Connection:
    """Connects the ranks of a group (None: all ranks), each of which calls it, by a group of their own.

    Gloo carries CPU tensors. CUDA tensors go over NCCL where the group has it, else over Gloo by way of the host.

    Args:
        group: At least two ranks.
        device: Where the tensors live; a `Group` has its own device.
        timeout: Seconds that a message may take; None: what `group` allows.
        streams: TCP connections between each two ranks, for Gloo.

    Raises:
        UserError: Several streams over NCCL.
        CommTimeout: The ranks did not meet in time.
    """
    ranks = group_of(group, device)
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
    names = [int(other) for other in group.all_gather(torch.tensor([name]))]
    order = list(dict.fromkeys(names))
    return tuple(order.index(name) for name in names)


def ranks_a_core(group: Group, count: int) -> float:
    """Of the first `count` ranks, on the machine that has most of them for its cores; network namespaces share one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    everyone = [other.tolist() for other in group.all_gather(torch.tensor([machine_number(), cores]))]
    machines = [machine for machine, _ in everyone[:count]]
    return max(machines.count(machine) / its_cores for machine, its_cores in everyone[:count])

"""The process of a rank that is ours: what it is started with, what it does, and how it reports its end.

Who starts it, the launcher or the agent of a machine that joins, tells it the port of the ranks' common store on
loopback, so nothing is looked up in the network and nothing that comes from there is unpickled.
"""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, runtime_checkable

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import groups
from ..comm.base import CommError, Liveness
from ..comm.groups import Group
from ..signals import StopFlag, die_with_launcher, hold_back
from .failures import Failure, FailureChannel
from .generations import GROUP_SECONDS, Generations, Released
from .gpus import compare_gpus, device_of, tell_gpu
from .liveness import Heartbeat, Limits

RankFunction = Callable[[Group, StopFlag, int, Liveness], Any]
"""what a rank does, whoever started it: (all ranks, whether to stop, restarts so far, liveness) -> a JSON value"""

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
JOINING = "joining"
"""prefix of the failures of ranks that have not taken part yet, which end nobody but themselves"""


@runtime_checkable
class Prepares(Protocol):
    """A `RankFunction` that can do something while the ranks that it joins are still at work without it."""

    def prepare(self, heartbeat: Heartbeat) -> None:
        """Called once in a rank that joins, before the others know of it; UserError where it doesn't belong to them."""

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        """Takes the state from the rank at place 0 of a group, until it sends no more, or is lost; then maybe again.

        `caught_up` is to be called once this rank could take part.
        """


@dataclass(frozen=True)
class RankSpec:
    """What the process of a rank is started with."""

    rank: int
    size: int
    """ranks with which the attempt began"""
    port: int
    """of the store, on loopback"""
    attempt: int
    device: str
    ranks_per_gpu: int
    limits: Limits
    function: RankFunction
    joins: bool
    """beside ranks that are at work already"""
    interface: str = LOOPBACK_INTERFACE
    """the network interface by which it exchanges messages"""
    stops_run: bool = True
    """a stop signal that reaches it asks the whole run to stop; else it is left to the agent, which ends its ranks"""


def start_rank(spec: RankSpec) -> BaseProcess:
    """Starts the process of a rank, forked from the fork server."""
    process = multiprocessing.get_context("forkserver").Process(target=_be_rank, args=(spec,))
    process.start()
    return process


def serve_store() -> TCPStore:
    """A store for processes of this machine, on a loopback port that nobody else can have taken meanwhile."""
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


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


def _be_rank(spec: RankSpec) -> None:
    """It ends with exit code 0 only when all is well: else it reports why."""
    if not spec.stops_run:
        hold_back()  # before any thread begins, which would not
    rank = str(spec.rank)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(spec.size), LOCAL_WORLD_SIZE=str(spec.size))
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME=spec.interface, NCCL_SOCKET_IFNAME=spec.interface)
    die_with_launcher()
    root = TCPStore(LOOPBACK, spec.port, None, False, wait_for_workers=False)
    store = PrefixStore(f"attempt-{spec.attempt}", root)
    generations = Generations(store)
    is_asked = False

    def is_asked_to_stop() -> bool:
        nonlocal is_asked
        if generations.check():
            is_asked = root.check(["stop"])
        return is_asked

    stop = StopFlag(also=is_asked_to_stop)
    if spec.stops_run:
        stop.install()
    heartbeat = Heartbeat(store, spec.rank, spec.limits, generations=generations)
    failures: Store = PrefixStore(JOINING, store) if spec.joins else store
    try:
        if spec.joins:
            follow = None
            if isinstance(spec.function, Prepares):
                spec.function.prepare(heartbeat)
                follow = spec.function.follow
            generations.wait_for_admission(spec.rank, follow)
            failures = store
        result = _run_through_generations(spec, generations, stop, heartbeat)
        store.set(f"result/{spec.rank}", json.dumps(result))
    except Released:
        heartbeat.close()
        os._exit(0)  # the groups that this rank was in are aborted, and nothing waits for it
    except (Exception, SystemExit) as error:
        with suppress(RuntimeError):  # the launcher is gone, and this process with it in a moment
            FailureChannel(failures, spec.size).report(Failure.of(error, spec.rank))
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)  # closes all connections, so that the other ranks notice at once
    heartbeat.close()


def _run_through_generations(spec: RankSpec, generations: Generations, stop: StopFlag, heartbeat: Heartbeat) -> Any:
    """Calls the function of a rank, and again with the others of the next generation each time that ranks change."""
    device = device_of(spec.device, spec.ranks_per_gpu)
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

"""The process of a rank that is ours: what it is started with, what it does, and how it reports its end."""

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import store_keys as keys
from ..comm.base import CommError, ConnectionLost, Liveness
from ..comm.groups import Group
from ..errors import as_user_error, retry
from ..signals import StopFlag, die_with_launcher, hold_back
from .failures import Failure, FailureChannel
from .generations import Generations, Released
from .gpus import device_of
from .liveness import Heartbeat, Limits

# What a rank does, whoever started it: (all ranks, whether to stop, restarts so far, liveness) -> a JSON value, or
# `RanksChange`, after which it is called again with those that are left or have come.
RankFunction = Callable[[Group, StopFlag, int, Liveness], Any]

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"


@runtime_checkable
class LastingFunction(Protocol):
    """A `RankFunction` that holds something before its first call, and from one call to the next."""

    def prepare(self, heartbeat: Heartbeat) -> None:
        """Called once in a rank that joins, before the others know of it; UserError if it doesn't belong to them."""

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        """Takes the state, maybe again, until the source sends no more; `caught_up` once this rank could take part."""

    def close(self) -> None:
        """Called if the function is not called again after a loss, since the others do not go on."""


class RankSpec(NamedTuple):
    """What the process of a rank is started with."""

    rank: int
    size: int  # ranks with which the attempt began
    port: int
    attempt: int
    device: str
    ranks_per_gpu: int
    limits: Limits
    function: RankFunction
    joins: bool  # beside ranks that are at work already
    interface: str = LOOPBACK_INTERFACE
    local: int = 0  # its number among the ranks that run on its machine, which decides its GPU
    stops_run: bool = True  # a stop signal that reaches it does; else it is left to the agent, which ends its ranks


def start_rank(spec: RankSpec) -> BaseProcess:
    def start() -> BaseProcess:
        process = multiprocessing.get_context("forkserver").Process(target=_be_rank, args=(spec,))
        process.start()
        return process

    # If somebody ends the fork server at this moment the next call starts it anew.
    return retry(start, (0.1, 1.0), lambda error: isinstance(error, EOFError | ConnectionError | FileNotFoundError))


def serve_store() -> TCPStore:
    """A store for processes of this machine, on loopback; UserError if the machine doesn't reach itself there."""
    # Where the interface is down, as in a network namespace of one's own, a port is given all the same, and the store
    # would try to reach itself for five minutes, deaf to signals. To connect by UDP sends nothing; it asks for the way.
    why = f"{LOOPBACK}: this machine doesn't reach itself there, and its ranks meet there"
    with as_user_error(why, "ip link set lo up"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((LOOPBACK, 9))
    # The store takes over a socket that is bound already: a port that was only looked up could be taken meanwhile.
    listener = socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _be_rank(spec: RankSpec) -> None:
    if not spec.stops_run:
        hold_back()  # before any thread begins, which would not
    size = str(spec.size)
    os.environ.update(RANK=str(spec.rank), LOCAL_RANK=str(spec.local), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    if sys.platform == "linux":
        os.environ.update(GLOO_SOCKET_IFNAME=spec.interface, NCCL_SOCKET_IFNAME=spec.interface)
    die_with_launcher()
    # The port on loopback came with the process, so nothing is looked up in the network and nothing that comes from
    # there is unpickled.
    root = TCPStore(LOOPBACK, spec.port, None, False, wait_for_workers=False)
    store = PrefixStore(keys.ATTEMPT.format(attempt=spec.attempt), root)
    generations, is_requested = Generations(store), False

    def stop_is_requested() -> bool:
        nonlocal is_requested
        if generations.check():
            is_requested = root.check([keys.STOP])
        return is_requested

    stop = StopFlag(also=stop_is_requested)
    if spec.stops_run:
        stop.install()
    heartbeat = Heartbeat(store, spec.rank, spec.limits, generations=generations)
    # Failures of ranks that have not taken part yet end nobody but themselves, and stand apart.
    failures: Store = PrefixStore(keys.JOINING, store) if spec.joins else store
    try:
        device = device_of(spec.device, spec.ranks_per_gpu)  # before a rank that joins draws its network there
        if spec.joins:
            follow = None
            if isinstance(spec.function, LastingFunction):
                spec.function.prepare(heartbeat)
                follow = spec.function.follow
            generations.wait_for_admission(spec.rank, follow)
            failures = store
        own = spec.rank, device, spec.ranks_per_gpu, heartbeat
        result = generations.run(lambda world: spec.function(world, stop, spec.attempt, heartbeat), *own)
        store.set(keys.RESULT.format(rank=spec.rank), json.dumps(result))
    except Released:
        heartbeat.close()
        os._exit(0)  # the groups that this rank was in are aborted, and nothing waits for it
    except (Exception, SystemExit) as error:
        # A stop signal that came to the whole group, as by Ctrl-C or `timeout`, has ended the compiler too.
        is_stop = stop.signal and type(error).__module__ in ("torch._dynamo.exc", "torch._inductor.exc")
        reported = ConnectionLost("the compiler was stopped") if is_stop else error
        with suppress(RuntimeError):  # the launcher is gone, and this process with it in a moment
            FailureChannel(failures, spec.size).report(Failure.of(reported, spec.rank))
        if isinstance(error, CommError) and isinstance(spec.function, LastingFunction):
            spec.function.close()  # a checkpoint that is being written is completed, unless the launcher is quicker
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)  # closes all connections, so that the other ranks notice at once
    heartbeat.close()

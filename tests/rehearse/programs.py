"""What each rank of a lab runs: `programs.py NAME ARGUMENT...`; it prints what it has found as JSON."""

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmarks.hosts import interface_bytes

from torusgd.comm import CommError, create
from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.connection import Clock, connect, typical

RANK = int(os.environ["RANK"])


def found(value: object) -> None:
    print("found:", json.dumps(value))


def bytes_of(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def links() -> None:
    """On hosts 0, 1 and 2: a round trip of 0 and 1, one of 0 and 2, and a megabyte from 0 to 1, in seconds."""
    seconds = []
    for peer, size in ((1, 1), (2, 1), (1, 1_000_000)):
        begin = time.perf_counter()
        if RANK == 0:
            dist.send(bytes_of(size), peer)
            dist.recv(bytes_of(1), peer)
        elif peer == RANK:
            dist.recv(bytes_of(size), 0)
            dist.send(bytes_of(1), 0)
        seconds.append(time.perf_counter() - begin)
    found(seconds)


def both_ways() -> None:
    """On two hosts: short questions and answers, then 400,000 bytes each way at once; what TCP then has sent twice."""
    for size in (*[10] * 20, 400_000):
        both = [dist.P2POp(way, bytes_of(size), 1 - RANK) for way in (dist.isend, dist.irecv)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    lines = Path("/proc/self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line[:4] == "Tcp:")
    found(int(values[names.index("RetransSegs")]))


def sent_bytes(length: str, repeat: int = 3) -> None:
    """Sums by torus and by ring; the kernel's counts at this host's interfaces, an all-reduce."""
    counted = {}
    for name in ("torus", "ring"):
        allreduce = create(name)
        tensor = torch.ones(int(length))
        allreduce.start(tensor).wait()
        assert bool((tensor == dist.get_world_size()).all())
        dist.barrier()
        before = interface_bytes()
        for _ in range(repeat):
            allreduce.start(tensor).wait()
        dist.barrier()
        after = interface_bytes()
        counted[name] = [(after[link] - before[link]) / repeat for link in ("lo", "tun0")]
        dist.barrier()
        allreduce.close()
    found(counted)


def cut() -> None:
    """Sums until a link is cut; exit code 3 if the all-reduce reports that."""
    allreduce = create("ring", timeout=2)
    allreduce.start(torch.ones(1000)).wait()
    print("summed", flush=True)
    begin = time.monotonic()
    while time.monotonic() < begin + 20:
        try:
            allreduce.start(torch.ones(1000)).wait()
        except CommError:
            time.sleep(3)  # the first to know must not, by ending, be how the others learn
            os._exit(3)


def skew(late: float = 0.05, repeat: int = 9) -> None:
    """Times a sum while one rank begins late: by the group's clock, and from a barrier on, as it was done before."""
    connection = connect()
    doubling = parse_algorithm("doubling", connection.group.size)
    is_late, start = connection.group.rank == 2, Clock.start

    def late_start(clock: Clock) -> float:
        start(clock)
        time.sleep(late)
        return clock.now()

    def run() -> Any:
        return connection.engine.run(torch.zeros(1024, dtype=torch.int32), doubling).wait()

    def from_barrier() -> float:
        connection.group.barrier()
        time.sleep(late if is_late else 0)
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def measured() -> tuple[float, float]:
        taken = typical(connection.clock.elapsed([connection.clock.span(run) for _ in range(repeat)]))
        return taken.seconds, taken.skew

    run()
    times = {"on_time": measured()}
    with patch.object(Clock, "start", late_start if is_late else start):
        times["late"] = measured()
    found({**times, "from_barrier": median(connection.slowest([from_barrier() for _ in range(repeat)]))})
    connection.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*sys.argv[2:])

"""Measures what the lab itself can carry: the program of a rank, and its result."""

import json
import time
from functools import cache

import torch.distributed as dist

from ..lab import Host, Lab
from ..sync.connect import Connection, connect
from ..sync.routes import Message, Round
from ..sync.tune import slowest, zeros
from .scale import Ceiling

_LARGE = 1 << 19
_LONG, _REPEAT = 9, 5


@cache
def measure_ceiling(hosts: int, ranks: int) -> Ceiling:
    """Of a lab of `hosts` hosts of `ranks` ranks each, all sending to the next host at once."""
    with Lab([Host(ranks=ranks, latency=0.0, rate=1e12)] * hosts) as lab:
        output = lab.run(["-m", __name__, str(ranks)], timeout=120)[0]
    found = json.loads(told(output))
    return Ceiling(found["round"], found["rate"])


def told(output: str) -> str:
    """The line of JSON among what a rank wrote."""
    return next(line.removeprefix("told: ") for line in output.splitlines() if line.startswith("told: "))


def _chain(connection: Connection, distance: int, size: int) -> float:
    """Seconds a round, of the slowest rank, in a chain in which every rank sends on what it got; the least of some."""
    rank, ranks = connection.rank, connection.size
    tensor = zeros(connection, 2 * size)
    half = tensor.numel() // 2
    turn = Round(
        (Message((rank + distance) % ranks, 0, half),),
        copies=(Message((rank - distance) % ranks, half, 2 * half),),
    )
    rounds = []
    for _ in range(_REPEAT):
        times = []
        for count in (1, _LONG):
            dist.barrier(connection.control)
            begin = time.perf_counter()
            connection.engine.carry(tensor, [[turn] * count]).wait()
            times.append(time.perf_counter() - begin)
        one, many = slowest(connection, times)
        rounds.append((many - one) / (_LONG - 1))
    return min(rounds)


def _be_a_rank(distance: int) -> None:
    dist.init_process_group("gloo")
    connection = connect()
    small, large = (_chain(connection, distance, size) for size in (8, _LARGE))
    if dist.get_rank() == 0:
        print("told:", json.dumps({"round": small, "rate": distance * _LARGE / max(large, 1e-9)}), flush=True)
    dist.barrier()
    connection.close()


if __name__ == "__main__":
    import sys

    _be_a_rank(int(sys.argv[1]))

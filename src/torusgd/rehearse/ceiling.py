"""Measures what the lab itself can carry: the program of a rank, and its result."""

import json
from functools import cache
from statistics import median

import torch.distributed as dist

from ..comm.connection import Connection, connect
from ..comm.rounds import Message, Round
from .lab import Host, Lab
from .scale import Ceiling

_LARGE = 1 << 18
_REPEAT = 5


@cache
def measure_ceiling(hosts: int, ranks: int) -> Ceiling:
    """Of a lab of `hosts` hosts of `ranks` ranks each, all sending to the next host at once."""
    with Lab([Host(ranks=ranks, latency=0.0, rate=1e12)] * hosts) as lab:
        output = lab.run(["-m", __name__, str(ranks)], timeout=120)[0]
    found = json.loads(result_line(output))
    return Ceiling(found["round"], found["rate"])


def result_line(output: str) -> str:
    """The line of JSON among what a rank wrote."""
    return next(line.removeprefix("result: ") for line in output.splitlines() if line.startswith("result: "))


def _chain(connection: Connection, distance: int, size: int, rounds: int) -> float:
    """Seconds a round of the slowest rank, in a chain in which each waits for the one before; the median of some."""
    rank, ranks = connection.rank, connection.size
    tensor = connection.zeros(2 * size)
    half = tensor.numel() // 2
    turn = Round(
        (Message((rank + distance) % ranks, 0, half),),
        copies=(Message((rank - distance) % ranks, half, 2 * half),),
    )
    chain, times = [[turn] * rounds], []
    for _ in range(_REPEAT):
        times.append(connection.stopwatch(lambda: connection.engine.run_rounds(tensor, chain).wait()) / rounds)
    return median(connection.slowest(times))


def _be_a_rank(distance: int) -> None:
    dist.init_process_group("gloo")
    connection = connect()
    small, large = _chain(connection, distance, 8, rounds=50), _chain(connection, distance, _LARGE, rounds=16)
    if connection.rank == 0:
        print("result:", json.dumps({"round": small, "rate": distance * _LARGE / large}), flush=True)
    connection.group.barrier()
    connection.close()


if __name__ == "__main__":
    import sys

    _be_a_rank(int(sys.argv[1]))

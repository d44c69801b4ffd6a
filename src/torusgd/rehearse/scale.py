"""The rule by which a step of a large machine becomes one of the lab: times are stretched, bytes are shrunk.

With all times s times as long and all messages f times as small, a link of latency a and bandwidth B becomes one of
latency s * a and bandwidth B / (s * f). Every ratio of times stays, so that a fraction of the step in the lab is one in
the large. Run as a module, the file is the program of a rank that measures the lab itself (`measure_ceiling`).
"""

import json
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist

from ..comm.algorithms import Message, Round
from ..comm.clock import typical
from ..comm.connection import Connection, connect
from ..plan.cluster import Cluster, Communication
from .lab import MTU, Host, Lab

SHARE = 0.15
"""largest fraction of the lab's measured rate in a scaled link, so that the CPU that carries packets does not count"""
_MEMORY = 4e9  # most bytes of all ranks' messages together
_SMALLEST_PACKET = 4_096
_PACKETS = 4_000  # a second of all hosts together; each takes the lab's wire some 40 us of a core
_LARGE = 1 << 18  # values of a message that shows the rate
_REPEAT = 5


@dataclass(frozen=True)
class Ceiling:
    """The speed of the lab itself with so many hosts and ranks, all at work."""

    round: float  # seconds of a round of small messages with a latency of zero
    rate: float  # bytes/s each way through each host's link


@dataclass(frozen=True)
class Scale:
    """The factors of time and bytes with which the lab plays a step."""

    stretch: float  # seconds of the lab for a second of the machine
    shrink: float  # bytes of the machine for a byte of the lab
    latency: float  # seconds, one way, that the lab's links add to its own
    rate: float  # bytes/s of a host's link in the lab
    excess: float
    """seconds of the machine by which a round in the lab is late, since the lab's own is longer than the scaled one"""

    def __str__(self) -> str:
        text = f"times x {self.stretch:.3g}, bytes / {self.shrink:.3g}, links of {8e-6 * self.rate:.0f} Mb/s"
        late = f"; the lab's own round is {1e6 * self.excess:.0f} us of the machine too long" if self.excess else ""
        return text + late


def choose_scale(
    cluster: Cluster, how: Communication, ceiling: Ceiling, seconds: float, size: float, ranks: int, limit: float
) -> Scale:
    """The scale at which the lab can play a planned step of `seconds` in at most about `limit` seconds.

    `size` are the bytes of a step's messages on a rank.
    """
    # The links between nodes count, or those inside of the only node; a message's cost goes with the latency.
    link = cluster.between if ranks > cluster.devices_per_node else cluster.inside
    alpha = link.alpha + how.message
    bandwidth = min(link.bandwidth * link.efficiency, link.stream or float("inf"))
    # Time is stretched until a round of the scaled network takes as long as the lab's own, but no further than to
    # `limit`; bytes are shrunk until a link needs no more than SHARE of the lab's rate.
    stretch = max(1.0, limit / seconds)
    if alpha > 0:
        stretch = min(stretch, max(1.0, ceiling.round / alpha))
    shrink = max(1.0, bandwidth / (stretch * SHARE * ceiling.rate), size * ranks / _MEMORY)
    scaled = stretch * alpha
    late = ceiling.round - scaled
    return Scale(stretch, shrink, max(0.0, -late), bandwidth / (stretch * shrink), max(0.0, late) / stretch)


def packet_bytes(hosts: int, rate: float) -> int:
    """The size of packets in a lab of so many hosts, each of which sends up to `rate` bytes a second.

    >>> packet_bytes(16, 4e6), packet_bytes(16, 1e9), packet_bytes(2, 1e6)
    (16000, 60000, 4096)
    """
    # A packet is passed on whole: the smaller it is, the less a round is late. But each costs the wire the same.
    return int(min(MTU, max(_SMALLEST_PACKET, hosts * rate / _PACKETS)))


@cache
def measure_ceiling(hosts: int, ranks: int) -> Ceiling:
    """The ceiling of `hosts` hosts of `ranks` ranks each, all of which send to the next host at once."""
    with Lab([Host(ranks=ranks, latency=0.0, rate=1e12)] * hosts) as lab:
        output = lab.run(["-m", __name__, str(ranks)], timeout=120)[0]
    found = json.loads(result_line(output))
    return Ceiling(found["round"], found["rate"])


def result_line(output: str) -> str:
    """The line of JSON among what a rank wrote."""
    return next(line.removeprefix("result: ") for line in output.splitlines() if line.startswith("result: "))


def _chain(connection: Connection, distance: int, size: int, rounds: int) -> float:
    """Seconds a round of the slowest rank, in a chain in which each waits for the one before; the median of some."""
    rank, ranks = connection.group.rank, connection.group.size
    tensor = connection.zeros(2 * size)
    half = tensor.numel() // 2  # sent from one half and received into the other
    turn = Round(
        (Message((rank + distance) % ranks, 0, half),), copies=(Message((rank - distance) % ranks, half, 2 * half),)
    )
    chain = [turn] * rounds
    spans = [connection.stopwatch(lambda: connection.engine.run_rounds(tensor, chain).wait()) for _ in range(_REPEAT)]
    return typical(connection.elapsed(spans)).seconds / rounds


def _be_a_rank(distance: int) -> None:
    dist.init_process_group("gloo")
    connection = connect()
    small, large = _chain(connection, distance, 8, rounds=50), _chain(connection, distance, _LARGE, rounds=16)
    if connection.group.rank == 0:
        print("result:", json.dumps({"round": small, "rate": distance * _LARGE / large}), flush=True)
    connection.group.barrier()
    connection.close()


if __name__ == "__main__":
    import sys

    _be_a_rank(int(sys.argv[1]))

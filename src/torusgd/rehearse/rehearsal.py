"""Joins plan and lab: a recipe's step as planned for a cluster, scaled down, played by real ranks, and the difference.

With all times s times as long and all messages f times as small, a link of latency a and bandwidth B becomes one of
latency s * a and bandwidth B / (s * f). Every ratio of times stays, so that a fraction of the step in the lab is one in
the large. Run as a module, the file is the program of a rank that measures the lab itself (`measure_ceiling`).
"""

import json
import math
import sys
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

from ..comm.algorithms import GRIDS, Message, Round
from ..comm.connection import Connection, connect, typical
from ..plan.cluster import Cluster, Communication, Software
from ..plan.forecast import Workload, longest_share
from ..plan.step_script import Send, compose
from ..plan.timeline import StepTime, compute_seconds, grid_of, price_of, step_time, step_work, waited_seconds
from .lab import MTU, Host, Lab
from .player import dump

SHARE = 0.15  # largest fraction of the lab's rate in a scaled link, so that the carrying CPU does not count
_MEMORY = 4e9  # most bytes of all ranks' messages together
_SMALLEST_PACKET = 4_096
_PACKETS = 4_000  # a second of all hosts together; each takes the lab's wire some 40 us of a core
_LARGE = 1 << 18  # values of a message that shows the rate
_REPEAT = 5


class Ceiling(NamedTuple):
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
    excess: float  # seconds of the machine by which the lab's own round is longer than the scaled one

    def __str__(self) -> str:
        text = f"times x {self.stretch:.3g}, bytes / {self.shrink:.3g}, links of {8e-6 * self.rate:.0f} Mb/s"
        late = f"; the lab's own round is {1e6 * self.excess:.0f} us of the machine too long" if self.excess else ""
        return text + late


@dataclass(frozen=True)
class Rehearsal:
    """A step as it was planned and as it was played; all times are seconds of the planned machine."""

    devices: int
    batch: int
    planned: StepTime
    alone: float  # a step of one device with the same batch
    predicted: float  # exposed communication of the plan, activations of split layers included
    predicted_late: float  # the same on the network that was played, whose rounds are `scale.excess` longer
    waits: tuple[float, ...]  # exposed communication of each rehearsed step
    ceiling: Ceiling
    scale: Scale
    allreduce: str  # the explanation of the all-reduce
    bytes: float  # bytes of a rank's messages in a step

    @property
    def rehearsed(self) -> float:
        return median(self.waits)

    @property
    def seconds(self) -> float:
        """The planned step with its exposed communication as rehearsed."""
        return self.planned.seconds - self.predicted + self.rehearsed

    @property
    def error(self) -> float:
        """Relative error of the plan's exposed communication against the rehearsed."""
        return self.predicted / self.rehearsed - 1 if self.rehearsed > 0 else math.inf

    @property
    def error_late(self) -> float:
        """The same for the network that was played: the error of timeline and formulas without that of the lab."""
        return self.predicted_late / self.rehearsed - 1 if self.rehearsed > 0 else math.inf

    @property
    def error_of_step(self) -> float:
        """Difference of planned and rehearsed exposed communication, as a fraction of the rehearsed step."""
        return (self.predicted - self.rehearsed) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices, "batch": self.batch, "compute": self.planned.compute,
            "exposed_rehearsed": self.rehearsed, "exposed_predicted": self.predicted,
            "exposed_predicted_late": self.predicted_late, "exposed_steps": list(self.waits),
            "error": self.error, "error_late": self.error_late, "error_of_step": self.error_of_step,
            "seconds": self.seconds, "seconds_predicted": self.planned.seconds,
            "speedup": self.alone / self.seconds, "speedup_predicted": self.alone / self.planned.seconds,
            "images_per_second": self.batch / self.seconds,
            "stretch": self.scale.stretch, "shrink": self.scale.shrink, "round_excess": self.scale.excess,
            "lab_rate": self.ceiling.rate, "lab_round": self.ceiling.round,
            "allreduce": self.allreduce, "bytes": self.bytes,
        }  # fmt: skip


def rehearse(
    workload: Workload, cluster: Cluster, software: Software, devices: int, *, reduction: str, allreduce: str,
    steps: int = 3, limit: float = 8.0,
) -> Rehearsal:  # fmt: skip
    """Plays the last stage's step of a workload in the network lab, with one step more than `steps` to warm up.

    `software` is of `program_for` and `as_torusgd`, `devices` fill two nodes or more; `limit` are the seconds of a step
    in the lab, about. RunError if there is no lab here (no root, no Linux), or a rank failed.
    """
    stage = workload.stages[-1]
    cluster, passes = longest_share(cluster, software, devices, stage.workers)
    cost = workload.cost_of(stage)
    planned = step_time(cost, cluster, software, devices, stage.images, passes, routine=stage.routine)
    work = step_work(cost, cluster, software, devices, stage.images, stage.routine)
    script = compose(cost, cluster, software, devices, stage.images, passes, work)
    how = software.communication

    def exposed(late: float) -> float:
        # The lab's own round, if it is longer than the scaled one, is a further cost of each message.
        slower = how.model_copy(update={"message": how.message + late})
        return waited_seconds(script, partial(price_of, cluster, slower, devices), how.pipelined)

    each = cluster.devices_per_node
    hosts = devices // each
    size = sum(action.bytes for action in script if isinstance(action, Send))
    ceiling = measure_ceiling(hosts, each)
    alone = step_time(cost, cluster, software, 1, stage.images * stage.workers).seconds
    scale = choose_scale(cluster, how, ceiling, planned.seconds, size, devices, limit)
    grid = grid_of(how, cluster, devices) if how.algorithm.partition(":")[0] in GRIDS else None
    dtype = f"int{how.wire_bits}" if reduction == "exact" else reduction
    part = dump(script, steps + 1, scale.stretch, scale.shrink, allreduce, grid, dtype)
    # A packet is passed on whole: the smaller it is, the less a round is late. But each costs the wire the same.
    mtu = int(min(MTU, max(_SMALLEST_PACKET, hosts * scale.rate / _PACKETS)))
    places = [Host(each, scale.latency, 8 * scale.rate)] * hosts
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, Lab(places, mtu=mtu) as lab:
        file.write(part)
        file.flush()
        outputs = lab.run(["-m", f"{__package__}.player", file.name], timeout=120 + 5 * (steps + 1) * limit)
    # The end of each step on the slowest rank, by the one machine's clock.
    ends = [max(step) for step in zip(*(json.loads(result_line(output)) for output in outputs), strict=True)]
    explanation = next((line for line in outputs[0].splitlines() if line.startswith("allreduce")), "allreduce native")
    # Back in seconds of the machine; the first step, which warms up, has no end before it.
    waits = [max(0.0, (after - before) / scale.stretch - compute_seconds(script)) for before, after in pairwise(ends)]
    return Rehearsal(
        devices, stage.images * stage.workers, planned, alone, predicted=exposed(0.0),
        predicted_late=exposed(scale.excess), waits=tuple(waits), ceiling=ceiling, scale=scale, allreduce=explanation,
        bytes=size,
    )  # fmt: skip


def choose_scale(
    cluster: Cluster, how: Communication, ceiling: Ceiling, seconds: float, size: float, ranks: int, limit: float
) -> Scale:
    """The scale at which a lab plays a step of `seconds`, of messages of `size` bytes, in `limit` seconds at most."""
    link = cluster.between
    alpha = link.alpha + how.message  # a message's cost goes with the latency
    bandwidth = min(link.bandwidth * link.efficiency, link.stream or float("inf"))
    # Time is stretched until a round of the scaled network takes as long as the lab's own, but no further than to
    # `limit`; bytes are shrunk until a link needs no more than SHARE of the lab's rate.
    stretch = max(1.0, limit / seconds)
    if alpha > 0:
        stretch = min(stretch, max(1.0, ceiling.round / alpha))
    shrink = max(1.0, bandwidth / (stretch * SHARE * ceiling.rate), size * ranks / _MEMORY)
    late = ceiling.round - stretch * alpha
    return Scale(stretch, shrink, max(0.0, -late), bandwidth / (stretch * shrink), max(0.0, late) / stretch)


@cache
def measure_ceiling(hosts: int, ranks: int) -> Ceiling:
    """The ceiling of `hosts` hosts of `ranks` ranks each, all of which send to the next host at once."""
    with Lab([Host(ranks=ranks, latency=0.0, rate=1e12)] * hosts) as lab:
        output = lab.run(["-m", __name__, str(ranks)], timeout=120)[0]
    return Ceiling(**json.loads(result_line(output)))


def result_line(output: str) -> str:
    return next(line.removeprefix("result: ") for line in output.splitlines() if line.startswith("result: "))


def _chain(connection: Connection, distance: int, size: int, rounds: int) -> float:
    """Seconds a round of the slowest rank, in a chain in which each waits for the one before; the median of some."""
    rank, ranks = connection.group.rank, connection.group.size
    tensor = connection.zeros(2 * size)
    half = tensor.numel() // 2  # sent from one half and received into the other
    sent, received = Message((rank + distance) % ranks, 0, half), Message((rank - distance) % ranks, half, 2 * half)
    chain = [Round((sent,), copies=(received,))] * rounds
    spans = [connection.clock.span(lambda: connection.engine.run_rounds(tensor, chain).wait()) for _ in range(_REPEAT)]
    return typical(connection.clock.elapsed(spans)).seconds / rounds


def _be_a_rank(distance: int) -> None:
    dist.init_process_group("gloo")
    connection = connect()
    small, large = _chain(connection, distance, 8, rounds=50), _chain(connection, distance, _LARGE, rounds=16)
    if connection.group.rank == 0:
        print("result:", json.dumps({"round": small, "rate": distance * _LARGE / large}), flush=True)
    connection.group.barrier()
    connection.close()


if __name__ == "__main__":
    _be_a_rank(int(sys.argv[1]))

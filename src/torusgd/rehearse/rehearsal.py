"""Joins plan and lab: a recipe's step as planned for a cluster, played by real ranks, and the difference."""

import json
import math
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from ..comm.algorithms import GRIDS
from ..plan.cluster import Cluster, Software
from ..plan.forecast import Workload, longest_share
from ..plan.network import grid_of
from ..plan.step_script import Send, compose
from ..plan.timeline import StepTime, compute_seconds, price_of, step_time, step_work, waited_seconds
from .lab import Host, Lab
from .player import dump
from .scale import Ceiling, Scale, choose_scale, measure_ceiling, packet_bytes, result_line


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
    workload: Workload,
    cluster: Cluster,
    software: Software,
    devices: int,
    *,
    reduction: str,
    allreduce: str,
    steps: int = 3,
    limit: float = 8.0,
) -> Rehearsal:
    """Plays the last stage's step of a workload in the network lab, with one step more than `steps` to warm up.

    `software` is `plan.program.program_for` of `as_torusgd`; `reduction` is the recipe's; `limit` are seconds of a step
    in the lab, about. RunError if there is no lab here (no root, no Linux), or a rank failed.
    """
    stage = workload.stages[-1]
    cluster, passes = longest_share(cluster, software, devices, stage.workers)
    cost = workload.cost_of(stage)
    planned = step_time(cost, cluster, software, devices, stage.images, passes, extra_pass=stage.extra_pass)
    work = step_work(cost, cluster, software, devices, stage.images, stage.extra_pass)
    script = compose(cost, cluster, software, devices, stage.images, passes, work)
    how = software.communication

    def exposed(late: float) -> float:
        # The lab's own round, if it is longer than the scaled one, is a further cost of each message.
        slower = how.model_copy(update={"message": how.message + late})
        return waited_seconds(script, partial(price_of, cluster, slower, devices), how.pipelined)

    each = min(devices, cluster.devices_per_node)
    hosts = math.ceil(devices / each)
    size = sum(action.bytes for action in script if isinstance(action, Send))
    ceiling = measure_ceiling(hosts, each)
    alone = step_time(cost, cluster, software, 1, stage.images * stage.workers).seconds
    scale = choose_scale(cluster, how, ceiling, planned.seconds, size, devices, limit)
    if how.algorithm.partition(":")[0] in GRIDS:
        rows, columns = grid_of(how, cluster, devices)
        allreduce += f" {rows}x{columns}"
    dtype = f"int{how.wire_bits}" if reduction == "exact" else reduction
    part = dump(script, steps + 1, scale.stretch, scale.shrink, allreduce, dtype)
    ends, explanation = _played(part, [Host(each, scale.latency, 8 * scale.rate)] * hosts, (steps + 1) * limit)
    # Back in seconds of the machine; the first step, which warms up, has no end before it.
    waits = [max(0.0, (after - before) / scale.stretch - compute_seconds(script)) for before, after in pairwise(ends)]
    return Rehearsal(
        devices, stage.images * stage.workers, planned, alone, predicted=exposed(0.0),
        predicted_late=exposed(scale.excess), waits=tuple(waits), ceiling=ceiling, scale=scale, allreduce=explanation,
        bytes=size,
    )  # fmt: skip


def _played(part: str, hosts: list[Host], seconds: float) -> tuple[list[float], str]:
    """The end of each step on the slowest rank, by the one machine's clock; and the all-reduce's explanation."""
    mtu = packet_bytes(len(hosts), hosts[0].rate / 8)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file, Lab(hosts, mtu=mtu) as lab:
        file.write(part)
        file.flush()
        outputs = lab.run(["-m", f"{__package__}.player", file.name], timeout=120 + 5 * seconds)
    ends = [json.loads(result_line(output)) for output in outputs]
    explanation = next((line for line in outputs[0].splitlines() if line.startswith("allreduce")), "allreduce native")
    return [max(step) for step in zip(*ends, strict=True)], explanation

"""Time and devices to an accuracy: the epochs that a batch needs times the seconds that they take on a cluster.

A larger batch keeps more devices busy and sends fewer messages, and needs more epochs. So each number of devices has a
batch of its own that is the quickest, and beyond some number of devices more of them bring nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..recipe.duration import Duration
from ..recipe.optimizer_schema import Stage
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe
from ..text import byte_size
from .cluster import Cluster, Software
from .epochs import LARGEST, SCHEDULE, SMALLEST, curve, spread
from .forecast import Workload
from .roofline import memory_bytes
from .run_time import HIGH, LOW, PlannedStage, RunTime, run_time, widened
from .search import knee_of

IMAGES = (32, 50, 64, 100, 128, 204, 256, 400)
"""of a virtual worker, which is a batch norm's: 32 in Goyal et al. (arXiv 1706.02677), 50 to 400 in the runs that the
curve of epochs is made of"""
_STEP = 2**0.5
"""from one batch that is tried to the next, about"""


@dataclass(frozen=True)
class AccuracyPlan:
    """A predicted run to an accuracy."""

    devices: int
    batch: int
    images: int
    """of a virtual worker"""
    epochs: float
    """to the accuracy, as the mean over runs"""
    images_per_second: float
    run: RunTime
    low: float
    high: float
    """seconds within which it should lie: the slowest device's luck, the errors of the profile and of the epochs"""

    @property
    def seconds(self) -> float:
        """Of the run, to the evaluation that finds the accuracy."""
        return self.run.seconds

    @property
    def schedule(self) -> float:
        """Epochs for which the rate's schedule is to be laid out, so that the accuracy is reached near its end."""
        return SCHEDULE * curve().epochs(self.batch)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; all times in seconds."""
        tree = {key: value for key, value in vars(self).items() if key != "run"}
        return {**tree, "seconds": self.seconds, "schedule_epochs": self.schedule}

    def cost(self, price: float) -> float:
        """At a price of a device and hour."""
        return self.devices * self.seconds / 3600 * price


def most_devices() -> int:
    """Devices that a batch within the curve can keep busy."""
    return LARGEST // IMAGES[0]


def plan_to_accuracy(
    recipe: Recipe, workload: Workload, cluster: Cluster, software: Software, devices: int
) -> list[AccuracyPlan]:
    """The quickest run of each batch that is tried on so many devices, by batch.

    Args:
        recipe: Of the family that `epochs.check_known` lets pass; it says when the held-out images are classified.
        workload: Of the recipe.
        cluster: Where it runs.
        software: What trains.
        devices: Each takes the same number of virtual workers.

    Raises:
        UserError: No batch within the curve can be shared by so many devices, or none fits into their memory.
    """
    if devices > most_devices():
        raise UserError(
            f"--to with {devices:,} devices: the smallest batch that keeps them busy is {IMAGES[0] * devices:,}, and "
            f"the epochs are known up to {LARGEST:,}; use at most {most_devices():,} devices"
        )

    def run_of(stage: PlannedStage, evaluations: int, quantile: float = 0.5) -> RunTime:
        cost, held_out = workload.cost, workload.eval_images
        return run_time(cost, cluster, software, devices, [stage], evaluations, held_out, quantile, workload.eval_cost)

    found: dict[int, tuple[RunTime, PlannedStage, int]] = {}
    for images, share in _cuts(workload, cluster, software, devices):
        stage, evaluations = _length(recipe, workload.train_images, devices * share, images)
        run, size = run_of(stage, evaluations), round(math.log(stage.batch, _STEP))
        if size not in found or run.seconds < found[size][0].seconds:
            found[size] = run, stage, evaluations
    if not found:
        raise UserError(
            f"--to with {devices:,} devices: {IMAGES[0]} images of the network don't fit into a device's memory "
            f"({byte_size(cluster.device.memory or 0)})"
        )
    # Two errors that have nothing to do with each other: of the seconds of a step, and of the number of epochs.
    error, plans = math.hypot(software.error, spread()), []
    for run, stage, evaluations in found.values():
        edges = [run_of(stage, evaluations, quantile).seconds for quantile in (LOW, HIGH)]
        low, high = widened([run.seconds, *edges], error)
        total = stage.steps * stage.batch
        epochs, rate = total / workload.train_images, total / run.training
        plans.append(AccuracyPlan(devices, stage.batch, stage.images, epochs, rate, run, low, high))
    return sorted(plans, key=lambda plan: plan.batch)


def quickest(plans: Sequence[AccuracyPlan]) -> AccuracyPlan:
    """The one that takes the least time."""
    return min(plans, key=lambda plan: plan.seconds)


@dataclass(frozen=True)
class AccuracySweep:
    """The quickest run of each number of devices."""

    plans: tuple[AccuracyPlan, ...]
    knee: int
    """devices beyond which another one adds less than `search.KNEE_EFFICIENCY` of what the first did"""
    useful: int
    """devices beyond which more bring nothing"""


def sweep_to_accuracy(
    recipe: Recipe,
    workload: Workload,
    cluster: Cluster,
    program: Callable[[int], Software],
    counts: Sequence[int],
) -> AccuracySweep:
    """Plans for every number of devices, each with the program that trains on so many."""
    plans = tuple(quickest(plan_to_accuracy(recipe, workload, cluster, program(count), count)) for count in counts)
    return AccuracySweep(plans, knee_of([(p.devices, 1 / p.seconds) for p in plans]), quickest(plans).devices)


def _cuts(workload: Workload, cluster: Cluster, software: Software, devices: int) -> list[tuple[int, int]]:
    """Images of a virtual worker and virtual workers of a device: a few batches an octave, that fit into memory."""
    limit, cuts = cluster.device.memory, []
    for images in IMAGES:
        if limit is not None and memory_bytes(workload.cost, software, images) > limit:
            continue
        last = 0.0
        for share in range(math.ceil(SMALLEST / (devices * images)), LARGEST // (devices * images) + 1):
            if share >= _STEP * last:
                cuts.append((images, share))
                last = share
    return cuts


def _length(recipe: Recipe, train_images: int, workers: int, images: int) -> tuple[PlannedStage, int]:
    """The steps of the epochs that a batch needs, and the evaluations up to the one that finds the accuracy.

    The steps are not rounded up to that evaluation: the reference points are means over runs, each of which ended with
    an evaluation.
    """
    needed = curve().epochs(workers * images)
    stages = (Stage(until=Duration(SCHEDULE * needed, "ep"), images_per_worker=images),)
    schedule = Schedule(recipe.model_copy(update={"virtual_workers": workers, "stages": stages}), train_images)
    steps = schedule.step_after(needed * train_images)
    marks = schedule.boundaries(recipe.evaluate.every, recipe.evaluate.first)
    return PlannedStage(steps, images, workers), bisect_left(marks, steps) + 1

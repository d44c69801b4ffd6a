"""Time and devices to an accuracy: the epochs that a batch needs times the seconds that they take on a cluster.

A larger batch occupies more devices and sends fewer messages, and needs more epochs: E(B) = minimum * (1 + B /
critical), the form of McCandlish et al. (arXiv 1812.06162, equation 2.11). So each number of devices has a quickest
batch, and beyond some number more of them gain nothing. The constants are fitted to MLPerf's reference points, which
are of one network, data set and accuracy, each tuned as the rows of the recipe `resnet50` are.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import getitem
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from ..errors import UserError
from ..recipe.load import load_recipe
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe, Stage
from ..recipe.section import Duration
from ..text import byte_size
from .cluster import Cluster, Software
from .forecast import HIGH, LOW, PlannedStage, RunTime, Workload, run_time, widened
from .model_cost import memory_bytes
from .search import knee_of

TARGET = 0.759  # top-1 of the reference points
FAMILY = "resnet50"  # the built-in recipe with those rows
SCHEDULE = 1.05  # length of a reference point's schedule over its epochs to the accuracy, 1.03 to 1.06 in all ten


class ReferencePoint(NamedTuple):
    """Mean epochs to TARGET over 10 to 28 runs at one batch."""

    batch: int
    epochs: float


# mlcommons/logging, mlperf_logging/rcp_checker/training_4.0.0/rcps_resnet.json: ResNet-50 v1.5, LARS, 224 pixels.
REFERENCE = tuple(map(ReferencePoint._make, (
    (1_632, 35.0), (3_264, 35.2), (4_096, 40.0), (8_192, 42.0), (13_056, 45.4), (32_768, 56.0), (49_152, 68.0),
    (58_880, 79.9), (65_536, 84.5), (67_840, 85.9),
)))  # fmt: skip
SMALLEST, LARGEST = REFERENCE[0].batch, REFERENCE[-1].batch  # batches between which the curve is known


class EpochCurve(NamedTuple):
    minimum: float  # epochs of a small batch
    critical: float  # the batch that needs twice as many

    def epochs(self, batch: float) -> float:
        return self.minimum * (1 + batch / self.critical)


def fit(points: Sequence[ReferencePoint]) -> EpochCurve:
    """The curve with the least sum of squared relative errors; needs two batches or more."""
    batches, epochs = np.array(points, dtype=np.float64).T
    # E(B) = a + b B is linear in a and b; divided by the epochs, its residuals are the relative errors.
    rows = np.stack([1 / epochs, batches / epochs], axis=1)
    (minimum, slope), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    return EpochCurve(float(minimum), float(minimum / slope))


@cache
def curve() -> EpochCurve:
    """The fit of all reference points: 34.6 epochs, twice as many at a batch of about 46,900."""
    return fit(REFERENCE)


@cache
def leave_one_out() -> tuple[float, ...]:
    """The relative error of each reference point's epochs, predicted by the fit of the nine others."""
    fits = [fit([other for other in REFERENCE if other != point]) for point in REFERENCE]
    return tuple(each.epochs(point.batch) / point.epochs - 1 for each, point in zip(fits, REFERENCE, strict=True))


def spread() -> float:
    """Standard deviation of the logarithm of the epochs: the root mean square of the leave-one-out errors."""
    return math.sqrt(sum(math.log1p(error) ** 2 for error in leave_one_out()) / len(REFERENCE))


def epochs_known() -> str:
    """The curve and its errors, in a sentence."""
    errors, known = sorted(abs(error) for error in leave_one_out()), curve()
    return (
        f"epochs to {TARGET:.1%}: {known.minimum:.1f} (1 + batch / {known.critical:,.0f}), fitted to MLPerf's "
        f"{len(errors)} reference points (batch {SMALLEST:,} to {LARGEST:,}, each with its own tuned rate); "
        f"leave-one-out error {median(errors):.1%} at the median, {errors[-1]:.1%} at worst"
    )


_EQUAL = (  # keys that must have FAMILY's values; rate, warm-up, momentum and weight decay go with the batch
    "data.train_images", "data.classes", "data.channels", "data.image_size", "data.augment", "model", "optimizer.name",
    "optimizer.variant", "optimizer.trust", "optimizer.eps", "optimizer.no_decay", "optimizer.no_trust",
    "label_smoothing", "rate.decay.shape", "rate.decay.power",
)  # fmt: skip


def check_known(recipe: Recipe, target: float) -> None:
    """UserError with the first difference if the curve does not hold for a recipe or an accuracy."""
    where = f"--to: epochs are known for the recipe {FAMILY} to {TARGET:.1%} alone (MLPerf's reference points)"
    if target != TARGET:
        raise UserError(f"{where}, not to {100 * target:.4g}%; write --to {TARGET:.1%}")
    trees = load_recipe(FAMILY).recipe.as_dict(), recipe.as_dict()
    for path in _EQUAL:
        there, here = (reduce(getitem, path.split("."), tree) for tree in trees)
        if there != here:
            raise UserError(f"{where}; {recipe.name} has another {path}: {here}, there {there}")
    if len(recipe.stages) > 1:
        raise UserError(f"{where}; {recipe.name} changes its batch in {len(recipe.stages)} stages")


# Numbers of images of a virtual worker, which is a batch norm's: 32 in Goyal et al. (arXiv 1706.02677), 50 to 400 in
# the reference runs.
IMAGES = (32, 50, 64, 100, 128, 204, 256, 400)
MOST_DEVICES = LARGEST // IMAGES[0]  # that a batch within the curve occupies
_STEP = 2**0.5  # ratio of one candidate batch to the next, about


@dataclass(frozen=True)
class AccuracyPlan:
    devices: int
    batch: int
    images: int  # images of a virtual worker
    epochs: float  # epochs to the accuracy, the mean over runs
    images_per_second: float
    run: RunTime
    low: float
    high: float  # with `low`, the band: the slowest device's luck, the errors of profile and epochs

    @property
    def seconds(self) -> float:
        """Seconds to the evaluation that finds the accuracy."""
        return self.run.seconds

    @property
    def schedule(self) -> float:
        """Epochs of the rate's schedule, so that the accuracy is reached near its end."""
        return SCHEDULE * curve().epochs(self.batch)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; all times in seconds."""
        tree = {key: value for key, value in vars(self).items() if key != "run"}
        return {**tree, "seconds": self.seconds, "schedule_epochs": self.schedule}

    def cost(self, price: float) -> float:
        return self.devices * self.seconds / 3600 * price


def plan_to_accuracy(
    recipe: Recipe, workload: Workload, cluster: Cluster, software: Software, devices: int
) -> list[AccuracyPlan]:
    """The quickest run of each candidate batch on so many devices, by batch; `check_known` accepts the recipe."""
    if devices > MOST_DEVICES:
        raise UserError(
            f"--to with {devices:,} devices: the smallest batch that keeps them busy is {IMAGES[0] * devices:,}, and "
            f"the epochs are known up to {LARGEST:,}; use at most {MOST_DEVICES:,} devices"
        )
    # Of cuts whose batches are about the same, the quickest: keys are steps of `_STEP` on a logarithmic scale.
    found: dict[int, tuple[RunTime, Workload]] = {}
    for images, workers in _cuts(workload, cluster, software, devices):
        cut = _with_length(recipe, workload, devices * workers, images)
        run, size = run_time(cut, cluster, software, devices), round(math.log(cut.stages[0].batch, _STEP))
        if size not in found or run.seconds < found[size][0].seconds:
            found[size] = run, cut
    if not found:
        raise UserError(
            f"--to with {devices:,} devices: {IMAGES[0]} images of the network don't fit into a device's memory "
            f"({byte_size(cluster.device.memory or 0)})"
        )
    # Two independent errors: of the seconds of a step, and of the number of epochs.
    error, plans = math.hypot(software.error, spread()), []
    for run, cut in found.values():
        edges = [run_time(cut, cluster, software, devices, quantile).seconds for quantile in (LOW, HIGH)]
        low, high = widened([run.seconds, *edges], error)
        epochs, rate, stage = cut.images / workload.train_images, cut.images / run.training, cut.stages[0]
        plans.append(AccuracyPlan(devices, stage.batch, stage.images, epochs, rate, run, low, high))
    return sorted(plans, key=lambda plan: plan.batch)


def quickest(plans: Sequence[AccuracyPlan]) -> AccuracyPlan:
    return min(plans, key=lambda plan: plan.seconds)


class AccuracySweep(NamedTuple):
    """The quickest run of each number of devices."""

    plans: tuple[AccuracyPlan, ...]
    knee: int  # devices beyond which another adds less than `search.KNEE_EFFICIENCY` of the first one's work
    useful: int  # number of devices beyond which more gain nothing


def sweep_to_accuracy(
    recipe: Recipe, workload: Workload, cluster: Cluster, program: Callable[[int], Software], counts: Sequence[int]
) -> AccuracySweep:
    """Plans for every number of devices, each with the program that trains on so many."""
    plans = tuple(quickest(plan_to_accuracy(recipe, workload, cluster, program(count), count)) for count in counts)
    return AccuracySweep(plans, knee_of([(p.devices, 1 / p.seconds) for p in plans]), quickest(plans).devices)


def _cuts(workload: Workload, cluster: Cluster, software: Software, devices: int) -> list[tuple[int, int]]:
    """Images of a virtual worker and virtual workers of a device: a few batches an octave that fit into memory."""
    limit, cuts = cluster.device.memory or math.inf, []
    for images in (n for n in IMAGES if memory_bytes(workload.cost, software, n) <= limit):
        last = 0.0
        for workers in range(math.ceil(SMALLEST / (devices * images)), LARGEST // (devices * images) + 1):
            if workers >= _STEP * last:
                cuts.append((images, workers))
                last = workers
    return cuts


def _with_length(recipe: Recipe, workload: Workload, workers: int, images: int) -> Workload:
    """The steps of the epochs that a batch needs, and the evaluations up to the one that finds the accuracy."""
    # The steps are not rounded up to that evaluation: the reference points are means over runs, each of which ended
    # with an evaluation.
    needed = curve().epochs(workers * images)
    stages = (Stage(until=Duration(SCHEDULE * needed, "ep"), images_per_worker=images),)
    recipe = recipe.model_copy(update={"virtual_workers": workers, "stages": stages})
    schedule = Schedule(recipe, workload.train_images)
    steps = schedule.step_after(needed * workload.train_images)
    marks = schedule.boundaries(recipe.evaluate.every, recipe.evaluate.first)
    stage = PlannedStage(steps, images, workers)
    return replace(workload, stages=(stage,), evaluations=bisect_left(marks, steps) + 1)

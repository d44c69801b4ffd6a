"""A whole run: steps of every stage, evaluations and the start, with a band."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..recipe.schedule import best_counts, even_counts
from .cluster import Cluster, Software
from .model_cost import ModelCost
from .network import phases
from .roofline import pass_seconds
from .timeline import StepTime, step_time

IMAGENET_TRAIN, IMAGENET_EVAL = 1_281_167, 50_000
LOW, HIGH = 0.05, 0.95
"""quantiles of a band"""


@dataclass(frozen=True)
class PlannedStage:
    """The steps of one batch size."""

    steps: int
    images: int
    """images of one virtual worker"""
    workers: int
    """number of virtual workers"""
    spare: int = 0
    """number of images that a batch lacks, if the workers don't divide it evenly"""
    cost: ModelCost | None = None
    """cost of the network at this stage's image size; None: the workload's"""

    @property
    def batch(self) -> int:
        """Images of a step."""
        return self.images * self.workers - self.spare


@dataclass(frozen=True)
class RunTime:
    """Seconds of a run; `steps` holds one step of each stage."""

    start: float
    training: float
    evaluation: float
    steps: tuple[StepTime, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start + self.training + self.evaluation


def longest_share(cluster: Cluster, software: Software, devices: int, workers: int) -> tuple[Cluster, int]:
    """The cluster as if all its devices were like the one that is done last, and the virtual workers of that one.

    A plan is of one device that stands for all: if they differ in speed, the one for which the others wait. `workers`
    are the virtual workers of a step, at least one a device.

    >>> from torusgd.plan.cluster import load_cluster, load_software
    >>> mixed = load_cluster("abci").model_copy(update={"speeds": (1.0, 1.0, 0.5)})
    >>> slow, passes = longest_share(mixed, load_software("torusgd"), devices=3, workers=12)
    >>> passes, slow.slowdown(3)
    (5, 1.0)
    """
    if not cluster.speeds:
        return cluster, math.ceil(workers / devices)
    seconds = [1 / cluster.speeds[device % len(cluster.speeds)] for device in range(devices)]
    counts = best_counts(workers, seconds) if software.shares == "speed" else even_counts(workers, devices)
    last = max(range(devices), key=lambda device: counts[device] * seconds[device])
    slowdown = seconds[last] * cluster.slowdown(devices)
    return cluster.model_copy(update={"crowding": {devices: slowdown}, "speeds": ()}), counts[last]


def run_time(
    cost: ModelCost,
    cluster: Cluster,
    software: Software,
    devices: int,
    stages: Sequence[PlannedStage],
    evaluations: int,
    eval_images: int = IMAGENET_EVAL,
    quantile: float = 0.5,
    eval_cost: ModelCost | None = None,
) -> RunTime:
    """Seconds of a run on `devices` devices.

    `evaluations` are the times that `eval_images` held-out images are classified, at the cost `eval_cost` (None:
    `cost`); `quantile` is that of `step_time`.
    """
    # Plan 7: steps, evaluations and the start, of the device for which all others wait.
    steps = tuple(_step(stage.cost or cost, cluster, software, devices, stage, quantile) for stage in stages)
    training = sum(stage.steps * step.seconds for stage, step in zip(stages, steps, strict=True))
    images = math.ceil(eval_images / devices)
    forward = pass_seconds(eval_cost or cost, cluster.device, software, images).forward if images else 0.0
    forward /= min(cluster.speeds[:devices], default=1.0)  # all devices get as many held-out images
    small = sum(phase.seconds for phase in phases(cluster, software.communication, devices, 4096.0))
    # Batch-norm statistics are small messages: 4 KiB, so mostly latency.
    each = forward + software.evaluation.seconds + software.evaluation.norm_sums * cost.norms * small
    return RunTime(software.start_on(devices), training, evaluations * each, steps)


def _step(
    cost: ModelCost, cluster: Cluster, software: Software, devices: int, stage: PlannedStage, quantile: float
) -> StepTime:
    like_last, passes = longest_share(cluster, software, devices, stage.workers)
    return step_time(cost, like_last, software, devices, stage.images, passes, quantile)


def staged(
    epochs: float,
    images: Sequence[int],
    devices: int,
    train_images: int = IMAGENET_TRAIN,
    whole_epochs: bool = False,
) -> list[PlannedStage]:
    """The stages of a published `a>b` batch on `devices` workers whose switch points are not published.

    Of k batches each but the last gets 1 / (k + 1) of the epochs, the last twice as much: Sony's 34K > 68K switched
    after 30 of 90. With `whole_epochs` each epoch has as many steps as show every image once, the last of them padded.

    >>> [staged(90, [42], 2048, whole_epochs=whole)[0].steps for whole in (False, True)]
    [1341, 1350]
    """
    early = [1 / (len(images) + 1)] * (len(images) - 1)
    stages = []
    for part, each in zip([*early, 1 - sum(early)], images, strict=True):
        steps = train_images / (each * devices)
        steps = math.ceil(steps) if whole_epochs else steps
        stages.append(PlannedStage(math.ceil(epochs * part * steps), each, devices))
    return stages


def widened(values: Sequence[float], error: float) -> tuple[float, float]:
    """A band around predicted values: stragglers as they are, times the profile's own error at the same quantiles."""
    spread = math.exp(1.645 * error)  # 1.645 deviations of a normal distribution: its quantiles LOW and HIGH
    return min(values) / spread, max(values) * spread

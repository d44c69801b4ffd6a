"""A recipe on a cluster: the steps of every stage by its Schedule, evaluations and the start, with a band."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data.registry import check_path, open_sources
from ..errors import UserError
from ..models.registry import construct
from ..recipe.schedule import Schedule, best_counts, even_counts
from ..recipe.schema import Model, Recipe
from .cluster import Cluster, Software
from .model_cost import ONE_PASS, ModelCost, Routine, memory_bytes, pass_seconds, read_model
from .timeline import StepTime, phases, step_time

IMAGENET_TRAIN, IMAGENET_EVAL = 1_281_167, 50_000
LOW, HIGH = 0.05, 0.95  # quantiles of a band
DEVIATIONS = 1.645  # of a normal distribution, from its middle to LOW and HIGH


@dataclass(frozen=True)
class PlannedStage:
    """The steps of one batch size."""

    steps: int
    images: int  # images of one virtual worker
    workers: int  # number of virtual workers
    spare: int = 0  # number of images that a batch lacks if the workers don't divide it evenly
    cost: ModelCost | None = None  # cost of the network at this stage's image size; None: the workload's
    routine: Routine = ONE_PASS  # of each virtual worker

    @property
    def batch(self) -> int:
        return self.images * self.workers - self.spare


class RunTime(NamedTuple):
    """Seconds of a run; `steps` holds one step of each stage."""

    start: float
    training: float
    evaluation: float  # with the polish and the evaluation after it
    steps: tuple[StepTime, ...]

    @property
    def seconds(self) -> float:
        return self.start + self.training + self.evaluation


@dataclass(frozen=True)
class Workload:
    cost: ModelCost
    stages: tuple[PlannedStage, ...]
    train_images: int
    eval_images: int  # number of images of an evaluation that pass through the network
    evaluations: int
    eval_cost: ModelCost | None = None  # cost of the network at the size of held-out images; None: as in training
    chunk: int = 0  # held-out images that torusgd evaluates in one pass; 0: all that a device has
    polish: tuple[int, int] = (0, 1)  # images that pass forward after training, and those of one pass

    def cost_of(self, stage: PlannedStage) -> ModelCost:
        return stage.cost or self.cost

    @property
    def images(self) -> int:
        return sum(stage.steps * stage.batch for stage in self.stages)


def longest_share(cluster: Cluster, software: Software, devices: int, workers: int) -> tuple[Cluster, int]:
    """The cluster as if all devices were like the one that is done last, and the virtual workers of that one."""
    # A plan is of one device that stands for all: if they differ in speed, the one for which the others wait.
    if not cluster.speeds:
        return cluster, math.ceil(workers / devices)
    seconds = [1 / cluster.speeds[device % len(cluster.speeds)] for device in range(devices)]
    counts = best_counts(workers, seconds) if software.shares == "speed" else even_counts(workers, devices)
    last = max(range(devices), key=lambda device: counts[device] * seconds[device])
    slowdown = seconds[last] * cluster.slowdown(devices)
    return cluster.model_copy(update={"crowding": {devices: slowdown}, "speeds": ()}), counts[last]


def stage_step(
    workload: Workload, stage: PlannedStage, cluster: Cluster, software: Software, devices: int, quantile: float = 0.5
) -> StepTime:
    """A step of a stage, of the device for which all others wait; `quantile` is that of `step_time`."""
    like_last, passes = longest_share(cluster, software, devices, stage.workers)
    cost = workload.cost_of(stage)
    return step_time(cost, like_last, software, devices, stage.images, passes, quantile, stage.routine)


def run_time(workload: Workload, cluster: Cluster, software: Software, devices: int, quantile: float = 0.5) -> RunTime:
    """Seconds of a run on `devices` devices; `quantile` is that of `step_time`."""
    # Plan 7: steps, evaluations and the start, of the device for which all others wait.
    steps = tuple(stage_step(workload, stage, cluster, software, devices, quantile) for stage in workload.stages)
    training = sum(stage.steps * step.seconds for stage, step in zip(workload.stages, steps, strict=True))
    slowdown = cluster.slowdown(devices) / min(cluster.speeds[:devices], default=1.0)

    def forward(cost: ModelCost, images: int, chunk: int) -> float:
        # Devices take chunks in turn: one of them, perhaps the slowest, has the most. It has the last one in part only
        # if it has all.
        passes = math.ceil(images / (chunk * devices)) if images else 0
        own = min(images, passes * chunk) / max(passes, 1)
        return passes * pass_seconds(cost, cluster.device, software, own).forward * slowdown

    # How other people's programs cut the held-out images is not known.
    chunk = (workload.chunk if software.program is None else 0) or math.ceil(workload.eval_images / devices)
    small = sum(phase.seconds for phase in phases(cluster, software.communication, devices, 4096.0))
    # Batch-norm statistics are small messages: 4 KiB, so mostly latency.
    each = forward(workload.eval_cost or workload.cost, workload.eval_images, chunk)
    each += software.evaluation.seconds + software.evaluation.norm_sums * workload.cost.norms * small
    polished = forward(workload.cost, *workload.polish) + each if workload.polish[0] else 0.0
    return RunTime(software.start_on(devices), training, workload.evaluations * each + polished, steps)


def staged(epochs: float, images: Sequence[int], devices: int, whole_epochs: bool = False) -> tuple[PlannedStage, ...]:
    """The stages of a published `a>b` batch on ImageNet whose switch points are not published; with `whole_epochs` each
    epoch has as many steps as show every image once, the last of them padded.
    """
    # Of k batches each but the last gets 1 / (k + 1) of the epochs, the last twice as much: Sony's 34K > 68K switched
    # after 30 of 90.
    early = [1 / (len(images) + 1)] * (len(images) - 1)
    stages = []
    for part, each in zip([*early, 1 - sum(early)], images, strict=True):
        steps = IMAGENET_TRAIN / (each * devices)
        steps = math.ceil(steps) if whole_epochs else steps
        stages.append(PlannedStage(math.ceil(epochs * part * steps), each, devices))
    return tuple(stages)


def widened(values: Sequence[float], error: float) -> tuple[float, float]:
    """A band around predicted values: stragglers as they are, times the profile's own error at the same quantiles."""
    spread = math.exp(DEVIATIONS * error)
    return min(values) / spread, max(values) * spread


@dataclass(frozen=True)
class Forecast:
    devices: int
    batches: tuple[int, ...]  # of each stage
    run: RunTime
    low: float
    high: float  # with `low`, the band of the run's seconds: the slowest device's luck, and the profile's own error
    images_per_second: float  # mean rate over all steps
    efficiency: float  # against one device alone with the same virtual workers each: weak scaling
    speedup: float  # factor of the rate of one device with the same global batch, in one pass: strong scaling
    memory: float  # bytes a device needs, about
    limit: str  # largest obstacle, in words

    def cost(self, price: float) -> float:
        """Cost of the run at a price of a device and hour."""
        return self.devices * self.run.seconds / 3600 * price

    def as_dict(self) -> dict[str, Any]:
        """For JSON; all times in seconds."""
        pairs = zip(self.batches, self.run.steps, strict=True)
        stages = [{"batch": batch, "seconds": step.seconds, **asdict(step)} for batch, step in pairs]
        run = {"start": self.run.start, "training": self.run.training, "evaluation": self.run.evaluation}
        return {
            "devices": self.devices, "seconds": self.run.seconds, "low": self.low, "high": self.high,
            "images_per_second": self.images_per_second, "efficiency": self.efficiency, "speedup": self.speedup,
            "memory_bytes": self.memory, "limit": self.limit, "run": run, "stages": stages,
        }  # fmt: skip


def workload_of(recipe: Recipe, path: Path | None = None) -> Workload:
    """Reads a recipe's network and lays out its steps, by the data at `path` if the recipe has no number of images."""
    if recipe.model.freeze:
        raise UserError("model.freeze: a plan is of networks that train as a whole; give --set model.freeze=[]")
    train, held_out, classes = _counts(recipe, path)
    schedule = Schedule(recipe, train)
    evaluations = len(schedule.boundaries(recipe.evaluate.every, recipe.evaluate.first))
    data, options = recipe.data, json.dumps(dict(recipe.model.options), sort_keys=True)
    cost_at, stages = partial(_cost, recipe.model.name, options, classes, data.channels), []
    for span in schedule.spans:
        cost = None if span.sizes.sides == data.sizes.sides else cost_at(span.sizes.sides)
        steps, images = span.stop_step - span.first_step, span.stage.images_per_worker
        routine = Routine(span.stage.extra_pass, recipe.synchrony.local_steps or 1)
        stages.append(PlannedStage(steps, images, recipe.virtual_workers, 0, cost, routine))
    # With a mirror image beside each, twice as many images pass through the network.
    sides = 2 if recipe.evaluate.flip else 1
    held_out, chunk = held_out * sides, recipe.evaluate.images_per_chunk * sides
    eval_cost, polish = cost_at(recipe.held_out_data.sizes.sides), (0, 1)
    if (given := recipe.polish) is not None:
        size = given.images_per_batch or recipe.stages[-1].images_per_worker
        workers = recipe.virtual_workers if recipe.model.batch_norm_workers == "all" else 1
        polish = (given.steps or 0) * workers * size or min(given.images or train, train), size
    return Workload(cost_at(data.sizes.sides), tuple(stages), train, held_out, evaluations, eval_cost, chunk, polish)


def _counts(recipe: Recipe, path: Path | None) -> tuple[int, int, int]:
    """Training images, held-out images (1 in 25, as in ImageNet, if no number is known) and classes."""
    data = recipe.data
    check_path(data.source, path)
    if data.train_images is not None and data.classes is not None:
        validation = data.validation_images or 0
        evaluated = validation or data.eval_images or round(data.train_images / 25)
        return data.train_images - validation, evaluated, data.classes
    try:
        train, held_out = open_sources(data, path, recipe.seed)
    except UserError as error:
        raise UserError(
            f"{error}; a plan needs the data, or --set data.train_images=50000 --set data.classes=1000"
        ) from error
    return len(train), len(held_out), data.classes or len(train.classes)


@cache
def _cost(name: str, options: str, classes: int, channels: int, size: tuple[int, int]) -> ModelCost:
    model = Model(name=name, options=json.loads(options))  # as text, since a dictionary can't be a key of the cache
    with torch.random.fork_rng(devices=[]):
        return read_model(lambda: construct(model, classes=classes, channels=channels), (channels, *size))


def with_communication(software: Software, **changes: Any) -> Software:
    """The profile with other ways to communicate, such as algorithm="torus"."""
    return software.model_copy(update={"communication": software.communication.model_copy(update=changes)})


def forecast(workload: Workload, cluster: Cluster, software: Software, devices: int) -> Forecast:
    """Predicts the run of a workload; UserError for more devices than virtual workers."""
    # Plan 4: the schedule's stages, each with the cost of the network at its size of images.
    workers = min(stage.workers for stage in workload.stages)
    if devices > workers:
        raise UserError(
            f"devices = {devices}: the recipe has {workers} virtual workers to share; use at most {workers}, "
            f"or --set virtual_workers={devices}"
        )
    runs = [run_time(workload, cluster, software, devices, quantile) for quantile in (0.5, LOW, HIGH)]
    low, high = widened([run.seconds for run in runs], software.error)
    run = runs[0]
    passes = [longest_share(cluster, software, devices, stage.workers)[1] for stage in workload.stages]
    speed = sum(islice(cycle(cluster.speeds or (1.0,)), devices))
    # Against one device alone with as many passes a step, times the fraction of the devices' speed that has work.
    alone = same = balance = 0.0
    for stage, number in zip(workload.stages, passes, strict=True):
        on_one = partial(step_time, workload.cost_of(stage), cluster, software, 1, routine=stage.routine)
        alone += stage.steps * on_one(stage.images, number).seconds
        same += stage.steps * on_one(stage.batch).seconds
        balance += stage.steps * stage.batch / (stage.images * speed * number)
    efficiency = alone / run.training * balance / sum(stage.steps for stage in workload.stages)
    return Forecast(
        devices, tuple(stage.batch for stage in workload.stages), run, low, high,
        images_per_second=workload.images / run.training, efficiency=efficiency, speedup=same / run.training,
        memory=memory_of(workload, software), limit=_limit(workload, cluster, software, run, devices),
    )  # fmt: skip


def memory_of(workload: Workload, software: Software) -> float:
    """Bytes that a device needs, about."""

    def of(stage: PlannedStage) -> float:
        cost, steps = workload.cost_of(stage), stage.routine.local_steps
        # Local steps have weights, gradients and momentum of their own.
        own = 3 * 4 * cost.parameters if steps > 1 else 0
        return memory_bytes(cost, software, stage.images / steps) + own

    return max(map(of, workload.stages))


def _limit(workload: Workload, cluster: Cluster, software: Software, run: RunTime, devices: int) -> str:
    """The largest part of a run that is not arithmetic or memory traffic, with its remedy."""

    def total(name: str, steps: Sequence[StepTime] = run.steps) -> float:
        return sum(stage.steps * getattr(step, name) for stage, step in zip(workload.stages, steps, strict=True))

    # The time of launches is the difference to a program whose kernels start at once: they overlap with nothing else.
    quick = run_time(workload, cluster, software.model_copy(update={"launch": 0.0}), devices)
    launches = total("compute") - total("compute", quick.steps)
    remedies = {
        "communication": (total("communication"), "try --best for another grid, algorithm or bucket size"),
        "kernel launches": (launches, "more images a virtual worker, fused kernels or CUDA graphs"),
        "slow devices": (total("jitter"), "fewer devices, or find the slow ones"),
        "the optimiser": (total("update"), "a sharded update"),
        "input": (total("input"), "faster decoding, or more cores for it"),
        "start and evaluation": (run.start + run.evaluation, "evaluate less often"),
    }
    name, (seconds, remedy) = max(remedies.items(), key=lambda item: item[1][0])
    if seconds < 0.02 * run.seconds:
        return "arithmetic and memory of the devices: more devices help"
    return f"{name}: {100 * seconds / run.seconds:.0f} % of the time; {remedy}"

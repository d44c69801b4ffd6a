"""What watches the steps of a run: requests, the ranks' weights, their speed, and the images that were replaced."""

from collections.abc import Callable, Iterator

from ..comm.groups import Group
from ..errors import RunError
from ..recipe.schedule import Schedule
from ..step.audit import Audit
from ..step.control_vector import ControlVector
from ..step.drift import DriftWatch, steps_between
from ..step.model_state import StepState
from ..step.noise_scale import NoiseScale
from ..step.rank_times import LinkProbe, SpeedWatch, Stragglers, follows_speed
from ..step.stats import StepClock
from ..step.watch import StepView, StepWatch
from .job import Job
from .summing import Sums


class ReplacedImages(StepWatch):
    """Ends a run of which too many images can't be decoded.

    Args:
        limit: The largest fraction of the images that may be replaced.
        train_images: Of an epoch.
        replaced: How many were replaced in all steps so far.
    """

    def __init__(self, limit: float, train_images: int, replaced: Callable[[], int]) -> None:
        self._limit, self._train_images, self._replaced = limit, train_images, replaced

    def check(self, view: StepView, control: ControlVector) -> None:
        step, replaced = view.step, self._replaced() + control.counts.replaced
        # Against at least one epoch, so that one bad image among the first few is no reason to stop.
        if replaced > self._limit * max(step.start + step.batch, self._train_images):
            raise RunError(
                f"step {step.index}: {replaced} training images could not be decoded, more than the "
                f"share of {self._limit} that data.max_replaced allows; mend the images, or raise it"
            )


def drift_of(job: Job, world: Group, state: StepState) -> DriftWatch:
    """What compares the ranks' weights."""
    every = job.options.drift_every
    if every is None:
        fewest = min(stage.images_per_worker for stage in job.recipe.stages)
        every = steps_between(job.recipe.virtual_workers * fewest // world.size)
    others = [state.batch_norm.running, *([state.average.values] if state.average else [])]
    return DriftWatch(state.reducer.layout.slots, others, world, every, state.update.wait_weights)


def watches_of(
    job: Job, world: Group, sums: Sums, state: StepState, clock: StepClock, schedule: Schedule
) -> Iterator[StepWatch]:
    """The audit, the noise scale, and what compares the ranks' speed; every rank calls it, since groups are made."""
    recipe, workers = job.recipe, job.recipe.virtual_workers
    yield Audit(job.options.audit, recipe.seed, world, sums.watched)
    probe = LinkProbe(world) if world.size > 2 else None  # of two ranks nobody can say whose link is slow
    yield Stragglers(world.rank, world.size, sums.reducer, clock.data_seconds, probe)
    if follows_speed(job.options, recipe):
        yield SpeedWatch(world.rank, world.size, lambda: clock.speed)
    # A column block's gradient is that of several virtual workers, and local steps hand over changes of weights.
    if workers > 1 and recipe.column_blocks == 1 and recipe.synchrony.form == "synchronous":
        norm, precision, to_host = state.update.gradient_norm, state.precision, clock.monitor.to_host
        yield NoiseScale(schedule, workers, world.device, sums.watched, norm, lambda: precision.loss_scale, to_host)

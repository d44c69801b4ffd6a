"""Recipe -> steps: batch, rate and momentum of every step, and how many virtual workers of it each rank takes.

All are pure functions, the same for a run and a plan. Positions are counted in samples consumed: a duration is turned
into the sample count at which it ends, and a stage ends at the first step boundary at or after its end.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from ..errors import UserError
from ..scalars import cosine, logarithm, power
from .schema import Recipe, Stage
from .section import Duration, ImageSizes

_MOST_IMAGES = int(1e15)  # that a run passes: so many are whole numbers of float64, and the times of a plan are finite
_HIGHEST = 1e300  # of rates
_MOST_MARKS = 1_000_000  # evaluations or checkpoints of a run


@dataclass(frozen=True)
class Span:
    """A stage laid on the axis of steps; `stop_step` and `stop` are exclusive."""

    stage: Stage
    first_step: int
    stop_step: int
    start: int  # samples consumed before its first step
    batch: int
    lr: float  # rate before warm-up and decay
    momentum: float
    sizes: ImageSizes

    @property
    def stop(self) -> int:
        """Samples consumed after its last step."""
        return self.start + (self.stop_step - self.first_step) * self.batch


@dataclass(frozen=True)
class Step:
    index: int
    stage: int  # index, from 0
    epoch: float  # passes over the training images before this step
    start: int  # samples consumed before this step
    images_per_worker: int
    batch: int
    lr: float
    momentum: float
    weight_decay_factor: float  # factor on the recipe's weight decay; 1.0 unless ramp_weight_decay
    augment: bool
    extra_pass: bool
    sizes: ImageSizes

    def share(self, worker: int) -> int:
        """First position in the stream of a virtual worker's images."""
        return self.start + worker * self.images_per_worker


class Schedule:
    """The steps of a recipe over a training set of so many images.

    UserError for a stage of no steps, or a warm-up or decay that doesn't fit the run.

    >>> from torusgd.recipe.load import load_recipe
    >>> schedule = Schedule(load_recipe("fujitsu-74s").recipe, train_images=1281167)
    >>> schedule[0].batch, len(schedule)
    (81920, 1440)
    """

    def __init__(self, recipe: Recipe, train_images: int) -> None:
        self.recipe, self.train_images = recipe, train_images
        self.spans = self._lay_stages()
        self._first_steps = [span.first_step for span in self.spans]
        self.stop = self.spans[-1].stop  # samples consumed by the whole run
        warmup, decay = recipe.rate.warmup, recipe.rate.decay
        self._warmup_end = float(self.position(warmup.length)) if warmup else 0.0
        self._decay_start = float(self.position(decay.start)) if decay.start else self._warmup_end
        self._decay_end = float(self.position(decay.end)) if decay.end else float(self.stop)
        self._milestones = [self.position(milestone) for milestone in decay.milestones]
        if self._milestones and decay.factor > 1:  # else rates fall
            rise = len(self._milestones) * logarithm(decay.factor)
            if rise + logarithm(max(span.lr for span in self.spans)) > logarithm(_HIGHEST):
                what = "its milestones make a rate above"
                raise UserError(f"rate.decay.factor = {decay.factor:g}: {what} {_HIGHEST:g}; lower it")
        if self._warmup_end > self.stop:
            raise UserError(f"rate.warmup.length = {warmup and warmup.length}: longer than the run, {self._length()}")
        if decay.shape in ("polynomial", "cosine") and self._decay_start >= self._decay_end:
            raise UserError(f"rate.decay: it starts at or after its end; the run lasts {self._length()}")

    def __len__(self) -> int:
        return self.spans[-1].stop_step

    def __getitem__(self, index: int) -> Step:
        """Step `index`; IndexError outside 0..len-1."""
        if not 0 <= index < len(self):
            raise IndexError(f"step {index} of {len(self)}")
        # Nothing is counted up from step to step: any step is found alone, as after a resume.
        number = bisect_right(self._first_steps, index) - 1
        span = self.spans[number]
        start = span.start + (index - span.first_step) * span.batch
        factor, offset = self._shape(start)  # by samples: an epoch decays as much with any batch
        return Step(
            index, number, start / self.train_images, start, span.stage.images_per_worker, span.batch,
            lr=offset + (span.lr - offset) * factor, momentum=span.momentum,
            weight_decay_factor=factor if self.recipe.optimizer.ramp_weight_decay else 1.0,
            augment=span.stage.augment, extra_pass=span.stage.extra_pass, sizes=span.sizes,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Step]:
        return (self[index] for index in range(len(self)))

    def position(self, duration: Duration) -> Fraction:
        """Samples consumed when `duration` has passed since the start of the run."""
        if duration.unit == "ep":  # exact: a product rounded up, such as 8.3 * 60,000, would cost a step
            return Fraction(repr(duration.value)) * self.train_images
        value = Fraction(duration.value)
        if duration.unit == "sa":
            return value
        # Steps beyond the last stage count with its batch.
        span = self.spans[bisect_right(self._first_steps, value) - 1]
        return span.start + (value - span.first_step) * span.batch

    def step_after(self, position: float | Fraction) -> int:
        """Index of the first step boundary (= count of steps done) at or after a position in samples."""
        span = self.spans[max(bisect_right([span.start for span in self.spans], position) - 1, 0)]
        return min(span.first_step + math.ceil(max(position - span.start, 0) / span.batch), len(self))

    def boundaries(self, every: Duration | None, first: Duration | None = None) -> list[int]:
        """Step counts after which something periodic happens; the end of the run is always one."""
        counts = {len(self)}  # a set: marks closer than a step fall together
        if every is not None:
            marks = every, first or every
            interval, offset = (Fraction(m.value) if every.unit == "st" else self.position(m) for m in marks)
            if first is not None and first.unit != every.unit:
                raise UserError(f"evaluate.first = {first}: needs the unit of evaluate.every, {every}")
            if interval <= 0:
                raise UserError(f"an interval of {every} never passes; give a positive one")
            limit = len(self) if every.unit == "st" else self.stop
            if limit / interval > _MOST_MARKS:
                raise UserError(
                    f"an interval of {every} passes more than {_MOST_MARKS} times in the run; give a longer one"
                )
            for k in range((limit - offset) // interval + 1):
                mark = offset + k * interval
                counts.add(min(int(mark), len(self)) if every.unit == "st" else self.step_after(mark))
        return sorted(count for count in counts if count > 0)

    def _lay_stages(self) -> list[Span]:
        recipe = self.recipe
        spans: list[Span] = []
        for number, stage in enumerate(recipe.stages):
            first_step, start = (spans[-1].stop_step, spans[-1].stop) if spans else (0, 0)
            batch = recipe.virtual_workers * stage.images_per_worker
            first_batch, lr = spans[0].batch if spans else batch, recipe.rate.lr
            if isinstance(stage.lr, float | int):
                lr = float(stage.lr)
            elif stage.lr is not None:  # scaled by the batch relative to the first stage's
                lr *= batch / first_batch if stage.lr == "linear" else math.sqrt(batch / first_batch)
            momentum = self._momentum(number, batch, lr, first_batch)
            if stage.until.unit == "st":
                stop_step = int(stage.until.value)
            else:
                # The stage ends at the first step boundary at or after its end.
                stop_step = first_step + math.ceil((self.position(stage.until) - start) / batch)
            if stop_step <= first_step:
                raise UserError(
                    f"stages.{number}.until = {stage.until}: the stage has no steps; it must end after "
                    f"step {first_step} ({start} samples)"
                )
            if (stop_step - first_step) * batch > _MOST_IMAGES - start:
                raise UserError(
                    f"stages.{number}.until = {stage.until}: the run would pass more than {_MOST_IMAGES:g} images "
                    f"({self.train_images} an epoch); end it earlier"
                )
            spans.append(Span(stage, first_step, stop_step, start, batch, lr, momentum, recipe.training_sizes(stage)))
        return spans

    def _momentum(self, number: int, batch: int, lr: float, first_batch: int) -> float:
        """The momentum of a stage: its own, or that with which the noise scale (`NoiseScale`) stays as it is."""
        given, base = self.recipe.stages[number].momentum, self.recipe.optimizer.momentum
        if given is None:
            return base
        if isinstance(given, float | int):
            return float(given)
        noise = self.recipe.noise_scale
        base = base if noise.momentum is None else noise.momentum
        images, reference = self._per_noise(batch), self._per_noise(noise.batch or first_batch)
        # Smith and Le: g = lr * (N / B - 1) / (1 - momentum) is to be that of the reference, solved for the momentum.
        momentum = 1 - (lr / images) * (reference * (1 - base) / (noise.lr or self.recipe.rate.lr))
        if not 0 <= momentum < 1:
            raise UserError(
                f"stages.{number}.momentum = noise-scale: comes to {momentum:.4g} for a batch of {batch} at "
                f"rate {lr:.4g}; it must be in [0, 1): lower stages.{number}.lr"
            )
        return momentum

    def _per_noise(self, batch: int) -> float:
        """N / (N / B - 1), to which the noise of a batch B is inverse; B itself if that is near enough."""
        if not self.recipe.noise_scale.exact:
            return batch
        if batch >= self.train_images:
            raise UserError(
                f"noise_scale.exact = true: a batch of {batch} is a whole epoch ({self.train_images} images) or more, "
                "without noise; lower it, or leave exact out"
            )
        return batch * self.train_images / (self.train_images - batch)

    def _shape(self, samples: int) -> tuple[float, float]:
        """(factor, offset): the rate is offset + (stage rate - offset) * factor."""
        warmup, decay = self.recipe.rate.warmup, self.recipe.rate.decay
        if warmup is not None and samples < self._warmup_end:
            progress = samples / self._warmup_end
            return (progress if warmup.shape == "linear" else progress * progress), warmup.start
        if decay.shape == "step":
            return power(decay.factor, sum(samples >= milestone for milestone in self._milestones)), 0.0
        if decay.shape == "constant":
            return 1.0, 0.0
        span = self._decay_end - self._decay_start
        progress = min(max((samples - self._decay_start) / span, 0.0), 1.0)
        is_cosine = decay.shape == "cosine"
        falling = 0.5 * (1 + cosine(math.pi * progress)) if is_cosine else power(1 - progress, decay.power)
        return decay.floor + (1 - decay.floor) * falling, 0.0

    def _length(self) -> str:
        return f"{len(self)} steps or {self.stop / self.train_images:.4g} epochs"


def even_counts(virtual_workers: int, ranks: int) -> tuple[int, ...]:
    """Sizes that differ by one at most."""
    # Cuts at the rounded-down multiples of V / N; neighbours differ by one at most.
    edges = [place * virtual_workers // ranks for place in range(ranks + 1)]
    return tuple(high - low for low, high in pairwise(edges))


def best_counts(virtual_workers: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Sizes with which the last rank is done as early as can be; each rank takes one at least.

    `seconds` are those of one virtual worker on each rank; `virtual_workers` are at least as many as ranks.
    """
    # A step is as long as its slowest rank: each next virtual worker goes to the rank that would be done first (ours;
    # list scheduling goes back to Graham, 1969).
    # A heap of (time at which the rank ends with one more, rank): the least one takes the next virtual worker.
    counts = [1] * len(seconds)
    ends = [(2 * each, place) for place, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(virtual_workers - len(seconds)):
        _, place = ends[0]
        counts[place] += 1
        heapq.heapreplace(ends, ((counts[place] + 1) * seconds[place], place))
    return tuple(counts)


def slowest_rank(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds until the last rank is done, of ranks that take so many virtual workers of so many seconds each."""
    return max(count * each for count, each in zip(counts, seconds, strict=True))

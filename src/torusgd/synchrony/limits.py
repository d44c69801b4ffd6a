"""How long a step waits, chosen from the times of the steps before; and what it takes in virtual time.

    count        a step takes so many workers, the first to finish
    seconds      it takes what each has finished by then

The same rule closes the steps of a run on ranks (`step.deadlines`), whose times come from clocks, and those in virtual
time (`VirtualSteps`), whose times come from a model of delays. The seconds may be DropCompute's threshold (Giladi et
al., arXiv 2306.10598): past so many seconds of its own clock each rank leaves out the rest of its micro-batches. No
rank knows the others' times.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np

from .cutoff import MovingAverage, Predictor, best_cutoff, expected_order
from .delays import F64, DelayModel

if TYPE_CHECKING:
    from .state_space import StateSpaceModel

CANDIDATES = 200
# The lowest candidate is the shortest time in which a rank has computed so many micro-batches.
FIRST_CANDIDATE = 6
# Draws of the coming step's times.
DRAWS = 64
# Steps in a row in which a worker is left out until one step waits for all, to see it; then twice as many, and so on:
# else a worker that was slow once would never be seen again.
LOOK = 32
# Iterations of a model's training that a step waits for.
LEARN = 50
# Fewest seconds of a step beside its passes.
_LEAST = 1e-6


class Threshold(NamedTuple):
    """A threshold and its effect on the times by which it was chosen."""

    seconds: float
    dropped: float  # fraction of the micro-batches that are left out
    gain: float  # micro-batches a second, over those without a threshold, minus 1


def choose_threshold(seconds: F64, overhead: float = 0.0) -> Threshold:
    """The threshold with the highest gain on times [steps, ranks, micro-batches]; the authors take steps 6 to 49.

    Behind the micro-batches of a rank that has fewer than others stands nan.
    """
    ends = np.cumsum(seconds, axis=2)
    first = min(FIRST_CANDIDATE, ends.shape[2]) - 1
    # A lower threshold makes steps shorter and leaves more out: the best of 200 on the measured times.
    candidates = np.linspace(np.nanmin(ends[:, :, first]), np.nanmax(ends), CANDIDATES)
    found = [threshold_at(float(tau), ends, overhead) for tau in candidates]
    # The last candidate, the longest step, leaves nothing out, so the gain is never negative.
    return max(found, key=lambda threshold: (threshold.gain, threshold.seconds))


def threshold_at(tau: float, ends: F64, overhead: float = 0.0) -> Threshold:
    """The effect of a threshold of `tau` seconds; `ends` are of each micro-batch, [steps, ranks, micro-batches].

    The gain is the mean over steps of (1 - dropped) (longest + overhead) / (min(tau, longest) + overhead) - 1, where
    `longest` is the time without a threshold.
    """
    finished = (ends <= tau).sum(axis=(1, 2)) / np.isfinite(ends).sum(axis=(1, 2))
    longest = np.nanmax(ends, axis=(1, 2))
    # A step ends at tau. The authors' code takes the last end before tau in its place, as if ranks knew that the next
    # micro-batch will not end in time; it finds the same thresholds.
    gains = finished * (longest + overhead) / (np.minimum(tau, longest) + overhead) - 1
    return Threshold(tau, float(1 - finished.mean()), float(gains.mean()))


@dataclass(frozen=True)
class Limit:
    """The most workers that a step takes, and the seconds after which it takes no further one: what comes first."""

    count: int
    seconds: float = inf


class Limits:
    """Chooses the limit of one step after the other; the same times give the same limits on every rank.

    Args:
        shares: Workers of each rank, in the order in which it computes them; numbers from 0 on.
        count: Workers that a step takes; predicted: the number with most gradients a second, by a moving average of
            their times; learned: the same by a state-space model that is fitted on the times of the first `warmup`
            steps (Teng and Wood); None: all.
        threshold: Seconds after which a step takes nothing more; measured: those with most gradients a second, on the
            times of the first `warmup` steps that are observed (DropCompute); None: it waits.
        warm: The first step that does not wait for all.
    """

    def __init__(
        self, shares: Sequence[Sequence[int]], seed: int, *, count: int | Literal["predicted", "learned"] | None,
        threshold: float | Literal["measured"] | None, warmup: int, warm: int,
    ) -> None:  # fmt: skip
        self._shares, self._count, self._warmup, self._warm = shares, count, warmup, warm
        self._workers, self._seed = sum(map(len, shares)), seed
        # Until the model is fitted, and for who was not seen for how long, the average is kept.
        self._average = None if isinstance(count, int | None) else MovingAverage(self._workers, seed)
        self._predictor: Predictor | None = self._average
        self._model: StateSpaceModel  # as far as it is trained
        self._is_learning, self._training = count == "learned", cast("Iterator[StateSpaceModel]", iter(()))
        self._is_measuring = threshold == "measured"
        self._seconds = threshold if isinstance(threshold, float) else inf
        self._measured: list[F64] = []
        self._steps, self._overhead, self._look = 0, 0.0, LOOK

    def next(self, step: int) -> Limit:
        if step < self._warm or self._is_learning or (self._predictor is not None and not self._steps):
            return Limit(self._workers)
        if self._average is not None and self._average.unseen.max() >= self._look:
            return Limit(self._workers, self._seconds)
        if self._predictor is not None:
            return Limit(best_cutoff(expected_order(self._predictor.samples(DRAWS)) + self._overhead), self._seconds)
        return Limit(self._count if isinstance(self._count, int) else self._workers, self._seconds)

    def observe(self, finished: F64, seconds: float) -> Threshold | None:
        """Learns from a step (nan: left out), and returns the threshold if it has just been determined."""
        self._steps, last = self._steps + 1, float(np.nanmax(finished))
        # The time beside the passes, such as that of the messages, is the same for any count: a mean over all steps.
        self._overhead += (max(seconds - last, _LEAST) - self._overhead) / self._steps
        if self._average is not None:
            if self._average.unseen.max() >= self._look and not np.isnan(finished).any():
                self._look *= 2
            self._average.observe(finished, last)
        if self._predictor is not None and self._predictor is not self._average:
            self._predictor.observe(finished, last)
        if not (self._is_measuring or self._is_learning):
            return None
        self._measured.append(finished)
        if len(self._measured) < self._warmup:
            return None
        if not self._is_learning:
            self._is_measuring = False
            found = choose_threshold(_passes(np.array(self._measured), self._shares), overhead=self._overhead)
            self._seconds = found.seconds
            return found
        from .state_space import STATES, StateSpace, training

        # What turns slow together is a rank's work, or a few ranks' on one machine.
        if len(self._measured) == self._warmup:
            self._training = training(np.array(self._measured), self._seed, min(STATES, max(2, len(self._shares))))
        # In parts: a rank that trained for a minute in one step would be taken for stuck.
        trained = list(islice(self._training, LEARN))
        if len(trained) < LEARN:
            self._is_learning = False
            self._predictor = StateSpace(self._model.eval(), np.array(self._measured), self._seed)
        else:
            self._model = trained[-1]
        return None


class VirtualStep(NamedTuple):
    """A step in virtual time, and the workers that it takes, ascending; at least one."""

    workers: tuple[int, ...]
    seconds: float


class VirtualSteps:
    """Steps of n workers, one a rank, that take `compute` seconds and keyed delays; `progress` hears of each."""

    def __init__(
        self, limits: Limits, workers: int, delays: DelayModel, compute: float,
        progress: Callable[[int], object] = lambda step: None,
    ) -> None:  # fmt: skip
        self._limits, self._workers, self._delays, self._compute = limits, workers, delays, compute
        self._progress = progress
        self._next, self._last = 0, VirtualStep((), 0.0)  # the last step taken, whose number is one less

    def at(self, step: int) -> VirtualStep:
        """The step of this number, which must not fall from call to call."""
        # A run that is resumed, or continues with other ranks, takes all the steps before again: each once, in their
        # order, for a learned model draws other numbers each time.
        while self._next <= step:
            self._progress(self._next)  # a learned model is trained on the way, for some 10 s
            if self._next:
                taken, known = list(self._last.workers), np.full(self._workers, np.nan)
                known[taken] = self._seconds(self._next - 1)[taken]
                self._limits.observe(known, self._last.seconds)
            self._next, self._last = self._next + 1, self._take(self._next)
        return self._last

    def _take(self, step: int) -> VirtualStep:
        # The first workers by (time, number), up to the count and the seconds; at least the first of all.
        limit, seconds = self._limits.next(step), self._seconds(step)
        first = np.argsort(seconds, kind="stable")[: limit.count]
        in_time = first[seconds[first] <= limit.seconds]
        taken = in_time if len(in_time) else first[:1]
        is_cut = 0 < len(in_time) < len(first)
        return VirtualStep(tuple(sorted(taken.tolist())), limit.seconds if is_cut else float(seconds[taken].max()))

    def _seconds(self, step: int) -> F64:
        return self._compute + self._delays.table(self._workers, step, parts=1)[:, 0]


def _passes(finished: F64, shares: Sequence[Sequence[int]]) -> F64:
    """The seconds of each worker, [steps, ranks, most of a rank], from the seconds until its end [steps, n]."""
    most = max(map(len, shares))
    took = np.full((len(finished), len(shares), most), np.nan)  # behind the last of a rank with fewer than others
    for rank, workers in enumerate(shares):
        took[:, rank, : len(workers)] = np.diff(finished[:, list(workers)], axis=1, prepend=0.0)
    return took

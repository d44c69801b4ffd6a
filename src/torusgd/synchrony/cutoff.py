"""How many gradients to wait for in a step: the cutoff that brings most of them a second.

Teng and Wood (Bayesian Distributed Stochastic Gradient Descent, NeurIPS 2018, arXiv 1803.04209) predict the times of a
step's workers together, and wait for the first c of n, with

    c* = argmax over c of  c / E[x_(c)]

where x_(c) is the c-th smallest time. The others' gradients are left out; of their times a predictor knows only that
they are above the cutoff (censored), and takes a draw of its own prediction beyond it. `MovingAverage` is the plain
predictor, `state_space` has the paper's; both see only what a journal holds: the times that arrived, and the cutoff.
"""

from statistics import NormalDist
from typing import NamedTuple, Protocol

import numpy as np

from ..rng import CUTOFF, keyed_uniform
from .delays import F64, Ints

_inverse = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])
_below = np.vectorize(NormalDist().cdf, otypes=[np.float64])
# Distance of probabilities from 0 and 1, where the normal distribution's inverse is infinite.
_SURE = 1e-9
# Time constants after which 5 % of an old average is left.
_FORGOTTEN = 3


def expected_order(samples: F64) -> F64:
    """E[x_(c)] for c = 1..n from joint draws of n workers' times: [draws, n] to [n], in the same unit."""
    return np.sort(samples, axis=1).mean(axis=0)


def best_cutoff(expected: F64) -> int:
    """c* for E[x_(c)], c = 1..n, in [n]; of equal rates the larger c, which leaves less out."""
    rates = np.arange(1, len(expected) + 1) / expected
    return int(len(rates) - np.argmax(rates[::-1]))


class Predictor(Protocol):
    def samples(self, draws: int) -> F64:
        """Joint draws of all workers' times in the coming step: seconds, [draws, workers]."""

    def observe(self, seconds: F64, cutoff: float) -> None:
        """Learns from a step: seconds by worker, nan for those that were left out at `cutoff` seconds."""


class MovingAverage:
    """Each worker's times are normal, with a moving mean and variance; `weight` is that of a new observation."""

    def __init__(self, workers: int, seed: int, weight: float = 0.2) -> None:
        self._seed, self._weight, self._steps = seed, weight, 0
        self._mean, self._variance = np.zeros(workers), np.zeros(workers)
        # Of each worker the steps in a row, up to now, in which it was left out.
        self.unseen = np.zeros(workers, dtype=np.int64)

    def samples(self, draws: int) -> F64:
        assert self._steps > 0
        chances = keyed_uniform(CUTOFF, self._seed, self._steps, np.arange(draws)[:, None], np.arange(len(self._mean)))
        drawn = self._mean + self._deviation() * _inverse(np.clip(chances, _SURE, 1 - _SURE))
        # A normal draw may be negative, a time is not: no draw is below a tenth of the worker's mean.
        return np.maximum(drawn, 0.1 * self._mean)

    def observe(self, seconds: F64, cutoff: float) -> None:
        is_seen = ~np.isnan(seconds)
        # If a worker was left out for long its mean is made of draws alone: its first time replaces them.
        is_new = is_seen & (self.unseen >= _FORGOTTEN / self._weight)
        self.unseen = np.where(is_seen, 0, self.unseen + 1)
        if not is_seen.all():
            deviation = self._deviation()
            chances = keyed_uniform(CUTOFF, self._seed, self._steps, -1, np.arange(len(seconds)))
            # For each worker that was left out a draw of the prediction beyond the cutoff: the inverse of the
            # distribution function above the cutoff only, a truncated normal draw.
            arrived = _below((cutoff - self._mean) / deviation)
            beyond = self._mean + deviation * _inverse(np.clip(arrived + chances * (1 - arrived), _SURE, 1 - _SURE))
            seconds = np.where(is_seen, seconds, np.maximum(beyond, cutoff))
        # An average of all observations until there are 1 / weight of them, so that the first has no greater weight.
        self._steps += 1
        weight = np.where(is_new, 1.0, max(self._weight, 1 / self._steps))
        change = seconds - self._mean
        self._mean = self._mean + weight * change
        self._variance = (1 - weight) * (self._variance + weight * change**2)

    def _deviation(self) -> F64:
        # At least a thousandth of the mean, for the first step has no spread yet.
        return np.maximum(np.sqrt(self._variance), 1e-3 * self._mean + 1e-12)


class CutoffRun(NamedTuple):
    """Of each step the number of gradients, the first to arrive, and the seconds until then."""

    counts: Ints
    seconds: F64

    def throughput(self, first: int = 0, stop: int | None = None) -> float:
        """Gradients a second over a range of steps."""
        return float(self.counts[first:stop].sum() / self.seconds[first:stop].sum())


def with_predictor(times: F64, predictor: Predictor) -> CutoffRun:
    """The run of a predictor on known times, which learns those within its cutoffs; the first step waits for all."""
    chosen: list[tuple[int, float]] = []
    for row in times:
        count = best_cutoff(expected_order(predictor.samples(64))) if chosen else len(row)
        cutoff = float(np.sort(row)[count - 1])
        predictor.observe(np.where(row <= cutoff, row, np.nan), cutoff)
        chosen.append((count, cutoff))
    counts, seconds = zip(*chosen, strict=True)
    return CutoffRun(np.array(counts, dtype=np.int64), np.array(seconds))

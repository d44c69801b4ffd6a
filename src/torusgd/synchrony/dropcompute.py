"""DropCompute's threshold: past so many seconds of its own clock a rank leaves out the rest of its micro-batches.

Giladi et al., DropCompute (arXiv 2306.10598): each of N ranks computes M micro-batches a step. Nobody learns of the
others' times: a rank that is late goes to the all-reduce with what it has, and the sum is divided by what arrived.
A lower threshold makes steps shorter and leaves more out; the automatic one is the best of 200 on measured times.
"""

from dataclasses import dataclass

import numpy as np

from .delays import F64

CANDIDATES = 200
FIRST_CANDIDATE = 6
"""micro-batches: the lowest threshold that is tried is the shortest time in which a rank has done so many"""


@dataclass(frozen=True)
class Threshold:
    """A threshold and what it brings on the times by which it was chosen."""

    seconds: float
    dropped: float
    """share of the micro-batches that are left out"""
    gain: float
    """micro-batches a second, over those without a threshold, minus 1"""


def choose_threshold(seconds: F64, overhead: float = 0.0) -> Threshold:
    """The threshold that brings the most micro-batches a second, as the authors' code chooses it.

    For each step, saved = (longest - longest within the threshold) / (longest + overhead), where `longest` is the
    slowest rank's whole time, and the gain is (1 - dropped) / (1 - saved) - 1, averaged over the steps.

    Args:
        seconds: Of each micro-batch, [steps, ranks, micro-batches]; at least 6 micro-batches.
        overhead: Seconds of a step beside the slowest rank's passes, such as its all-reduce.

    Returns:
        The best of 200 thresholds, evenly spread from the shortest time of 6 micro-batches to the longest step. The
        last leaves nothing out, so the gain is never negative.
    """
    ends = np.cumsum(seconds, axis=2)
    longest = ends[:, :, -1].max(axis=1)
    first = min(FIRST_CANDIDATE, ends.shape[2]) - 1
    candidates = np.linspace(ends[:, :, first].min(), longest.max(), CANDIDATES)
    found = [_threshold(float(tau), ends, longest, overhead) for tau in candidates]
    return max(found, key=lambda threshold: threshold.gain)


def _threshold(tau: float, ends: F64, longest: F64, overhead: float) -> Threshold:
    within = ends <= tau
    dropped = 1 - within.mean(axis=(1, 2))
    last = np.where(within, ends, 0.0).max(axis=(1, 2))
    saved = (longest - last) / (longest + overhead)
    return Threshold(tau, float(dropped.mean()), float(((1 - dropped) / (1 - saved)).mean() - 1))

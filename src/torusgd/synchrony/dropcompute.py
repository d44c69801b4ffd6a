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
    """The threshold with the highest gain on measured times.

    Args:
        seconds: Of each micro-batch, [steps, ranks, micro-batches]; the authors look at steps 6 to 49.
        overhead: Seconds of a step beside the slowest rank's passes, such as its all-reduce.

    Returns:
        The best of 200 thresholds, evenly spread from the shortest time of 6 micro-batches to the longest step; of
        equal ones the highest. The last leaves nothing out, so the gain is never negative.
    """
    ends = np.cumsum(seconds, axis=2)
    first = min(FIRST_CANDIDATE, ends.shape[2]) - 1
    candidates = np.linspace(ends[:, :, first].min(), ends[:, :, -1].max(), CANDIDATES)
    found = [_at(float(tau), ends, overhead) for tau in candidates]
    return max(found, key=lambda threshold: (threshold.gain, threshold.seconds))


def threshold_at(tau: float, seconds: F64, overhead: float = 0.0) -> Threshold:
    """What a threshold of `tau` seconds brings on such times; arguments as in `choose_threshold`.

    A step that takes `longest` without a threshold takes min(tau, longest) with it. The gain is the mean over steps of
    (1 - dropped) (longest + overhead) / (min(tau, longest) + overhead) - 1. The authors' code takes the last end before
    tau in place of tau, as if ranks knew that the next micro-batch will not end in time; it finds the same thresholds.

    >>> threshold_at(2.0, np.array([[[1.0, 1.0], [1.0, 3.0]]]))
    Threshold(seconds=2.0, dropped=0.25, gain=0.5)
    """
    return _at(tau, np.cumsum(seconds, axis=2), overhead)


def _at(tau: float, ends: F64, overhead: float) -> Threshold:
    kept = (ends <= tau).mean(axis=(1, 2))
    longest = ends[:, :, -1].max(axis=1)
    gains = kept * (longest + overhead) / (np.minimum(tau, longest) + overhead) - 1
    return Threshold(tau, float(1 - kept.mean()), float(gains.mean()))

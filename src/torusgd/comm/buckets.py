"""Which gradients travel together: fixed sizes, the static groups of published systems, or what a profile makes best.

Tensors stand in the order in which they are sent, that is in which backward completes them; a bucket is a run of them.
The layout changes no bit of an exact sum, whose scales are a tensor's and not a bucket's.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

import numpy as np

from ..gradients.integer_sum import Bucket
from .profile import Profile, hidden, waited

Buckets = Literal["auto", "cubic"] | float | tuple[int, ...]
"""the rule: MiB of 4-byte elements, tensors of each bucket, Fujitsu's groups, or `auto`"""
USUAL_MIB = 4.0
"""where nothing is measured; with `auto`, before"""
_BYTES = 4


def lay_out(rule: Buckets, numels: Sequence[int]) -> list[Bucket]:
    """The buckets of tensors with so many elements each, in sending order.

    A number is a size in MiB. A list tells the tensors of each bucket, from the network's output on; what it leaves out
    is one more. `cubic` has 3, 21, 57, ... tensors: bucket k ends with tensor 3 (k + 1)^3, as in Fujitsu's record
    (arXiv 1903.12650). `auto` is what it begins with, buckets of USUAL_MIB.

    >>> [b.stop for b in lay_out((1, 2), [5, 5, 5, 5])]
    [1, 3, 4]
    """
    if rule == "cubic":
        return group([3 * (k + 1) ** 3 - 3 * k**3 for k in range(len(numels))], numels)
    if isinstance(rule, tuple):
        return group(rule, numels)
    return plan_buckets(numels, largest(rule))


def largest(rule: Buckets) -> int:
    """Elements of a bucket by a rule that gives its size; the usual ones for other rules."""
    mib = rule if isinstance(rule, float | int) else USUAL_MIB
    return max(int(mib * 2**20) // _BYTES, 1)


def plan_buckets(numels: Sequence[int], limit: int) -> list[Bucket]:
    """Groups tensors, in sending order, into runs of at most `limit` elements (a larger tensor stands alone).

    >>> [(b.first, b.stop, b.length) for b in plan_buckets([4, 4, 9, 1], limit=8)]
    [(0, 2, 8), (2, 3, 9), (3, 4, 1)]
    """
    counts: list[int] = []
    length = limit + 1
    for numel in numels:
        if length + numel > limit:
            counts.append(0)
            length = 0
        counts[-1] += 1
        length += numel
    return group(counts, numels)


def group(counts: Sequence[int], numels: Sequence[int]) -> list[Bucket]:
    """Buckets of so many tensors each; what is left over is one more."""
    edges = [0, *accumulate(counts), len(numels)]
    cuts = sorted({edge for edge in edges if edge <= len(numels)})
    buckets = []
    for first, stop in pairwise(cuts):
        part = tuple(numels[first:stop])
        buckets.append(Bucket(first, stop, tuple(accumulate(part, initial=0))[:-1], part))
    return buckets


def best_buckets(profile: Profile, numels: Sequence[int], ready: Sequence[float]) -> list[Bucket]:
    """The buckets with which a step ends earliest: the end of the last sum, after `finish`, and each message's work.

    Args:
        profile: It tells an all-reduce's time, and what a message costs the computation.
        numels: Elements of each tensor, in sending order.
        ready: When each may leave, in seconds before (negative) or after the end of backward.

    Of layouts that end at the same time, one with fewest buckets. By dynamic programming over the number of buckets and
    the last one's first tensor, since an earlier end of what is before it never does harm. What a message costs
    whatever its size is what counts here, for all layouts send the same bytes.
    """
    many, edges = len(numels), np.cumsum([0, *numels])
    leaves = np.maximum.accumulate(np.asarray(ready, dtype=float))
    took = _Times(profile, int(edges[-1]))(edges[None, 1:] - edges[:-1, None])
    took[np.tril_indices(many, -1)] = inf  # [first tensor, last tensor]
    message = hidden(profile, 1)
    ends = np.array([-inf, *[inf] * (many - 1)])
    best, cut = inf, [0, many]
    begins: list[np.ndarray] = []
    for count in range(1, many + 1):
        if leaves[-1] + took[-1, -1] + count * message >= best:
            break
        options = np.maximum(ends[:, None], leaves[None, :]) + took
        begins.append(options.argmin(axis=0))
        last = options.min(axis=0)
        ends = np.array([inf, *last[:-1]])
        if last[-1] + count * message < best:
            best, cut = last[-1] + count * message, [many]
            for firsts in reversed(begins):
                cut.insert(0, int(firsts[cut[0] - 1]))
    return group([stop - first for first, stop in pairwise(cut)], numels)


def finish(profile: Profile, buckets: Sequence[Bucket], ready: Sequence[float]) -> float:
    """When the last bucket is summed, in seconds after the end of backward, if they leave one after another."""
    seconds, end = _Times(profile, sum(b.length for b in buckets)), -inf
    for bucket in buckets:
        end = max(end, *ready[: bucket.stop]) + float(seconds(np.array(bucket.length)))
    return end


class _Times:
    """Seconds of an all-reduce by its elements: a line through what the profile tells at powers of two."""

    def __init__(self, profile: Profile, largest: int) -> None:
        self._lengths = [1 << power for power in range(8, max(largest, 256).bit_length() + 1)]
        # A longer message never takes less: noise of a timing is no reason for a larger bucket.
        expected = (waited(profile, _BYTES * length) for length in self._lengths)
        self._seconds = list(accumulate(expected, max))

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        return np.interp(lengths, self._lengths, self._seconds)

"""How many virtual workers each rank takes, evenly or by speed: the same sizes for a run and for a plan.

A step is as long as its slowest rank, so the best sizes are found by handing each next virtual worker to the rank that
would be done first (ours; list scheduling goes back to Graham, 1969). If sums are exact, the sizes change no bit of
the weights.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise


def even_counts(virtual_workers: int, ranks: int) -> tuple[int, ...]:
    """Sizes that differ by one at most.

    >>> even_counts(8, 3)
    (2, 3, 3)
    """
    # Cuts at the rounded-down multiples of V / N; neighbours differ by one at most.
    edges = [place * virtual_workers // ranks for place in range(ranks + 1)]
    return tuple(high - low for low, high in pairwise(edges))


def best_counts(virtual_workers: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Sizes with which the last rank is done as early as can be; each rank takes one at least.

    Args:
        virtual_workers: At least as many as ranks.
        seconds: That one of them takes on each rank.

    >>> best_counts(12, [1.0, 1.0, 2.0])
    (5, 5, 2)
    """
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

"""Reduce-scatter and all-gather beside an all-reduce: each rank ends with the sum of one shard of a tensor.

Das et al. (arXiv 1602.06709) call the pair part-reduce and part-broadcast. The shards are those that the all-reduce's
own algorithm leaves after its first phases; on a torus, after the reduce-scatters of both axes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from .algorithms import Algorithm, parse_algorithm
from .allreduce import AlgorithmAllReduce, NativeAllReduce
from .base import Done, Work, check_tensor
from .rounds import Round, cut, mirror

Stops = tuple[int, ...] | None
"""element offsets at which a shard may begin and end, in ascending order; None: any"""
# Bytes of an element by which an algorithm is chosen, whatever the dtype: a sum in int32 and the weights in 16 bits
# that are gathered later must have the same shards.
_ELEMENT = 4


class ShardCollectives:
    """Sums tensors into shards, one a rank, and gathers shards; by the algorithm, grid and ranks of an all-reduce.

    Every rank makes the same calls in the same order, those of the all-reduce included; several may be on their way.
    The shards depend on the length and the stops alone. `doubling` has no reduce-scatter, halving stands for it;
    `hierarchical` runs as the torus of its grid. Gloo's own reduce-scatter is a whole all-reduce: `native` pays for
    that; if `auto` finds the backend's own best, a ring runs over Gloo.

    Args:
        allreduce: From `create`.
        watch: Function of each message and the time it left (time.perf_counter) to the work to use in its place.

    >>> from torusgd.comm.allreduce import create
    >>> shards = ShardCollectives(create("ring"))
    >>> shards.span(0, length=10)
    (0, 10)
    """

    def __init__(
        self, allreduce: AlgorithmAllReduce | NativeAllReduce, watch: Callable[[Work, float], Work] | None = None
    ) -> None:
        self._watch = watch or (lambda work, left: work)
        self._connection = None if isinstance(allreduce, NativeAllReduce) else allreduce.connection
        self._algorithm_for = None if isinstance(allreduce, NativeAllReduce) else allreduce.algorithm_for
        self._group = allreduce.group
        self.rank = self._group.rank
        self.size = self._group.size
        self._cached = lru_cache(1024)(self._make)

    def span(self, rank: int, length: int, stops: Stops = None) -> tuple[int, int]:
        """The shard [low, high) of a rank of the group, of a tensor of `length` elements; it may be empty."""
        algorithm = self._algorithm(length)
        if algorithm is not None:
            return algorithm.scatter(rank, length, stops)[1]
        edges = cut(0, length, self.size, stops)
        return edges[rank], edges[rank + 1]

    def start_reduce_scatter(self, tensor: torch.Tensor, stops: Stops = None) -> Work:
        """Sums into shards: after `wait` this rank's shard of `tensor` holds the sum over ranks, the rest anything."""
        return self._start(tensor, stops, self._native_scatter, lambda schedule: schedule.scatter)

    def start_all_gather(self, tensor: torch.Tensor, stops: Stops = None) -> Work:
        """Gathers shards: `tensor` holds this rank's, and after `wait` those of all."""
        return self._start(tensor, stops, self._native_gather, lambda schedule: schedule.gather)

    def _start(
        self,
        tensor: torch.Tensor,
        stops: Stops,
        native: Callable[[torch.Tensor, list[int]], Work],
        rounds: Callable[["_Schedule"], list[Round]],
    ) -> Work:
        check_tensor(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return Done()
        left, schedule = time.perf_counter(), self._cached(tensor.numel(), stops)
        if schedule.edges:
            return self._watch(native(tensor, schedule.edges), left)
        assert self._connection is not None
        return self._watch(self._connection.engine.run_rounds(tensor, [rounds(schedule)]), left)

    def _algorithm(self, length: int) -> Algorithm | None:
        """The algorithm for a tensor of `length` elements; None for the backend's own collectives."""
        if self._connection is None or self._algorithm_for is None:
            return None
        algorithm = self._algorithm_for(_ELEMENT * max(length, 1))
        if algorithm is None:
            return None if self._group.has_nccl else parse_algorithm("ring", self.size)
        return replace(algorithm, chunks=1)

    def _make(self, length: int, stops: Stops) -> "_Schedule":
        algorithm = self._algorithm(length)
        if algorithm is None:
            return _Schedule([], [], cut(0, length, self.size, stops))
        rounds, _ = algorithm.scatter(self.rank, length, stops)
        return _Schedule(rounds, mirror(rounds), [])

    def _native_scatter(self, tensor: torch.Tensor, edges: list[int]) -> Work:
        group = self._group
        # Gloo's reduce-scatter is an all-reduce and a copy: the all-reduce alone is the same sum in place.
        if tensor.device.type == "cpu" or not group.has_nccl:
            return group.start_all_reduce(tensor)
        low, high = edges[self.rank], edges[self.rank + 1]
        padded, longest = _padded(tensor, edges, range(self.size))
        own = tensor.new_empty(longest)
        work = group.start_reduce_scatter_single(own, padded)
        return _Unfinished(work, lambda: tensor[low:high].copy_(own[: high - low]))

    def _native_gather(self, tensor: torch.Tensor, edges: list[int]) -> Work:
        # One length for all shards: Gloo takes no others.
        own, longest = _padded(tensor, edges, range(self.rank, self.rank + 1))
        gathered = tensor.new_empty(longest * self.size)

        def unpack() -> None:
            for rank, (low, high) in enumerate(pairwise(edges)):
                tensor[low:high].copy_(gathered[rank * longest : rank * longest + high - low])

        return _Unfinished(self._group.start_all_gather_single(gathered, own), unpack)


class _Schedule(NamedTuple):
    """This rank's rounds, or the edges of the shards that the backend's own collectives cut."""

    scatter: list[Round]
    gather: list[Round]
    edges: list[int]


class _Unfinished:
    """A collective of the backend on its way, and a function for the caller's stream once it has arrived."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self, limit: float | None = None) -> None:
        self._work.wait(limit)
        if self._finish is not None:
            self._finish()
            self._finish = None

    def done(self) -> bool:
        return self._work.done()

    def ended(self) -> float | None:
        return self._work.ended()


def _padded(tensor: torch.Tensor, edges: list[int], ranks: range) -> tuple[torch.Tensor, int]:
    """The shards of `ranks` one after another, each padded to the longest of all; and that length."""
    longest = max(high - low for low, high in pairwise(edges))
    padded = tensor.new_zeros(longest * len(ranks))
    for number, rank in enumerate(ranks):
        low, high = edges[rank], edges[rank + 1]
        padded[number * longest : number * longest + high - low].copy_(tensor[low:high])
    return padded, longest

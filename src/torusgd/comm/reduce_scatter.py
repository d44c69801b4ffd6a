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
import torch.distributed as dist

from .algorithms import Algorithm, parse_algorithm
from .allreduce import AlgorithmAllReduce
from .base import Done, Work, check_tensor
from .native import BackendWork, NativeAllReduce
from .nccl import NcclEngine
from .rounds import Round, cut, mirror

Stops = tuple[int, ...] | None
"""where a shard may begin and end, in ascending order; None: at any element"""
_ELEMENT = 4
"""bytes by which a plan is chosen, whatever the dtype: a sum and what is gathered later have the same shards"""


class ShardCollectives:
    """Sums tensors into shards, one a rank, and gathers shards; by the algorithm, grid and ranks of an all-reduce.

    Every rank makes the same calls in the same order, those of the all-reduce included; several may be on their way.
    The shards depend on the length and the stops alone. `doubling` has no reduce-scatter, halving stands for it;
    `hierarchical` does as the torus of its grid. Gloo's own reduce-scatter is a whole all-reduce: `native` pays for
    that, and where `auto` finds the backend's own best, a ring runs over Gloo.

    Args:
        allreduce: What `create` makes.
        watch: Shown each message and when it left (time.perf_counter), it answers with the work to use in its place.

    >>> from torusgd.comm.allreduce import create
    >>> shards = ShardCollectives(create("ring"))
    >>> shards.span(0, length=10)
    (0, 10)
    """

    def __init__(
        self, allreduce: AlgorithmAllReduce | NativeAllReduce, watch: Callable[[Work, float], Work] | None = None
    ) -> None:
        self._watch = watch or (lambda work, left: work)
        self._native = allreduce if isinstance(allreduce, NativeAllReduce) else allreduce.connection.native
        self._allreduce = None if isinstance(allreduce, NativeAllReduce) else allreduce
        group = self._native.group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        """this rank's place in the group"""
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self._cached = lru_cache(1024)(self._make)

    def span(self, rank: int, length: int, stops: Stops = None) -> tuple[int, int]:
        """The shard [low, high) of a rank of the group, of a tensor of `length` elements; it may be empty."""
        how = self._algorithm(length)
        if how is not None:
            return how.scatter(rank, length, stops)[1]
        edges = cut(0, length, self.size, stops)
        return edges[rank], edges[rank + 1]

    def start_reduce_scatter(self, tensor: torch.Tensor, stops: Stops = None) -> Work:
        """Sums into shards: after `wait` this rank's shard of `tensor` holds the sum over ranks, the rest anything."""
        check_tensor(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return Done()
        left, route = time.perf_counter(), self._cached(tensor.numel(), stops)
        work = self._carry(tensor, route.scatter) if route.scatter else self._native_scatter(tensor, route.edges)
        return self._watch(work, left)

    def start_all_gather(self, tensor: torch.Tensor, stops: Stops = None) -> Work:
        """Gathers shards: `tensor` holds this rank's, and after `wait` those of all."""
        check_tensor(tensor)
        if self.size == 1 or tensor.numel() == 0:
            return Done()
        left, route = time.perf_counter(), self._cached(tensor.numel(), stops)
        work = self._carry(tensor, route.gather) if route.gather else self._native_gather(tensor, route.edges)
        return self._watch(work, left)

    def _algorithm(self, length: int) -> Algorithm | None:
        """What runs for so many elements; None for the backend's own collectives."""
        if self._allreduce is None:
            return None
        how = self._allreduce.algorithm_for(_ELEMENT * max(length, 1))
        if how is None:
            is_nccl = isinstance(self._allreduce.connection.engine, NcclEngine)
            return None if is_nccl else parse_algorithm("ring", self.size)
        return replace(how, chunks=1)

    def _make(self, length: int, stops: Stops) -> "_Route":
        how = self._algorithm(length)
        if how is None:
            return _Route([], [], cut(0, length, self.size, stops))
        rounds, _ = how.scatter(self.rank, length, stops)
        return _Route(rounds, mirror(rounds), [])

    def _carry(self, tensor: torch.Tensor, rounds: list[Round]) -> Work:
        assert self._allreduce is not None
        return self._allreduce.connection.engine.carry(tensor, [rounds])

    def _native_scatter(self, tensor: torch.Tensor, edges: list[int]) -> Work:
        group = self._native.group
        if tensor.device.type == "cpu" or "nccl" not in dist.get_backend_config(group):
            return self._native.start(tensor)
        padded, longest = _padded(tensor, edges, range(self.size))
        own = tensor.new_empty(longest)
        low, high = edges[self.rank], edges[self.rank + 1]
        work = dist.reduce_scatter_single(own, padded, group=group, async_op=True)
        return _Collective(work, tensor, lambda: tensor[low:high].copy_(own[: high - low]))

    def _native_gather(self, tensor: torch.Tensor, edges: list[int]) -> Work:
        # One length for all shards: Gloo takes no others.
        own, longest = _padded(tensor, edges, [self.rank])
        gathered = tensor.new_empty(longest * self.size)
        work = dist.all_gather_single(gathered, own, group=self._native.group, async_op=True)

        def unpack() -> None:
            for place, (low, high) in enumerate(pairwise(edges)):
                tensor[low:high].copy_(gathered[place * longest : place * longest + high - low])

        return _Collective(work, tensor, unpack)


class _Route(NamedTuple):
    """This rank's rounds, or the edges of the shards that the backend's own collectives cut."""

    scatter: list[Round]
    gather: list[Round]
    edges: list[int]


class _Collective(BackendWork):
    """A collective of the backend on its way, and what is left to do on the caller's stream when it is done."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor, finish: Callable[[], object]) -> None:
        super().__init__(work, tensor.device)
        self._finish: Callable[[], object] | None = finish

    def wait(self, limit: float | None = None) -> None:
        super().wait(limit)
        if self._finish is not None:
            self._finish()
            self._finish = None


def _padded(tensor: torch.Tensor, edges: list[int], places: "range | list[int]") -> tuple[torch.Tensor, int]:
    """The shards of `places` one after another, each padded to the longest of all; and that length."""
    longest = max(high - low for low, high in pairwise(edges))
    padded = tensor.new_zeros(longest * len(places))
    for number, place in enumerate(places):
        low, high = edges[place], edges[place + 1]
        padded[number * longest : number * longest + high - low].copy_(tensor[low:high])
    return padded, longest

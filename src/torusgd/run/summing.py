"""How the ranks of a run sum gradients, by its runtime options: all-reduces, shards, layers that ranks share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..comm.allreduce import AnyAllReduce, ShardCollectives, create
from ..comm.base import AllReduce, Work
from ..comm.exact_sum import gradient_integers
from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..gradients.reducer import Channel, MakeSum, Reducer, parameter_slots
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..tensor_parallel.tail import ParallelTail, column_tail
from ..tensor_parallel.volume import choose_parallel


@dataclass(frozen=True)
class Sums:
    """What sums the gradients of a rank with those of the others."""

    allreduce: AnyAllReduce
    """over all ranks"""
    watched: AllReduce
    """the same, with waits that find late ranks"""
    tail: ParallelTail | None
    """layers that ranks share; None: each rank has whole layers"""
    reducer: Reducer
    close_groups: Callable[[], None]

    def close(self) -> None:
        """Closes the groups; every rank calls it, with nothing under way."""
        self.close_groups()
        self.allreduce.close()


def sums_of(
    model: nn.Module, recipe: Recipe, options: RuntimeOptions, world: Group, monitor: Monitor, make_sum: MakeSum | None
) -> Sums:
    """The all-reduce of a run and the reducer that hands it full buckets; every rank calls it, since groups are made.

    `make_sum` makes another gradient sum than the recipe's usual one; None: the usual one.
    """
    allreduce = all_reduce_of(options, world, options.grid_size)
    watched = monitor.over(allreduce)
    tail = shared_tail(model, recipe, options, world, monitor.watch)
    own = parameter_slots(model, wide_norms=recipe.has_wide_norms)
    # Shards and column blocks have channels of their own, by how many ranks share a layer.
    channels, close_groups = channels_of(options, allreduce, watched, monitor, tail)

    def maximum_over_ranks(maxima: Tensor) -> None:
        if world.size > 1:
            monitor.watch(world.start_all_reduce(maxima, maximum=True)).wait()
            # A GPU's host has not waited yet, and no scale may follow from what a lost rank has left half done.
            monitor.to_host(maxima)

    reducer = Reducer(
        [*(tail.slots if tail is not None else ()), *own],  # column blocks first
        reduction=recipe.reduction,
        addends=recipe.virtual_workers,
        channels=channels,
        maximum_over_ranks=maximum_over_ranks,
        rule=options.buckets,
        to_host=monitor.to_host,
        make_sum=make_sum,
    )
    return Sums(allreduce, watched, tail, reducer, close_groups)


def all_reduce_of(options: RuntimeOptions, group: Group, grid: tuple[int, int] | None = None) -> AnyAllReduce:
    """The all-reduce that the options name, over a group; every rank calls it."""
    profile = Path(options.profile) if options.profile else None
    return create(
        options.allreduce, grid=grid, profile=profile, group=group, device=group.device, streams=options.streams
    )


def shared_tail(
    model: nn.Module, recipe: Recipe, options: RuntimeOptions, world: Group, watch: Callable[[Work], Work]
) -> ParallelTail | None:
    """The network's tail in column blocks; None where the recipe computes its linear layers whole."""
    blocks, requested = recipe.column_blocks, options.model_parallel
    if blocks == 1:
        return None
    tail = column_tail(model, blocks)
    batch = recipe.virtual_workers * recipe.stages[0].images_per_worker
    parallel = choose_parallel(requested, tail.layers, blocks, recipe.virtual_workers, batch, world.size)
    return ParallelTail(model, tail, parallel, world, watch)


def channels_of(
    options: RuntimeOptions, allreduce: AnyAllReduce, watched: AllReduce, monitor: Monitor, tail: ParallelTail | None
) -> tuple[Mapping[int, Channel], Callable[[], None]]:
    """By the number of ranks that share a layer, how those that hold the same columns sum them; and how to end it."""
    own: dict[int, AnyAllReduce] = {}
    if tail is not None:  # sorted: all ranks make these groups in one order
        own = {n: all_reduce_of(options, tail.groups.data_parallel(n)) for n in sorted({*tail.parallel} - {1})}
    channels = {
        ranks: Channel(
            watched if each is allreduce else monitor.over(each),
            ShardCollectives(each, monitor.watch) if options.update == "sharded" else None,
        )
        for ranks, each in {1: allreduce, **own}.items()
    }

    def close() -> None:
        for each in own.values():
            each.close()
        if tail is not None:
            tail.close()

    return channels, close


def explanations(
    recipe: Recipe, options: RuntimeOptions, allreduce: AnyAllReduce, tail: ParallelTail | None, world: Group
) -> list[str]:
    """Lines that say how gradients travel; none where there is nothing to choose."""
    lines = [allreduce.explanation] if world.size > 1 and options.allreduce != "native" else []
    lines += [tail.explanation] if tail is not None else []
    if recipe.reduction == "exact" and gradient_integers(recipe.virtual_workers) == torch.int64:
        lines.append(f"gradients of {recipe.virtual_workers} virtual workers are summed as int64: 8 bytes an element")
    return lines

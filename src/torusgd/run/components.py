"""The parts of one rank that depend on the network: how gradients are summed, what a step changes, and its passes."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ..comm.allreduce import AnyAllReduce, ShardCollectives, create
from ..comm.base import AllReduce, Liveness
from ..comm.exact_sum import gradient_integers
from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..gradients.layout import rule_on
from ..gradients.reducer import Channel, MakeSum, Reducer, parameter_slots
from ..gradients.update import Update
from ..models import head_of, model_of
from ..models.repeatable import CompilerHook, check_repeatable, compile_blocks
from ..optim import build_optimizer
from ..precision import Precision
from ..recipe.compatibility import BY_CLOCKS
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Optimizer, Recipe
from ..runtime import prepare_process
from ..step.batchnorm import BatchNormStatistics
from ..step.deadlines import PassThread
from ..step.forward_backward import ForwardBackward, LocalSteps, SharedTail, WholeNetwork
from ..step.model_state import MovingAverage, StepState
from ..step.weights_first import WeightsFirst
from ..tensor_parallel.tail import ParallelTail, choose_parallel, column_tail
from .job import Job, setup_of
from .open_data import Data

if TYPE_CHECKING:
    from ..cuda.form import GpuForm


@dataclass(frozen=True)
class Sums:
    """What sums the gradients of a rank with those of the others."""

    allreduce: AnyAllReduce
    watched: AllReduce  # the same, with waits that find late ranks
    tail: ParallelTail | None  # layers that ranks share; None: each rank has whole layers
    reducer: Reducer
    over_columns: Sequence[AnyAllReduce]  # over the ranks that hold the same column blocks

    def close(self) -> None:
        """Every rank calls it, with nothing under way."""
        for each in self.over_columns:
            each.close()
        if self.tail is not None:
            self.tail.close()
        self.allreduce.close()


def sums_of(
    model: nn.Module, recipe: Recipe, options: RuntimeOptions, world: Group, monitor: Monitor, make_sum: MakeSum | None
) -> Sums:
    """The all-reduce of a run and the reducer that hands it full buckets; every rank calls it, and makes groups."""
    allreduce = all_reduce_of(options, world, options.grid_size)
    watched = monitor.over(allreduce)
    blocks, workers, tail = recipe.column_blocks, recipe.virtual_workers, None
    if blocks > 1:
        columns, batch = column_tail(model, blocks), workers * recipe.stages[0].images_per_worker
        parallel = choose_parallel(options.model_parallel, columns.layers, blocks, workers, batch, world.size)
        tail = ParallelTail(model, columns, parallel, world, monitor.watch)
    own = parameter_slots(model, wide_norms=recipe.has_wide_norms)
    # Shards and column blocks have channels of their own, by how many ranks share a layer; sorted, since all ranks make
    # these groups in one order.
    sizes = sorted({*tail.parallel} - {1}) if tail is not None else []
    over_columns = {n: all_reduce_of(options, tail.groups.data_parallel(n)) for n in sizes} if tail is not None else {}
    channels = {
        ranks: Channel(
            watched if each is allreduce else monitor.over(each),
            ShardCollectives(each, monitor.watch) if options.update == "sharded" else None,
        )
        for ranks, each in {1: allreduce, **over_columns}.items()
    }

    def maximum_over_ranks(maxima: Tensor) -> None:
        if world.size > 1:
            monitor.watch(world.start_all_reduce(maxima, maximum=True)).wait()
            # A GPU's host has not waited yet, and no scale may follow from what a lost rank has left half done.
            monitor.to_host(maxima)

    reducer = Reducer(
        [*(tail.slots if tail is not None else ()), *own],  # column blocks first
        reduction=recipe.reduction, addends=workers, channels=channels, maximum_over_ranks=maximum_over_ranks,
        rule=rule_on(world.device.type == "cuda", options.buckets), to_host=monitor.to_host, make_sum=make_sum,
    )  # fmt: skip
    return Sums(allreduce, watched, tail, reducer, [*over_columns.values()])


def all_reduce_of(options: RuntimeOptions, group: Group, grid: tuple[int, int] | None = None) -> AnyAllReduce:
    """The all-reduce that the options name, over a group; every rank calls it."""
    profile, streams = Path(options.profile) if options.profile else None, options.streams
    return create(options.allreduce, grid=grid, profile=profile, group=group, device=group.device, streams=streams)


def explanations(
    recipe: Recipe, options: RuntimeOptions, allreduce: AnyAllReduce, tail: ParallelTail | None, world: Group
) -> list[str]:
    """Lines that say how gradients travel; none where there is nothing to choose."""
    lines = [allreduce.explanation] if world.size > 1 and options.allreduce != "native" else []
    lines += [tail.explanation] if tail is not None else []
    if recipe.reduction == "exact" and gradient_integers(recipe.virtual_workers) == torch.int64:
        lines.append(f"gradients of {recipe.virtual_workers} virtual workers are summed as int64: 8 bytes an element")
    return lines


@dataclass(frozen=True)
class Network:
    """The network of a rank; it knows of no ranks, and is drawn only once."""

    model: nn.Module
    batch_norm: BatchNormStatistics
    own_copy: nn.Module | None  # as drawn, never used itself; for recipes whose ranks compute with weights of their own


def draw_network(job: Job, data: Data, device: torch.device) -> Network:
    """The network of a job with the weights that its seed gives, on a device."""
    recipe = job.recipe
    prepare_process(recipe, device)
    model = model_of(recipe, len(data.training.source.classes)).to(device)
    own_copy = copy.deepcopy(model) if recipe.synchrony.form != "synchronous" else None
    each_of = recipe.virtual_workers if recipe.model.batch_norm_workers == "each" else None
    batch_norm = BatchNormStatistics(model, each_of, recipe.has_extra_passes)
    if recipe.compile:
        compile_blocks(model, device)
    if device.type == "cuda" and recipe.reduction == "exact":
        check_repeatable(model, recipe)
    return Network(model, batch_norm, own_copy)


class Hook(Protocol):
    """On a network or on torch, until it is removed."""

    def remove(self) -> None: ...


def compiler_hooks(recipe: Recipe, liveness: Liveness) -> list[Hook]:
    """Has a rank say that it compiles; none where nothing is compiled."""
    return [CompilerHook(liveness.compiles)] if recipe.compile else []


def state_of(job: Job, data: Data, network: Network, sums: Sums, world: Group, form: "GpuForm | None") -> StepState:
    """What the steps of a run change: the network, its statistics and average, the optimizer, scales."""
    recipe, train, model, tail = job.recipe, data.training.source, network.model, sums.tail
    if recipe.synchrony.local_steps is not None:
        # SGD, which takes the mean changes of local steps as gradients.
        outer = recipe.synchrony.outer
        optimizer = build_optimizer(Optimizer(momentum=outer.momentum, nesterov=outer.nesterov), model, outer.lr)
    else:
        head = head_of(recipe, len(train.classes)) if recipe.optimizer.needs_head else ()
        optimizer = build_optimizer(recipe.optimizer, model, recipe.rate.lr, tail.held if tail else None, head=head)
    update = Update(
        model, optimizer, sums.reducer, sum_over_ranks=lambda table: sums.watched.start(table).wait(), columns=tail,
        take_step=form.flat_update(optimizer, sums.reducer).step if form is not None else None,
        # An inner step has the schedule's rate already; the outer one has its own.
        follows_schedule=recipe.synchrony.local_steps is None,
    )  # fmt: skip
    batch_norm, settings = network.batch_norm, recipe.average
    average = MovingAverage(settings, len(train), model, batch_norm.running) if settings is not None else None
    return StepState(model, sums.reducer, update, batch_norm, Precision(recipe, world.device), average)


def passes_of(job: Job, network: Network, state: StepState, sums: Sums, world: Group) -> ForwardBackward:
    """The forward and backward pass of a virtual worker: of the whole network, or of a tail that ranks share."""
    recipe, order = job.recipe, WeightsFirst if job.options.weights_first else nullcontext
    if recipe.synchrony.local_steps is not None and network.own_copy is not None:
        return LocalSteps(recipe, copy.deepcopy(network.own_copy), state)
    if sums.tail is None:
        return WholeNetwork(state.model, recipe, state.precision, state.batch_norm, world.device, order=order)
    return SharedTail(recipe, state, sums.tail, world, order)


def thread_of(job: Job, network: Network, state: StepState, world: Group) -> PassThread | None:
    """The thread that takes the passes of steps that time decides; None: every step waits for all of its passes."""
    if network.own_copy is None or not BY_CLOCKS.is_in(setup_of(job)):
        return None
    return PassThread(job.recipe, copy.deepcopy(network.own_copy), state, world, job.delays)

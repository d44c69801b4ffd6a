"""The network of a rank: as its recipe's seed draws it, what its steps change, and how its passes are taken."""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..comm.groups import Group
from ..gradients.update import Update
from ..models import head_of, model_of
from ..models.registry import check_repeatable, compile_blocks
from ..optim import build_optimizer
from ..precision import Precision
from ..recipe.compatibility import BY_CLOCKS
from ..runtime import prepare_process
from ..step.batchnorm import BatchNormStatistics
from ..step.forward_backward import ForwardBackward, LocalSteps, SharedTail, WholeNetwork, outer_optimizer
from ..step.model_state import MovingAverage, StepState
from ..step.pass_thread import PassThread
from ..step.weights_first import order_of_gradients
from ..weights import weights_sha256
from .fingerprint import Fingerprint, conditions, fingerprint_of
from .job import Job, setup_of
from .open_data import Data
from .operators import check_stored, operators_of_passes
from .summing import Sums

if TYPE_CHECKING:
    from ..cuda.form import GpuForm


@dataclass(frozen=True)
class Network:
    """The network of a rank; it knows of no ranks, and is drawn only once."""

    model: nn.Module
    batch_norm: BatchNormStatistics
    own_copy: nn.Module | None
    """network as drawn, never used itself; for recipes whose ranks compute with weights of their own"""


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


def fingerprint_on_rank(job: Job, data: Data, network: Network, device: torch.device) -> Fingerprint:
    """Of a job on this rank, with the hash of the weights as they were drawn, and the operators of its passes."""
    recipe, drawn = job.recipe, weights_sha256(network.model.state_dict())
    operators = ""
    if recipe.precision == "portable":
        check_stored(recipe.model.name)
        operators = " ".join(sorted(operators_of_passes(network.model, recipe)))
    sources = (data.training.source, data.held_out.source)
    return fingerprint_of(job, *sources, drawn, conditions(recipe, device), operators)


def state_of(job: Job, data: Data, network: Network, sums: Sums, world: Group, form: "GpuForm | None") -> StepState:
    """What the steps of a run change: the network, its statistics and average, the optimizer, scales."""
    recipe, train, model, tail = job.recipe, data.training.source, network.model, sums.tail
    if recipe.synchrony.local_steps is not None:
        optimizer = outer_optimizer(recipe, model)
    else:
        head = head_of(recipe, len(train.classes)) if recipe.optimizer.needs_head else ()
        optimizer = build_optimizer(recipe.optimizer, model, recipe.rate.lr, tail.held if tail else None, head=head)
    update = Update(
        model,
        optimizer,
        sums.reducer,
        sum_over_ranks=lambda table: sums.watched.start(table).wait(),
        columns=tail,
        take_step=form.flat_update(optimizer, sums.reducer).step if form is not None else None,
        # An inner step has the schedule's rate already; the outer one has its own.
        follows_schedule=recipe.synchrony.local_steps is None,
    )
    average = None
    if recipe.average is not None:
        average = MovingAverage(recipe.average, len(train), model, network.batch_norm.running)
    return StepState(model, sums.reducer, update, network.batch_norm, Precision(recipe, world.device), average)


def passes_of(job: Job, network: Network, state: StepState, sums: Sums, world: Group) -> ForwardBackward:
    """The forward and backward pass of a virtual worker: of the whole network, or of a tail that ranks share."""
    recipe, order = job.recipe, order_of_gradients(job.options)
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

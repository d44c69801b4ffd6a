"""The network of a rank as its recipe's seed draws it, its optimizer, and the fingerprint of both."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.fingerprint import data_sha256
from ..gradients.layout import Slot
from ..gradients.reducer import parameter_slots
from ..hub import commit_of
from ..models import head_of, model_of
from ..models.compiled import compile_blocks
from ..models.repeatable import check_repeatable
from ..optim import build_optimizer
from ..recipe.schema import Recipe
from ..runtime import prepare_process
from ..step.batchnorm import BatchNormStatistics
from ..step.relaxed import outer_optimizer
from ..tensor_parallel.tail import ParallelTail
from ..weights import weights_sha256
from .fingerprint import Fingerprint, conditions
from .job import Job, init_sha256, replayed_sha256
from .open_data import Data


@dataclass(frozen=True)
class Network:
    """The network of a rank; it knows of no ranks either, and is drawn only once."""

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
    batch_norm = BatchNormStatistics(model)
    if recipe.compile:
        compile_blocks(model, device)
    if device.type == "cuda" and recipe.reduction == "exact":
        check_repeatable(model, recipe)
    return Network(model, batch_norm, own_copy)


def slots_of(recipe: Recipe, model: nn.Module, tail: ParallelTail | None) -> list[Slot]:
    """All tensors that are summed, those of column blocks first."""
    own = parameter_slots(model, wide_norms=recipe.has_wide_norms)
    return [*(tail.slots if tail is not None else ()), *own]


def optimizer_of(recipe: Recipe, model: nn.Module, held: dict[str, list[Tensor]] | None, classes: int) -> Optimizer:
    """The recipe's optimizer over the network; with local steps the outer one."""
    if recipe.synchrony.local_steps is not None:
        return outer_optimizer(recipe, model)
    head = head_of(recipe, classes) if recipe.optimizer.needs_head else ()
    return build_optimizer(recipe.optimizer, model, recipe.rate.lr, held, head=head)


def fingerprint_of(job: Job, data: Data, model: nn.Module, device: torch.device) -> Fingerprint:
    """Of a job on this rank, with the network's weights as they were drawn."""
    recipe, train = job.recipe, data.training.source
    return Fingerprint(
        recipe_sha256=recipe.sha256(),
        train_images=len(train),
        data_sha256=data_sha256(train, data.held_out.source),
        init_sha256=init_sha256(job),
        drawn_sha256=weights_sha256(model.state_dict()),
        conditions=conditions(recipe, device),
        replayed_sha256=replayed_sha256(job),
        data_revision=commit_of(job.data),
    )

"""How a rank takes its passes: the whole network, a tail that ranks share, local steps, or a thread beside the step."""

from torch import nn

from ..comm.groups import Group
from ..gradients.reducer import Reducer
from ..gradients.update import Update
from ..precision import Precision
from ..step.batchnorm import BatchNormStatistics
from ..step.forward_backward import ForwardBackward, SharedTail, WholeNetwork
from ..step.pass_thread import PassThread
from ..step.relaxed import local_steps, pass_thread
from ..step.weights_first import order_of_gradients
from ..tensor_parallel.parallel_tail import ParallelTail
from .job import Job, is_live


def passes_of(
    job: Job,
    model: nn.Module,
    copy: nn.Module | None,
    batch_norm: BatchNormStatistics,
    precision: Precision,
    reducer: Reducer,
    update: Update,
    tail: ParallelTail | None,
    world: Group,
) -> ForwardBackward:
    """The forward and backward pass of a virtual worker.

    Args:
        job: Of the run.
        model: Is trained.
        copy: Another one like it, for recipes whose ranks compute with weights of their own.
        batch_norm: Of the model.
        precision: Of the passes.
        reducer: Takes the gradients.
        update: Brings the weights that a pass needs.
        tail: The layers that ranks share; None: each rank has whole layers.
        world: All ranks.
    """
    recipe, device = job.recipe, world.device
    order = order_of_gradients(job.options, recipe, device)
    if recipe.synchrony.local_steps is not None and copy is not None:
        return local_steps(recipe, copy, model, reducer, update, precision, batch_norm)
    if tail is None:
        return WholeNetwork(model, recipe, precision, batch_norm, device, order=order)
    return SharedTail(model, tail, reducer, update.wait_weights, recipe, precision, batch_norm, world, order)


def thread_of(
    job: Job, copy: nn.Module | None, model: nn.Module, reducer: Reducer, precision: Precision, world: Group
) -> PassThread | None:
    """The thread that takes the passes of steps that time decides; None: every step waits for all of its passes."""
    if copy is None or not is_live(job):
        return None
    return pass_thread(job.recipe, copy, model, reducer.names, precision, world, job.delays)

"""How a rank takes its passes: the whole network, a tail that ranks share, local steps, or a thread beside the step."""

from torch import nn

from ..comm.groups import Group
from ..step.forward_backward import ForwardBackward, SharedTail, WholeNetwork
from ..step.model_state import StepState
from ..step.pass_thread import PassThread
from ..step.relaxed import local_steps, pass_thread
from ..step.weights_first import order_of_gradients
from ..tensor_parallel.tail import ParallelTail
from .job import Job, is_live


def passes_of(
    job: Job, state: StepState, copy: nn.Module | None, tail: ParallelTail | None, world: Group
) -> ForwardBackward:
    """The forward and backward pass of a virtual worker.

    Args:
        job: Of the run.
        state: The model that is trained, and what sums and updates it.
        copy: Another model like it, for recipes whose ranks compute with weights of their own.
        tail: The layers that ranks share; None: each rank has whole layers.
        world: All ranks.
    """
    recipe, device, model, update = job.recipe, world.device, state.model, state.update
    order = order_of_gradients(job.options)
    if recipe.synchrony.local_steps is not None and copy is not None:
        return local_steps(recipe, copy, model, state.reducer, update, state.precision, state.batch_norm)
    if tail is None:
        return WholeNetwork(model, recipe, state.precision, state.batch_norm, device, order=order)
    return SharedTail(
        model, tail, state.reducer, update.wait_weights, recipe, state.precision, state.batch_norm, world, order
    )


def thread_of(job: Job, copy: nn.Module | None, state: StepState, world: Group) -> PassThread | None:
    """The thread that takes the passes of steps that time decides; None: every step waits for all of its passes."""
    if copy is None or not is_live(job):
        return None
    return pass_thread(job.recipe, copy, state.model, state.reducer.names, state.precision, world, job.delays)

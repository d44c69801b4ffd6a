"""What relaxed synchrony adds to the parts of a run: passes in a thread, and local steps."""

from torch import nn
from torch.optim import Optimizer

from ..comm.groups import Group
from ..gradients.reducer import Reducer
from ..gradients.update import Update
from ..optim import build_optimizer
from ..precision import Precision, arithmetic_of
from ..recipe.schema import Optimizer as OptimizerSettings
from ..recipe.schema import Recipe
from ..synchrony.delays import delay_model
from .batchnorm import BatchNormStatistics
from .closing import Arrivals
from .forward_backward import WholeNetwork
from .local_steps import LocalSteps
from .pass_thread import PassThread

DELAY_UNIT = 0.05
"""seconds of a unit of `--delays`: one or two passes of the small recipes; a delay may name another by @SECONDS"""


def pass_thread(
    recipe: Recipe, copy: nn.Module, model: nn.Module, slots: list[str], precision: Precision, world: Group, delays: str
) -> PassThread:
    """The thread of a rank whose steps are closed by time.

    Args:
        recipe: Of the run.
        copy: Of the network, for the thread.
        model: The network that is trained.
        slots: Names of its parameters in slot order.
        precision: Of the passes.
        world: All ranks.
        delays: A model of delays to sleep, in units of DELAY_UNIT; empty: none.
    """
    copied = BatchNormStatistics(copy)
    model_of_delays = delay_model(delays, recipe.seed, DELAY_UNIT) if delays else None
    return PassThread(
        copy,
        model,
        slots,
        WholeNetwork(copy, recipe, precision, copied, world.device),
        copied,
        Arrivals(world),
        lambda step, worker: 0.0 if model_of_delays is None else model_of_delays.seconds(worker, step, 0),
        arithmetic_of(recipe),
    )


def local_steps(
    recipe: Recipe,
    copy: nn.Module,
    model: nn.Module,
    reducer: Reducer,
    update: Update,
    precision: Precision,
    batch_norm: BatchNormStatistics,
) -> LocalSteps:
    """What takes local steps on a copy of the network; `update` has the outer optimiser."""
    assert recipe.synchrony.local_steps is not None
    copied = BatchNormStatistics(copy)
    return LocalSteps(
        WholeNetwork(copy, recipe, precision, copied, next(model.parameters()).device),
        copy,
        model,
        build_optimizer(recipe.optimizer, copy, recipe.rate.lr),
        recipe.synchrony.local_steps,
        copied,
        batch_norm,
        slots=reducer.names,
        add=reducer.add,
        wait_weights=update.wait_weights,
    )


def outer_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """SGD over the network's weights, which takes mean changes in place of gradients."""
    outer = recipe.synchrony.outer
    return build_optimizer(OptimizerSettings(momentum=outer.momentum, nesterov=outer.nesterov), model, outer.lr)

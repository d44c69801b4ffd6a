"""What relaxed synchrony adds to the parts of a run: passes in a thread, local steps, and what it can't go with."""

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm.groups import Group
from ..errors import UserError
from ..gradients.reducer import Reducer
from ..gradients.update import Update
from ..optim import build_optimizer
from ..precision import Precision
from ..recipe.optimizer_schema import Optimizer as OptimizerSettings
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..synchrony.delays import delay_model
from .batchnorm import BatchNormStatistics
from .closing import Arrivals
from .forward_backward import WholeNetwork
from .local_steps import LocalSteps
from .pass_thread import PassThread

DELAY_UNIT = 0.05
"""seconds of a unit of `--delays`: one or two passes of the small recipes; a delay may name another by @SECONDS"""


def check_synchrony(recipe: Recipe, options: RuntimeOptions, device: torch.device, delays: str, is_live: bool) -> None:
    """UserError where a run can't leave out late work as asked.

    Args:
        recipe: Of the run.
        options: Of the run.
        device: Of the ranks.
        delays: A model of delays that the ranks are to sleep; empty: none.
        is_live: Clocks decide what is left out.
    """
    form = recipe.synchrony
    asked = f"synchrony.form = {form.form}"
    if form.is_simulated:
        raise UserError(f"{asked}: is simulated only; give the recipe to torusgd simulate, or choose another form")
    if form.leaves_out and options.audit:
        raise UserError(f"audit = {options.audit:g}: with {asked} not all of the work is done twice; leave out one")
    if is_live and device.type == "cuda":
        raise UserError(f"{asked}: by clocks on CPUs only; use --device cpu, or synchrony.delays, which needs no clock")
    if form.form == "local" and recipe.precision == "float16":
        raise UserError(f"{asked}: copies have no loss scale; use precision: bfloat16 or float32")
    if delays and not is_live:
        raise UserError(f"--delays {delays}: only clocks of a run that leaves out late work notice it; {asked}")
    for text in {delays, form.delays or ""} - {""}:
        delay_model(text, recipe.seed)


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

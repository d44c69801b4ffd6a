"""A simulated run from its description to errors over virtual time and the hash of its weights."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..data import Pipeline, open_sources
from ..errors import UserError
from ..recipe.schema import Recipe
from ..synchrony.barriers import barrier
from ..synchrony.delays import delay_model
from ..weights import weights_sha256
from . import forms
from .forms import Moment, Workers
from .passes import Passes

FORMS = {
    "bsp": "everybody waits for all",
    "ssp:S": "nobody is more than S steps ahead of the slowest",
    "asp": "nobody waits",
    "pbsp:B": "as bsp, of B workers drawn at random",
    "pssp:BxS": "as ssp, of B workers drawn at random",
    "threshold:MxT": "M micro-batches a step; those that end after T s are left out",
    "local:H": "the mean of all workers' weights every H steps",
    "diloco:H": "as local, with an outer SGD of rate 0.7 and Nesterov momentum 0.9",
    "gossip:P": "after a step, with probability P the mean with another worker's weights",
    "elastic:T": "every T steps a pull towards the centre",
}
"""what may be simulated"""
ELASTIC_BETA = 0.9
"""the pull of all workers together; the authors' value"""
OUTER = {"local": (1.0, 0.0), "diloco": (0.7, 0.9)}
"""rate and Nesterov momentum of the outer SGD; DiLoCo's are the authors'"""
_TEXT = re.compile(r"(threshold|local|diloco|gossip|elastic):(\d+(?:\.\d+)?)(?:x(\d+(?:\.\d+)?|inf))?")


@dataclass(frozen=True)
class Setting:
    """What to simulate: a recipe's model, images and seed, with plain SGD at one rate."""

    recipe: Recipe
    form: str
    """one of FORMS"""
    workers: int
    delays: str
    """of a gradient, in units of `compute` seconds (`torusgd.synchrony.delays`)"""
    lr: float
    compute: float = 1.0
    """virtual seconds of a gradient without its delay"""


@dataclass(frozen=True)
class Point:
    """The state at one moment."""

    time: float
    """virtual seconds"""
    images: int
    """that gradients were computed of"""
    error: float
    """share of held-out images that are classified wrongly"""


@dataclass(frozen=True)
class Simulation:
    """What a simulated run leaves."""

    points: tuple[Point, ...]
    weights_sha256: str
    """of the weights at the end, without batch-norm statistics"""


def simulate(
    setting: Setting,
    data: Path | None = None,
    *,
    seconds: float = math.inf,
    images: float = math.inf,
    points: int = 10,
) -> Simulation:
    """Trains in virtual time up to the first update at which `seconds` or `images` are used up.

    The same setting gives the same bits each time on one machine: gradients are computed in the total order (time,
    worker), and all that is random is drawn by key.

    Args:
        setting: What to simulate.
        data: Of the recipe's images; None where its source needs none.
        seconds: Virtual time.
        images: Of all gradients.
        points: How many errors to take, evenly over what limits the run, and at its end.

    Raises:
        UserError: The setting, or the data, is not what can be used.
    """
    recipe = setting.recipe
    if min(seconds, images) == math.inf or min(seconds, images) <= 0:
        raise UserError("simulate: needs seconds or images, above 0, at which to end")
    if setting.workers < 1 or not 0 < setting.lr < math.inf or not 0 < setting.compute < math.inf:
        raise UserError("simulate: needs at least 1 worker, a rate above 0, and seconds of compute above 0")
    run = moments(setting.form)
    delays = delay_model(setting.delays, recipe.seed, unit=setting.compute)
    train, held_out = open_sources(recipe.data, data, recipe.seed)
    passes = Passes(
        recipe, Pipeline(train, recipe.data, recipe.seed), Pipeline(held_out, recipe.held_out_data, recipe.seed)
    )
    workers = Workers(passes, setting.workers, delays, setting.compute, setting.lr, recipe.seed)

    found = [Point(0.0, 0, passes.error(passes.initial))]
    for moment in run(workers):
        drawn = moment.gradients * passes.images
        progress = max(moment.time / seconds, drawn / images)
        if progress >= len(found) / points:
            weights = moment.weights()
            found.append(Point(moment.time, drawn, passes.error(weights)))
        if progress >= 1:
            break
    return Simulation(tuple(found), weights_sha256(passes.tensors(weights)))


def moments(form: str) -> Callable[[Workers], Iterator[Moment]]:
    """What a form does with workers, from its text.

    Raises:
        UserError: It is no form.
    """
    if form in ("bsp", "asp") or form.partition(":")[0] in ("ssp", "pbsp", "pssp"):
        rule = barrier(form)
        return lambda workers: forms.barrier(workers, rule)
    match = _TEXT.fullmatch(form)
    name, first, second = match.groups() if match is not None else ("", "0", None)
    number = float(first)
    is_count = number.is_integer() and number > 0
    if name == "threshold" and is_count and second is not None:
        return lambda workers: forms.threshold(workers, int(number), float(second))
    if name == "gossip" and number <= 1 and second is None:
        return lambda workers: forms.gossip(workers, number)
    if name == "elastic" and is_count and second is None:
        return lambda workers: forms.elastic(workers, int(number), ELASTIC_BETA)
    if name in OUTER and is_count and second is None:
        return lambda workers: forms.local(workers, int(number), *OUTER[name])
    raise UserError(f"simulate: no form {form!r}; write {', '.join(FORMS)}")

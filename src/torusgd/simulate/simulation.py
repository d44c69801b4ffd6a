"""A simulated run from its description to errors over virtual time and the hash of its weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..data import Pipeline, open_sources
from ..errors import UserError
from ..recipe.schedule import Schedule
from ..recipe.schema import Outer, Recipe, Synchrony
from ..synchrony.barriers import Barrier, barrier
from ..synchrony.delays import delay_model
from ..synchrony.limits import Limits, each_alone
from ..text import listed
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
    "backup:B": "the first P - B workers to finish",
    "cutoff:C": "the first C; cutoff:predicted: as many as make the most gradients a second, by earlier steps",
    "threshold:MxT": "M micro-batches a step; those that end after T s are left out",
    "local:H": "the mean of all workers' weights every H steps",
    "diloco:H": "as local, with an outer SGD of rate 0.7 and Nesterov momentum 0.9",
    "gossip:P": "after a step, with probability P the mean with another worker's weights",
    "elastic:T": "every T steps a pull towards the centre",
}
"""forms, by the text that names them"""
ELASTIC_BETA = 0.9
"""pull of all workers together; the authors' value"""
OUTER = {"local": Outer(lr=1.0, momentum=0.0, nesterov=False), "diloco": Outer()}
"""outer SGD by form; DiLoCo's is the authors'"""
_KEYS: dict[str, tuple[str, type]] = {
    "backup": ("backups", int),
    "cutoff": ("count", int),
    "local": ("local_steps", int),
    "diloco": ("local_steps", int),
    "gossip": ("probability", float),
    "elastic": ("pull_every", int),
}
"""key of a recipe's `synchrony` that the text of a form gives, and its type"""


@dataclass(frozen=True)
class Setting:
    """What to simulate: a recipe's model, images and seed, with plain SGD at one rate."""

    recipe: Recipe
    form: str
    """one of FORMS; empty: the recipe's `synchrony`"""
    workers: int
    delays: str
    """delays of a gradient, in units of `compute` seconds (`torusgd.synchrony.delays`)"""
    lr: float
    compute: float = 1.0
    """virtual seconds of a gradient without its delay"""


@dataclass(frozen=True)
class Point:
    """The state at one moment."""

    time: float
    """virtual seconds"""
    images: int
    """images whose gradients were computed"""
    error: float
    """fraction of held-out images that are classified wrongly"""


@dataclass(frozen=True)
class Simulation:
    """What a simulated run leaves."""

    points: tuple[Point, ...]
    weights_sha256: str
    """hash of the weights at the end, without batch-norm statistics"""


def simulate(
    setting: Setting,
    data: Path | None = None,
    *,
    seconds: float = math.inf,
    images: float = math.inf,
    points: int = 10,
) -> Simulation:
    """Trains in virtual time up to the first update at which `seconds` or `images` are used up, or the recipe's stages.

    The same setting gives the same bits each time on one machine: gradients are computed in the total order (time,
    worker), and all that is random is drawn by key.

    Args:
        setting: What to simulate.
        data: Of the recipe's images; None if its source needs none.
        seconds: Virtual time.
        images: Of all gradients. If neither is given, it ends after those of the recipe's stages.
        points: How many errors to take, evenly over what limits the run, and at its end.

    Raises:
        UserError: The setting, or the data, is not what can be used.
    """
    recipe = setting.recipe
    if min(seconds, images) <= 0:
        raise UserError("simulate: needs seconds and images above 0, at which to end")
    if setting.workers < 1 or not 0 < setting.lr < math.inf or not 0 < setting.compute < math.inf:
        raise UserError("simulate: needs at least 1 worker, a rate above 0, and seconds of compute above 0")
    run = moments(setting.form) if setting.form else recipe_moments(recipe.synchrony)
    delays = delay_model(setting.delays, recipe.seed, unit=setting.compute)
    train, held_out = open_sources(recipe.data, data, recipe.seed)
    if seconds == images:
        images = Schedule(recipe, len(train)).stop
    passes = Passes(
        recipe, Pipeline(train, recipe.data, recipe.seed), Pipeline(held_out, recipe.held_out_data, recipe.seed)
    )
    workers = Workers(passes, setting.workers, delays, setting.compute, setting.lr, recipe.seed)

    found = [Point(0.0, 0, passes.error(passes.initial))]
    for moment in run(workers):
        drawn = moment.gradients * passes.images
        progress = max(moment.time / seconds, drawn / images)
        # Errors are taken evenly over whichever of time and images runs out first.
        if progress >= len(found) / points:
            weights = moment.weights()
            found.append(Point(moment.time, drawn, passes.error(weights)))
        if progress >= 1:
            break
    return Simulation(tuple(found), weights_sha256(passes.tensors(weights)))


def recipe_moments(form: Synchrony) -> Callable[[Workers], Iterator[Moment]]:
    """What a recipe's `synchrony` does with workers."""
    staleness = form.staleness or 0
    rules = {
        "synchronous": Barrier(0),
        "stale": Barrier(staleness),
        "sampled": Barrier(staleness, form.sample or 0),
        "asynchronous": Barrier(math.inf),
    }
    if form.form in rules:
        return lambda workers: forms.barrier(workers, rules[form.form])
    if form.probability is not None:
        chance = form.probability
        return lambda workers: forms.gossip(workers, chance)
    if form.pull_every is not None:
        every = form.pull_every
        return lambda workers: forms.elastic(workers, every, ELASTIC_BETA)
    if form.local_steps is not None:
        steps = form.local_steps
        return lambda workers: forms.local(workers, steps, form.outer)
    return lambda workers: forms.leaving_out(workers, _limits(form, workers))


def _limits(form: Synchrony, workers: Workers) -> Limits:
    count, most = form.count_of(workers.count), workers.count
    if isinstance(count, int) and not 0 < count <= most:
        raise UserError(
            f"simulate: synchrony.form = {form.form}: there are {most} workers; wait for 1 to {most} of them"
        )
    return Limits(
        each_alone(most),
        workers.seed,
        count=count,
        threshold=form.threshold,
        warmup=form.warmup,
        warm=form.warmup,
    )


def moments(form: str) -> Callable[[Workers], Iterator[Moment]]:
    """What a form does with workers, from its text.

    Raises:
        UserError: It is no form.
    """
    if form in ("bsp", "asp") or form.partition(":")[0] in ("ssp", "pbsp", "pssp"):
        rule = barrier(form)
        return lambda workers: forms.barrier(workers, rule)
    with suppress(ValueError):  # of a number that is none, and of a value that the recipe's key doesn't take
        name, _, value = form.partition(":")
        if name == "threshold":
            parts, _, seconds = value.partition("x")
            if int(parts) > 0 and float(seconds) > 0:
                return lambda workers: forms.threshold(workers, int(parts), float(seconds))
        elif name in _KEYS:
            key, kind = _KEYS[name]
            outer = {"outer": OUTER[name]} if name in OUTER else {}
            settings = {"form": "local" if outer else name, key: value if value == "predicted" else kind(value)}
            # A number needs no steps that wait for all, to learn from; a recipe takes two at least.
            known = {"warmup": 2} if key in ("backups", "count") and value != "predicted" else {}
            return recipe_moments(Synchrony.model_validate(settings | outer | known))
    raise UserError(f"simulate: no form {form!r}; write {listed(FORMS)}")

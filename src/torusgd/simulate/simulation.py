"""A simulated run from its description to errors over virtual time and the hash of its weights."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
from .forms import Moment, Passes, Workers

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
# The pull of all workers together, and DiLoCo's outer SGD, are the authors'.
ELASTIC_BETA = 0.9
OUTER = {"local": Outer(lr=1.0, momentum=0.0, nesterov=False), "diloco": Outer()}
# Of the text of a form the key of a recipe's `synchrony` that its value stands for.
_KEYS: dict[str, tuple[str, type]] = {
    "backup": ("backups", int),
    "cutoff": ("count", int),
    "local": ("local_steps", int),
    "diloco": ("local_steps", int),
    "gossip": ("probability", float),
    "elastic": ("pull_every", int),
}


@dataclass(frozen=True)
class Setting:
    """What to simulate: a recipe's model, images and seed, with plain SGD at one rate."""

    recipe: Recipe
    form: str
    """text of one of FORMS; empty: the recipe's `synchrony`"""
    workers: int
    delays: str
    """model of a gradient's delays, in units of `compute` (`torusgd.synchrony.delays`)"""
    lr: float
    compute: float = 1.0
    """virtual seconds of a gradient without its delay"""


@dataclass(frozen=True)
class Point:
    """By a virtual time in seconds, the images whose gradients were computed, and the fraction classified wrongly."""

    time: float
    images: int
    error: float


@dataclass(frozen=True)
class Simulation:
    """What a simulated run leaves; the hash is of its last weights, without batch-norm statistics."""

    points: tuple[Point, ...]
    weights_sha256: str


def simulate(
    setting: Setting, data: Path | None = None, *, seconds: float = math.inf, images: float = math.inf, points: int = 10
) -> Simulation:
    """Trains in virtual time up to the first update at which `seconds` or `images` are used up, or the recipe's stages.

    The same setting gives the same bits each time on one machine: gradients are computed in the total order (time,
    worker), and all that is random is drawn by key.

    `data` has the recipe's images, and `points` is the number of errors to take, evenly over what limits the run.
    UserError if setting or data can't be used.
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
    judged = Pipeline(held_out, recipe.held_out_data, recipe.seed)
    passes = Passes(recipe, Pipeline(train, recipe.data, recipe.seed), judged)
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
        return partial(forms.barrier, rule=rules[form.form])
    if form.probability is not None:
        return partial(forms.gossip, chance=form.probability)
    if form.pull_every is not None:
        return partial(forms.elastic, every=form.pull_every, beta=ELASTIC_BETA)
    if form.local_steps is not None:
        return partial(forms.local, steps=form.local_steps, outer=form.outer)
    return lambda workers: forms.leaving_out(workers, _limits(form, workers))


def _limits(form: Synchrony, workers: Workers) -> Limits:
    count, most = form.count_of(workers.count), workers.count
    if isinstance(count, int) and not 0 < count <= most:
        raise UserError(
            f"simulate: synchrony.form = {form.form}: there are {most} workers; wait for 1 to {most} of them"
        )
    warmup = form.warmup
    return Limits(each_alone(most), workers.seed, count=count, threshold=form.threshold, warmup=warmup, warm=warmup)


def moments(form: str) -> Callable[[Workers], Iterator[Moment]]:
    """What a form does with workers, from its text; UserError if it is none."""
    name, _, value = form.partition(":")
    if form in ("bsp", "asp") or name in ("ssp", "pbsp", "pssp"):
        return partial(forms.barrier, rule=barrier(form))
    with suppress(ValueError):  # of a number that is none, and of a value that the recipe's key doesn't take
        if name == "threshold":
            parts, _, seconds = value.partition("x")
            if int(parts) > 0 and float(seconds) > 0:
                return partial(forms.threshold, parts=int(parts), tau=float(seconds))
        elif name in _KEYS:
            key, kind = _KEYS[name]
            outer = {"outer": OUTER[name]} if name in OUTER else {}
            settings = {"form": "local" if outer else name, key: value if value == "predicted" else kind(value)}
            # A number needs no steps that wait for all, to learn from; a recipe takes two at least.
            known = {"warmup": 2} if key in ("backups", "count") and value != "predicted" else {}
            return recipe_moments(Synchrony.model_validate(settings | outer | known))
    raise UserError(f"simulate: no form {form!r}; write {listed(FORMS)}")

"""Training in virtual time: P virtual workers in one process, with real gradients and keyed delays.

Stale and sampled barriers, gossip and elastic averaging have no other. Forms of relaxed synchrony are loops over
virtual time, each with plain SGD, and generators of moments. Batches are numbered as a synchronous run shares out its
stream: the k-th gradient of worker i of P is of batch k P + i.

| form | source |
| --- | --- |
| `barrier` | BSP, SSP, ASP; PSP: Wang, Catterall and Mortier, arXiv 1709.07772 |
| `threshold` | DropCompute: Giladi et al., arXiv 2306.10598 |
| `leaving_out` | backup workers: Chen et al., arXiv 1604.00981; cutoff: Teng and Wood, arXiv 1803.04209 |
| `local` | local SGD: Stich, ICLR 2019; with an outer optimiser DiLoCo: Douillard et al., arXiv 2311.08105 |
| `gossip` | Jin, Yuan, Iandola and Keutzer, arXiv 1611.04581 |
| `elastic` | EASGD: Zhang, Choromanska and LeCun, NeurIPS 2015 |
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .data import Pipeline, StreamOrder, open_sources
from .errors import RunError, UserError
from .models import model_of
from .optim.sgd import Sgd
from .recipe.schedule import Schedule
from .recipe.schema import LEAST_LEARNED, Outer, Recipe, Synchrony
from .rng import DROPOUT, PEER, keyed_integer, keyed_uniform, seed_torch
from .synchrony import barriers
from .synchrony.barriers import Barrier, passages
from .synchrony.delays import DelayModel, delay_model
from .synchrony.limits import Limits, VirtualSteps
from .text import listed
from .weights import weights_sha256

_CHUNK = 500
# Batches of _CHUNK training images from which batch norm takes its statistics in evaluations.
_STATISTICS = 4
_MOST_COMPUTE = 1e9  # virtual seconds of a gradient: any number of them has a finite sum


class Passes:
    """Gradients and accuracy of a recipe's network as functions of its weights, float32 [weights].

    A gradient is over the first stage's images of a virtual worker, or of one local step.
    """

    def __init__(self, recipe: Recipe, train: Pipeline, held_out: Pipeline) -> None:
        self._recipe, self._train = recipe, train
        self._order = StreamOrder(len(train.source), recipe.seed)
        self.images = recipe.stages[0].images_per_worker // (recipe.synchrony.local_steps or 1)
        self._model = model_of(recipe, len(train.source.classes))
        self._norms = [layer for layer in self._model.modules() if isinstance(layer, _BatchNorm)]
        for layer in self._norms:
            layer.momentum = None  # a plain average over the passes of `error`; those of gradients read none
        self._parameters = list(self._model.parameters())
        self.initial = parameters_to_vector(self._parameters).detach().clone()
        known = min(_CHUNK * _STATISTICS, len(train.source))
        self._known = train.training_batch(np.arange(known), np.zeros(known, dtype=np.int64), augment=False)
        self._held_out = held_out.validation_batch(np.arange(len(held_out.source)))

    def gradient(self, weights: Tensor, number: int) -> Tensor:
        """The mean gradient over the stream's batch of that number."""
        indices, epochs = self._order.at(number * self.images, self.images)
        batch = self._train.training_batch(indices, epochs, augment=self._recipe.stages[0].augment)
        vector_to_parameters(weights, self._parameters)  # views of the vector, through which nothing writes
        self._model.train()
        seed_torch(self.initial.device, DROPOUT, self._recipe.seed, number)
        loss = F.cross_entropy(self._model(batch.images), batch.targets, label_smoothing=self._recipe.label_smoothing)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, self._parameters)])

    @torch.no_grad()
    def error(self, weights: Tensor) -> float:
        """The fraction of held-out images that are classified wrongly."""
        vector_to_parameters(weights, self._parameters)
        self._model.train()
        # Workers see different images with different weights, so there are no running statistics that were theirs all:
        # batch norm takes those of fixed training images with the weights that are judged.
        for layer in self._norms:
            layer.reset_running_stats()
        for images in self._known.images.split(_CHUNK):
            self._model(images)
        self._model.eval()
        found = torch.cat([self._model(images).argmax(dim=1) for images in self._held_out.images.split(_CHUNK)])
        return float((found != self._held_out.targets).double().mean())

    def tensors(self, weights: Tensor) -> dict[str, Tensor]:
        vector_to_parameters(weights, self._parameters)
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}


@dataclass(frozen=True)
class Workers:
    """Who computes, at which rate, and how long it takes: `compute` virtual seconds a gradient, and its delay."""

    passes: Passes
    count: int
    delays: DelayModel
    compute: float
    lr: float
    seed: int
    momentum: float = 0.0  # of the server, a push, under barriers; other forms have none

    def gradient(self, weights: Tensor, worker: int, step: int) -> Tensor:
        return self.passes.gradient(weights, step * self.count + worker)


@dataclass(frozen=True)
class Moment:
    """The state after an update, at a virtual time in seconds."""

    time: float
    gradients: int  # number of gradients that have entered the weights since the moment before
    weights: Callable[[], Tensor]  # maker of the weights to evaluate now; valid until the next moment is taken


def barrier(workers: Workers, rule: Barrier) -> Iterator[Moment]:
    """Workers push gradients to one server's weights as they pass their barriers, then compute from the new weights.

    A gradient weighs 1/P, so that P of them of the same weights are one synchronous step.
    """
    weights = workers.passes.initial.clone()
    velocity = torch.zeros_like(weights)
    pushed: dict[int, Tensor] = {}
    for passage in passages(workers.count, rule, workers.delays, workers.compute, workers.seed):
        arrived = [pushed.pop(worker) for worker in passage.workers if worker in pushed]
        if arrived:
            velocity.mul_(workers.momentum).add_(sum(arrived[1:], start=arrived[0]) / workers.count)
            weights.sub_(velocity, alpha=workers.lr)
            yield Moment(passage.time, len(arrived), weights.clone)
        for worker, step in zip(passage.workers, passage.steps, strict=True):
            pushed[worker] = workers.gradient(weights, worker, step)


def threshold(workers: Workers, parts: int, tau: float) -> Iterator[Moment]:
    """Synchronous steps of `parts` micro-batches a worker; those that end after `tau` seconds are left out.

    The step is the mean over what arrived, and takes tau seconds if anything was left out. A step in which nothing
    arrives changes nothing.
    """

    def closed() -> Iterator[tuple[float, Sequence[int]]]:
        for step in count():
            ends = np.cumsum(workers.compute + workers.delays.table(workers.count, step, parts), axis=1)
            first = step * workers.count * parts
            yield min(tau, float(ends.max())), [first + int(part) for part in np.flatnonzero(ends <= tau)]

    return _by_steps(workers, closed())


def leaving_out(workers: Workers, form: Synchrony) -> Iterator[Moment]:
    """Synchronous steps that take the mean over the workers that finish before a step is closed."""
    most, number, warmup = workers.count, form.count_of(workers.count), form.warmup
    if isinstance(number, int) and not 0 < number <= most:
        there = f"there are {most} workers; wait for 1 to {most} of them"
        raise UserError(f"simulate: synchrony.form = {form.form}: {there}")
    alone = [[worker] for worker in range(most)]
    limits = Limits(alone, workers.seed, count=number, threshold=form.threshold, warmup=warmup, warm=warmup)
    steps = VirtualSteps(limits, most, workers.delays, workers.compute)

    def closed() -> Iterator[tuple[float, Sequence[int]]]:
        for step in count():
            taken = steps.at(step)
            yield taken.seconds, [step * most + worker for worker in taken.workers]

    return _by_steps(workers, closed())


def _by_steps(workers: Workers, steps: Iterable[tuple[float, Sequence[int]]]) -> Iterator[Moment]:
    """Synchronous steps, each with its seconds and the numbers of the batches over which it takes the mean."""
    weights, time = workers.passes.initial.clone(), 0.0
    for seconds, numbers in steps:
        time += seconds
        if numbers:
            weights.sub_(_mean([workers.passes.gradient(weights, number) for number in numbers]), alpha=workers.lr)
        yield Moment(time, len(numbers), weights.clone)


def local(workers: Workers, steps: int, outer: Outer) -> Iterator[Moment]:
    """Each worker takes `steps` steps by itself; then the mean of their changes is a gradient for an outer SGD.

    A round takes as long as the slowest worker's steps together.
    """
    weights = workers.passes.initial.clone().requires_grad_()
    optimizer = Sgd([weights], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
    time, everyone = 0.0, np.arange(workers.count)
    for first in count(step=steps):
        changes = []
        for worker in range(workers.count):
            own = weights.detach().clone()
            for step in range(first, first + steps):
                own.sub_(workers.gradient(own, worker, step), alpha=workers.lr)
            changes.append(weights.detach() - own)
        taken = workers.compute + workers.delays.at(everyone[:, None], np.arange(first, first + steps), 0)
        time += float(taken.sum(axis=1).max())
        weights.grad = _mean(changes)
        optimizer.step()
        yield Moment(time, steps * workers.count, weights.detach().clone)


def gossip(workers: Workers, chance: float) -> Iterator[Moment]:
    """Each worker steps on weights of its own and then, by chance, takes the mean of them and another worker's.

    Nobody waits for anybody. The mean of all workers' weights is what is evaluated.
    """
    own = [workers.passes.initial.clone() for _ in range(workers.count)]
    for time, ended in _ends(workers):
        for worker, step in ended:
            own[worker] = own[worker] - workers.lr * workers.gradient(own[worker], worker, step)
        # Workers that end at one moment take means of the weights after all their steps, or their order would matter.
        stepped = list(own)
        for worker, step in ended:
            if workers.count > 1 and keyed_uniform(PEER, workers.seed, worker, step, 0) < chance:
                other = int(keyed_integer(workers.count - 1, PEER, workers.seed, worker, step, 1))
                own[worker] = (stepped[worker] + stepped[other + (other >= worker)]) / 2
        yield Moment(time, len(ended), lambda: _mean(own))


def elastic(workers: Workers, every: int, beta: float) -> Iterator[Moment]:
    """Each worker steps on weights x of its own, which a spring ties to a centre c.

    Every so many steps: d = (beta / P) (x - c), then c += d, x -= d, beside the step whose gradient is of the x before.
    Nobody waits. The centre is what is evaluated.
    """
    centre = workers.passes.initial.clone()
    own = [centre.clone() for _ in range(workers.count)]
    for time, ended in _ends(workers):
        for worker, step in ended:
            # The gradient is of the weights before the pull.
            gradient = workers.gradient(own[worker], worker, step)
            if step % every == 0:
                pull = (own[worker] - centre) * (beta / workers.count)
                centre += pull
                own[worker] -= pull
            own[worker].sub_(gradient, alpha=workers.lr)
        yield Moment(time, len(ended), centre.clone)


def _ends(workers: Workers) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Where nobody waits: the moments at which steps end, with the (worker, step) that do, steps from 0."""
    free = passages(workers.count, Barrier(math.inf), workers.delays, workers.compute, workers.seed)
    for time, group in groupby(free, key=lambda passage: passage.time):
        ended = [(each.workers[0], each.steps[0] - 1) for each in group if each.steps[0] > 0]
        if ended:
            yield time, ended


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], start=tensors[0]) / len(tensors)


FORMS = {
    "bsp": "everybody waits for all",
    "ssp:S": "nobody is more than S steps ahead of the slowest",
    "asp": "nobody waits",
    "pbsp:B": "as bsp, of B workers drawn at random",
    "pssp:BxS": "as ssp, of B workers drawn at random",
    "backup:B": "the first P - B workers to finish",
    "cutoff:C": "the first C; predicted or learned: as many as make the most gradients a second, by earlier steps",
    "threshold:MxT": "M micro-batches a step; those that end after T s are left out",
    "local:H": "the mean of all workers' weights every H steps",
    "diloco:H": "as local, with an outer SGD of rate 0.7 and Nesterov momentum 0.9",
    "gossip:P": "after a step, with probability P the mean with another worker's weights",
    "elastic:T": "every T steps a pull towards the centre",
}
# The pull of all workers together, and DiLoCo's outer SGD, are the authors'.
ELASTIC_BETA = 0.9
OUTER = {"local": Outer(lr=1.0, momentum=0.0, nesterov=False), "diloco": Outer()}
# Steps that wait for all, from whose times the count is predicted.
_BY_TIMES = {"predicted": 20, "learned": LEAST_LEARNED}
# Of the text of a form the key of a recipe's `synchrony` that its value stands for.
_KEYS: dict[str, tuple[str, type]] = {
    "backup": ("backups", int), "cutoff": ("count", int), "local": ("local_steps", int),
    "diloco": ("local_steps", int), "gossip": ("probability", float), "elastic": ("pull_every", int),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What to simulate: a recipe's model, images and seed, with plain SGD at one rate."""

    recipe: Recipe
    form: str  # text of one of FORMS; empty: the recipe's `synchrony`
    workers: int
    delays: str  # model of a gradient's delays, in units of `compute` (`torusgd.synchrony.delays`)
    lr: float
    compute: float = 1.0  # virtual seconds of a gradient without its delay
    momentum: float = 0.0  # of the server's SGD; above 0 for barriers alone


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
    worker), and all that is random is drawn by key. `points` is the number of errors to take, evenly over what limits
    the run. UserError if setting or data can't be used, RunError if the weights are not finite.
    """
    # A form that is given stands in the place of all that the recipe says.
    recipe = setting.recipe.model_copy(update={"synchrony": Synchrony()} if setting.form else {})
    if not (seconds > 0 and images > 0):  # nan is neither
        raise UserError("simulate: needs seconds and images above 0, at which to end")
    if setting.workers < 1 or not 0 < setting.lr < math.inf or not 0 < setting.compute <= _MOST_COMPUTE:
        raise UserError(
            "simulate: needs at least 1 worker, a rate above 0, and seconds of compute above 0, of 1e9 at most"
        )
    run = moments(setting.form) if setting.form else recipe_moments(recipe.synchrony)
    if setting.momentum and (getattr(run, "func", None) is not barrier or not 0 < setting.momentum < 1):
        raise UserError(f"--momentum {setting.momentum:g}: below 1, and for barriers: bsp, ssp, asp, pbsp, pssp")
    delays = delay_model(setting.delays, recipe.seed, unit=setting.compute)
    train, held_out = open_sources(recipe.data, data, recipe.seed)
    if seconds == images == math.inf:
        images = Schedule(recipe, len(train)).stop
    judged = Pipeline(held_out, recipe.held_out_data, recipe.seed)
    passes = Passes(recipe, Pipeline(train, recipe.data, recipe.seed), judged)
    workers = Workers(passes, setting.workers, delays, setting.compute, setting.lr, recipe.seed, setting.momentum)
    found, drawn = [Point(0.0, 0, passes.error(passes.initial))], 0
    for moment in run(workers):
        drawn += moment.gradients * passes.images
        progress = max(moment.time / seconds, drawn / images)
        # Errors are taken evenly over whichever of time and images runs out first.
        if progress >= len(found) / points:
            weights = moment.weights()
            if not bool(weights.isfinite().all()):
                raise RunError(f"simulate: the weights are not finite after {drawn:,} images; lower --lr or --momentum")
            found.append(Point(moment.time, drawn, passes.error(weights)))
        if progress >= 1:
            break
    return Simulation(tuple(found), weights_sha256(passes.tensors(weights)))


def recipe_moments(form: Synchrony) -> Callable[[Workers], Iterator[Moment]]:
    """What a recipe's `synchrony` does with workers."""
    staleness = form.staleness or 0
    rules = {
        "synchronous": Barrier(0), "stale": Barrier(staleness), "sampled": Barrier(staleness, form.sample or 0),
        "asynchronous": Barrier(math.inf),
    }  # fmt: skip
    if form.form in rules:
        return partial(barrier, rule=rules[form.form])
    if form.probability is not None:
        return partial(gossip, chance=form.probability)
    if form.pull_every is not None:
        return partial(elastic, every=form.pull_every, beta=ELASTIC_BETA)
    if form.local_steps is not None:
        return partial(local, steps=form.local_steps, outer=form.outer)
    return partial(leaving_out, form=form)


def moments(form: str) -> Callable[[Workers], Iterator[Moment]]:
    """What a form does with workers, from its text; UserError if it is none."""
    name, _, value = form.partition(":")
    if form in ("bsp", "asp") or name in ("ssp", "pbsp", "pssp"):
        return partial(barrier, rule=barriers.barrier(form))
    with suppress(ValueError):  # of a number that is none, and of a value that the recipe's key doesn't take
        if name == "threshold":
            parts, _, seconds = value.partition("x")
            if int(parts) > 0 and float(seconds) > 0:
                return partial(threshold, parts=int(parts), tau=float(seconds))
        elif name in _KEYS:
            key, kind = _KEYS[name]
            outer = {"outer": OUTER[name]} if name in OUTER else {}
            settings = {"form": "local" if outer else name, key: value if value in _BY_TIMES else kind(value)}
            # A number needs no steps that wait for all, to learn from; a recipe takes two at least.
            warmup = _BY_TIMES.get(value, 2 if key in ("backups", "count") else None)
            known = {} if warmup is None else {"warmup": warmup}
            return recipe_moments(Synchrony.model_validate(settings | outer | known))
    raise UserError(f"simulate: no form {form!r}; write {listed(FORMS)}")

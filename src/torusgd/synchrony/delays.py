"""Keyed delays: how much longer a piece of work takes than its computation, as a pure function of integer keys.

A piece of work is (worker, step, part), where a part is a micro-batch or a virtual worker. Its delay depends on the
seed and these three alone, so that a run in virtual time is a function of its recipe. A real run sleeps as long.

Delays are written as text, `NAME[:PARAMETERS][@SECONDS]`, several joined by `+`:

| text | delay in units, independent for each part unless said |
| --- | --- |
| `constant:A` | A (1) |
| `exponential:A` | exponential with mean A (1) |
| `shifted-exponential` | 1 + exponential with mean 1 |
| `gamma:KxA` | Gamma with shape K (1) and scale A (1) |
| `lognormal:A` | the noise of DropCompute (Giladi et al., arXiv 2306.10598), with mean A (0.5) |
| `pause:PxA` | A (2) with probability P (0.25), otherwise 0 |
| `slow:PxF,T` | F - 1 (F is 4) from step T (0) on, for a fraction P (0.05) of the workers, which stays the same |

A unit is the number of seconds after `@`; without it, the caller's time of the computation itself. So `slow` makes a
part F times as long as its computation.
"""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature

import numpy as np
import numpy.typing as npt

from ..errors import UserError, suggest
from ..rng import DELAY, keyed_integer, keyed_uniform

F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Key = tuple[int, int, int]

# Delays are whole multiples of 1/_GRID seconds, about a nanosecond, so that float64 adds them without rounding: a
# virtual time is the same in whatever order its delays are added.
_GRID = 2.0**30

# A distribution of delays in units, from the key that begins every draw, and worker, step and part: arrays that
# broadcast, to whose shape the result does; the parameters of the text follow, in its order.
Delay = Callable[[Key, Ints, Ints, Ints], F64]


def _constant(_: Key, worker: Ints, step: Ints, part: Ints, amount: float = 1.0) -> F64:
    return np.full(np.broadcast_shapes(worker.shape, step.shape, part.shape), amount)


def _exponential(key: Key, worker: Ints, step: Ints, part: Ints, mean: float = 1.0) -> F64:
    # Without memory, and without a shift: half of the delays are below 0.69 of the mean, 1 % above 4.6 of it.
    return -mean * np.log1p(-keyed_uniform(*key, worker, step, part))


def _gamma(key: Key, worker: Ints, step: Ints, part: Ints, shape: float = 1.0, scale: float = 1.0) -> F64:
    # By Marsaglia and Tsang's rejection (ACM TOMS 26, 2000), each attempt with draws of its own.
    worker, step, part = np.broadcast_arrays(worker, step, part)
    # For a shape below 1: a draw of shape + 1 times a power of a uniform draw (the same paper).
    boost = 1.0 if shape >= 1 else (1 - keyed_uniform(*key, worker, step, part, 0)) ** (1 / shape)
    d = max(shape, shape + (shape < 1)) - 1 / 3
    drawn, rejected, attempt = np.zeros(worker.shape), np.ones(worker.shape, dtype=bool), 0
    while rejected.any():
        attempt += 1
        # For all elements, accepted ones too: a draw's key must not depend on which other elements are open.
        u, v, w = (1 - keyed_uniform(*key, worker, step, part, 3 * attempt + i) for i in range(3))
        normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)  # Box and Muller
        cube = np.maximum(1 + normal / np.sqrt(9 * d), 0) ** 3
        with np.errstate(divide="ignore"):  # a cube of 0 is refused
            accepted = np.log(w) < normal**2 / 2 + d - d * cube + d * np.log(cube)
        drawn = np.where(rejected & accepted, d * cube, drawn)
        rejected = rejected & ~accepted
    return np.asarray(scale * drawn * boost)


def _lognormal(key: Key, worker: Ints, step: Ints, part: Ints, mean: float = 0.5) -> F64:
    cumulative, values = _drop_compute_noise()
    drawn = np.searchsorted(cumulative, keyed_uniform(*key, worker, step, part), side="right")
    return mean * values[np.minimum(drawn, len(values) - 1)]


@cache  # a simulation draws at every step
def _drop_compute_noise() -> tuple[F64, F64]:
    # As in DropCompute's authors' code: m / E[m] with m from 1 to 999 and p(m) ~ exp(-(ln m - 4)^2 / 2) / m, a
    # log-normal cut at 18 times its median. The cumulative distribution, and the values.
    m = np.arange(1, 1000, dtype=np.float64)
    weights = np.exp(-((np.log(m) - 4) ** 2) / 2) / m
    weights /= weights.sum()
    return np.cumsum(weights), m / (weights @ m)


def _pause(key: Key, worker: Ints, step: Ints, part: Ints, probability: float = 0.25, amount: float = 2.0) -> F64:
    return np.where(keyed_uniform(*key, worker, step, part) < probability, amount, 0.0)


def _slow(
    key: Key, worker: Ints, step: Ints, part: Ints, fraction: float = 0.05, factor: float = 4.0, since: float = 0.0
) -> F64:
    # Which workers are slow is drawn once, for each by itself, so that few workers may have none.
    slow = (keyed_uniform(*key, worker) < fraction) & (step >= since)
    return np.where(slow, factor - 1, 0.0) + np.zeros(part.shape)


@dataclass(frozen=True)
class Measured:
    """Delays of whole steps that were measured, all equally likely; a step's first part has all of its delay."""

    amounts: tuple[float, ...]

    def __call__(self, key: Key, worker: Ints, step: Ints, part: Ints) -> F64:
        drawn = keyed_integer(len(self.amounts), *key, worker, step)
        return np.where(part == 0, np.array(self.amounts)[drawn], 0.0)


@dataclass(frozen=True)
class DelayModel:
    """A sum of delays, each with the seconds of its unit, keyed by a seed."""

    terms: tuple[tuple[Delay, float], ...]
    seed: int

    def at(self, worker: npt.ArrayLike, step: npt.ArrayLike, part: npt.ArrayLike) -> F64:
        """Seconds for pieces of work, from integer arrays that broadcast: float64 of their shape."""
        keys = [np.asarray(words, dtype=np.int64) for words in (worker, step, part)]
        total = np.zeros(np.broadcast_shapes(*(key.shape for key in keys)))
        for index, (delay, unit) in enumerate(self.terms):
            total += np.rint(unit * delay((DELAY, self.seed, index), *keys) * _GRID) / _GRID
        return total

    def seconds(self, worker: int, step: int, part: int) -> float:
        return float(self.at(worker, step, part))

    def table(self, workers: int, step: int, parts: int) -> F64:
        """Seconds of a whole step: float64 [workers, parts]."""
        return self.at(np.arange(workers)[:, None], step, np.arange(parts))


_MODELS: dict[str, tuple[Callable[..., F64], ...]] = {
    "constant": (_constant,), "exponential": (_exponential,), "shifted-exponential": (_constant, _exponential),
    "gamma": (_gamma,), "lognormal": (_lognormal,), "pause": (_pause,), "slow": (_slow,),
}  # fmt: skip


def delay_model(text: str, seed: int, unit: float = 1.0) -> DelayModel:
    """The model that a text describes in the module's language; UserError if it is none.

    `seed` is the first word of every draw's key, `unit` the seconds of a unit for terms without `@`.

    >>> model = delay_model("constant@0.25 + slow:1x4,10", seed=0)
    >>> model.seconds(worker=3, step=9, part=0), model.seconds(worker=3, step=10, part=0)
    (0.25, 3.25)
    """
    return DelayModel(tuple(term for each in text.split("+") for term in _parse(each.strip(), text, unit)), seed)


def _parse(term: str, text: str, unit: float) -> list[tuple[Delay, float]]:
    match = re.fullmatch(r"([a-z-]+)(?::([^@]*))?(?:@(.*))?", term)
    if match is None:
        raise UserError(f"delays: {text!r} is none; write NAME[:PARAMETERS][@SECONDS], such as exponential@0.05")
    name, parameters, seconds = match.groups()
    if name not in _MODELS:
        raise UserError(f"delays: no model {name!r} in {text!r}{suggest(name, _MODELS)}")
    kinds = _MODELS[name]
    allowed = [*signature(kinds[0]).parameters][4:] if len(kinds) == 1 else []
    given = [_number(word, term) for word in re.split("[x,]", parameters)] if parameters is not None else []
    if len(given) > len(allowed):
        known = f"{name} takes {', '.join(allowed)}" if allowed else f"{name} takes none"
        raise UserError(f"delays: {term!r} has {len(given)} parameters; {known}")
    values = dict(zip(allowed, given, strict=False))
    for key, value in values.items():
        if key in ("probability", "fraction") and value > 1:
            raise UserError(f"delays: {term!r} has {key} {value:g}; it is a fraction from 0 to 1")
        if (key == "shape" and value == 0) or (key == "factor" and value < 1):
            needed = "above 0" if key == "shape" else "1 or more"
            raise UserError(f"delays: {term!r} has {key} {value:g}; it is {needed}")
    return [(partial(kind, **values), unit if seconds is None else _number(seconds, term)) for kind in kinds]


def _number(word: str, term: str) -> float:
    with suppress(ValueError):
        if 0 <= (value := float(word)) < math.inf:
            return value
    raise UserError(f"delays: {word!r} in {term!r} is no number from 0 up")

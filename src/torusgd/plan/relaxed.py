"""The throughput of relaxed synchrony, beside the synchronous steps of a plan, where ranks are late at random.

A plan's step is a rank's passes and the rest (communication that is waited for, update, input). Keyed delays
(`torusgd.synchrony.delays`) make the passes longer, each rank's by itself; what a step waits for follows from the form:

| form | a step waits for | its mean is over |
| --- | --- | --- |
| `synchronous` | the slowest of N ranks | all |
| `cutoff` | the first c of N, for the c with most gradients a second | c of N |
| `backup:B` | the first N - B | N - B of N |
| `local:H` | the slowest in H steps together, then one exchange | all, of changes over H steps |

Expectations are means over keyed draws of steps. All but the first change what is computed: their images a second
count work, not what it does for the accuracy.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..errors import UserError
from ..synchrony.cutoff import best_cutoff
from ..synchrony.delays import F64, DelayModel, Measured, delay_model
from .forecast import Forecast, Workload
from .timeline import StepTime

_SEED = 0
_DRAWS = 400_000
"""delays of ranks and steps that a mean is taken over"""
_LEAST_STEPS = 30
LOCAL_STEPS = (4, 16, 64)
"""local steps that are tried where no number is given"""


@dataclass(frozen=True)
class RelaxedForecast:
    """What a form brings, over the steps of all stages."""

    form: str
    seconds: float
    """of a step, on average"""
    share: float
    """of the gradients that enter an update"""
    images_per_second: float
    """that enter updates"""
    speedup: float
    """of images_per_second over the synchronous steps with the same delays"""


def measured_delays(steps: Sequence[Mapping[str, Any]]) -> Measured:
    """How late a rank was in the steps of a run: what its own work took beyond the fastest tenth at the same batch.

    Args:
        steps: Events of a run's steps, of which each tells what the rank that wrote them (rank 0) spent.

    Raises:
        UserError: Fewer than `_LEAST_STEPS` steps, the first tenth of which is warm-up and does not count.
    """
    by_batch: dict[float, list[float]] = {}
    for step in steps[len(steps) // 10 :]:
        own = step["step_seconds"] - step["data_seconds"] - step["sync_seconds"] - step["update_seconds"]
        by_batch.setdefault(step["batch"], []).append(max(own, 0.0))
    if len(steps) < _LEAST_STEPS:
        raise UserError(f"--delays: the run has {len(steps)} steps; its delays are known from {_LEAST_STEPS} on")
    floors = {batch: float(np.quantile(times, 0.1)) for batch, times in by_batch.items()}
    return Measured(tuple(max(each - floors[batch], 0.0) for batch, times in by_batch.items() for each in times))


def relaxed_forecasts(
    workload: Workload, forecast: Forecast, forms: list[str], delays: str | Measured
) -> list[RelaxedForecast]:
    """What synchronous steps and `forms` bring with delays, the synchronous steps first.

    Args:
        workload: What is planned.
        forecast: Its plan; its `jitter` is left out, as the delays stand in its place.
        forms: `cutoff`, `backup:B`, `local:H`.
        delays: A model's text; its unit, where it names none, is the time of one virtual worker's passes. Or what was
            measured, in seconds, as if every rank were late like the one that measured it, each by itself.

    Raises:
        UserError: A form or the delays are not what there is, or more backup ranks than there are ranks.
    """
    found: list[RelaxedForecast] = []
    for form in ["synchronous", *(form for form in forms if form != "synchronous")]:
        seconds = images = computed = 0.0
        for stage, step in zip(workload.stages, forecast.steps, strict=True):
            parts = math.ceil(stage.workers / forecast.devices)
            each, share = _step(form, step, forecast.devices, parts, delays)
            seconds += stage.steps * each
            images += stage.steps * stage.batch * share
            computed += stage.steps * stage.batch
        rate = images / seconds
        steps = sum(stage.steps for stage in workload.stages)
        speedup = rate / found[0].images_per_second if found else 1.0
        found.append(RelaxedForecast(form, seconds / steps, images / computed, rate, speedup))
    return found


def candidate_forms(devices: int) -> list[str]:
    """The forms that a search proposes: cutoff, a backup of 4 % (Chen et al.'s best of 100), and local steps.

    >>> candidate_forms(100)
    ['cutoff', 'backup:4', 'local:4', 'local:16', 'local:64']
    """
    backup = [f"backup:{max(1, devices // 25)}"] if devices > 1 else []
    return ["cutoff", *backup, *(f"local:{steps}" for steps in LOCAL_STEPS)]


def _step(form: str, step: StepTime, ranks: int, parts: int, delays: str | Measured) -> tuple[float, float]:
    """Seconds of a step, and the share of the gradients that enter it."""
    rest = step.seconds - step.compute - step.jitter
    match = re.fullmatch(r"synchronous|cutoff|(backup|local):(\d+)", form)
    number = int(match[2]) if match is not None and match[2] is not None else 0
    if match is None or (match[1] == "local" and number < 1):
        raise UserError(f"--synchrony {form}: no form that is planned; write cutoff, backup:4 or local:16")
    if match[1] == "backup" and number >= ranks:
        raise UserError(f"--synchrony {form}: needs fewer backup ranks than the {ranks} ranks there are")
    if match[1] == "local":
        draws = max(1, _DRAWS // (ranks * parts * number))
        late = _passes(delays, step.compute, ranks, parts, draws * number).reshape(draws, number, ranks)
        exchanged = step.exposed + step.contention
        return float(late.sum(axis=1).max(axis=1).mean()) / number + rest - exchanged * (1 - 1 / number), 1.0
    late = np.sort(_passes(delays, step.compute, ranks, parts, max(20, _DRAWS // (ranks * parts))), axis=1)
    expected = late.mean(axis=0) + rest
    taken = ranks - number if form != "cutoff" else best_cutoff(expected)
    return float(expected[taken - 1]), taken / ranks


@cache
def _passes(delays: str | Measured, compute: float, ranks: int, parts: int, steps: int) -> F64:
    """Seconds of each rank's passes with their delays, [steps, ranks]."""
    model = (
        DelayModel(((delays, 1.0),), _SEED)
        if isinstance(delays, Measured)
        else delay_model(delays, _SEED, unit=compute / parts)
    )
    late = model.at(np.arange(ranks)[:, None], np.arange(steps)[:, None, None], np.arange(parts))
    return np.asarray(compute + late.sum(axis=2))

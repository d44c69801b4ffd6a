"""The throughput of relaxed synchrony, beside the synchronous steps of a plan, if ranks are late at random.

Keyed delays (`torusgd.synchrony.delays`) make each rank's passes longer. The form decides for whom a step waits: the
slowest of N ranks (`synchronous`), the first c of N, with the c of most gradients a second (`cutoff`), the first N - B
(`backup:B`), or the slowest in H steps together, after which one exchange follows (`local:H`). All but the first change
what is computed: their images a second count work, not its effect on the accuracy.
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
from .measured_run import check_times
from .timeline import StepTime

_SEED = 0
_DRAWS = 400_000  # of a delay (one rank, one step) for a mean
_MOST_DRAWS = 40_000_000  # of one step: 320 MB
_LEAST_STEPS = 30


@dataclass(frozen=True)
class RelaxedForecast:
    """The throughput of a form, over the steps of all stages."""

    form: str
    seconds: float  # mean seconds of a step
    share: float  # fraction of the gradients that enter an update
    images_per_second: float  # images a second that enter updates
    speedup: float  # ratio of images_per_second to that of synchronous steps with the same delays


def measured_delays(steps: Sequence[Mapping[str, Any]]) -> Measured:
    """The delays of rank 0 in a run's steps (its events), each a time beyond the fastest tenth's; UserError for few."""
    check_times("--delays", steps, "data_seconds", "sync_seconds")
    by_batch: dict[float, list[float]] = {}
    # The first tenth of the steps is warm-up. Waiting for data or messages is no delay of the rank's own.
    for step in steps[len(steps) // 10 :]:
        own = step["step_seconds"] - step["data_seconds"] - step["sync_seconds"] - step["update_seconds"]
        by_batch.setdefault(step["batch"], []).append(max(own, 0.0))
    if len(steps) < _LEAST_STEPS:
        raise UserError(f"--delays: the run has {len(steps)} steps; its delays are known from {_LEAST_STEPS} on")
    # A rank is never late by less than nothing: the fastest tenth is the time without delay.
    floors = {batch: float(np.quantile(times, 0.1)) for batch, times in by_batch.items()}
    return Measured(tuple(max(each - floors[batch], 0.0) for batch, times in by_batch.items() for each in times))


def relaxed_forecasts(
    workload: Workload, forecast: Forecast, forms: list[str], delays: str | Measured
) -> list[RelaxedForecast]:
    """The throughput of synchronous steps and then of `forms` (`cutoff`, `backup:B`, `local:H`) with delays.

    `delays`, in place of the plan's `jitter`, is a model's text, in units of the time of one virtual worker's passes
    unless it names seconds; or measured delays, as if every rank were late like the one that measured, each by itself.
    """
    found: list[RelaxedForecast] = []
    for form in ["synchronous", *(form for form in forms if form != "synchronous")]:
        seconds = images = computed = 0.0
        for stage, step in zip(workload.stages, forecast.run.steps, strict=True):
            parts = math.ceil(stage.workers / forecast.devices)
            each, taken = _step(form, step, forecast.devices, parts, delays)
            seconds += stage.steps * each
            images += stage.steps * stage.batch * taken
            computed += stage.steps * stage.batch
        rate, steps = images / seconds, sum(stage.steps for stage in workload.stages)
        speedup = rate / found[0].images_per_second if found else 1.0
        found.append(RelaxedForecast(form, seconds / steps, images / computed, rate, speedup))
    return found


def candidate_forms(devices: int) -> list[str]:
    # Backups of 4 % were the best of 100 workers in Chen et al. (arXiv 1604.00981).
    backup = [f"backup:{max(1, devices // 25)}"] if devices > 1 else []
    return ["cutoff", *backup, *(f"local:{steps}" for steps in (4, 16, 64))]


def _step(form: str, step: StepTime, ranks: int, parts: int, delays: str | Measured) -> tuple[float, float]:
    """Seconds of a step, and the fraction of the gradients that enter it."""
    rest = step.seconds - step.compute - step.jitter
    match = re.fullmatch(r"synchronous|cutoff|(backup|local):(\d+)", form)
    number = int(match[2]) if match is not None and match[2] is not None else 0
    if match is None or (match[1] == "local" and number < 1):
        raise UserError(f"--synchrony {form}: no form that is planned; write cutoff, backup:4 or local:16")
    if match[1] == "backup" and number >= ranks:
        raise UserError(f"--synchrony {form}: needs fewer backup ranks than the {ranks} ranks there are")
    if match[1] == "local":
        if number > (most := _MOST_DRAWS // (ranks * parts)):
            raise UserError(f"--synchrony {form}: for so many ranks at most local:{most} can be planned")
        draws = max(1, _DRAWS // (ranks * parts * number))
        late = _passes(delays, step.compute, ranks, parts, draws * number).reshape(draws, number, ranks)
        # A rank's delays add up over H steps before the slowest is waited for; one exchange serves all of them.
        exchanged = step.exposed + step.contention
        return float(late.sum(axis=1).max(axis=1).mean()) / number + rest - exchanged * (1 - 1 / number), 1.0
    # Sorted within each keyed draw of a step: column c is the time at which the first c + 1 ranks are done.
    late = np.sort(_passes(delays, step.compute, ranks, parts, max(20, _DRAWS // (ranks * parts))), axis=1)
    expected = late.mean(axis=0) + rest  # of the first, second, ... rank to be done
    taken = ranks - number if form != "cutoff" else best_cutoff(expected)
    return float(expected[taken - 1]), taken / ranks


@cache
def _passes(delays: str | Measured, compute: float, ranks: int, parts: int, steps: int) -> F64:
    """Seconds of each rank's passes with their delays, [steps, ranks]."""
    if isinstance(delays, Measured):
        model = DelayModel(((delays, 1.0),), _SEED)
    else:
        model = delay_model(delays, _SEED, unit=compute / parts)
    late = model.at(np.arange(ranks)[:, None], np.arange(steps)[:, None, None], np.arange(parts))
    return np.asarray(compute + late.sum(axis=2))

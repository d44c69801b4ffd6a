"""Throughput of relaxed synchrony from delays whose order statistics are known."""

from dataclasses import fields, replace

import numpy as np
import pytest

from tests.messages import refused
from torusgd.plan.forecast import Forecast, PlannedStage, RunTime, Workload
from torusgd.plan.model_cost import ModelCost
from torusgd.plan.relaxed import measured_delays, relaxed_forecasts
from torusgd.plan.timeline import StepTime

STEP = StepTime(**{field.name: 0.0 for field in fields(StepTime)} | {"forward": 0.4, "backward": 0.6})


def planned(step: StepTime = STEP, ranks: int = 100, share: int = 1) -> tuple[Workload, Forecast]:
    workload = Workload(ModelCost.__new__(ModelCost), (PlannedStage(10, 4, ranks * share),), 4000, 100, 0)
    run = RunTime(0.0, 10 * step.seconds, 0.0, (step,))
    rate = workload.images / run.training
    forecast = Forecast(ranks, (step,), (400,), run, run.seconds, run.seconds, rate, 1.0, 1.0, 0.0, "")
    return workload, forecast


def test_forms_with_steps_of_a_second_and_exponential_delays() -> None:
    """A step of 1 + Exp(1) s on 100 ranks: full 16.2 gradients a second, the best cutoff (69) 31.9."""
    full, cutoff, backup, local = relaxed_forecasts(*planned(), ["cutoff", "backup:4", "local:16"], "exponential")
    harmonic = np.cumsum(1 / np.arange(1, 101))[-1]
    assert full.seconds == pytest.approx(1 + harmonic, rel=0.02)
    assert full.images_per_second == pytest.approx(4 * 16.2, rel=0.02)
    assert cutoff.images_per_second == pytest.approx(4 * 31.9, rel=0.02)
    assert cutoff.share == pytest.approx(0.69, abs=0.03)
    assert (backup.share, local.share) == (0.96, 1)
    assert backup.seconds == pytest.approx(1 + harmonic - (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.02)
    assert 2 < local.seconds < full.seconds
    assert cutoff.speedup == pytest.approx(31.9 / 16.2, rel=0.03)


def test_without_delays_nothing_is_gained_but_the_exchange() -> None:
    step = replace(STEP, exposed=0.5, update=0.1, jitter=0.2)
    full, cutoff, local = relaxed_forecasts(*planned(step, ranks=8, share=2), ["cutoff", "local:5"], "constant:0")
    assert full.seconds == pytest.approx(1.6)
    assert (cutoff.share, cutoff.speedup) == (1, 1)
    assert local.seconds == pytest.approx(1.6 - 0.5 * 4 / 5)


def event(own: float, batch: int = 4) -> dict[str, float]:
    times = {"data_seconds": 0.1, "sync_seconds": 0.2, "update_seconds": 0.3}
    return {"step_seconds": own + sum(times.values()), "batch": batch, **times}


def test_delays_that_a_run_had_are_what_its_ranks_are_late_by() -> None:
    """Of ten steps one takes 3 s more, at two batches; the first tenth of the run is warm-up."""
    late = [3.0 * (number % 10 == 0) for number in range(50)]
    steps = [event(50.0)] * 11 + [event(1.0 + each) for each in late] + [event(2.0 + each, batch=8) for each in late]
    delays = measured_delays(steps)
    assert sorted(delays.amounts)[89:91] == pytest.approx([0.0, 3.0])
    full, cutoff = relaxed_forecasts(*planned(ranks=4), ["cutoff"], delays)
    assert full.seconds == pytest.approx(1 + 3 * (1 - 0.9**4), rel=0.03)
    assert cutoff.seconds < full.seconds
    with refused("delays of a short run", "--delays:"):
        measured_delays(steps[:29])


@pytest.mark.parametrize("form", ["", "gossip", "backup", "backup:100", "local:0", "cutoff:3"])
def test_a_wrong_form_is_one_line(form: str) -> None:
    with refused(f"a planned form: {form}", f"--synchrony {form}:"):
        relaxed_forecasts(*planned(), [form], "exponential")

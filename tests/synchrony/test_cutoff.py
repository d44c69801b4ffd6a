"""Cutoffs of known distributions, and predictors that see no more than a journal holds."""

import numpy as np
import pytest

from torusgd.synchrony.cutoff import (
    MovingAverage,
    best_cutoff,
    elfving,
    expected_order,
    with_counts,
    with_predictor,
)
from torusgd.synchrony.delays import delay_model


@pytest.mark.parametrize(("workers", "cutoff", "rate", "full"), [(100, 69, 31.9, 16.2), (158, 108, 50.4, 23.8)])
def test_the_best_cutoff_of_shifted_exponential_times(workers: int, cutoff: int, rate: float, full: float) -> None:
    """E[x_(c)] = 1 + H_n - H_(n - c), exactly and by draws."""
    harmonic = np.concatenate([[0], np.cumsum(1 / np.arange(1, workers + 1))])
    exact = 1 + harmonic[-1] - harmonic[workers - np.arange(1, workers + 1)]
    drawn = expected_order(
        delay_model("shifted-exponential", seed=0).at(np.arange(20000)[:, None], 0, np.arange(workers))
    )
    assert best_cutoff(exact) == cutoff
    assert cutoff / exact[cutoff - 1] == pytest.approx(rate, abs=0.05)
    assert workers / exact[-1] == pytest.approx(full, abs=0.05)
    # The rate is flat at its top, so that draws may pick a neighbour; what they lose by it is nothing.
    assert abs(best_cutoff(drawn) - cutoff) <= 2
    assert drawn == pytest.approx(exact, rel=0.01)


def test_elfvings_approximation_is_near_the_order_statistics_of_normal_times() -> None:
    drawn = np.random.default_rng(0).normal(5, 1, (20000, 20))
    assert elfving(5, 1, 20) == pytest.approx(expected_order(drawn), abs=0.03)
    assert best_cutoff(elfving(5, 0.1, 20)) == 20


def test_a_moving_average_learns_who_is_slow_from_what_arrived() -> None:
    times = np.exp(0.05 * np.random.default_rng(0).normal(size=(60, 10)))
    times[30:, 0] *= 10
    run = with_predictor(times, MovingAverage(10, seed=0))
    assert set(run.counts[10:30].tolist()) <= {9, 10}
    assert set(run.counts[34:].tolist()) <= {8, 9}
    best = with_counts(times, lambda row: best_cutoff(np.sort(row)))
    assert run.throughput(first=34) > 0.95 * best.throughput(first=34)

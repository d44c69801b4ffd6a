"""Cutoffs of known distributions, and predictors that see no more than a journal holds."""

import numpy as np
import pytest
import torch
from benchmarks.slow_ranks.synchrony import elfving, with_counts

from torusgd.synchrony.cutoff import MovingAverage, Predictor, best_cutoff, expected_order, with_predictor
from torusgd.synchrony.delays import delay_model
from torusgd.synchrony.state_space import StateSpace, fit


@pytest.mark.parametrize(("workers", "cutoff", "rate", "full"), [(100, 69, 31.9, 16.2), (158, 108, 50.4, 23.8)])
def test_the_best_cutoff_of_shifted_exponential_times(workers: int, cutoff: int, rate: float, full: float) -> None:
    """E[x_(c)] = 1 + H_n - H_(n - c), exactly and by draws."""
    harmonic = np.concatenate([[0], np.cumsum(1 / np.arange(1, workers + 1))])
    exact = 1 + harmonic[-1] - harmonic[workers - np.arange(1, workers + 1)]
    times = delay_model("shifted-exponential", seed=0).at(np.arange(20000)[:, None], 0, np.arange(workers))
    drawn = expected_order(times)
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


def node_times(steps: int, seed: int) -> np.ndarray:
    """20 workers on 4 nodes, of which one or other is three times as slow for spells of 20 steps; noise of 5 %."""
    rng = np.random.default_rng(seed)
    slow = rng.random((steps // 20, 4)) < 0.25
    return np.repeat(np.repeat(1 + 2 * slow, 20, axis=0), 5, axis=1) * np.exp(0.05 * rng.normal(size=(steps, 20)))


def test_a_moving_average_learns_who_is_slow_from_what_arrived() -> None:
    times = np.exp(0.05 * np.random.default_rng(0).normal(size=(60, 10)))
    times[30:, 0] *= 10
    run = with_predictor(times, MovingAverage(10, seed=0))
    assert set(run.counts[10:30].tolist()) <= {9, 10}
    assert set(run.counts[34:].tolist()) <= {8, 9}
    best = with_counts(times, lambda row: best_cutoff(np.sort(row)))
    assert run.throughput(first=34) > 0.95 * best.throughput(first=34)


@pytest.mark.slow
def test_the_same_model_is_trained_each_time_and_it_learns() -> None:
    known = node_times(steps=40, seed=0)
    bounds = []
    for iterations in (5, 25, 25):
        model = fit(known, seed=0, iterations=iterations)
        windows = model.standardised(torch.from_numpy(known).float())[:, None]
        bounds.append(model.lower_bound(windows, torch.Generator().manual_seed(0)).item())
    assert bounds[0] + 0.5 < bounds[1] == bounds[2]


@pytest.mark.slow
def test_the_state_space_model_learns_that_nodes_turn_slow_together() -> None:
    """After spells that it has learned it brings more than the moving average, and not all that an oracle brings."""
    known, coming = node_times(steps=400, seed=0), node_times(steps=200, seed=1)
    average = MovingAverage(20, seed=0)
    for row in known:
        average.observe(row, row.max())
    learned = with_predictor(coming, StateSpace(fit(known, seed=0), known, seed=0)).throughput(first=1)
    plain = with_predictor(coming, average).throughput(first=1)
    oracle = with_counts(coming, lambda row: best_cutoff(np.sort(row))).throughput(first=1)
    assert 1.05 * plain < learned < oracle


@pytest.mark.parametrize("name", ["average", "learned"])
def test_times_beyond_the_cutoff_are_imputed_beyond_it(name: str) -> None:
    known = node_times(steps=40, seed=0)
    if name == "average":
        predictor: Predictor = MovingAverage(20, seed=0, weight=1.0)
        for row in known:
            predictor.observe(row, row.max())
    else:
        predictor = StateSpace(fit(known, seed=0, iterations=60), known, seed=0)
    before = predictor.samples(64).mean(axis=0)
    predictor.observe(np.where(np.arange(20) < 15, 1.0, np.nan), 50.0)
    after = predictor.samples(64).mean(axis=0)
    assert np.isfinite(after).all()
    if name == "average":  # with all of the weight on the newest step
        assert (after[15:] >= 49).all()
        assert after[:15] == pytest.approx(1.0, rel=0.05)
    else:
        assert (after[15:] > before[15:]).mean() > 0.5

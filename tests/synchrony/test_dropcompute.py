"""The automatic threshold on keyed times brings the gains that were computed from the authors' noise."""

import numpy as np
import pytest

from torusgd.synchrony.delays import delay_model
from torusgd.synchrony.limits import choose_threshold, threshold_at

MICRO_BATCHES = 12
LOOKED_AT = 44
"""steps by which a threshold is chosen, as many as the authors'"""


def times(ranks: int, first: int, stop: int) -> np.ndarray:
    """Micro-batches of 1 s with the noise of the paper's simulations, in these steps."""
    noise, steps = delay_model("lognormal", seed=0), np.arange(first, stop)[:, None, None]
    return 1 + noise.at(np.arange(ranks)[:, None], steps, np.arange(MICRO_BATCHES))


@pytest.mark.parametrize(("ranks", "gain", "step"), [(8, 13, 21.1), (32, 24, 23.3), (64, 29, 24.1), (200, 37, 25.7)])
def test_gain_of_the_automatic_threshold(ranks: int, gain: int, step: float) -> None:
    """Chosen by some steps, and judged by as many others as tell a gain to half a point."""
    chosen = choose_threshold(times(ranks, 0, LOOKED_AT))
    assert chosen.seconds == pytest.approx(16, abs=1)
    coming = times(ranks, LOOKED_AT, LOOKED_AT + 40000 // ranks)
    found = threshold_at(chosen.seconds, coming)
    assert abs(100 * found.gain - gain) <= 1
    assert 0.13 < found.dropped < 0.17
    assert coming.sum(axis=2).max(axis=1).mean() == pytest.approx(step, abs=0.25)


def test_nothing_is_left_out_where_nothing_is_late() -> None:
    found = choose_threshold(np.ones((3, 4, 8)))
    assert (found.seconds, found.dropped, found.gain) == (8, 0, 0)


def test_overhead_makes_dropping_dearer() -> None:
    seconds = times(32, 0, LOOKED_AT)
    assert choose_threshold(seconds, overhead=10.0).gain < choose_threshold(seconds).gain
    assert choose_threshold(seconds, overhead=10.0).dropped < choose_threshold(seconds).dropped

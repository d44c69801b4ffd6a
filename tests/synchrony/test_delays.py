"""Delays are functions of their keys, and have the distributions that their names say."""

import numpy as np
import pytest
from tests.messages import refuses

from torusgd.synchrony.delays import delay_model

PARTS = 12


@pytest.mark.parametrize("text", ["exponential", "gamma:0.5x2", "lognormal@0.1", "pause", "exponential+slow:0.5x4,7"])
def test_a_delay_is_a_function_of_its_keys(text: str) -> None:
    model = delay_model(text, seed=3)
    table = model.table(workers=5, step=7, parts=PARTS)
    assert table.shape == (5, PARTS)
    assert model.seconds(worker=4, step=7, part=11) == table[4, 11]
    assert np.array_equal(table[:2], delay_model(text, seed=3).table(workers=2, step=7, parts=PARTS))
    assert not np.array_equal(table, delay_model(text, seed=4).table(workers=5, step=7, parts=PARTS))


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("constant:3", 3, 0), ("exponential:2", 2, 2), ("shifted-exponential@2", 4, 2), ("gamma", 1, 1),
     ("gamma:0.25x2", 0.5, 1), ("gamma:9x0.5", 4.5, 1.5), ("lognormal", 0.5, 0.58), ("pause:0.2x5", 1, 2),
     ("exponential+exponential", 2, 2**0.5)],
)  # fmt: skip
def test_mean_and_deviation(text: str, mean: float, deviation: float) -> None:
    drawn = delay_model(text, seed=0).at(np.arange(400)[:, None], 5, np.arange(400))
    assert (drawn.mean(), drawn.std()) == pytest.approx((mean, deviation), rel=0.02)


def test_slow_workers_stay_slow() -> None:
    model = delay_model("slow:0.2x3,10", seed=0, unit=0.5)
    late = model.at(np.arange(1000), 10, 0)
    assert set(late) == {0.0, 1.0}
    assert 150 < np.count_nonzero(late) < 250
    assert np.array_equal(late, model.at(np.arange(1000), 99, 5))
    assert not model.at(np.arange(1000), 9, 0).any()


def test_the_log_normal_is_drop_computes_and_times_add_without_rounding() -> None:
    drawn = delay_model("lognormal", seed=0).at(np.arange(1000)[:, None], 0, np.arange(1000))
    assert np.median(drawn) == pytest.approx(0.31, abs=0.005)
    assert np.quantile(drawn, (0.99, 1.0)) == pytest.approx((3.0, 5.7), abs=0.1)
    drawn = delay_model("exponential+lognormal", seed=0).at(np.arange(1000), 0, 0)
    assert sum(drawn) == sum(drawn[::-1])


@pytest.mark.parametrize(
    "text",
    ["", "exponental", "exponential:-1", "exponential:1x2", "exponential@", "slow:5x4", "slow:0.1x0.5", "gamma:0",
     "shifted-exponential:2", "exponential++pause", "lognormal@inf", "pause:nan"],
)  # fmt: skip
def test_a_wrong_text_is_one_line(text: str) -> None:
    refuses(f"delays {text}", delay_model, text, seed=0, about="delays: ")

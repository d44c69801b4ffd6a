"""Rotation, distortion, brightness, contrast and noise: their formulas, ranges and keys."""

import math
from dataclasses import replace

import numpy as np
import pytest

from torusgd.data.geometry import _TERMS, _normal, bend, cosine_and_sine, draw_warps, resample, tone
from torusgd.data.types import Region
from torusgd.recipe.data_schema import Augment
from torusgd.rng import keyed_hash

ALL = Augment(rotation=0.5, distortion=0.2, brightness=0.1, contrast=1.5, noise=0.05, by_channel=True)


def warps(augment: Augment, count: int = 500):
    return draw_warps(augment, 3, 0, np.zeros(count, np.int64), np.arange(count))


def test_draws_fill_their_ranges() -> None:
    found = warps(ALL)
    for values, low, high in (
        (found.angles, -0.5, 0.5),
        (found.distortions, math.exp(-0.2) - 1, math.exp(0.2) - 1),
        (found.brightness, -0.1, 0.1),
        (found.contrast, 1 / 1.5, 1.5),
        (found.noise, 0.0, 0.05),
    ):
        reach = high - low
        assert low - 1e-4 <= values.min() < low + 0.02 * reach
        assert high - 0.02 * reach < values.max() <= high + 1e-4
    assert abs(np.log(found.contrast).mean()) < 0.02
    assert len(np.unique(found.brightness[0])) == 3
    together = warps(ALL.model_copy(update={"by_channel": False}))
    assert (together.brightness == together.brightness[:, :1]).all()
    assert warps(Augment(flip=0.5)) is None


def test_a_quarter_turn_turns_a_square_image() -> None:
    for angle in (-math.pi, -1.0, 0.0, 0.3, math.pi):
        assert cosine_and_sine(angle, _TERMS) == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-12)
    image = np.random.default_rng(0).integers(0, 256, (3, 9, 9), dtype=np.uint8)
    assert np.array_equal(bend(image, math.pi / 2, 0.0), np.rot90(image, 1, axes=(1, 2)))
    assert bend(image, 0.0, 0.0) is image


def test_a_distortion_keeps_the_middle_and_the_border_and_moves_what_is_between() -> None:
    ramp = np.tile(np.arange(0, 202, 2, dtype=np.uint8), (1, 101, 1))
    bent = bend(ramp, 0.0, 0.2)[0, 50].astype(int)
    straight = ramp[0, 50].astype(int)
    assert bent[50] == straight[50]
    assert abs(bent[0] - straight[0]) <= 2
    # Halfway to the border (1 + 0.2 / 4) / 1.2 of the way is looked up.
    assert bent[75] == pytest.approx(100 + 50 * 1.05 / 1.2, abs=1.5)


def test_brightness_and_contrast_follow_the_formula_and_noise_has_its_deviation() -> None:
    found = warps(ALL.model_copy(update={"noise": 0.0}), 4)
    plane = np.full((5, 6), 51.0, dtype=np.float32)
    tone(plane, found, 2, 1)
    brightness, contrast = found.brightness[2, 1], found.contrast[2, 1]
    assert plane[0, 0] / 255 == pytest.approx((0.2 + brightness - 0.5) * contrast + 0.5, abs=1e-5)
    noise = _normal((100, 100), 0, 1, 2, 3)
    assert noise.mean() == pytest.approx(0, abs=0.03)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert not np.array_equal(noise, _normal((100, 100), 0, 1, 2, 4))


@pytest.mark.parametrize("sizes", [(37, 41, 16, 9), (9, 7, 24, 31), (64, 50, 64, 13), (300, 1, 7, 3)])
def test_exact_scaling_is_the_triangles_mean_by_whole_numbers(sizes: tuple[int, int, int, int]) -> None:
    height, width, rows, columns = sizes
    image = (keyed_hash(5, *np.ogrid[:height, :width, :3]) % 256).astype(np.uint8)

    def scaled_side(values: np.ndarray, out: int) -> np.ndarray:
        """Along the first axis, each weight counted in 1 / (2 * out), rounded half up."""
        length, result = len(values), []
        for place in range(out):
            reach = 2 * max(length, out)
            weights = [max(0, reach - abs((2 * j + 1) * out - (2 * place + 1) * length)) for j in range(length)]
            total = np.tensordot(np.array(weights), values.astype(np.int64), 1)
            result.append((2 * total + sum(weights)) // (2 * sum(weights)))
        return np.array(result)

    expected = scaled_side(scaled_side(image, rows).swapaxes(0, 1), columns).swapaxes(0, 1)
    region = Region(0, 0, height, width, rows, columns, exact=True)
    assert np.array_equal(resample(image, region), expected)
    fast = resample(image, replace(region, exact=False))
    assert abs(expected - fast.astype(int)).max() <= 1

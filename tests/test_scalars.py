"""Scalars against mpmath, whose results at 200 bits are rounded once."""

import math
import random

import pytest

from torusgd.scalars import cosine, logarithm, power

mpmath = pytest.importorskip("mpmath")


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.5, 2.0, 2.2, 3.0, 64.0, 65.0, 1000.0, -0.7, -3.0])
def test_powers_are_the_nearest_floats(exponent: float) -> None:
    draw = random.Random(1)
    with mpmath.workprec(200):
        for _ in range(300):
            base = draw.random()
            assert power(base, exponent) == float(mpmath.mpf(base) ** mpmath.mpf(exponent))


def test_cosines_and_logarithms_are_the_nearest_floats() -> None:
    draw = random.Random(2)
    with mpmath.workprec(200):
        for _ in range(300):
            x = draw.random() * math.pi
            assert cosine(x) == float(mpmath.cos(mpmath.mpf(x)))
            assert logarithm(x) == float(mpmath.log(mpmath.mpf(x)))
    assert (cosine(0.0), power(0.0, 2.0), power(0.0, 0.0)) == (1.0, 0.0, 1.0)

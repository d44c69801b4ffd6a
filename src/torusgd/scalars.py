"""Powers, logarithms and cosines of Python's floats, correctly rounded: no mathematics library decides a digit.

Rates, decays and bias corrections are on the way to every weight. libm's `pow` and `cos` are the nearest float in all
but one case of a thousand, which is another one on each machine.
"""

import decimal
from decimal import Decimal
from fractions import Fraction

# The basic operations, `ln` and `exp` of decimal are correctly rounded by its specification, in C and in Python alike.
_CONTEXT = decimal.Context(prec=60, Emin=-999999, Emax=999999, rounding=decimal.ROUND_HALF_EVEN)
_MOST_EXACT = 64  # whole exponent up to which a power is exact; beyond none is in the middle of two floats


def power(base: float, exponent: float) -> float:
    """base ** exponent for a base of at least 0.

    >>> power(0.9, 2), power(2.0, -0.5), power(0.0, 2.0)
    (0.81, 0.7071067811865476, 0.0)
    """
    if exponent == int(exponent) and 0 <= exponent <= _MOST_EXACT:
        return float(Fraction(base) ** int(exponent))
    if base == 0:
        return 0.0**exponent
    return float(_CONTEXT.exp(_CONTEXT.multiply(Decimal(exponent), _CONTEXT.ln(Decimal(base)))))


def logarithm(x: float) -> float:
    """The natural logarithm of a number above 0."""
    return float(_CONTEXT.ln(Decimal(x)))


def cosine(angle: float) -> float:
    """The cosine of an angle of a few turns, by its series."""
    square = _CONTEXT.multiply(Decimal(angle), Decimal(angle))
    term, total, number = Decimal(1), Decimal(1), 0
    while abs(term) > Decimal("1e-60"):
        number += 2
        term = _CONTEXT.divide(_CONTEXT.multiply(term, -square), Decimal(number * (number - 1)))
        total = _CONTEXT.add(total, term)
    return float(total)

"""Sums that do not depend on order: fixed-point numbers in int64 limbs, for statistics, losses and evaluation.

A float is cut into limbs of 40 bits, each stored in an int64 that has room for 2**20 addends. Integer addition is
associative, so the limbs may be added in any order, on any ranks. The cutting uses only scaling by powers of two,
truncation and exact subtraction, so it runs as it stands on any device (Kulisch's superaccumulator, ours in form).
"""

from typing import NamedTuple

import torch
from torch import Tensor

LIMB_BITS = 40
MOST_ADDENDS = 2**20  # most addends of any of these sums: virtual workers of a step, images of an evaluation
_MOST_NARROW = 2**13 - 1


class Window(NamedTuple):
    """The bits that a sum holds: `limbs` limbs, the highest of weight 2**top.

    A value of 2**(top + 43) or more in magnitude counts as non-finite. Bits below the lowest limb are dropped from
    each value alone, so that the result still does not depend on order.
    """

    top: int
    limbs: int

    @property
    def weights(self) -> list[float]:
        return [2.0 ** (self.top - LIMB_BITS * i) for i in range(self.limbs)]

    @property
    def rows(self) -> int:
        """int64 values of one sum: its limbs and a count of non-finite addends."""
        return self.limbs + 1


FULL = Window(top=85, limbs=7)  # every finite float32, and float64 from 2**-155 to 2**128, without loss
# Magnitudes up to 2**57 with a resolution of 2**-66: batch-norm statistics and losses of a step.
NARROW = Window(top=14, limbs=3)


def gradient_integers(addends: int) -> torch.dtype:
    """The integers in which exact sums of gradients travel: int32 up to 8,191 addends of a step, int64 beyond.

    An addend has about 28 - log2(addends) bits of an int32, so that the mean's relative error grows with the root of
    their number; from 8,192 on it would be above 1e-5 where the noise of a gradient is 10 times its mean.
    """
    assert addends <= MOST_ADDENDS, "the bound of a sum has no bits left"
    return torch.int32 if addends <= _MOST_NARROW else torch.int64


def encode(values: Tensor, window: Window = FULL) -> Tensor:
    """Cuts floats into limbs, int64 [window.rows, *values.shape], to be added at most 2**20 times, then `decode`d."""
    rest = values.to(torch.float64)
    # 2**43 of the highest limb's weight times 2**20 addends is 2**63. Not `>=`: a nan has to be counted, too.
    bad = ~(rest.abs() < 2.0 ** (window.top + 43))
    rest = rest.masked_fill(bad, 0.0)
    rows = []
    for weight in window.weights:
        # Exact at each line: scaling by a power of two, truncation, and a difference that cancels the leading bits.
        digits = torch.trunc(rest * (1 / weight))
        rows.append(digits.to(torch.int64))
        rest = rest - digits * weight
    rows.append(bad.to(torch.int64))
    return torch.stack(rows)


def decode(limbs: Tensor, window: Window = FULL) -> Tensor:
    """The float64 value, within one unit in the last place, of summed limbs, int64 [window.rows, ...].

    An element is nan if one of its addends was not finite.
    """
    digits = list(limbs[:-1])
    # From the lowest limb up: an arithmetic shift leaves each limb in 0..2**40 and hands its sign to the one above.
    for i in range(len(digits) - 1, 0, -1):
        carry = digits[i] >> LIMB_BITS
        digits[i] = digits[i] - (carry << LIMB_BITS)
        digits[i - 1] = digits[i - 1] + carry
    # Highest first and in this order on every rank: these few additions of floats are the only ones that round.
    total = torch.zeros_like(digits[0], dtype=torch.float64)
    for digit, weight in zip(digits, window.weights, strict=True):
        total = total + digit.to(torch.float64) * weight
    return total.masked_fill(limbs[-1] > 0, torch.nan)

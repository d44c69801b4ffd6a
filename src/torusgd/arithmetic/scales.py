"""Powers of two that bring float32 values to integers, made of their bits; and the pairs of values that they lose.

The scale of a set of values is 2**s with the largest integer s for which round(amax * 2**s) <= LARGEST, at most 127.
`torch.pow`, `ldexp` and `frexp` take no part: they are off by one unit on some devices, and bits are not.

>>> scale, inverse = scales(torch.tensor([1.0, 1.9843, 1.9845, 0.0]))
>>> scale, inverse[3].item() == 2.0**-127
(tensor([8.1920e+03, 8.1920e+03, 4.0960e+03, 1.7014e+38]), True)

A value below half a unit of its scale has the integer 0. A pair of two numbers other than 0, which a product
multiplies, is lost where one of the two integers is 0. Pairs are counted by the index that both operands share, a row
of `counts`, edges and strides of convolutions aside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError
from .passes import extremes

LARGEST = 16256  # of an operand's integers: 127 * 128, so that the upper slice fits 8 bits

_ONE = 1 << 23  # of a float32 exponent
_EXPONENT = 0xFF << 23
# A mantissa of at most 8258048 / 2**23 rounds to at most LARGEST at 14 bits (16256.5 is a tie, and goes to even).
# Adding this carries any larger one into the exponent.
_CARRY = _ONE - 1 - 8258048
# Below this biased exponent 2**s would leave float32.
_LEAST = 13


def amax_over(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitude over some dimensions, which stay with length 1, or NaN; UserError if not of float32."""
    _check(x)
    least, most = extremes(x, dims)
    return torch.maximum(most, least.neg_())


def _check(x: Tensor) -> None:
    if x.dtype != torch.float32:
        raise UserError(f"portable arithmetic: a product or sum of {x.dtype}; it takes torch.float32 alone")


def scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """2**s, float32, for values up to `amax`, float32, and 2**-s, float64, which is NaN where `amax` is not finite."""
    raised = (amax.view(torch.int32) + (_CARRY - _LEAST * _ONE)).clamp_(min=0).bitwise_and_(_EXPONENT)
    scale = (254 * _ONE - raised).view(torch.float32)
    return scale, torch.div(torch.ones((), dtype=torch.float64, device=amax.device), scale.double()).add_(amax - amax)


def grid_offset(amax: Tensor) -> Tensor:
    """c, float32, for which (x + c) - c rounds values up to `amax` half to even to multiples of 2**(e - 22)."""
    # 2**e is the smallest power of two above `amax`, at least 2**-126, and c = 1.5 * 2**(e + 1): c + x stays within one
    # binade, whose spacing is that of the grid. From 2**126 on, and where `amax` is not finite, c is NaN.
    _check(amax)
    return (amax.view(torch.int32) & _EXPONENT).clamp_(max=253 * _ONE).add_(2 * _ONE + _ONE // 2).view(torch.float32)


def grid_unit(offset: Tensor) -> Tensor:
    """2**(e - 22), the distance between multiples of the grid of an offset: float64, NaN where that is."""
    return (offset.view(torch.int32) & _EXPONENT).view(torch.float32).double().mul_(2.0**-23).add_(offset - offset)


@dataclass
class Pairs:
    """Those of the products so far."""

    lost: int = 0
    all: int = 0


_counted: ContextVar[Pairs | None] = ContextVar("_counted", default=None)


@contextmanager
def counting() -> Iterator[Pairs]:
    """Counts the pairs of this thread's products inside of it.

    >>> import torch
    >>> from .mode import portable
    >>> with portable(), counting() as pairs:
    ...     _ = torch.tensor([[1.0, 1e-5]]) @ torch.tensor([[1.0], [1.0]])
    >>> pairs
    Pairs(lost=1, all=2)
    """
    token = _counted.set(pairs := Pairs())
    try:
        yield pairs
    finally:
        _counted.reset(token)


def is_counting() -> bool:
    """Whether this thread is inside of `counting`."""
    return _counted.get() is not None


def count(left: Callable[[], tuple[Tensor, Tensor]], right: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Adds a product's pairs where they are counted. `left` and `right`: see `counts`; for one shared index each."""
    pairs = _counted.get()
    if pairs is None:
        return
    (a, a_kept), (b, b_kept) = left(), right()
    whole, kept = (int((x.flatten() * y.flatten()).sum()) for x, y in ((a, b), (a_kept, b_kept)))
    pairs.lost += whole - kept
    pairs.all += whole


def counts(x: Tensor, scaled: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The numbers other than 0 over `dims`, all but the shared index, and those whose integer is not 0: int64.

    `scaled` is x * 2**s, float32, rounded or not.
    """
    return (x != 0).sum(dims), (scaled.abs() > 0.5).sum(dims)

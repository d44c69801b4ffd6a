"""How many pairs of numbers that a product multiplies give nothing, since one of the two is too small for its scale.

A value below half a unit of its scale has the integer 0. A pair of two numbers other than 0 is lost where one of the
two integers is 0. Pairs are counted by the index that both operands share, a row of `counts`, edges and strides of
convolutions aside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


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


def count(left: Callable[[], tuple[Tensor, Tensor]], right: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Adds a product's pairs where they are counted. `left` and `right`: see `counts`; for one shared index each."""
    pairs = _counted.get()
    if pairs is None:
        return
    (a, a_kept), (b, b_kept) = left(), right()
    whole, kept = int((a * b).sum()), int((a_kept * b_kept).sum())
    pairs.lost += whole - kept
    pairs.all += whole


def counts(x: Tensor, scale: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The numbers other than 0 over `dims`, all but the shared index, and those whose integer is not 0: int64.

    `x` is float32, and `scale` 2**s, of length 1 or of that of `x` in each dimension.
    """
    return (x != 0).sum(dims), ((x * scale).abs() > 0.5).sum(dims)

"""Sums of float32 values over a grid: each value is rounded to a multiple of a power of two, and multiples add exactly.

The grid of a sum lies 22 bits below the smallest power of two above the largest magnitude among its terms
(`scales.grid_offset`); each sum has its own. At most 2**30 such terms add in float64 without rounding, in any order.
"""

import math
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from .passes import at_a_time, blocks, multiples
from .scales import amax_over, grid_offset, grid_unit

_MOST_TERMS = 1 << 30
_MOST_FLOAT64 = 4096


def on_grid(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The values rounded half to even to the grid of the sums over `dims`: float64, shaped like `x`."""
    offset = grid_offset(amax_over(x, dims))
    return (x + offset).sub_(offset).double()


def grid_sum(x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """The exact sum of float32 values rounded to their grid: float64.

    >>> grid_sum(torch.tensor([1.0, 2.0**-21, 2.0**-23]), (0,)).item() - 1 == 2.0**-21
    True
    """
    if x.numel() == 0:
        return x.double().sum(dims, keepdim)
    total = grid_total(x, dims, amax_over(x, dims))
    return total if keepdim else total.view([n for dim, n in enumerate(x.shape) if dim not in dims])


def grid_total(x: Tensor, dims: tuple[int, ...], amax: Tensor, center: Tensor | None = None) -> Tensor:
    """The grid sum over `dims`, of length 1 then, of values up to `amax`; with a center of (x - center)**2 up to it."""
    if x.numel() > _MOST_TERMS:
        raise UserError(f"portable arithmetic: a sum over a tensor of {x.numel()} elements; there may be {_MOST_TERMS}")
    dims, offset = all_dims(x, dims), grid_offset(amax)
    if (counted := multiples(x, offset, dims, center)) is not None:
        return counted.double().mul_(grid_unit(offset))

    def part_of(x: Tensor, offset: Tensor, center: Tensor | None) -> Tensor:
        distance = x if center is None else x - center
        terms = x if center is None else distance * distance
        return (terms + offset).sub_(offset).sum(dims, True, dtype=torch.float64)

    if x.numel() <= at_a_time(x.device):
        return part_of(x, offset, center)
    if 0 in dims:
        return reduce(Tensor.add_, (part_of(x[part], offset, center) for part in blocks(x)))
    return torch.cat([part_of(x[part], offset[part], None if center is None else center[part]) for part in blocks(x)])


def total(x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """The grid sum of float32 values, or the sum of a few float64 ones, in row order, one after the other: float64."""
    if x.dtype != torch.float64 or x.numel() == 0:
        return grid_sum(x, dims, keepdim)
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    terms = x.permute(*dims, *rest).reshape(count_of(x, dims), *(x.shape[dim] for dim in rest))
    if len(terms) > _MOST_FLOAT64:
        raise UserError(f"portable arithmetic: a sum of {len(terms)} float64 values; there may be {_MOST_FLOAT64}")
    added = terms[0].clone()
    for term in terms[1:]:
        added.add_(term)
    return added.view([1 if dim in dims else x.shape[dim] for dim in range(x.dim())]) if keepdim else added


def all_dims(x: Tensor, dims: int | list[int] | tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Dimensions as an operator takes them, as numbers from 0; none are all of them."""
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(dim % x.dim() for dim in dims) if dims and x.dim() else tuple(range(x.dim()))


def count_of(x: Tensor, dims: tuple[int, ...]) -> int:
    """The number of terms of a sum over some dimensions."""
    return math.prod(x.shape[dim] for dim in dims)


def quotient(total: Tensor, count: float) -> Tensor:
    """A float64 sum divided by a number, rounded once more to float32."""
    return over(total, count).float()


def over(x: Tensor, number: float) -> Tensor:
    """x / number by IEEE division: a device may turn a Python number into a product with its inverse, a tensor not."""
    return torch.div(x, torch.full((), number, dtype=x.dtype, device=x.device))


def mean(x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """The grid sum divided by the number of terms: float32."""
    return quotient(grid_sum(x, dims, keepdim), count_of(x, dims))


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded square root of float32 or float64 values, in their dtype; of integers as float32."""
    if x.is_floating_point() and x.dtype not in (torch.float32, torch.float64):
        raise UserError(f"portable arithmetic: a root of {x.dtype}; it takes torch.float32 and float64")
    # torch's own is off for 16 % of float32 values and 1 % of float64 on x86. That of float64, off by a unit, still
    # rounds right for float32 values: a root is never as near to the middle of two of them.
    return _square_root64(x) if x.dtype == torch.float64 else x.double().sqrt_().float()


def _square_root64(x: Tensor) -> Tensor:
    if x.is_cuda:
        return x.sqrt()  # IEEE's there
    return torch.from_numpy(np.asarray(np.sqrt(x.numpy())))  # the processor's own instruction


def norm(x: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """The Euclidean norm: the root of the grid sum of float32 squares."""
    return _square_root64(grid_sum(x * x, dims, keepdim)).float()


def variance(x: Tensor, dims: tuple[int, ...], correction: float = 1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Variance and mean, float32: the grid sum of squares of x - mean, divided by the count less the correction."""
    middle = mean(x, dims, True)
    distance = x - middle
    found = quotient(grid_sum(distance.mul_(distance), dims, keepdim), max(count_of(x, dims) - correction, 0))
    return found, middle if keepdim else middle.view(found.shape)

"""Matrix products of float32 tensors over integers: the same bits by any exact method, in any order, on any device.

Each row of the left operand and each column of the right one, so each index that the product keeps, has a scale of its
own, 2**s (`scales`). q = round-half-even(x * 2**s), the sums of products of integers are exact, and the sum times
2**-s of the row times 2**-s of the column is rounded once to float32. Where a row or column has a value that is not
finite, all results of it are NaN.

Integers are multiplied by whatever is exact on this machine. All methods give the same integers, so that the choice
decides the time alone. Nothing is believed: a method is tried at its first use for each shape, layout, device and
number of threads (`multiply`), on operands at the bound and on the caller's own, and where one element is wrong it is
left out for that shape.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import RunError, UserError
from ..rng import keyed_hash
from .passes import SLICE, Terms, blocks, joined, scaled, slices
from .scales import LARGEST, amax_over, count, counts, scales

MOST_TERMS = 1 << 25  # of a sum: LARGEST**2 times as many is below 2**53
_CHECK = 22  # first word of the draws of a check; those of `rng` end at 20
_ROUNDS = 7  # of the methods' times

T = TypeVar("T")
Operand = tuple[Tensor, ...]  # a matrix of integers as a method takes it: its slices, each [M, K] or [B, M, K]


class Inexact(Exception):
    """A method has given, or has given before, a wrong integer for this shape."""


@dataclass(frozen=True)
class Method:
    """One way of multiplying integers up to LARGEST."""

    name: str
    # Slices of the integers round-half-even(x * 2**s), each shaped like x; a caller may rearrange them all alike.
    prepare: Callable[[Tensor, Tensor], Operand]
    # A @ B of operands [M, K] and [K, N], or with a batch before: terms of exact integers, which `joined` adds.
    product: Callable[[Operand, Operand], Terms]


def _float_slices(x: Tensor, scale: Tensor) -> Operand:
    integers = _integer(x, scale)
    upper = (integers + SLICE // 2).mul_(1 / SLICE).floor_()
    return upper, integers - upper * SLICE


def _integer(x: Tensor, scale: Tensor) -> Tensor:
    return torch.mul(x, scale).round_()


def _by_slices(multiply: Callable[[Tensor, Tensor], Tensor], a: Operand, b: Operand) -> Terms:
    """lo*lo, hi*lo and lo*hi, hi*hi, where q = 256 * hi + lo and lo is within -128..127."""
    return multiply(a[1], b[1]), multiply(a[0], b[1]), multiply(a[1], b[0]), multiply(a[0], b[0])


# Of int32 sums: 128 * 128 times as many is below 2**31, as is the sum of the middle two. CUDA takes them in eights.
_INT_TERMS = (1 << 17) - 8
_FLOAT_TERMS = 1024  # of float32 sums: 128 * 128 times as many is 2**24


def _int_product(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == 3:
        return torch.stack([_int_product(left, right) for left, right in zip(a, b, strict=True)])
    rows, columns = a.shape[0], b.shape[1]
    if a.is_cuda:  # torch wants more than 16 rows there, and the other sizes in eights
        a = torch.nn.functional.pad(a, (0, -a.shape[1] % 8, 0, max(17 - rows, 0)))
        b = torch.nn.functional.pad(b, (0, -columns % 8, 0, -b.shape[0] % 8))
    if a.shape[1] <= _INT_TERMS:
        total = torch._int_mm(a, b)
    else:
        pieces = zip(a.split(_INT_TERMS, 1), b.split(_INT_TERMS), strict=True)
        total = torch.stack([torch._int_mm(left, right).double() for left, right in pieces]).sum(0)
    return total[:rows, :columns] if a.is_cuda else total


def _float_product(a: Tensor, b: Tensor) -> Tensor:
    def piece(left: Tensor, right: Tensor) -> Tensor:
        if left.dtype == torch.bfloat16:
            return (torch.bmm if left.dim() == 3 else torch.mm)(left, right, out_dtype=torch.float32).double()
        return (left @ right).double()

    return reduce(Tensor.add_, map(piece, a.split(_FLOAT_TERMS, -1), b.split(_FLOAT_TERMS, -2)))


METHODS = {method.name: method for method in (
    # One product; sums stay below 2**53.
    Method("float64", lambda x, scale: (_integer(x, scale).double(),), lambda a, b: (a[0] @ b[0],)),
    # Slices of 8 bits, and int32 sums of fewer than 2**17 terms.
    Method("int8", slices, partial(_by_slices, _int_product)),
    # The same slices, in pieces whose sums stay below 2**24; bfloat16 with float32 sums torch has on CUDA devices only.
    Method("float32", _float_slices, partial(_by_slices, _float_product)),
    Method("bfloat16", lambda *x: tuple(each.bfloat16() for each in _float_slices(*x)),
           partial(_by_slices, _float_product)),
)}  # fmt: skip
_chosen: ContextVar[tuple[str, ...] | None] = ContextVar("_chosen", default=None)
_is_exact: dict[tuple[Any, ...], bool] = {}


@contextmanager
def only_methods(names: Sequence[str] | None) -> Any:
    """Uses these methods inside, in this order; None: those chosen outside, or all. UserError for an unknown name."""
    for name in names or ():
        if name not in METHODS:
            raise UserError(f"methods: {name!r} is none of {', '.join(METHODS)}")
    token = _chosen.set(_chosen.get() if names is None else tuple(names))
    try:
        yield
    finally:
        _chosen.reset(token)


def exactly(compute: Callable[[Method], T], device: torch.device) -> T:
    """What `compute`, which calls `multiply`, gives with the first method that is exact; RunError if none is."""
    names = _chosen.get() or order_of_preference(device, torch.get_num_threads())
    for name in names:
        try:
            return compute(METHODS[name])
        except Inexact:
            continue
    raise RunError(f"no product of {', '.join(names)} is exact on {device}: this machine can't run portable arithmetic")


def fastest_method(device: torch.device) -> str:
    """The name of the method that is taken first."""
    return (_chosen.get() or order_of_preference(device, torch.get_num_threads()))[0]


def multiply(method: Method, a: Operand, b: Operand) -> Terms:
    """Terms of A @ B by a method that is tried at its first use for shapes and layouts; `Inexact` if it has failed."""
    left, right = a[0], b[0]
    key = (method.name, left.shape, left.stride(), right.shape, right.stride(), left.device, torch.get_num_threads())
    verdict = _is_exact.get(key)
    if verdict:
        return method.product(a, b)
    if verdict is None:
        if left.is_cuda and torch.cuda.is_current_stream_capturing():  # the host reads what is tried
            raise RuntimeError(f"a product of {tuple(left.shape)} and {tuple(right.shape)} was not tried before")
        if left.shape[-1] > MOST_TERMS:
            raise UserError(f"portable arithmetic: a sum of {left.shape[-1]} products; there may be {MOST_TERMS}")
        product, verdict = _try(method, a, b)
        if verdict is not None:
            _is_exact[key] = verdict
        if verdict is not False:
            return product
    raise Inexact(method.name)


def _try(method: Method, a: Operand, b: Operand) -> tuple[Terms, bool | None]:
    """A product, and whether the method is exact; None: it is for operands at the bound, and these are not finite."""
    try:
        for kind in _AT_THE_BOUND:
            left, right = (_at_the_bound(method, like, kind) for like in (a, b))
            if not is_product(left, right, joined(method.product(left, right))):
                return (), False
        product = method.product(a, b)
    except (RuntimeError, TypeError) as error:  # torch has no such product here
        # Lack of memory, of which a CPU has no class, says nothing of the method.
        if re.search("alloc|out of memory", str(error), re.IGNORECASE):
            raise
        return (), False
    sums = joined(product)
    if not bool(sums.isfinite().all()):
        return product, None
    return product, is_product(a, b, sums)


_AT_THE_BOUND = ("largest", "alternating", "mixed")
# The slices of 16256 are 64 and -128, the largest of both; those of 16255 are 63 and 127.
_EXTREMES = torch.tensor([LARGEST, -LARGEST, 16255.0, -16255.0, 127.0, -128.0, 0.0, 8127.0], dtype=torch.float32)


_DRAWN = 65521  # a prime, so that the rows of no matrix are alike


def _at_the_bound(method: Method, like: Operand, kind: str) -> Operand:
    """Operands in the layout of `like` that bring sums to their largest."""
    shape, device = like[0].shape, like[0].device
    operand = tuple(torch.empty_strided(shape, x.stride(), dtype=x.dtype, device=device) for x in like)
    width = shape[1:].numel()
    # int64 values of a block at a time: of all windows of a convolution they would take 50 MiB.
    for part in blocks(like[0]):
        index = torch.arange(part.start * width, part.stop * width, device=device).view(-1, *shape[1:])
        if kind == "largest":
            values = torch.full(index.shape, LARGEST, dtype=torch.float32, device=device)
        elif kind == "alternating":
            values = torch.where(index % 2 == 0, LARGEST, -LARGEST).float()
        else:
            values = _mixed(device)[index % _DRAWN]
        prepared = method.prepare(values, torch.ones([1] * len(shape), dtype=torch.float32, device=device))
        for slice_of, found in zip(operand, prepared, strict=True):
            slice_of[part].copy_(found)
    return operand


@cache
def _mixed(device: torch.device) -> Tensor:
    draws = keyed_hash(_CHECK, 2, torch.arange(_DRAWN, device="cpu").numpy()) % len(_EXTREMES)
    return _EXTREMES[torch.from_numpy(draws.astype("int64"))].to(device)


def is_product(a: Operand, b: Operand, product: Tensor) -> bool:
    """Freivalds' check that A(Br) = (AB)r in integers modulo 2**64, with a keyed random r."""
    # An error of one unit in one element is found unless r has a zero there, and any error with a probability of a half
    # at least (that of a multiple of 2**63) and nearly always of one.
    if product.dim() == 3:
        matrices = zip(zip(*a, strict=True), zip(*b, strict=True), product, strict=True)
        return all(is_product(*each) for each in matrices)
    columns = product.shape[-1]
    draws = keyed_hash(_CHECK, columns, *a[0].shape, torch.arange(columns).numpy())
    r = torch.from_numpy(draws.view("int64")).to(product.device)
    factors = torch.cat([(_integers(b, part) * r).sum(-1) for part in blocks(b[0])])
    for part in blocks(a[0]):
        rows, expected = product[part], (_integers(a, part) * factors).sum(-1)
        whole = rows.to(torch.int64)
        if not (bool((whole == rows).all()) and bool(((whole * r).sum(-1) == expected).all())):
            return False
    return True


def _integers(operand: Operand, rows: slice) -> Tensor:
    first, *others = (each[rows].to(torch.int64) for each in operand)
    return first.mul_(SLICE).add_(others[0]) if others else first


@cache
def order_of_preference(device: torch.device, threads: int) -> tuple[str, ...]:
    """The methods that a device has, the fastest first, by the time of one product of ordinary size."""
    times: dict[str, float] = {}
    # On a GPU so many that the product takes longer than its launches.
    rows, columns = (256, 128) if device.type == "cpu" else (16384, 256)
    # In turn, so that what else the machine does for a moment meets no method alone.
    for name, method in [*METHODS.items()] * _ROUNDS:
        one = torch.ones(1, 1, dtype=torch.float32, device=device)
        a, b = (method.prepare(1000 * one.expand(shape), one) for shape in ((rows, 1152), (1152, columns)))
        try:
            if a[0].is_cuda:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            joined(method.product(a, b)).flatten()[0].item()  # until it can be read
            times[name] = min(times.get(name, math.inf), time.perf_counter() - start)
        except (RuntimeError, TypeError):
            continue
    return tuple(sorted(times, key=times.__getitem__))


def quantised(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Integers round-half-even(x * 2**s), float32, and 2**-s, float64, of length 1 in `dims`, each with its own s."""
    scale, inverse = scales(amax_over(x, dims))
    return _integer(x, scale), inverse


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of float32 matrices [M, K] and [K, N], or of batches of them [B, M, K] and [B, K, N]."""
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(*a.shape[:-1], b.shape[-1])
    (down, rows), (across, columns) = scales(amax_over(a, (a.dim() - 1,))), scales(amax_over(b, (b.dim() - 2,)))
    count(lambda: counts(a, a * down, (-2,)), lambda: counts(b, b * across, (-1,)))
    terms = exactly(lambda method: multiply(method, method.prepare(a, down), method.prepare(b, across)), a.device)
    if a.dim() == 3:
        return joined(terms).mul_(rows).mul_(columns).float()
    result = a.new_empty(len(a), b.shape[1])
    scaled(terms, rows, columns, result.view(len(a), 1, 1, -1))
    return result

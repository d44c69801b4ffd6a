"""Passes over memory: slices, sums of products, extremes, grid sums and polynomials, in C where there is a compiler.

Torch takes several operators for each, and as many readings and writings. `passes.c` is compiled at its first use, in a
fifth of a second, by the command `CC` or cc, into a temporary folder: nothing is kept, and nothing is taken from
elsewhere. It decides the time alone: what it does is exact, or rounded where torch's operators round, and each function
is compared with its torch form, on values at the bound too, before it is used. Without a compiler, on a GPU and for
small tensors there are torch's forms.
"""

import ctypes
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

Terms = tuple[Tensor, ...]  # the exact sum itself, float64, or its four parts: lower times lower, the two mixed, upper

BLOCK = 1 << 17  # elements that torch's operators take at a time, so that what is made of them stays in a core's cache
_ON_A_GPU = 1 << 24  # there each operator is a launch, some 10 us of the host, and only memory sets a limit
SLICE = 256
LEAST = 1 << 15  # elements from which C pays
_LEAST_VALUES = 1 << 8  # of a polynomial
_A_THREAD = 1 << 16  # elements at least
_SOURCE = Path(__file__).with_name("passes.c")
_PATIENCE = 20  # seconds for a compiler that needs a fifth of one
_FLAGS = "-O3 -march=native -ffp-contract=off -fwrapv -fopenmp -shared -fPIC -nostdlib"


@cache
def compiled() -> ctypes.CDLL | str:
    """`passes.c`, compiled and compared with torch's operators, or in a few words why it is not used."""
    try:
        command, *options = shlex.split(os.environ.get("CC", "")) or ["cc"]
        if shutil.which(command) is None:
            return f"no C compiler ({command}; CC names another)"
        with tempfile.TemporaryDirectory(prefix="torusgd-", ignore_cleanup_errors=True) as folder:
            built = Path(folder) / "passes.so"
            arguments: list[str | Path] = [command, *options, *_FLAGS.split(), "-o", built, _SOURCE]
            subprocess.run(arguments, check=True, capture_output=True, timeout=_PATIENCE, errors="replace")
            # At once, so that a function of OpenMP that torch has not brought is missed here.
            found = ctypes.CDLL(str(built), mode=os.RTLD_NOW)
    except subprocess.CalledProcessError as error:
        return f"the C compiler failed ({' '.join((error.stderr.split() or [f'exit code {error.returncode}'])[:30])})"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"what the C compiler gives can't be used ({error})"
    return found if _agrees(found) else "C gives other bits than torch here"


def _agrees(found: ctypes.CDLL) -> bool:
    cpu, draw = torch.device("cpu"), torch.Generator().manual_seed(1)  # whatever the default device and dtype are
    uniform = partial(torch.rand, generator=draw, dtype=torch.float32, device=cpu)
    x, scale = uniform(300, 520) - 0.5, uniform(300, 1)
    edges = [0.5, -0.5, 1.5, 127.5, -128.5, 16256.0, -16256.0, 1e-45, -0.0, 3e-39]
    x[:2], scale[:2] = torch.tensor(edges, dtype=torch.float32, device=cpu).repeat(52), 1.0
    x[2:] *= 3000
    terms = tuple(torch.randint(-(2**30), 2**30, (4, 60, 40), generator=draw, dtype=torch.int32, device=cpu))
    down, across, more = uniform(3).double(), uniform(40).double(), terms[0].double()
    outs, center, few = uniform(2, 6, 2, 5, 40), x[5:6].contiguous(), tuple(down.tolist())
    _scaled_in_c(found, terms, down, across, outs[0])
    _scaled_in_torch(terms, down, across, outs[1])
    pairs: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = [
        (_slices_in_c(found, x, scale), _slices_in_torch(x, scale)),
        ([outs[0]], [outs[1]]),
        ([_added_in_c(found, terms, more.clone())], [_added_in_torch(terms, more)]),
        ([_polynomial_in_c(found, across, few)], [_polynomial_in_torch(across, few)]),
        *((_extremes_in_c(found, x, _three(x, (dim,))), (x.amin(dim, True), x.amax(dim, True))) for dim in (0, 1)),
    ]
    squares = (x - center) * (x - center)
    for middle, values, bound, dim in ((None, x, 2.0**15, 0), (center, squares, 2.0**29, 0), (None, x, 2.0**15, 1)):
        offset = torch.full_like(x.amax(dim, True), 1.5 * bound)
        counts = ((values + offset).view(torch.int32) - offset.view(torch.int32)).sum(dim, True)
        pairs.append(([_multiples_in_c(found, x, offset, _three(x, (dim,)), middle)], [counts]))
    return all(torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True))


def _library_for(*tensors: Tensor, least: int | None = None) -> ctypes.CDLL | None:
    # None where torch's operators do it. A FakeTensor has no memory.
    is_plain = all(x.is_cpu and type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    if not is_plain or tensors[0].numel() < (least or LEAST):
        return None
    return None if isinstance(found := compiled(), str) else found


def _threads(x: Tensor) -> int:
    return max(1, min(torch.get_num_threads(), x.numel() // _A_THREAD))


def _call(function: "ctypes._NamedFuncPointer", threads: int, *arguments: Tensor | int | None) -> None:
    """With all numbers as int64, but the last, the number of threads."""
    words = (x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
    function(*map(ctypes.c_void_p, words), ctypes.c_int(threads))


def slices(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """hi = floor((q + 128) / 256), within -63..64, and lo = q - 256 * hi, int8, of q = round-half-even(x * scale).

    Both have the layout of `x`, float32 [..., N]; `scale` has its shape, or 1 in its last dimensions, or in the last
    but one, or both.
    """
    found = _library_for(x, scale) if x.dtype == scale.dtype == torch.float32 else None
    if found is not None and not x.is_contiguous() and x.dim() > 1 and x.mT.is_contiguous() and x.dim() == scale.dim():
        upper, lower = slices(x.mT, scale.mT.contiguous())
        return upper.mT, lower.mT
    same = max((dim + 1 for dim, n in enumerate(scale.shape[:-1]) if n > 1), default=0)
    is_prefix = scale.dim() == x.dim() and scale.shape[:same] == x.shape[:same]
    if found is None or not (x.is_contiguous() and scale.is_contiguous() and is_prefix):
        return _slices_in_torch(x, scale)
    return _slices_in_c(found, x, scale)


def _slices_in_c(found: ctypes.CDLL, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = (torch.empty(x.shape, dtype=torch.int8, device="cpu") for _ in range(2))
    rows, down = x.numel() // x.shape[-1], scale.shape[-1]
    same = rows // (scale.numel() // down)
    _call(found.slices, _threads(x), x, scale, rows, x.shape[-1], same, down, int(down > 1), upper, lower)
    return upper, lower


def _slices_in_torch(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    # A conversion of integers takes their low bits.
    integers = torch.mul(x, scale).round_().to(torch.int16)
    lower = integers.to(torch.int8)
    return integers.add_(SLICE // 2).bitwise_right_shift_(8).to(torch.int8), lower


def scaled(terms: Terms, down: Tensor, across: Tensor, out: Tensor) -> None:
    """Writes sum * down * across, rounded once, of sums [rows, N] into `out`, a float32 view [I, H, W, N].

    `down`, float64, has a number for each so many of the I; `across` one for each of the N.
    """
    found = _library_for(out, *terms)
    if found is None or terms[-1].dtype != torch.int32 or out.dtype != torch.float32 or out.stride(-1) != 1:
        _scaled_in_torch(terms, down, across, out)
    else:
        _scaled_in_c(found, terms, down, across, out)


def _scaled_in_c(found: ctypes.CDLL, terms: Terms, down: Tensor, across: Tensor, out: Tensor) -> None:
    same, whole = len(out) // down.numel(), [x.contiguous() for x in (*terms, down, across)]
    _call(found.scaled, _threads(out), *whole, *out.shape, same, *out.stride()[:3], out)


def _scaled_in_torch(terms: Terms, down: Tensor, across: Tensor, out: Tensor) -> None:
    sums = terms[0] if len(terms) == 1 else _added_in_torch(terms)
    by_down = sums.view(down.numel(), -1, out.shape[-1]).mul_(down.view(-1, 1, 1))
    out.copy_(by_down.mul_(across.flatten()).view(out.shape))


def joined(terms: Terms, more: Tensor | None = None) -> Tensor:
    """The sums themselves, float64: added to `more`, in place, or over the first of the terms if that is one."""
    if len(terms) == 1:
        return terms[0] if more is None else more.add_(terms[0])
    found = _library_for(*terms) if terms[-1].dtype == torch.int32 else None
    if found is None:
        return _added_in_torch(terms, more)
    return _added_in_c(found, terms, torch.zeros(terms[0].shape, dtype=torch.float64) if more is None else more)


def _added_in_c(found: ctypes.CDLL, terms: Terms, more: Tensor) -> Tensor:
    _call(found.added, _threads(more), *(x.contiguous() for x in terms), more.numel(), more)
    return more


def _added_in_torch(terms: Terms, more: Tensor | None = None) -> Tensor:
    lowest, *others = terms
    sums = lowest.to(torch.float64, copy=True) if more is None else more.add_(lowest)
    is_small = not sums.is_cpu or sums.numel() <= BLOCK
    parts = [(sums, *others)] if is_small else zip(*(x.reshape(-1).split(BLOCK) for x in (sums, *others)), strict=True)
    for block, left, right, highest in parts:
        # Every term and sum is an integer below 2**53, so that neither fused nor single operations round.
        block.add_(left + right, alpha=SLICE).add_(highest, alpha=SLICE * SLICE)
    return sums


class _Three:
    """A tensor as [outer, middle, inner] in the order of memory, of which the middle is summed; `fits` if it is so."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...]) -> None:
        summed_dims = {dim % len(shape) for dim in dims}  # a rule may count them from the end
        self.order = sorted(range(len(shape)), key=lambda dim: strides[dim], reverse=True)
        self.kept = [1 if dim in summed_dims else shape[dim] for dim in self.order]
        long = [dim for dim in self.order if shape[dim] > 1]
        summed = [place for place, dim in enumerate(long) if dim in summed_dims]
        begin, end = (summed[0], summed[-1] + 1) if summed else (0, 0)
        self.sizes = [math.prod(shape[dim] for dim in part) for part in (long[:begin], long[begin:end], long[end:])]
        is_whole = all(
            strides[dim] == math.prod(shape[after] for after in long[place + 1 :]) for place, dim in enumerate(long)
        )
        self.fits = is_whole and len(summed) == end - begin

    def threads(self, x: Tensor) -> int:
        """At most one a place in the middle: of none the least value would be NaN."""
        return min(_threads(x), self.sizes[1])

    def empty(self, dtype: torch.dtype, threads: int) -> Tensor:
        outer, _, inner = self.sizes
        return torch.empty(threads, outer * inner, dtype=dtype, device="cpu")

    def back(self, values: Tensor) -> Tensor:
        """[outer * inner] as the tensor was, with length 1 where it was summed; side by side, as torch has sums."""
        return values.view(self.kept).permute([self.order.index(dim) for dim in range(len(self.order))]).contiguous()

    def there(self, values: Tensor) -> Tensor:
        """The other way."""
        return values.permute(self.order).contiguous()


_read = lru_cache(maxsize=1024)(_Three)  # a step asks for the same shapes again and again


def _three(x: Tensor, dims: tuple[int, ...]) -> _Three:
    return _read(x.shape, x.stride(), dims)


def extremes(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The least and the largest value over some dimensions, which stay with length 1; of a NaN one of them is NaN."""
    found = _library_for(x) if x.dtype == torch.float32 else None
    if found is None or not (three := _three(x, dims)).fits:
        return x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    return _extremes_in_c(found, x, three)


def _extremes_in_c(found: ctypes.CDLL, x: Tensor, three: _Three) -> tuple[Tensor, Tensor]:
    threads = three.threads(x)
    least, most = three.empty(torch.float32, threads), three.empty(torch.float32, threads)
    _call(found.extremes, threads, x, *three.sizes, least, most)
    return three.back(least.amin(0)), three.back(most.amax(0))


def multiples(x: Tensor, offset: Tensor, dims: tuple[int, ...], center: Tensor | None) -> Tensor | None:
    """The int64 sums over `dims`, of length 1 then, of (x + offset) - offset in its unit; None if not in C.

    `offset`, float32, and `center` have the shape of the result; with a center it is (x - center)**2 in place of x.
    """
    found = _library_for(x) if x.dtype == torch.float32 else None
    if found is None or not (three := _three(x, dims)).fits:
        return None
    return _multiples_in_c(found, x, offset, three, center)


def _multiples_in_c(found: ctypes.CDLL, x: Tensor, offset: Tensor, three: _Three, center: Tensor | None) -> Tensor:
    threads, middle = three.threads(x), None if center is None else three.there(center)
    sums = three.empty(torch.int64, threads)
    _call(found.sums, threads, x, three.there(offset), middle, *three.sizes, sums)
    return three.back(sums.sum(0))


def polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Its value at float64 `x`, by Horner's rule: a product, then a sum, from the highest degree down to the first."""
    found = _library_for(x, least=_LEAST_VALUES) if x.dtype == torch.float64 and x.is_contiguous() else None
    return _polynomial_in_torch(x, coefficients) if found is None else _polynomial_in_c(found, x, coefficients)


def _polynomial_in_c(found: ctypes.CDLL, x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = torch.empty_like(x)
    _call(found.polynomial, _threads(x), x, _as_tensor(coefficients), len(coefficients), x.numel(), value)
    return value


@cache
def _as_tensor(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def _polynomial_in_torch(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])


def at_a_time(device: torch.device, in_cache: int = BLOCK) -> int:
    """Elements that operators take at a time on a device: `in_cache` on a CPU."""
    return in_cache if device.type == "cpu" else _ON_A_GPU


def blocks(x: Tensor) -> list[slice]:
    """Runs of the first dimension that operators take at a time."""
    step = max(1, at_a_time(x.device) * len(x) // max(1, x.numel()))
    return [slice(begin, min(begin + step, len(x))) for begin in range(0, len(x), step)]

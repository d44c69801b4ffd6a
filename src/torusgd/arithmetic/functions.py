"""exp, log, erf, tanh, sigmoid, sine and cosine of float32 values: polynomials in float64, one operation at a time.

Each value is taken to float64, goes through the additions and multiplications that stand here, in this order and each
rounded on its own, and is rounded to float32 at the end: within 1 unit of float32 everywhere (`docs/methods/
portable-arithmetic.md` has the errors). No library's function takes part; those differ by machine and version.

A function has two forms: `exp64`, on float64 tensors, for rules that go on in float64, and `exp`, on float32. The
coefficients are those of Chebyshev interpolation, lowest degree first.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..errors import UserError
from .passes import at_a_time, polynomial

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# Polynomials, each with its range; behind the semicolon stands its relative error.
# (2**f - 1) / f for f in [-1/2, 1/2]; 2**-31.8
EXP2 = (
    0.6931471805599453, 0.24022650922288763, 0.05550410883910522, 0.009618056678521874, 0.0013333502384966778,
    0.00015461444699635, 1.5297324125640444e-05,
)  # fmt: skip
# 2 atanh(z) / z as a polynomial in z * z for |z| <= (sqrt(2) - 1) / (sqrt(2) + 1); 2**-37.7
ATANH = (2.000000000008362, 0.6666666524700432, 0.40000384775485404, 0.2853504433643064, 0.2361649129560904)
# erf(x) / x as a polynomial in x * x / 8 - 1 for |x| <= 4; 2**-31.2
ERF = (
    0.3535309956434049, -0.17657623580039228, 0.13167511777582963, -0.10771029288641266, 0.09020894134279632,
    -0.07473048679705468, 0.05988782958300683, -0.04574431267502724, 0.033053291696067265, -0.022562558293108114,
    0.014381038744396328, -0.008384044276092753, 0.0047749462205666495, -0.0029097129559724944, 0.0014101528932398749,
    -0.00032551962727953547, 0.0001732295034487736, -0.0002464220145300619, 9.403816578637098e-05,
)  # fmt: skip
# sin(r) / r as a polynomial in r * r for |r| <= pi / 4; 2**-37.6
SINE = (0.9999999999956705, -0.16666666631575122, 0.008333328780948664, -0.00019839201763025975, 2.7173415684016946e-06)
# cos(r) as a polynomial in r * r for |r| <= pi / 4; 2**-33.8
COSINE = (0.9999999999524651, -0.49999999614702334, 0.04166661667747791, -0.0013886617544818772, 2.437978916242134e-05)

_ROOT_HALF_BITS = 0x3FE6A09E667F3BCD  # of the float64 next to sqrt(1/2)
_BIAS = 1023
_MANTISSA = 52
_BLOCK = 1 << 14  # elements at a time, so that what lies between two operations stays in a core's cache


def exp2_parts(t: Tensor) -> tuple[Tensor, Tensor]:
    """2**f - 1 and 2**n for t = n + f, float64, clamped to -1000..1000, with the nearest integer n (half to even)."""
    t = t.clamp(-1000.0, 1000.0)
    whole = t.round()
    fraction = t.sub_(whole)
    power = (whole.to(torch.int64).add_(_BIAS) << _MANTISSA).view(torch.float64)
    return polynomial(fraction, EXP2).mul_(fraction), power


def exp64(x: Tensor) -> Tensor:
    """e**x."""
    near, power = exp2_parts(x * LOG2_E)
    return near.add_(1.0).mul_(power)


def expm1_64(x: Tensor) -> Tensor:
    """e**x - 1, small where x is."""
    near, power = exp2_parts(x * LOG2_E)
    return near.mul_(power).add_(power.sub(1.0))


def log64(x: Tensor) -> Tensor:
    """ln(x) of normal numbers; -inf of zero, NaN below it."""
    bits = x.view(torch.int64)
    exponent = (bits - _ROOT_HALF_BITS) >> _MANTISSA
    mantissa = (bits - (exponent << _MANTISSA)).view(torch.float64)
    ratio = torch.div(mantissa - 1.0, mantissa + 1.0)
    value = polynomial(ratio * ratio, ATANH).mul_(ratio).add_(exponent.double().mul_(LN_2))
    value = torch.where((x > 0) & (x < math.inf), value, x)  # inf and NaN are their own logarithms
    return value.masked_fill_(x == 0, -math.inf).masked_fill_(x < 0, math.nan)


def erf64(x: Tensor) -> Tensor:
    """The error function; beyond 4 it is that of 4, which float32 rounds to 1."""
    x = x.clamp(-4.0, 4.0)
    return polynomial((x * x).mul_(0.125).sub_(1.0), ERF).mul_(x)


def tanh64(x: Tensor) -> Tensor:
    """(e**2x - 1) / (e**2x + 1)."""
    grown = expm1_64(x.clamp(-30.0, 30.0).mul_(2.0))
    return torch.div(grown, grown + 2.0)


def sigmoid64(x: Tensor) -> Tensor:
    """1 / (1 + e**-x)."""
    return torch.div(torch.ones((), dtype=x.dtype, device=x.device), exp64(x.neg()).add_(1.0))


def sine_and_cosine64(x: Tensor) -> tuple[Tensor, Tensor]:
    """sin(x) and cos(x) for |x| up to 2**20, beyond which they are NaN."""
    x = x.masked_fill(x.abs() > 2.0**20, math.nan)
    quarter = (x * (2 / math.pi)).round_()
    # pi / 2 in two parts, of which the first has 20 zeros at its end: its multiples are exact.
    r = x.sub(quarter * 1.5707963267341256).sub_(quarter * 6.077100506506192e-11)
    square = r * r
    sine, cosine = polynomial(square, SINE).mul_(r), polynomial(square, COSINE)
    turn = quarter.to(torch.int64) & 3
    is_odd = (turn & 1) == 1
    first, second = torch.where(is_odd, cosine, sine), torch.where(is_odd, sine, cosine)
    return torch.where(turn >= 2, first.neg(), first), torch.where((turn == 1) | (turn == 2), second.neg(), second)


def elementwise(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A float64 function for float32 tensors of one shape, block by block, laid out like the first; float64: itself."""
    first = inputs[0]
    if first.dtype == torch.float64:
        return function(*inputs)
    if first.dtype != torch.float32:
        raise UserError(f"portable arithmetic: a function of {first.dtype}; it takes torch.float32 and float64")
    most = at_a_time(first.device, _BLOCK)
    if first.numel() <= most:
        return function(*(x.double() for x in inputs)).float()
    result = torch.empty_like(first)
    flats = [_flat(x, result) for x in inputs]
    flat = _flat(result, result)
    for begin in range(0, flat.numel(), most):
        part = slice(begin, begin + most)
        flat[part] = function(*(x[part].double() for x in flats))
    return result


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """The elements in the order in which `like` has them in memory; a view where `x` has them so too."""
    return x.permute(sorted(range(like.dim()), key=like.stride, reverse=True)).reshape(-1)


exp, log, erf, tanh, sigmoid = (partial(elementwise, each) for each in (exp64, log64, erf64, tanh64, sigmoid64))

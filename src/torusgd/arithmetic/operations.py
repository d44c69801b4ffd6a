"""Rules for elementwise operators that are no single IEEE operation, for lists of tensors, and for draws."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import activations, draws
from .functions import elementwise, erf, exp, exp64, expm1_64, log, log64, sigmoid, sigmoid64, sine_and_cosine64, tanh
from .layers import scaled, vector_norm
from .reductions import over, square_root
from .rules import Rule, Rules, aten, in_place

RULES = Rules()
_ERF_OF_TWO_DEVIATIONS = 0.9544997361036416  # rounded correctly

# Functions and activations


def _reciprocal(x: Tensor) -> Tensor:
    return torch.div(torch.ones_like(x), x)


def _inverse_erf(x: Tensor) -> Tensor:
    """Of draws between bounds that timm has by Python's `math.erf`, the machine's: two deviations, or far off."""
    if math.erf(2.0 / math.sqrt(2.0)) != _ERF_OF_TWO_DEVIATIONS:
        raise UserError(
            "portable arithmetic: math.erf of this machine's library is off by a bit, by which a truncated normal is "
            "drawn; draw by normal_, or give --init FILE"
        )
    return draws.inverse_erf64(x.double().cpu()).to(x)


_FUNCTIONS: dict[str, Rule] = {
    "exp": exp, "log": log, "erf": erf, "tanh": tanh, "sigmoid": sigmoid, "sqrt": square_root,
    "softplus": activations.softplus, "elu": activations.elu, "gelu": activations.gelu,
    "silu": lambda x: elementwise(lambda v: sigmoid64(v).mul_(v), x),
    "hardsigmoid": lambda x: over((x + 3.0).clamp_(0.0, 6.0), 6.0),
    "hardswish": lambda x: over((x + 3.0).clamp_(0.0, 6.0).mul_(x), 6.0),
    "leaky_relu": lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    "reciprocal": _reciprocal, "erfinv": _inverse_erf,
    "rsqrt": lambda x: _reciprocal(square_root(x)),
    "expm1": partial(elementwise, expm1_64),
    "sin": lambda x: elementwise(lambda v: sine_and_cosine64(v)[0], x),
    "cos": lambda x: elementwise(lambda v: sine_and_cosine64(v)[1], x),
}  # fmt: skip

RULES |= {
    aten.silu_backward.default: activations.silu_gradient,
    aten.sigmoid_backward.default: lambda g, y: g * (1.0 - y) * y,
    aten.tanh_backward.default: lambda g, y: g * (1.0 - y * y),
    aten.hardswish_backward.default: activations.hardswish_gradient,
    aten.hardsigmoid_backward.default: lambda g, x: over(g, 6.0).masked_fill_((x <= -3) | (x >= 3), 0.0),
    aten.gelu_backward.default: activations.gelu_gradient,
    # x and the result have the same sign.
    aten.leaky_relu_backward.default: lambda g, x, slope, is_result: torch.where(x > 0, g, g * slope),
    aten.elu_backward.default: activations.elu_gradient,
    aten.softplus_backward.default: lambda g, x, beta, threshold: torch.where(
        x * beta > threshold, g, sigmoid(x * beta).mul_(g)
    ),
}


def _power(x: Tensor, exponent: float) -> Tensor:
    """Whole powers by products, lowest first; halves by a root; a negative one is 1 over the positive."""
    if exponent < 0:
        return _reciprocal(_power(x, -exponent))
    whole, half = int(exponent), exponent - int(exponent)
    if half not in (0, 0.5) or whole > 64:
        raise UserError(f"portable arithmetic: a power of {exponent}; there are multiples of 1/2 up to 64")
    result = square_root(x) if half else torch.ones_like(x)
    for _ in range(whole):
        result = result * x
    return result


RULES[aten.pow.Tensor_Scalar], RULES[aten.pow_.Scalar] = _power, in_place(_power)


@RULES.of(aten.pow.Scalar)
def _powers_of(base: float, exponent: Tensor) -> Tensor:
    logarithm = log64(torch.full((), base, dtype=torch.float64, device=exponent.device))
    return elementwise(lambda v: exp64(v * logarithm), exponent)


# Arithmetic with a factor, or with a Python number


def _with_alpha(plain: Rule) -> Rule:
    """A product with alpha, rounded, and then a sum or difference."""
    return lambda x, y, alpha=1: plain(x, y if alpha == 1 else y * alpha)


for _sum, _plain in (aten.add, torch.add), (aten.add_, Tensor.add_), (aten.sub, torch.sub), (aten.sub_, Tensor.sub_):
    RULES[_sum.Tensor] = RULES[_sum.Scalar] = _with_alpha(_plain)


RULES[aten.rsub.Scalar] = RULES[aten.rsub.Tensor] = lambda x, y, alpha=1: y - (x if alpha == 1 else x * alpha)


def _quotient(x: Tensor, y: Any) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    if not isinstance(y, Tensor):
        return over(x, float(y))
    return torch.div(x, y if y.dim() else y.to(x.device, x.dtype if y.is_floating_point() else None))


_COMBINED: dict[str, Rule] = {
    "div": _quotient,
    "lerp": lambda x, end, weight: x + (end - x) * weight,
    "addcmul": lambda x, a, b, value=1: x + scaled(a * b, value),
    "addcdiv": lambda x, a, b, value=1: x + scaled(torch.div(a, b), value),
}
for _name, _function in (_FUNCTIONS | _COMBINED).items():
    RULES.both(_name, _function, "default", "Tensor", "Scalar")

# Lists of tensors, as optimizers and clipping take them


def _each(function: Rule, is_in_place: bool) -> Rule:
    """The rule for lists of a rule for tensors: a list, or numbers, beside the first one is taken tensor by tensor."""

    def run(tensors: list[Tensor], *args: Any, **options: Any) -> list[Tensor] | None:
        args = tuple(arg.tolist() if isinstance(arg, Tensor) and arg.dim() else arg for arg in args)
        rows = [arg if isinstance(arg, list | tuple) else [arg] * len(tensors) for arg in args]
        results = [function(*row, **options) for row in zip(tensors, *rows, strict=True)]
        return None if is_in_place else results

    return run


_LISTED = _COMBINED | {
    "add": RULES[aten.add.Tensor], "sub": RULES[aten.sub.Tensor], "mul": torch.mul, "neg": torch.neg,
    "zero": torch.zeros_like, "copy": lambda x, y, *_: y.clone(), "sqrt": square_root, "reciprocal": _reciprocal,
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, Tensor) else x.clamp_min(y),
    "norm": lambda x, order=2, dtype=None: vector_norm(x, order, dtype=dtype),
}  # fmt: skip
for _name, _function in _LISTED.items():
    for _suffix, _form in (("", _function), ("_", in_place(_function))):
        _packet = getattr(aten, f"_foreach_{_name}{_suffix}", None)
        for _which in () if _packet is None else _packet.overloads():
            if not _which.endswith("out"):
                RULES[getattr(_packet, _which)] = _each(_form, bool(_suffix))


@RULES.of(aten._fused_sgd_.default)
def _sgd_step(
    weights: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], *, weight_decay: float, momentum: float,
    lr: float, dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, **scaling: Any,
) -> None:  # fmt: skip
    """SGD as torch has it, each operation rounded: g + w * decay; b * momentum + g * (1 - dampening); w - b * lr."""
    if any(value is not None for value in scaling.values()):
        raise UserError("portable arithmetic: a fused SGD step by a gradient scaler; leave the scaler out")
    for number, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        step = gradient.neg() if maximize else gradient
        if weight_decay:
            step = step + weight * weight_decay
        if momentum:
            buffer = buffers[number]
            if is_first_step:
                buffer.copy_(step)
            else:
                buffer.mul_(momentum).add_(step * (1 - dampening))
            step = step + buffer * momentum if nesterov else buffer
        weight.sub_(step * lr)


# Messages

_LARGEST_AND_LEAST = (3, 4)  # torch.distributed's numbers of reductions that have no order


@RULES.of(torch.ops.c10d.allreduce_.default)
def _all_reduce(tensors: list[Tensor], group: Any, operation: Any, *args: Any) -> Any:
    is_ordered = not operation._has_method("op") or operation.op() not in _LARGEST_AND_LEAST  # torch 2.9 has no op()
    if is_ordered and any(x.is_floating_point() for x in tensors):
        raise UserError("portable arithmetic: a sum of floats over ranks has their order; use exact_all_reduce")
    return torch.ops.c10d.allreduce_.default(tensors, group, operation, *args)


# Draws


@RULES.of(aten.native_dropout.default)
def _dropout(x: Tensor, share: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False:  # None drops
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draws.bernoulli_(torch.empty_like(x), 1 - share)
    return over(kept, (1 - share) or 1.0).mul_(x), kept.bool()


def _drawn(fill: Rule, size: list[int], generator: Any = None, **options: Any) -> Tensor:
    return fill(torch.empty(size, **options), generator=generator)


RULES |= {
    aten.native_dropout_backward.default: lambda g, kept, scale: over(kept.float(), 1 / (scale or 1.0)).mul_(g),
    aten.normal_.default: draws.normal_,
    aten.uniform_.default: draws.uniform_,
    aten.bernoulli_.float: draws.bernoulli_,
    aten.rand_like.default: lambda x, **options: draws.uniform_(torch.empty_like(x, **options)),
    aten.randn_like.default: lambda x, **options: draws.normal_(torch.empty_like(x, **options)),
}
RULES.of(aten.rand.default, aten.rand.generator)(partial(_drawn, draws.uniform_))
RULES.of(aten.randn.default, aten.randn.generator)(partial(_drawn, draws.normal_))


@RULES.of(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _range(*args: float, dtype: Any = None, **options: Any) -> Tensor:
    """Multiples of a whole step are made as integers."""
    if all(float(number).is_integer() for number in args):
        numbers = torch.arange(*(int(number) for number in args), **options)
        return numbers.to(dtype or (torch.float32 if any(isinstance(n, float) for n in args) else torch.int64))
    start, stop, step = (0.0, *args, 1.0)[:3] if len(args) == 1 else (*args, 1.0)[:3]
    count = torch.arange(start, stop, step, device="meta").numel()
    return torch.arange(count, dtype=torch.float64, **options).mul_(step).add_(start).to(dtype or torch.float32)


@RULES.of(aten.linspace.default)
def _even_points(start: float, end: float, steps: int, *, dtype: Any = None, **options: Any) -> Tensor:
    """start + n * ((end - start) / (steps - 1)) in float64, and the end itself."""
    points = torch.arange(steps, dtype=torch.float64, **options).mul_((end - start) / max(steps - 1, 1)).add_(start)
    if steps > 1:
        points[-1] = end
    return points.to(dtype or torch.float32)

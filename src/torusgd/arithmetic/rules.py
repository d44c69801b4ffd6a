"""A rule for each ATen operator that multiplies and adds, or is no single IEEE operation: `RULES`.

A rule takes its operator's arguments and gives what it gives. An operator that has none and isn't in `table` can't be
used.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import activations, draws, losses, normalization, pools, reductions
from .contraction import matmul
from .convolution import Geometry, convolution, input_gradient, weight_gradient
from .functions import elementwise, erf, exp, exp64, log, log64, sigmoid, sine_and_cosine64, tanh
from .reductions import all_dims, grid_sum, over, square_root

aten = torch.ops.aten

Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}
"""by overload"""


def rule(*overloads: Any) -> Callable[[Rule], Rule]:
    """Makes a function the rule of overloads."""

    def register(function: Rule) -> Rule:
        for overload in overloads:
            RULES[overload] = function
        return function

    return register


def in_place(function: Rule) -> Rule:
    """The rule that writes a function's result into its first argument."""

    def write(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return x.copy_(function(x, *args, **options))

    return write


def _both(name: str, function: Rule, overload: str = "default") -> None:
    """Registers a function for an operator and for its in-place form, if torch has them."""
    for suffix, form in (("", function), ("_", in_place(function))):
        packet = getattr(aten, name + suffix, None)
        if packet is not None and overload in packet.overloads():
            RULES[getattr(packet, overload)] = form


# Products of matrices


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x.mul_(factor)


@rule(aten.mm.default, aten.bmm.default)
def _product(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b)


@rule(aten.addmm.default, aten.baddbmm.default)
def _added_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = _scaled(matmul(a, b), alpha)
    if beta == 0:
        return product
    return product.add_(c if beta == 1 else c * beta)


@rule(aten.mv.default)
def _matrix_vector(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a, b.unsqueeze(1)).squeeze(1)


@rule(aten.dot.default)
def _inner_product(a: Tensor, b: Tensor) -> Tensor:
    return matmul(a.unsqueeze(0), b.unsqueeze(1)).view(())


# Convolutions


def _pair(values: Sequence[int]) -> tuple[int, int]:
    """Vertical and horizontal; of one dimension, it is the horizontal one."""
    return (values[0], values[1]) if len(values) == 2 else (-1, values[0])


def _geometry(
    weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    if weight.dim() == 3:
        return Geometry((1, weight.shape[2]), (1, stride[0]), (0, padding[0]), (1, dilation[0]), groups)
    return Geometry((weight.shape[2], weight.shape[3]), _pair(stride), _pair(padding), _pair(dilation), groups)


def _images(x: Tensor) -> Tensor:
    """Of one dimension as images of one row."""
    if x.dim() not in (3, 4):
        raise UserError("portable arithmetic: a convolution over three dimensions has no rule; use precision: float32")
    return x if x.dim() == 4 else x.unsqueeze(2)


@rule(aten.convolution.default)
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    shape = _geometry(weight, stride, padding, dilation, groups)
    images, kernels = _images(x), _images(weight)
    if transposed:
        sizes = zip(images.shape[2:], *(shape.stride, shape.padding, shape.dilation, shape.kernel), strict=True)
        extra = (0, *output_padding) if x.dim() == 3 else tuple(output_padding)
        height, width = (
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1 for (n, s, p, d, k), e in zip(sizes, extra, strict=True)
        )
        result = input_gradient(images, kernels, (height, width), shape)
        result = result if bias is None else result.add_(bias.view(-1, 1, 1))
    else:
        result = convolution(images, kernels, bias, shape)
    return result if x.dim() == 4 else result.squeeze(2)


@rule(aten.convolution_backward.default)
def _convolution_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, needed: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    shape = _geometry(weight, stride, padding, dilation, groups)
    out, images, kernels = _images(gradient), _images(x), _images(weight)
    of_input = of_weight = of_bias = None
    if needed[0]:
        of_input = (
            convolution(out, kernels, None, shape)
            if transposed
            else input_gradient(out, kernels, (images.shape[2], images.shape[3]), shape)
        ).view(x.shape)
    if needed[1]:
        of_weight = (weight_gradient(images, out, shape) if transposed else weight_gradient(out, images, shape)).view(
            weight.shape
        )
    if needed[2]:
        of_bias = grid_sum(out, (0, 2, 3)).float()
    return of_input, of_weight, of_bias


# Norms


@rule(aten.native_batch_norm.default)
def _batch_norm(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return normalization.batch_norm(x, *args)


@rule(aten.cudnn_batch_norm.default)
def _batch_norm_of_cudnn(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*normalization.batch_norm(x, *args), x.new_empty(0, dtype=torch.uint8))


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    middle: Tensor, deviation: Tensor, training: bool, eps: float, needed: list[bool],
) -> normalization.Gradients:  # fmt: skip
    if not training:
        assert running_mean is not None and running_var is not None
        middle, deviation = running_mean, normalization.inverse_std(running_var, eps)
    return normalization.batch_norm_gradient(gradient, x, weight, middle, deviation, training, needed)


@rule(aten.cudnn_batch_norm_backward.default)
def _batch_norm_gradients_of_cudnn(
    x: Tensor, gradient: Tensor, weight: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    middle: Tensor, deviation: Tensor, eps: float, reserve: Tensor,
) -> normalization.Gradients:  # fmt: skip
    return normalization.batch_norm_gradient(gradient, x, weight, middle, deviation, True, [True] * 3)


def _last(x: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(x.dim() - len(shape), x.dim()))


@rule(aten.native_layer_norm.default)
def _layer_norm(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    return normalization.layer_norm(x, _last(x, shape), weight, bias, eps)


@rule(aten.native_layer_norm_backward.default)
def _layer_norm_gradients(
    gradient: Tensor, x: Tensor, shape: list[int], middle: Tensor, deviation: Tensor, weight: Tensor | None,
    bias: Tensor | None, needed: list[bool],
) -> normalization.Gradients:  # fmt: skip
    return normalization.layer_norm_gradient(gradient, x, _last(x, shape), middle, deviation, weight, needed)


@rule(aten.native_group_norm.default)
def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return normalization.group_norm(x, groups, weight, bias, eps)


@rule(aten.native_group_norm_backward.default)
def _group_norm_gradients(
    gradient: Tensor, x: Tensor, middle: Tensor, deviation: Tensor, weight: Tensor | None, n: int, c: int,
    pixels: int, groups: int, needed: list[bool],
) -> normalization.Gradients:  # fmt: skip
    return normalization.group_norm_gradient(gradient, x, groups, middle, deviation, weight, needed)


# Sums


@rule(aten.sum.default, aten.sum.dim_IntList)
def _sum(x: Tensor, dims: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if not x.is_floating_point():
        return torch.sum(x, all_dims(x, dims), keepdim, dtype=dtype) if dtype is None or not dtype.is_floating_point \
            else grid_sum(x.float(), all_dims(x, dims), keepdim).to(dtype)  # fmt: skip
    return grid_sum(x, all_dims(x, dims), keepdim).to(dtype or x.dtype)


@rule(aten.mean.default, aten.mean.dim)
def _mean(x: Tensor, dims: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return reductions.mean(x, all_dims(x, dims), keepdim).to(dtype or x.dtype)


@rule(aten.var.correction)
def _variance(x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return reductions.variance(x, all_dims(x, dims), 1 if correction is None else correction, keepdim)[0]


@rule(aten.std.correction)
def _deviation(x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return square_root(_variance(x, dims, correction=correction, keepdim=keepdim))


@rule(aten.var_mean.correction)
def _variance_mean(x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return reductions.variance(x, all_dims(x, dims), 1 if correction is None else correction, keepdim)


@rule(aten.linalg_vector_norm.default)
def _vector_norm(x: Tensor, order: float = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = all_dims(x, dims)
    if order == 2:
        return reductions.norm(x, dims, keepdim)
    if order == 1:
        return grid_sum(x.abs(), dims, keepdim).float()
    if order == float("inf"):
        return x.abs().amax(dims, keepdim)
    raise UserError(f"portable arithmetic: a norm of order {order}; there are 1, 2 and inf")


@rule(aten.cumsum.default)
def _cumulative_sum(x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    if x.is_floating_point():
        return reductions.cumulative_sum(x, dim % x.dim())
    # Sums of integers, whatever the dtype that was asked for: exact below 2**53.
    return x.cumsum(dim, dtype=torch.int64).to(dtype or torch.int64)


def _scattered(function: Callable[[Tensor, Tensor], Tensor], zeros: Tensor, values: Tensor) -> Tensor:
    """Adds values, over one grid for all, in float64 by a function (zeros, values) -> sums; float32."""
    on_grid = reductions.on_grid(values, all_dims(values)) if values.numel() else values.double()
    return function(zeros.double(), on_grid).float()


@rule(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    if not accumulate or not x.is_floating_point():
        return x.index_put(indices, values, accumulate)
    zeros = torch.zeros_like(x)
    return x + _scattered(lambda z, v: z.index_put_(indices, v, accumulate=True), zeros, values)


for _overload in (aten.index_put_.default, aten._index_put_impl_.default):
    RULES[_overload] = in_place(_index_put)


@rule(aten.index_add.default)
def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return x + _scattered(lambda z, v: z.index_add_(dim, index, v), torch.zeros_like(x), _scaled(source.clone(), alpha))


RULES[aten.index_add_.default] = in_place(_index_add)


@rule(aten.scatter_add.default)
def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return x + _scattered(lambda z, v: z.scatter_add_(dim, index, v), torch.zeros_like(x), source)


RULES[aten.scatter_add_.default] = in_place(_scatter_add)


@rule(aten.embedding_dense_backward.default)
def _embedding_gradient(gradient: Tensor, index: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    if by_frequency:
        raise UserError("portable arithmetic: an embedding with scale_grad_by_freq has no rule; leave the option out")
    flat, where = gradient.reshape(-1, gradient.shape[-1]), index.flatten()
    flat = flat.masked_fill((where == padding).unsqueeze(1), 0.0)
    return _scattered(lambda z, v: z.index_add_(0, where, v), gradient.new_zeros(rows, flat.shape[1]), flat)


# Pooling


@rule(aten.max_pool2d_with_indices.default)
def _max_pool(
    x: Tensor, kernel: list[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return pools.max_pool(x, kernel, stride, padding, dilation, ceil_mode)


@rule(aten.max_pool2d_with_indices_backward.default)
def _max_pool_gradient(
    gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Tensor
) -> Tensor:
    return pools.max_pool_gradient(gradient, x, indices)


@rule(aten.avg_pool2d.default)
def _average_pool(
    x: Tensor, kernel: list[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,), ceil_mode: bool = False,
    with_padding: bool = True, divisor: int | None = None,
) -> Tensor:  # fmt: skip
    return pools.average_pool(x, kernel, stride, padding, ceil_mode, with_padding, divisor)


RULES[aten.avg_pool2d_backward.default] = pools.average_pool_gradient
RULES[aten._adaptive_avg_pool2d.default] = pools.adaptive_average_pool
RULES[aten._adaptive_avg_pool2d_backward.default] = pools.adaptive_average_pool_gradient


@rule(aten.upsample_nearest2d.default)
def _upsample(x: Tensor, size: list[int], up: float | None = None, across: float | None = None) -> Tensor:
    return pools.nearest_upsample(x, size)


@rule(aten.upsample_nearest2d_backward.default)
def _upsample_gradient(gradient: Tensor, size: list[int], input_size: list[int], *scales: float | None) -> Tensor:
    return pools.nearest_upsample_gradient(gradient, input_size[2:])


# Softmax, losses, attention


@rule(aten._softmax.default)
def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return losses.softmax(x, dim)


@rule(aten._softmax_backward_data.default)
def _softmax_gradient(gradient: Tensor, result: Tensor, dim: int, dtype: Any) -> Tensor:
    return losses.softmax_gradient(gradient, result, dim)


@rule(aten._log_softmax.default)
def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return losses.log_softmax(x, dim)


@rule(aten._log_softmax_backward_data.default)
def _log_softmax_gradient(gradient: Tensor, result: Tensor, dim: int, dtype: Any) -> Tensor:
    return losses.log_softmax_gradient(gradient, result, dim)


RULES[aten.nll_loss_forward.default] = losses.nll_loss
RULES[aten.nll_loss_backward.default] = losses.nll_loss_gradient


@rule(aten.binary_cross_entropy_with_logits.default)
def _binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, positive: Tensor | None = None, reduction: int = 1
) -> Tensor:
    return losses.binary_cross_entropy(x, target, weight, positive, reduction)


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _without_dropout(dropout)
    return losses.attention(query, key, value, attn_mask, is_causal, scale)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logarithm: Tensor, dropout: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _without_dropout(dropout)
    return losses.attention_gradient(gradient, query, key, value, attn_mask, is_causal, scale)


def _without_dropout(share: float) -> None:
    if share:
        raise UserError("portable arithmetic: attention with dropout has no rule; set its dropout to 0")


# Functions and activations

for _name, _function in {"exp": exp, "log": log, "erf": erf, "tanh": tanh, "sigmoid": sigmoid, "sqrt": square_root,
                         "silu": activations.silu, "hardsigmoid": activations.hardsigmoid,
                         "hardswish": activations.hardswish}.items():  # fmt: skip
    _both(_name, _function)


def _reciprocal(x: Tensor) -> Tensor:
    return torch.div(torch.ones_like(x), x)


_both("reciprocal", _reciprocal)
_both("rsqrt", lambda x: _reciprocal(square_root(x)))
_both("expm1", lambda x: elementwise(lambda v: exp64(v).sub_(1.0), x))
_both("sin", lambda x: elementwise(lambda v: sine_and_cosine64(v)[0], x))
_both("cos", lambda x: elementwise(lambda v: sine_and_cosine64(v)[1], x))
_both("softplus", lambda x, beta=1, threshold=20: _softplus(x, beta, threshold))
_both("leaky_relu", lambda x, slope=0.01: activations.leaky_relu(x, slope))
_both("elu", lambda x, alpha=1, scale=1, input_scale=1: activations.elu(x, alpha, scale, input_scale))
_both("gelu", lambda x, *, approximate="none": activations.gelu(x, approximate))
_both("erfinv", lambda x: draws.inverse_erf64(x.double().cpu()).to(x))


def _softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    def compute(v: Tensor) -> Tensor:
        return over(activations.softplus64(v * beta), beta)

    return torch.where(x * beta > threshold, x, elementwise(compute, x))


@rule(aten.gelu_backward.default)
def _gelu_gradient(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    return activations.gelu_gradient(gradient, x, approximate)


@rule(aten.leaky_relu_backward.default)
def _leaky_relu_gradient(gradient: Tensor, x: Tensor, slope: float, is_result: bool) -> Tensor:
    return activations.leaky_relu_gradient(gradient, x, slope)


RULES |= {
    aten.silu_backward.default: activations.silu_gradient,
    aten.sigmoid_backward.default: activations.sigmoid_gradient,
    aten.tanh_backward.default: activations.tanh_gradient,
    aten.hardswish_backward.default: activations.hardswish_gradient,
    aten.hardsigmoid_backward.default: activations.hardsigmoid_gradient,
}


def _power(x: Tensor, exponent: float) -> Tensor:
    """Whole powers by products, lowest first; halves by a root; a negative one is 1 over the positive."""
    if exponent < 0:
        return _reciprocal(_power(x, -exponent))
    whole, half = int(exponent), exponent - int(exponent)
    if half not in (0, 0.5) or whole > 64:
        raise UserError(f"portable arithmetic: a power of {exponent}; there are multiples of 1/2 up to 64")
    result = square_root(x) if half else torch.ones_like(x)
    for number in range(whole):
        result = x if number == 0 and not half else result * x
    return result.clone() if result is x else result


_both("pow", _power, "Tensor_Scalar")


@rule(aten.pow.Scalar)
def _powers_of(base: float, exponent: Tensor) -> Tensor:
    logarithm = log64(torch.full((), base, dtype=torch.float64, device=exponent.device))
    return elementwise(lambda v: exp64(v.mul_(logarithm)), exponent)


# Arithmetic with a factor, or with a Python number


def _plus(x: Any, y: Any, sign: Callable[..., Any], alpha: float) -> Any:
    return sign(x, y if alpha == 1 else y * alpha)


def _with_alpha(name: str, plain: Rule, plain_in_place: Rule) -> None:
    """add and sub: a product with alpha, rounded, and then a sum."""
    for overload in ("Tensor", "Scalar"):
        out = getattr(getattr(aten, name), overload)
        inside = getattr(getattr(aten, name + "_"), overload)
        RULES[out] = lambda x, y, *args, alpha=1: _plus(x, y, plain, args[0] if args else alpha)
        RULES[inside] = lambda x, y, *args, alpha=1: _plus(x, y, plain_in_place, args[0] if args else alpha)


_with_alpha("add", torch.add, Tensor.add_)
_with_alpha("sub", torch.sub, Tensor.sub_)


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def _subtracted_from(x: Tensor, y: Any, alpha: float = 1) -> Tensor:
    return y - (x if alpha == 1 else x * alpha)


@rule(aten.div.Tensor, aten.div.Scalar)
def _quotient(x: Tensor, y: Any) -> Tensor:
    x = x if x.is_floating_point() else x.float()
    return torch.div(x, y) if isinstance(y, Tensor) and y.dim() else over(x, float(y)) if not isinstance(
        y, Tensor) else torch.div(x, y.to(x.device, x.dtype if y.is_floating_point() else None))  # fmt: skip


for _overload in (aten.div_.Tensor, aten.div_.Scalar):
    RULES[_overload] = in_place(_quotient)


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def _between(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    """x + (end - x) * weight."""
    return x + (end - x) * weight


for _overload in (aten.lerp_.Scalar, aten.lerp_.Tensor):
    RULES[_overload] = in_place(_between)


@rule(aten.addcmul.default)
def _plus_product(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + value * (a * b), each operation rounded."""
    return x + _scaled(a * b, value)


@rule(aten.addcdiv.default)
def _plus_quotient(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    """x + value * (a / b), each operation rounded."""
    return x + _scaled(torch.div(a, b), value)


RULES[aten.addcmul_.default] = in_place(_plus_product)
RULES[aten.addcdiv_.default] = in_place(_plus_quotient)


# Draws


@rule(aten.normal_.default)
def _normal(x: Tensor, mean: float = 0, std: float = 1, *, generator: Any = None) -> Tensor:
    return draws.normal_(x, mean, std, generator)


@rule(aten.uniform_.default)
def _uniform(x: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Tensor:
    return draws.uniform_(x, low, high, generator)


@rule(aten.bernoulli_.float)
def _bernoulli(x: Tensor, probability: float = 0.5, *, generator: Any = None) -> Tensor:
    return draws.bernoulli_(x, probability, generator)


@rule(aten.native_dropout.default)
def _dropout(x: Tensor, share: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = draws.bernoulli_(torch.empty_like(x), 1 - share)
    return over(kept, 1 - share).mul_(x), kept.bool()


@rule(aten.native_dropout_backward.default)
def _dropout_gradient(gradient: Tensor, kept: Tensor, scale: float) -> Tensor:
    return over(kept.float(), 1 / scale).mul_(gradient)


def _drawn(fill: Rule, size: list[int], generator: Any = None, **options: Any) -> Tensor:
    return fill(torch.empty(size, **options), generator=generator)


RULES |= {
    aten.rand.default: partial(_drawn, _uniform),
    aten.rand.generator: partial(_drawn, _uniform),
    aten.randn.default: partial(_drawn, _normal),
    aten.randn.generator: partial(_drawn, _normal),
}


@rule(aten.rand_like.default)
def _uniform_like(x: Tensor, **options: Any) -> Tensor:
    return _uniform(torch.empty_like(x, **options))


@rule(aten.randn_like.default)
def _normal_like(x: Tensor, **options: Any) -> Tensor:
    return _normal(torch.empty_like(x, **options))


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _range(*args: float, dtype: Any = None, **options: Any) -> Tensor:
    """Multiples of a whole step are made as integers."""
    if all(float(number).is_integer() for number in args):
        numbers = torch.arange(*(int(number) for number in args), **options)
        return numbers.to(dtype or (torch.float32 if any(isinstance(n, float) for n in args) else torch.int64))
    start, stop, step = (0.0, *args, 1.0)[:3] if len(args) == 1 else (*args, 1.0)[:3]
    count = torch.arange(start, stop, step, device="meta").numel()
    return torch.arange(count, dtype=torch.float64, **options).mul_(step).add_(start).to(dtype or torch.float32)


@rule(aten.linspace.default)
def _even_points(start: float, end: float, steps: int, *, dtype: Any = None, **options: Any) -> Tensor:
    """start + n * ((end - start) / (steps - 1)) in float64, and the end itself."""
    numbers = torch.arange(steps, dtype=torch.float64, **options)
    points = numbers.mul_((end - start) / max(steps - 1, 1)).add_(start)
    if steps > 1:
        points[-1] = end
    return points.to(dtype or torch.float32)

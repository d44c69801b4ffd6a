"""Rules for operators that multiply and add: products, convolutions, norms, sums, pooling, softmax and activations."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import activations, normalization, pools, reductions
from .convolution import Geometry, convolution, input_gradient, pair, weight_gradient
from .methods import matmul
from .reductions import all_dims, grid_sum, square_root
from .rules import Rules, aten, in_place

RULES = Rules()

# Products of matrices


def scaled(x: Tensor, factor: float) -> Tensor:
    """The product with a factor, in place, unless that is 1."""
    return x if factor == 1 else x.mul_(factor)


RULES |= {
    aten.mm.default: matmul,
    aten.bmm.default: matmul,
    aten.mv.default: lambda a, b: matmul(a, b.unsqueeze(1)).squeeze(1),
    aten.dot.default: lambda a, b: matmul(a.unsqueeze(0), b.unsqueeze(1)).view(()),
}


@RULES.of(aten.addmm.default, aten.baddbmm.default)
def _added_product(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = scaled(matmul(a, b), alpha)
    if beta == 0:
        return product
    return product.add_(c if beta == 1 else c * beta)


# Convolutions


def _geometry(
    weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Geometry:
    if weight.dim() == 3:
        return Geometry((1, weight.shape[2]), (1, stride[0]), (0, padding[0]), (1, dilation[0]), groups)
    return Geometry(pair(weight.shape[2:]), pair(stride), pair(padding), pair(dilation), groups)


def _images(x: Tensor) -> Tensor:
    """Of one dimension as images of one row."""
    if x.dim() not in (3, 4):
        raise UserError("portable arithmetic: a convolution over three dimensions has no rule; use precision: float32")
    return x if x.dim() == 4 else x.unsqueeze(2)


@RULES.of(aten.convolution.default)
def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    shape = _geometry(weight, stride, padding, dilation, groups)
    images, kernels = _images(x), _images(weight)
    if transposed:
        extra = (0, *output_padding) if x.dim() == 3 else output_padding
        sizes = zip(images.shape[2:], shape.stride, shape.padding, shape.dilation, shape.kernel, extra, strict=True)
        height, width = ((n - 1) * s - 2 * p + d * (k - 1) + e + 1 for n, s, p, d, k, e in sizes)
        result = input_gradient(images, kernels, (height, width), shape)
        result = result if bias is None else result.add_(bias.view(-1, 1, 1))
    else:
        result = convolution(images, kernels, bias, shape)
    return result if x.dim() == 4 else result.squeeze(2)


@RULES.of(aten.convolution_backward.default)
def _convolution_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[int] | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int, needed: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    shape = _geometry(weight, stride, padding, dilation, groups)
    out, images, kernels = _images(gradient), _images(x), _images(weight)
    of_input = of_weight = None
    if needed[0] and transposed:
        of_input = convolution(out, kernels, None, shape).view(x.shape)
    elif needed[0]:
        of_input = input_gradient(out, kernels, (images.shape[2], images.shape[3]), shape).view(x.shape)
    if needed[1]:
        of_weight = weight_gradient(*((images, out) if transposed else (out, images)), shape).view(weight.shape)
    return of_input, of_weight, grid_sum(out, (0, 2, 3)).float() if needed[2] else None


# Norms

RULES |= {
    aten.native_batch_norm.default: normalization.batch_norm,
    aten.native_layer_norm.default: normalization.layer_norm,
    aten.native_layer_norm_backward.default: normalization.layer_norm_gradient,
    aten.native_group_norm.default: normalization.group_norm,
    aten.native_group_norm_backward.default: normalization.group_norm_gradient,
    # cuDNN's give a buffer of its own besides, and take their arguments in another order.
    aten.cudnn_batch_norm.default: lambda x, *args: (
        *normalization.batch_norm(x, *args), x.new_empty(0, dtype=torch.uint8)
    ),
    aten.cudnn_batch_norm_backward.default: lambda x, g, weight, mean, var, middle, deviation, *_:
        normalization.batch_norm_gradient(g, x, weight, middle, deviation, True, [True] * 3),
}  # fmt: skip


@RULES.of(aten.native_batch_norm_backward.default)
def _batch_norm_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    middle: Tensor, deviation: Tensor, training: bool, eps: float, needed: list[bool],
) -> normalization.Gradients:  # fmt: skip
    if not training and running_mean is not None and running_var is not None:
        middle, deviation = running_mean, normalization.inverse_std(running_var, eps)
    return normalization.batch_norm_gradient(gradient, x, weight, middle, deviation, training, needed)


# Sums


@RULES.of(aten.sum.default, aten.sum.dim_IntList)
def _sum(x: Tensor, dims: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if x.is_floating_point() or (dtype is not None and dtype.is_floating_point):
        dtype, x = dtype or x.dtype, x if x.is_floating_point() else x.float()
        return reductions.total(x, all_dims(x, dims), keepdim).to(dtype)
    return torch.sum(x, all_dims(x, dims), keepdim, dtype=dtype)


@RULES.of(aten.mean.default, aten.mean.dim)
def _mean(x: Tensor, dims: list[int] | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    over_dims = all_dims(x, dims)
    found = reductions.over(reductions.total(x, over_dims, keepdim), reductions.count_of(x, over_dims))
    return found.to(dtype or x.dtype)


@RULES.of(aten.var_mean.correction)
def _variance_mean(x: Tensor, dims: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    return reductions.variance(x, all_dims(x, dims), 1 if correction is None else correction, keepdim)


RULES[aten.var.correction] = lambda *args, **options: _variance_mean(*args, **options)[0]
RULES[aten.std.correction] = lambda *args, **options: square_root(_variance_mean(*args, **options)[0])


@RULES.of(aten.linalg_vector_norm.default)
def vector_norm(x: Tensor, order: float = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The norm of order 1, 2 or infinity."""
    x, dims = x.to(dtype or x.dtype), all_dims(x, dims)
    if order == 2:
        return reductions.norm(x, dims, keepdim)
    if order == 1:
        return grid_sum(x.abs(), dims, keepdim).float()
    if order == float("inf"):
        return x.abs().amax(dims, keepdim)
    raise UserError(f"portable arithmetic: a norm of order {order}; there are 1, 2 and inf")


@RULES.of(aten.cumsum.default)
def _cumulative_sum(x: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    if x.is_floating_point():
        return reductions.on_grid(x, all_dims(x, dim)).cumsum_(dim).to(dtype or x.dtype)
    # Sums of integers, whatever the requested dtype: exact below 2**53.
    return x.cumsum(dim, dtype=torch.int64).to(dtype or torch.int64)


def _scattered(function: Callable[[Tensor, Tensor], Tensor], zeros: Tensor, values: Tensor) -> Tensor:
    """Adds values, over one grid for all, in float64 by a function (zeros, values) -> sums; float32."""
    on_grid = reductions.on_grid(values, all_dims(values)) if values.numel() else values.double()
    return function(zeros.double(), on_grid).float()


def _index_put(x: Tensor, indices: Any, values: Tensor, accumulate: bool = False, unsafe: bool = False) -> Tensor:
    if not accumulate or not x.is_floating_point():
        return aten.index_put.default(x, indices, values, accumulate)
    return x + _scattered(lambda z, v: aten.index_put_.default(z, indices, v, True), torch.zeros_like(x), values)


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    return x + _scattered(lambda z, v: z.index_add_(dim, index, v), torch.zeros_like(x), scaled(source.clone(), alpha))


def _scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    return x + _scattered(lambda z, v: z.scatter_add_(dim, index, v), torch.zeros_like(x), source)


for _name, _function in (("index_put", _index_put), ("index_add", _index_add), ("scatter_add", _scatter_add)):
    RULES.both(_name, _function)
RULES[aten._index_put_impl_.default] = in_place(_index_put)


@RULES.of(aten.embedding_dense_backward.default)
def _embedding_gradient(gradient: Tensor, index: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    if by_frequency:
        raise UserError("portable arithmetic: an embedding with scale_grad_by_freq has no rule; leave the option out")
    flat, where = gradient.reshape(-1, gradient.shape[-1]), index.flatten()
    flat = flat.masked_fill((where == padding).unsqueeze(1), 0.0)
    return _scattered(lambda z, v: z.index_add_(0, where, v), gradient.new_zeros(rows, flat.shape[1]), flat)


# Pooling

RULES |= {
    aten.max_pool2d_with_indices_backward.default: pools.max_pool_gradient,
    aten.avg_pool2d.default: pools.average_pool,
    aten.avg_pool2d_backward.default: pools.average_pool_gradient,
    aten._adaptive_avg_pool2d.default: pools.adaptive_average_pool,
    aten._adaptive_avg_pool2d_backward.default: pools.adaptive_average_pool_gradient,
    aten.upsample_nearest2d.default: pools.nearest_upsample,
    aten.upsample_nearest2d_backward.default: pools.nearest_upsample_gradient,
}
for _kind in ("reflection", "replication"):
    _rule = partial(pools.pad_gradient, getattr(aten, f"{_kind}_pad1d").default)
    RULES.of(*(getattr(aten, f"{_kind}_pad{dims}d_backward").default for dims in (1, 2, 3)))(_rule)

# Softmax, losses, attention

RULES |= {
    aten._softmax.default: lambda x, dim, half_to_float: activations.softmax(x, dim),
    aten._safe_softmax.default: activations.safe_softmax,
    aten._softmax_backward_data.default: lambda g, y, dim, dtype: activations.softmax_gradient(g, y, dim),
    aten._log_softmax.default: lambda x, dim, half_to_float: activations.log_softmax(x, dim),
    aten._log_softmax_backward_data.default: lambda g, y, dim, dtype: activations.log_softmax_gradient(g, y, dim),
    aten.nll_loss_forward.default: activations.nll_loss,
    aten.nll_loss_backward.default: activations.nll_loss_gradient,
    aten.binary_cross_entropy_with_logits.default: activations.binary_cross_entropy,
}

# Attention of modules that call torch's own, as they do on a CPU; `mode.attention` has the others'.


@RULES.of(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *_, out, _ = _attended(query, key, value, is_causal, attn_mask, scale)
    return out.view(*query.shape[:-1], value.shape[-1]), out.new_zeros(query.shape[:-1])


@RULES.of(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, unused: Tensor, dropout: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    flat, factor, _, weights = _attended(query, key, value, is_causal, attn_mask, scale)
    found = activations.attention_gradient(_flat(gradient), *flat, weights, factor)
    return found[0].view(query.shape), found[1].view(key.shape), found[2].view(value.shape)


def _flat(x: Tensor) -> Tensor:
    """Batches and heads as one dimension."""
    return x.reshape(-1, *x.shape[-2:])


def _attended(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[tuple[Tensor, Tensor, Tensor], float, Tensor, Tensor]:
    """Flat query, key and value, the factor of their scores, the output and the softmax."""
    shape = (*query.shape[:-1], key.shape[-2])
    if is_causal:
        mask = torch.full(shape[-2:], -math.inf, device=query.device).triu(1)
    elif mask is not None and mask.dim() > 2:  # of floats: torch has made them of booleans
        mask = _flat(mask.expand(shape))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    flat = (_flat(query), _flat(key), _flat(value))
    return flat, factor, *activations.attention(*flat, factor, mask)


@RULES.of(aten.div.Tensor_mode)
def _rounded_quotient(x: Tensor, y: Any, *, rounding_mode: str | None) -> Tensor:
    if not x.is_floating_point():
        return torch.div(x, y, rounding_mode=rounding_mode)
    y = y.to(x) if isinstance(y, Tensor) else torch.full((), y, dtype=x.dtype, device=x.device)
    if rounding_mode == "floor":  # float32's quotient of 1 by 0.1 is 10
        return torch.div(x.double(), y.double()).floor_().to(x.dtype)
    return torch.div(x, y) if rounding_mode is None else torch.div(x, y).trunc_()

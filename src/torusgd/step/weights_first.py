"""A layer's weight gradient before its input gradient, so that it leaves for the other ranks at once.

Nothing but the layer below waits for an input gradient, while a weight gradient has a network to cross: Das et al.
(arXiv 1602.06709) compute it first. Each gradient comes from the kernel that torch takes, with the same bits.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Context = Callable[[], AbstractContextManager[object]]
# Of weight and bias, from a layer's output gradient, its input, its weight, and whether it has a bias.
_Gradients = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


class WeightsFirst(TorchFunctionMode):
    """In this context `linear` and `conv2d` make two nodes, on a CPU, with autocast or without.

    Calls stay as they are if there is no order to choose, since one of the two gradients is not needed, or if torch
    takes another kernel: an input of more or less dimensions, padding by a word.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return {F.linear: _linear, F.conv2d: _convolution}.get(func, func)(*args, **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dim() != 2 or not _has_two_gradients(x, weight):
        return F.linear(x, weight, bias)
    return _two_nodes(F.linear, _gradients_of_linear, x, weight, bias)


def _convolution(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    how = (stride, padding, dilation)
    if x.dim() != 4 or isinstance(padding, str) or not _has_two_gradients(x, weight):
        return F.conv2d(x, weight, bias, *how, groups)
    stride, padding, dilation = ([each, each] if isinstance(each, int) else list(each) for each in how)
    layer = partial(F.conv2d, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return _two_nodes(layer, partial(_gradients_of_convolution, (stride, padding, dilation), groups), x, weight, bias)


def _has_two_gradients(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad


def _two_nodes(
    layer: Callable[..., Tensor], gradients: _Gradients, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    # torch computes both gradients in one node of its graph, the input's first, and hands them on together. Here a
    # layer has two nodes: torch's own, whose weights need no gradient, and after it one for the weights, which backward
    # therefore reaches first. torch runs the node of a parameter before all others that are ready, so the reducer has
    # the gradient before the input's is begun.
    # The dtype is what autocast would choose; the weight's gradient is cast back by its own node, not by one of torch's
    # that would have to wait for its turn.
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    x, used = x.to(dtype), weight.detach().to(dtype)
    out = layer(x, used, None if bias is None else bias.detach().to(dtype))
    return _WeightNode.apply(out, x.detach(), used, weight, bias, gradients)


class _WeightNode(Function):
    """Leaves a layer's output as it is; backward computes the gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, used: Tensor, weight: Tensor, bias: Tensor | None, gradients: _Gradients
    ) -> Tensor:
        ctx.mark_dirty(out)  # else what comes back is a view, which a ReLU may not change in place
        ctx.save_for_backward(x, used)
        ctx.gradients, ctx.dtype, ctx.has_bias = gradients, weight.dtype, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        of_weight, of_bias = ctx.gradients(out, *ctx.saved_tensors, ctx.has_bias)
        of_bias = None if of_bias is None else of_bias.to(ctx.dtype)
        return out, None, None, of_weight.to(ctx.dtype), of_bias, None


def _gradients_of_linear(out: Tensor, x: Tensor, weight: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    return out.t().mm(x), out.sum(0) if has_bias else None


def _gradients_of_convolution(
    how: tuple[list[int], list[int], list[int]], groups: int, out: Tensor, x: Tensor, weight: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    shape = [weight.shape[0]] if has_bias else None
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        out, x, weight, shape, *how, False, [0, 0], groups, [False, True, has_bias]
    )
    return of_weight, of_bias

"""Activations and their gradients, by the arguments of ATen's operators.

They are float64 formulas rounded once, or single float32 operations.
"""

import torch
from torch import Tensor

from .functions import elementwise, erf64, exp64, expm1_64, log64, sigmoid, sigmoid64, tanh64
from .reductions import over

ROOT_HALF = 0.7071067811865476
_DENSITY = 0.3989422804014327
"""1 / sqrt(2 pi)"""
_TANH_SCALE = 0.7978845608028654
"""sqrt(2 / pi)"""
_TANH_CUBE = 0.044715


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * (erf(x * sqrt(1/2)) + 1) / 2, or its approximation by tanh."""
    return elementwise(_gelu_by_tanh if approximate == "tanh" else _gelu, x)


def gelu_gradient(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`'s input."""
    return elementwise(_gelu_by_tanh_gradient if approximate == "tanh" else _gelu_gradient, x, gradient)


def _gelu(x: Tensor) -> Tensor:
    return erf64(x * ROOT_HALF).add_(1.0).mul_(0.5).mul_(x)


def _gelu_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    share = erf64(x * ROOT_HALF).add_(1.0).mul_(0.5)
    density = exp64((x * x).mul_(-0.5)).mul_(_DENSITY)
    return share.add_(density.mul_(x)).mul_(gradient)


def _bent(x: Tensor) -> Tensor:
    return tanh64((x * x).mul_(_TANH_CUBE).add_(1.0).mul_(x).mul_(_TANH_SCALE))


def _gelu_by_tanh(x: Tensor) -> Tensor:
    return _bent(x).add_(1.0).mul_(0.5).mul_(x)


def _gelu_by_tanh_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    bent = _bent(x)
    slope = (x * x).mul_(3 * _TANH_CUBE).add_(1.0).mul_(_TANH_SCALE)
    inner = (1.0 - bent * bent).mul_(0.5).mul_(x).mul_(slope)
    return bent.add_(1.0).mul_(0.5).add_(inner).mul_(gradient)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return elementwise(lambda x: sigmoid64(x).mul_(x), x)


def silu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """g * s * (1 + x * (1 - s)) with s = sigmoid(x)."""

    def compute(x: Tensor, gradient: Tensor) -> Tensor:
        share = sigmoid64(x)
        return (1.0 - share).mul_(x).add_(1.0).mul_(share).mul_(gradient)

    return elementwise(compute, x, gradient)


def sigmoid_gradient(gradient: Tensor, result: Tensor) -> Tensor:
    """g * (1 - y) * y."""
    return gradient * (1.0 - result) * result


def tanh_gradient(gradient: Tensor, result: Tensor) -> Tensor:
    """g * (1 - y * y)."""
    return gradient * (1.0 - result * result)


def hardsigmoid(x: Tensor) -> Tensor:
    """clamp(x + 3, 0, 6) / 6."""
    return over((x + 3.0).clamp_(0.0, 6.0), 6.0)


def hardsigmoid_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """g / 6 for x within (-3, 3)."""
    return over(gradient, 6.0).masked_fill_((x <= -3) | (x >= 3), 0.0)


def hardswish(x: Tensor) -> Tensor:
    """(x * clamp(x + 3, 0, 6)) / 6."""
    return over((x + 3.0).clamp_(0.0, 6.0).mul_(x), 6.0)


def hardswish_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """g * (x / 3 + 1/2) for x within (-3, 3), 0 below and g above it."""
    inside = over(x, 3.0).add_(0.5).mul_(gradient)
    return torch.where(x >= 3, gradient, inside.masked_fill_(x <= -3, 0.0))


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """x, or x * slope where it is not above 0."""
    return torch.where(x > 0, x, x * slope)


def leaky_relu_gradient(gradient: Tensor, x: Tensor, slope: float, is_result: bool) -> Tensor:
    """g, or g * slope; x and the result have the same sign."""
    return torch.where(x > 0, gradient, gradient * slope)


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    """scale * x above 0, else scale * alpha * (e**(x * input_scale) - 1)."""
    below = elementwise(lambda x: expm1_64(x.mul_(input_scale)).mul_(alpha * scale), x)
    return torch.where(x > 0, x * scale, below)


def elu_gradient(
    gradient: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    """g * scale above 0, else g * (y + alpha * scale) * input_scale, with the result y."""
    below = (x if is_result else elu(x, alpha, scale, input_scale)) + alpha * scale
    return torch.where(x > 0, gradient * scale, below.mul_(gradient).mul_(input_scale))


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """ln(1 + e**(beta * x)) / beta, or x above the threshold."""
    return torch.where(x * beta > threshold, x, elementwise(lambda x: over(softplus64(x * beta), beta), x))


def softplus_gradient(gradient: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """g * sigmoid(beta * x), or g above the threshold."""
    return torch.where(x * beta > threshold, gradient, sigmoid(x * beta).mul_(gradient))


def softplus64(x: Tensor) -> Tensor:
    """ln(1 + e**x) of float64 values: max(x, 0) + ln(1 + e**-|x|)."""
    return x.clamp(min=0.0).add_(log64(exp64(x.abs().neg_()).add_(1.0)))

"""Activations, softmax and losses with their gradients, by the arguments of ATen's operators.

They are float64 formulas rounded once, or single float32 operations. Of softmax, with m the maximum and d = x - m, t is
the sum of float32(e**d) over its grid; softmax is float32(e**d) / t and its logarithm d - ln(t), both in float64 and
then rounded.
"""

import torch
from torch import Tensor

from .functions import elementwise, erf64, exp, exp64, expm1_64, log64, sigmoid64, tanh64
from .methods import matmul
from .reductions import all_dims, grid_sum, over

ROOT_HALF = 0.7071067811865476
_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)
_TANH_SCALE = 0.7978845608028654  # sqrt(2 / pi)
_TANH_CUBE = 0.044715


def _bent(x: Tensor, is_bent: bool) -> Tensor:
    """erf(x * sqrt(1/2)), or the tanh that approximates it."""
    if is_bent:
        return tanh64((x * x).mul_(_TANH_CUBE).add_(1.0).mul_(x).mul_(_TANH_SCALE))
    return erf64(x * ROOT_HALF)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * (erf(x * sqrt(1/2)) + 1) / 2, or its approximation by tanh."""
    return elementwise(lambda x: _bent(x, approximate == "tanh").add_(1.0).mul_(0.5).mul_(x), x)


def gelu_gradient(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    """The gradient of `gelu`'s input."""

    def compute(x: Tensor, gradient: Tensor) -> Tensor:
        bent = _bent(x, approximate == "tanh")
        if approximate == "tanh":
            slope = (x * x).mul_(3 * _TANH_CUBE).add_(1.0).mul_(_TANH_SCALE)
            inner = (1.0 - bent * bent).mul_(0.5).mul_(x).mul_(slope)
        else:
            inner = exp64((x * x).mul_(-0.5)).mul_(_DENSITY).mul_(x)
        return bent.add_(1.0).mul_(0.5).add_(inner).mul_(gradient)

    return elementwise(compute, x, gradient)


def silu_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """g * s * (1 + x * (1 - s)) with s = sigmoid(x)."""

    def compute(x: Tensor, gradient: Tensor) -> Tensor:
        share = sigmoid64(x)
        return (1.0 - share).mul_(x).add_(1.0).mul_(share).mul_(gradient)

    return elementwise(compute, x, gradient)


def hardswish_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """g * (x / 3 + 1/2) for x within (-3, 3), 0 below and g above it."""
    return torch.where(x >= 3, gradient, over(x, 3.0).add_(0.5).mul_(gradient).masked_fill_(x <= -3, 0.0))


def elu(x: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Tensor:
    """scale * x above 0, else scale * alpha * (e**(x * input_scale) - 1)."""
    return torch.where(x > 0, x * scale, elementwise(lambda x: expm1_64(x * input_scale).mul_(alpha * scale), x))


def elu_gradient(
    gradient: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor
) -> Tensor:
    """g * scale above 0, else g * (y + alpha * scale) * input_scale, with the result y."""
    below = (x if is_result else elu(x, alpha, scale, input_scale)) + alpha * scale
    return torch.where(x > 0, gradient * scale, below.mul_(gradient).mul_(input_scale))


def softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    """ln(1 + e**(beta * x)) / beta, or x above the threshold."""
    return torch.where(x * beta > threshold, x, elementwise(lambda x: over(softplus64(x * beta), beta), x))


def softplus64(x: Tensor) -> Tensor:
    """ln(1 + e**x) of float64 values: max(x, 0) + ln(1 + e**-|x|)."""
    return x.clamp(min=0.0).add_(log64(exp64(x.abs().neg_()).add_(1.0)))


_MEAN, _SUM = 1, 2  # torch's numbers of the ways to reduce a loss


def _parts(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """d, float32(e**d) and its sum t, float64, of length 1 in `dim`."""
    distance = x - x.amax(dim, keepdim=True)
    grown = exp(distance)
    return distance, grown, grid_sum(grown, all_dims(x, dim), True)


def softmax(x: Tensor, dim: int) -> Tensor:
    """e**d / t along a dimension."""
    _, grown, total = _parts(x, dim)
    return torch.div(grown.double(), total).float()


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, and zeros where all is masked."""
    return softmax(x, dim).masked_fill_((x == -torch.inf).all(dim, keepdim=True), 0.0)


def softmax_gradient(gradient: Tensor, result: Tensor, dim: int) -> Tensor:
    """g * y - y * sum(g * y)."""
    product = gradient * result
    return product - result * grid_sum(product, all_dims(product, dim), True).float()


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of q k' * scale + mask over keys, times v, and that softmax; of matrices [B, M, K]."""
    scores = matmul(query, key.mT).mul_(scale)
    weights = softmax(scores, -1) if mask is None else safe_softmax(scores + mask, -1)
    return matmul(weights, value), weights


def attention_gradient(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value, from the softmax."""
    of_scores = softmax_gradient(matmul(gradient, value.mT), weights, -1).mul_(scale)
    return matmul(of_scores, key), matmul(of_scores.mT, query), matmul(weights.mT, gradient)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """d - ln(t) along a dimension."""
    distance, _, total = _parts(x, dim)
    return distance.double().sub_(log64(total)).float()


def log_softmax_gradient(gradient: Tensor, result: Tensor, dim: int) -> Tensor:
    """g - e**y * sum(g)."""
    return gradient - exp(result) * grid_sum(gradient, all_dims(gradient, dim), True).float()


def nll_loss(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor]:
    """The loss of log-probabilities [N, classes] or [classes], and the sum of the targets' weights."""
    labels, weights = _labels(scores, target, weight, ignored)
    picked = scores.gather(-1, labels).squeeze(-1)
    # A score of -inf times a weight of 0 would be NaN.
    losses = picked.neg().mul_(weights).masked_fill_(weights == 0, 0.0)
    if reduction not in (_MEAN, _SUM):
        return losses, scores.new_zeros(())
    dims = all_dims(losses)
    total, count = grid_sum(losses, dims), grid_sum(weights, dims)
    return (torch.div(total, count) if reduction == _MEAN else total).float(), count.float()


def nll_loss_gradient(
    gradient: Tensor, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
) -> Tensor:
    """-weight * g, divided by the weights' sum for a mean, at each target."""
    labels, weights = _labels(scores, target, weight, ignored)
    values = weights.neg().mul_(gradient)
    if reduction == _MEAN:
        values = torch.div(values, total)
    values = values.masked_fill_(weights == 0, 0.0)
    return torch.zeros_like(scores).scatter_(-1, labels, values.unsqueeze(-1))


def _labels(scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> tuple[Tensor, Tensor]:
    """Targets, of length 1 in a last dimension, and their weights; both are 0 where a target is the ignored one."""
    is_ignored = target == ignored
    labels = target.masked_fill(is_ignored, 0)
    weights = scores.new_ones(target.shape) if weight is None else weight[labels]
    return labels.unsqueeze(-1), weights.masked_fill(is_ignored, 0.0)


def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, positive: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """Of logits: (1 - t) * x + (1 + (p - 1) * t) * ln(1 + e**-x), in float64, with the weight p of positives."""

    def compute(x: Tensor, target: Tensor, *positive: Tensor) -> Tensor:
        rest = softplus64(x.neg())
        if positive:
            rest.mul_((positive[0] - 1.0).mul_(target).add_(1.0))
        return (1.0 - target).mul_(x).add_(rest)

    others = () if positive is None else (positive.expand_as(x),)
    losses = elementwise(compute, x, target, *others)
    if weight is not None:
        losses = losses * weight
    if reduction not in (_MEAN, _SUM):
        return losses
    total = grid_sum(losses, all_dims(losses))
    return (over(total, losses.numel()) if reduction == _MEAN else total).float()

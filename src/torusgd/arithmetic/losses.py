"""Softmax, its logarithm, and the losses, with their gradients.

With m the maximum and d = x - m, t is the sum of float32(e**d) over its grid; softmax is float32(e**d) / t and its
logarithm d - ln(t), both in float64 and then rounded.
"""

import torch
from torch import Tensor

from .activations import softplus64
from .contraction import matmul
from .functions import elementwise, exp, log64
from .reductions import all_dims, grid_sum, over

_MEAN, _SUM = 1, 2
"""torch's numbers of the ways to reduce a loss"""


def _parts(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """d, float32(e**d) and its sum t, float64, of length 1 in `dim`."""
    distance = x - x.amax(dim, keepdim=True)
    grown = exp(distance)
    return distance, grown, grid_sum(grown, all_dims(x, dim), True)


def softmax(x: Tensor, dim: int) -> Tensor:
    """e**d / t along a dimension."""
    _, grown, total = _parts(x, dim)
    return torch.div(grown.double(), total).float()


def softmax_gradient(gradient: Tensor, result: Tensor, dim: int) -> Tensor:
    """g * y - y * sum(g * y)."""
    product = gradient * result
    return product - result * grid_sum(product, all_dims(product, dim), True).float()


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of q k' * scale + mask over keys, times v, and that softmax; of matrices [B, M, K]."""
    scores = matmul(query, key.mT).mul_(scale)
    weights = softmax(scores if mask is None else scores + mask, -1)
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
    weights = _weights(scores, target, weight, ignored)
    picked = scores.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
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
    weights = _weights(scores, target, weight, ignored)
    values = weights.neg().mul_(gradient)
    if reduction == _MEAN:
        values = torch.div(values, total)
    values = values.masked_fill_(weights == 0, 0.0)
    return torch.zeros_like(scores).scatter_(-1, target.clamp(min=0).unsqueeze(-1), values.unsqueeze(-1))


def _weights(scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    weights = scores.new_ones(target.shape) if weight is None else weight[target.clamp(min=0)]
    return weights.masked_fill_(target == ignored, 0.0)


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

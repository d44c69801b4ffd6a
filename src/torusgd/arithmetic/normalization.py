"""Batch, layer and group norm, each with its gradients: means over grids, and single float32 operations.

    mean = sum(x) / n           d = x - mean         var = sum(d * d) / n
    std_inverse = 1 / sqrt(var + eps)                out = d * (std_inverse * weight) + bias

and, with h = d * std_inverse, the gradient of x is (g - sum(g) / n - h * (sum(g * h) / n)) * std_inverse. Sums are
`reductions.grid_sum`; means and variances are float64 quotients, rounded to float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .passes import blocks, extremes
from .reductions import count_of, grid_sum, grid_total, mean, quotient, square_root

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def inverse_std(variances: Tensor, eps: float) -> Tensor:
    """1 / sqrt(variance + eps), float32, each of the three operations rounded."""
    root = square_root(variances + eps)
    return torch.div(torch.ones_like(root), root)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and of the batch the mean and the inverse deviation of each channel (none in evaluation).

    A training pass moves the running statistics, in place.
    """
    dims = (0, *range(2, x.dim()))
    if not training and running_mean is not None and running_var is not None:
        out = _affine(x, _channels(running_mean, x), inverse_std(running_var, eps), weight, bias)
        return out, x.new_empty(0), x.new_empty(0)
    count = count_of(x, dims)
    least, most = extremes(x, dims)
    center = quotient(grid_total(x, dims, torch.maximum(most, least.neg())), count)
    # Rounding keeps order, so that the largest square is that of the least or of the largest value.
    furthest = torch.maximum(most - center, center - least)
    total = grid_total(x, dims, furthest * furthest, center).flatten()
    middle = center.flatten()
    deviation = inverse_std(quotient(total, count), eps)
    if running_mean is not None and running_var is not None:
        # With the variance over one less than the count.
        for running, new in ((running_mean, middle), (running_var, quotient(total, max(count - 1, 0)))):
            running.mul_(1 - momentum).add_(new * momentum)
    return _affine(x, center, deviation, weight, bias), middle, deviation


def _affine(x: Tensor, center: Tensor, deviation: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    factor = _channels(deviation if weight is None else deviation * weight, x)
    out = torch.empty_like(x)
    for part in blocks(x):
        block = torch.sub(x[part], center, out=out[part]).mul_(factor)
        if bias is not None:
            block.add_(_channels(bias, x))
    return out


def _channels(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


def batch_norm_gradient(
    gradient: Tensor, x: Tensor, weight: Tensor | None, middle: Tensor, deviation: Tensor, training: bool,
    needed: list[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input, weight and bias, or None; `middle`, `deviation` are the batch's (`training`) or running."""
    dims = (0, *range(2, x.dim()))
    scale = deviation if weight is None else deviation * weight
    center, factor = _channels(middle, x), _channels(deviation, x)
    products = torch.empty_like(x)
    for part in blocks(x):
        torch.sub(x[part], center, out=products[part]).mul_(factor).mul_(gradient[part])
    shift, stretch = grid_sum(gradient, dims, True), grid_sum(products, dims, True)
    result = None
    if needed[0] and not training:
        result = gradient * _channels(scale, x)
    elif needed[0]:
        result, count = products, count_of(x, dims)
        by_shift, by_stretch, last = quotient(shift, count), quotient(stretch, count), _channels(scale, x)
        for part in blocks(x):
            normal = torch.sub(x[part], center).mul_(factor).mul_(by_stretch)
            torch.sub(gradient[part], by_shift, out=result[part]).sub_(normal).mul_(last)
    return result, stretch.flatten().float() if needed[1] else None, shift.flatten().float() if needed[2] else None


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and of each row the mean and the inverse deviation, of length 1 in the last dimensions `shape`."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    middle = mean(x, dims, True)
    distance = x - middle
    deviation = inverse_std(quotient(grid_sum(distance * distance, dims, True), count_of(x, dims)), eps)
    out = distance.mul_(deviation)
    if weight is not None:
        out.mul_(weight)
    return out if bias is None else out.add_(bias), middle, deviation


def layer_norm_gradient(
    gradient: Tensor, x: Tensor, shape: Sequence[int], middle: Tensor, deviation: Tensor, weight: Tensor | None,
    bias: Tensor | None, needed: list[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input, weight and bias, as `layer_norm` has its arguments; those not needed are None."""
    normal = (x - middle).mul_(deviation)
    first = x.dim() - len(shape)
    dims, rows = tuple(range(first, x.dim())), (-1, *shape)  # a tensor of one row has no dimension of rows
    weights = grid_sum((gradient * normal).reshape(rows), (0,)).float() if needed[1] else None
    biases = grid_sum(gradient.reshape(rows), (0,)).float() if needed[2] else None
    if not needed[0]:
        return None, weights, biases
    return _behind(gradient if weight is None else gradient * weight, normal, deviation, dims), weights, biases


def _behind(inner: Tensor, normal: Tensor, deviation: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The gradient of x from that of h, `inner`, and h itself, `normal`, which it overwrites."""
    count = count_of(inner, dims)
    shift, stretch = grid_sum(inner, dims, True), grid_sum(inner * normal, dims, True)
    normal.mul_(quotient(stretch, count))
    return (inner - quotient(shift, count)).sub_(normal).mul_(deviation)


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the channels and pixels of each group; mean and inverse deviation are [N, groups]."""
    rows = x.reshape(len(x), groups, -1)
    out, middle, deviation = layer_norm(rows, rows.shape[2:], None, None, eps)
    out = out.view(x.shape)
    if weight is not None:
        out.mul_(_channels(weight, x))
    if bias is not None:
        out.add_(_channels(bias, x))
    return out, middle.squeeze(2), deviation.squeeze(2)


def group_norm_gradient(
    gradient: Tensor, x: Tensor, middle: Tensor, deviation: Tensor, weight: Tensor | None, n: int, c: int,
    pixels: int, groups: int, needed: list[bool],
) -> Gradients:  # fmt: skip
    """Gradients of input, weight and bias; those that are not needed are None."""
    dims, deviation = (0, *range(2, x.dim())), deviation.unsqueeze(2)
    rows = (x.reshape(len(x), groups, -1) - middle.unsqueeze(2)).mul_(deviation)
    weights = grid_sum(gradient * rows.view(x.shape), dims).float() if needed[1] else None
    biases = grid_sum(gradient, dims).float() if needed[2] else None
    if not needed[0]:
        return None, weights, biases
    inner = gradient if weight is None else gradient * _channels(weight, x)
    return _behind(inner.reshape(rows.shape), rows, deviation, (2,)).view(x.shape), weights, biases

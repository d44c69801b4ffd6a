"""Means of pools, nearest upsampling, gradients of pools and pads: gathers, and sums on the grid of image and channel.

The functions have the arguments of ATen's operators, of a batch or of one image. Torch's own maxima pass: they compare.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .convolution import Geometry, pair
from .reductions import on_grid, over
from .rules import Rule

_PIXELS = (-2, -1)


def _geometry(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Geometry:
    return Geometry(pair(kernel), pair(stride or kernel), pair(padding), dilation=(1, 1), groups=1)


def _output(x: Tensor, shape: Geometry, ceil_mode: bool) -> tuple[int, int]:
    """Pixels of the output; `ceil_mode` adds windows that begin inside of the image or its left padding."""
    if not ceil_mode:
        return shape.output(*x.shape[-2:])
    counts = []
    for size, kernel, stride, padding in zip(x.shape[-2:], shape.kernel, shape.stride, shape.padding, strict=True):
        count = -(-(size + 2 * padding - kernel) // stride) + 1
        counts.append(count - 1 if (count - 1) * stride >= size + padding else count)
    return counts[0], counts[1]


def _padded(x: Tensor, shape: Geometry, output: tuple[int, int]) -> Tensor:
    """Images with their padding, and to the right and below as much as the last windows reach."""
    (top, left), sizes = shape.padding, zip(output, shape.stride, shape.kernel, strict=True)
    height, width = ((n - 1) * s + k for n, s, k in sizes)
    below, right = max(height - x.shape[-2] - top, top), max(width - x.shape[-1] - left, left)
    return pad(x, (left, right, top, below))


def max_pool_gradient(
    gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, indices: Tensor
) -> Tensor:
    """The gradient of each maximum goes to its pixel; those of one pixel are added."""
    total = torch.zeros(*x.shape[:-2], x.shape[-2] * x.shape[-1], dtype=torch.float64, device=x.device)
    total.scatter_add_(-1, indices.flatten(-2), on_grid(gradient, _PIXELS).flatten(-2))
    return torch.empty_like(x).copy_(total.view(x.shape))


def average_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, with_padding: bool = True, divisor: int | None = None,
) -> Tensor:  # fmt: skip
    """The means of windows; see torch's `avg_pool2d` for what the divisor counts."""
    shape = _geometry(kernel, stride, padding)
    output = _output(x, shape, ceil_mode)
    padded = _padded(on_grid(x, _PIXELS), shape, output)
    total = reduce(torch.add, (shape.at(padded, tap, output) for tap in shape.taps()))
    return torch.div(total, _counts(x, shape, output, with_padding, divisor)).float()


def _counts(x: Tensor, shape: Geometry, output: tuple[int, int], with_padding: bool, divisor: int | None) -> Tensor:
    """What the sum of each window is divided by: float64 [H', W'] or a number."""
    if divisor is not None:
        return torch.full((), float(divisor), dtype=torch.float64, device=x.device)
    spans = []
    for n, size, k, s, p in zip(output, x.shape[-2:], shape.kernel, shape.stride, shape.padding, strict=True):
        edges = [(begin, min(begin + k, size + p)) for begin in range(-p, n * s - p, s)]
        inside = [stop - begin if with_padding else min(stop, size) - max(begin, 0) for begin, stop in edges]
        spans.append(_vector(inside, x.device))
    return spans[0].unsqueeze(1) * spans[1]


def _vector(numbers: Sequence[int], device: torch.device) -> Tensor:
    """As float64, made on the device: a CUDA graph can't wait for what the host has."""
    found = torch.full((len(numbers),), float(numbers[0]), dtype=torch.float64, device=device)
    for place, number in enumerate(numbers):
        if number != numbers[0]:
            found[place].fill_(number)
    return found


def average_pool_gradient(
    gradient: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    ceil_mode: bool, with_padding: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    """Each output's gradient, divided, goes to all pixels of its window."""
    shape = _geometry(kernel, stride, padding)
    output = (gradient.shape[-2], gradient.shape[-1])
    parts = on_grid(torch.div(gradient, _counts(x, shape, output, with_padding, divisor).float()), _PIXELS)
    padded = _padded(torch.zeros_like(x, dtype=torch.float64), shape, output)
    for tap in shape.taps():
        shape.at(padded, tap, output).add_(parts)
    (top, left), (height, width) = shape.padding, x.shape[-2:]
    return torch.empty_like(x).copy_(padded[..., top : top + height, left : left + width])


def _spans(size: int, outputs: int) -> list[tuple[int, int]]:
    """First pixel and stop of the windows of an adaptive pooling."""
    return [(n * size // outputs, -(-(n + 1) * size // outputs)) for n in range(outputs)]


def adaptive_average_pool(x: Tensor, output: Sequence[int]) -> Tensor:
    """The means of windows that cover the image."""
    values = on_grid(x, _PIXELS)
    rows = [values[..., a:b, :].sum(-2) for a, b in _spans(x.shape[-2], output[0])]
    spans = _spans(x.shape[-1], output[1])
    total = torch.stack([torch.stack([row[..., a:b].sum(-1) for a, b in spans], -1) for row in rows], -2)
    return torch.div(total, _adaptive_counts(x, output)).float()


def _adaptive_counts(x: Tensor, output: Sequence[int]) -> Tensor:
    heights, widths = (
        _vector([b - a for a, b in _spans(size, count)], x.device)
        for size, count in zip(x.shape[-2:], output, strict=True)
    )
    return heights.unsqueeze(1) * widths


def adaptive_average_pool_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Each output's gradient, divided, goes to all pixels of its window."""
    parts = on_grid(torch.div(gradient, _adaptive_counts(x, gradient.shape[-2:]).float()), _PIXELS)
    total = torch.zeros_like(x, dtype=torch.float64)
    for row, (a, b) in enumerate(_spans(x.shape[-2], gradient.shape[-2])):
        for column, (c, d) in enumerate(_spans(x.shape[-1], gradient.shape[-1])):
            total[..., a:b, c:d].add_(parts[..., row : row + 1, column : column + 1])
    return total.float()


def nearest_upsample(x: Tensor, output: Sequence[int], *scales: float | None) -> Tensor:
    """Each pixel takes that of the input at floor(n * input / output); or n / scale factor, as torch does on a CPU."""
    rows, columns = map(_sources, x.shape[2:], output, scales or (None, None), (x, x))
    return x[:, :, rows.unsqueeze(1), columns]


def nearest_upsample_gradient(gradient: Tensor, output: Any, shape: Sequence[int], *scales: float | None) -> Tensor:
    """The gradients of the pixels that took one of the input, [N, C, H, W] by its shape, are added."""
    size = shape[2:]
    rows, columns = map(_sources, size, gradient.shape[2:], scales or (None, None), (gradient, gradient))
    values = on_grid(gradient, _PIXELS)
    total = values.new_zeros(*gradient.shape[:2], size[0], gradient.shape[3]).index_add_(2, rows, values)
    return total.new_zeros(*gradient.shape[:2], *size).index_add_(3, columns, total).float()


def _sources(size: int, count: int, scale: float | None, x: Tensor) -> Tensor:
    places = torch.arange(count, device=x.device)
    if scale is None or count in (size, 2 * size):
        return places * size // count
    return over(places.double(), scale).long().clamp_(max=size - 1)


def pad_gradient(padded: Rule, gradient: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """The gradients of the pixels that took one of the input are added; `padded` is the pad of rows, [1, 1, W]."""
    dims = range(-1, -1 - len(padding) // 2, -1)
    total = on_grid(gradient, tuple(dims))
    for number, dim in enumerate(dims):
        places = torch.arange(x.shape[dim], dtype=torch.float64, device=x.device).view(1, 1, -1)
        sources = padded(places, padding[2 * number : 2 * number + 2]).long().flatten()
        shape = [x.shape[dim] if other == dim % x.dim() else size for other, size in enumerate(total.shape)]
        total = total.new_zeros(shape).index_add_(dim, sources, total)
    return total.float()

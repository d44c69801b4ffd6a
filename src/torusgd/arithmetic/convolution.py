"""Convolutions as exact matrix products over windows, forward and for both gradients.

Scales are taken over what a product sums (`contraction`), as far as windows allow; each role has its own integers:

    product            left operand, one scale for           right operand, one scale for
    output             weights: each output channel          input: each image and group
    input's gradient   weights: each input channel           output's gradient: each image and group
    weights' gradient  output's gradient: each its channel   input: each channel

A convolution with one input and one output channel in each group (depthwise) is no matrix product: its terms are
multiplied and added in float64, where all of them are exact. A library's convolution may take Winograd's way, which is
not exact, so none takes part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from .contraction import quantised
from .methods import MOST_TERMS, Method, Operand, exactly, multiply

_WINDOW_BYTES = 1 << 23
"""of the windows of the images that are multiplied at a time: about a core's share of the last cache"""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a two-dimensional convolution, each (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Pixels of the output of an image."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        vertical, horizontal = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return vertical, horizontal

    @property
    def is_pointwise(self) -> bool:
        """Whether each window is one pixel, and each pixel one window."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    def taps(self) -> list[tuple[int, int]]:
        """Offset of each element of the kernel in a padded image, in row order."""
        vertical, horizontal = self.kernel
        return [(y * self.dilation[0], x * self.dilation[1]) for y in range(vertical) for x in range(horizontal)]

    def at(self, padded: Tensor, tap: tuple[int, int], output: tuple[int, int]) -> Tensor:
        """The pixels of padded images [..., H, W] that one element of the kernel meets: a view [..., H', W']."""
        (y, x), (down, right) = tap, self.stride
        stop_y, stop_x = y + down * (output[0] - 1) + 1, x + right * (output[1] - 1) + 1
        return padded[..., y:stop_y:down, x:stop_x:right]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Geometry) -> Tensor:
    """The output of a convolution.

    Args:
        x: float32 [N, C, H, W].
        weight: float32 [O, C / groups, *kernel].
        bias: float32 [O], added to the rounded product.
        shape: The other sizes.

    Returns:
        float32 [N, O, H', W'], in the memory format of the input.
    """
    output = shape.output(*x.shape[2:])
    result = torch.empty(
        x.shape[0], weight.shape[0], *output, device=x.device, memory_format=_format(x, weight)
    )  # fmt: skip
    if result.numel() == 0:
        return result
    images, image_units = quantised(x.unflatten(1, (shape.groups, -1)), (2, 3, 4))
    weights, weight_units = quantised(weight, (1, 2, 3))
    if _is_depthwise(weight, shape):
        padded = _padded(images.squeeze(2), shape).double()
        total = _taps_sum(padded, weights.double(), shape, output)
        result.copy_(total.mul_(image_units.view(len(x), -1, 1, 1)).mul_(weight_units.view(1, -1, 1, 1)))
    else:
        units = image_units.view(len(x), -1)

        def compute(method: Method) -> Tensor:
            kernels = tuple(_rows(part, shape) for part in method.prepare(weights))
            parts = _channels_last(method, images.flatten(1, 2), shape)
            for chunk in _chunks(x, weight, output):
                windows = tuple(_windows(part[chunk], shape, output) for part in parts)
                product = multiply(method, kernels, tuple(part.transpose(-1, -2) for part in windows))
                product = product.view(shape.groups, -1, units[chunk].shape[0], output[0] * output[1])
                product.mul_(weight_units.view(shape.groups, -1, 1, 1)).mul_(units[chunk].t()[:, None, :, None])
                result[chunk].copy_(product.flatten(0, 1).unflatten(2, output).transpose(0, 1))
            return result

        exactly(compute, x.device)
    return result if bias is None else result.add_(bias.view(-1, 1, 1))


def input_gradient(gradient: Tensor, weight: Tensor, size: tuple[int, int], shape: Geometry) -> Tensor:
    """The gradient of a convolution's input, of `size` pixels, from that of its output [N, O, H', W']."""
    output, groups = (gradient.shape[2], gradient.shape[3]), shape.groups
    inputs = groups * weight.shape[1]
    result = torch.empty(len(gradient), inputs, *size, device=gradient.device, memory_format=_format(gradient, weight))
    if gradient.numel() == 0:
        return result.zero_()
    gradients, image_units = quantised(gradient.unflatten(1, (groups, -1)), (2, 3, 4))
    weights, weight_units = quantised(weight.unflatten(0, (groups, -1)), (1, 3, 4))
    height, width = (n + 2 * p for n, p in zip(size, shape.padding, strict=True))
    inside = (slice(shape.padding[0], height - shape.padding[0]), slice(shape.padding[1], width - shape.padding[1]))
    if _is_depthwise(weight, shape):
        padded = torch.zeros(len(gradient), inputs, height, width, dtype=torch.float64, device=gradient.device)
        whole, kernels = gradients.squeeze(2).double(), weights.double().flatten(0, 1).flatten(2)
        for number, tap in enumerate(shape.taps()):
            shape.at(padded, tap, output).addcmul_(whole, kernels[:, :, number, None])
        scaled = padded[:, :, *inside].mul_(image_units.view(len(gradient), -1, 1, 1))
        return result.copy_(scaled.mul_(weight_units.view(1, -1, 1, 1)))

    units = image_units.view(len(gradient), -1)

    def compute(method: Method) -> Tensor:
        kernels = tuple(part.permute(0, 3, 4, 2, 1).flatten(1, 3).contiguous() for part in method.prepare(weights))
        kernels = tuple(part[0] for part in kernels) if groups == 1 else kernels
        for chunk in _chunks(result, weight, output):
            parts = method.prepare(gradients[chunk])
            product = multiply(method, kernels, tuple(_channels_first(part) for part in parts))
            columns = product.view(groups, shape.kernel[0] * shape.kernel[1], -1, *units[chunk].shape[:1], *output)
            if shape.is_pointwise:
                total = columns[:, 0]
            else:
                total = columns.new_zeros(*columns.shape[:1], *columns.shape[2:4], height, width)
                for number, tap in enumerate(shape.taps()):
                    shape.at(total, tap, output).add_(columns[:, number])
            total = total[..., *inside].mul_(weight_units.view(groups, -1, 1, 1, 1))
            total.mul_(units[chunk].t()[:, None, :, None, None])
            result[chunk].copy_(total.flatten(0, 1).transpose(0, 1))
        return result

    return exactly(compute, gradient.device)


def weight_gradient(gradient: Tensor, x: Tensor, shape: Geometry) -> Tensor:
    """The gradient of a convolution's weights, [O, C / groups, *kernel], from that of its output and its input."""
    output, groups, channels = (gradient.shape[2], gradient.shape[3]), shape.groups, gradient.shape[1]
    size = (channels, x.shape[1] // groups, *shape.kernel)
    if gradient.numel() == 0:
        return x.new_zeros(size)
    if gradient.numel() // channels > MOST_TERMS:
        raise UserError(f"portable arithmetic: a weight's gradient sums more than {MOST_TERMS} products")
    gradients, gradient_units = quantised(gradient, (0, 2, 3))
    images, image_units = quantised(x, (0, 2, 3))
    if size[:2] == (groups, 1):
        padded, whole = _padded(images, shape).double(), gradients.double()
        sums = [(shape.at(padded, tap, output) * whole).sum((0, 2, 3)) for tap in shape.taps()]
        total = torch.stack(sums, 1).mul_(gradient_units.view(-1, 1)).mul_(image_units.view(-1, 1))
        return total.view(size).float()

    def compute(method: Method) -> Tensor:
        parts, total = _channels_last(method, images, shape), None
        for chunk in _chunks(x, torch.empty(size, device="meta"), output):
            left = method.prepare(gradients[chunk].unflatten(1, (groups, -1)))
            windows = tuple(_windows(part[chunk], shape, output) for part in parts)
            product = multiply(method, tuple(_channels_first(part) for part in left), windows)
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    total = exactly(compute, x.device).view(groups, -1, shape.kernel[0] * shape.kernel[1], size[1])
    total.mul_(gradient_units.view(groups, -1, 1, 1)).mul_(image_units.view(groups, 1, 1, -1))
    return total.flatten(0, 1).transpose(1, 2).float().reshape(size)


def _is_depthwise(weight: Tensor, shape: Geometry) -> bool:
    return weight.shape[:2] == (shape.groups, 1)


def _format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That of torch's own convolutions: channels last where the input or the weights are."""
    is_last = any(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, weight))
    return torch.channels_last if is_last else torch.contiguous_format


def _padded(images: Tensor, shape: Geometry) -> Tensor:
    vertical, horizontal = shape.padding
    return pad(images, (horizontal, horizontal, vertical, vertical)) if vertical or horizontal else images


def _taps_sum(padded: Tensor, weights: Tensor, shape: Geometry, output: tuple[int, int]) -> Tensor:
    """The sum over a depthwise kernel; a term is below 2**28, so that neither fused nor single operations round."""
    kernels = weights.flatten(1)
    total: Tensor | None = None
    for number, tap in enumerate(shape.taps()):
        pixels, factor = shape.at(padded, tap, output), kernels[:, number, None, None]
        total = pixels * factor if total is None else total.addcmul_(pixels, factor)
    assert total is not None
    return total


def _rows(weights: Tensor, shape: Geometry) -> Tensor:
    """Weights [O, C, *kernel] as rows in the order of a window: [O, kernel * C], or with several groups in front."""
    rows = weights.permute(0, 2, 3, 1).reshape(len(weights), -1)
    return rows if shape.groups == 1 else rows.unflatten(0, (shape.groups, -1))


def _channels_last(method: Method, images: Tensor, shape: Geometry) -> Operand:
    """Padded images of integers as a method takes them: [N, H, W, C] without gaps."""
    last = images.permute(0, 2, 3, 1)
    vertical, horizontal = shape.padding
    if vertical or horizontal:
        last = pad(last, (0, 0, horizontal, horizontal, vertical, vertical))
    return tuple(part.contiguous() for part in method.prepare(last))


def _windows(images: Tensor, shape: Geometry, output: tuple[int, int]) -> Tensor:
    """Windows of padded images [N, H, W, C]: [N * H' * W', kernel * C], or with several groups in front of it."""
    count, _, _, channels = images.shape
    a_image, row, pixel, _ = images.stride()
    size = (shape.groups, count, *output, *shape.kernel, channels // shape.groups)
    (down, right), (apart_y, apart_x) = shape.stride, shape.dilation
    strides = (channels // shape.groups, a_image, row * down, pixel * right, row * apart_y, pixel * apart_x, 1)
    windows = images.as_strided(size, strides, images.storage_offset())
    rows = count * output[0] * output[1]
    return windows[0].reshape(rows, -1) if shape.groups == 1 else windows.reshape(shape.groups, rows, -1)


def _channels_first(gradients: Tensor) -> Tensor:
    """Gradients [N, groups, O, H', W'] as rows: [O, N * H' * W'], or with several groups in front."""
    rows = gradients.permute(1, 2, 0, 3, 4).reshape(*gradients.shape[1:3], -1)
    return rows[0] if len(rows) == 1 else rows


def _chunks(x: Tensor, weight: Tensor, output: tuple[int, int]) -> list[slice]:
    """Runs of images whose windows fit a cache."""
    window = x.shape[1] * weight.shape[2] * weight.shape[3]
    count = max(1, _WINDOW_BYTES // (8 * window * output[0] * output[1]))
    return [slice(begin, begin + count) for begin in range(0, len(x), count)]

"""Convolutions as exact matrix products over windows, forward and for both gradients.

Scales are taken over what a product sums (`methods`), as far as windows allow; each role has its own integers:

    product            left operand, one scale for           right operand, one scale for
    output             weights: each output channel          input: each image and group
    input's gradient   weights: each input channel           output's gradient: each image and group
    weights' gradient  output's gradient: each its channel   input: each channel

A convolution with one input and one output channel in each group (depthwise) is no matrix product: its terms are
multiplied and added in float64, where all of them are exact. A library's convolution may take Winograd's way, which is
not exact, so none takes part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UserError
from .methods import MOST_TERMS, Method, Operand, exactly, multiply, quantised
from .passes import at_a_time, joined, scaled
from .scales import amax_over, count, counts, scales

# Elements of the windows that are multiplied at a time: at 8 bits, with the product, they stay in a core's cache.
_CHUNK = 1 << 20


def pair(values: Sequence[int]) -> tuple[int, int]:
    """Vertical and horizontal, of two numbers or of one for both."""
    return values[0], values[-1]


@dataclass(frozen=True)
class Geometry:
    """Sizes of a two-dimensional convolution, each (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def around(self) -> tuple[int, int, int, int]:
        """Zeros to the left, right, above and below."""
        vertical, horizontal = self.padding
        return horizontal, horizontal, vertical, vertical

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Pixels of the output of an image."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        vertical, horizontal = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return vertical, horizontal

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
    """The output [N, O, H', W'] of x [N, C, H, W] and weights [O, C / groups, *kernel]; the bias is added last."""
    output = shape.output(*x.shape[2:])
    result = torch.empty(len(x), len(weight), *output, dtype=x.dtype, device=x.device, memory_format=_format(x, weight))
    if result.numel() == 0:
        return result
    scale, image_units = _group_scales(x, shape.groups)
    weights, weight_units = quantised(weight, (1, 2, 3))
    by_group = weight.unflatten(0, (shape.groups, -1)), weights.unflatten(0, (shape.groups, -1))
    count(lambda: counts(x, x * scale, (0, 2, 3)), lambda: counts(*by_group, (1, 3, 4)))
    if weight.shape[:2] == (shape.groups, 1):
        padded = pad(x.mul(scale).round_(), shape.around).double()
        kernels = weights.double().flatten(1)[..., None, None]
        total = torch.zeros_like(result, dtype=torch.float64)
        for number, tap in enumerate(shape.taps()):
            # A term is below 2**28, so that neither fused nor single operations round.
            total.addcmul_(shape.at(padded, tap, output), kernels[:, number])
        result.copy_(total.mul_(image_units.view(len(x), -1, 1, 1)).mul_(weight_units.view(1, -1, 1, 1)))
    else:
        windows = Windows(shape.kernel, shape.stride, shape.dilation, output)
        kernels = weights.permute(0, 2, 3, 1).reshape(shape.groups, len(weight) // shape.groups, -1).mT
        units, part = (image_units, weight_units.view(shape.groups, -1)), (windows, kernels, result.permute(0, 2, 3, 1))
        exactly(lambda method: _correlate(method, x, scale, shape.around, units, [part]), x.device)
    return result if bias is None else result.add_(bias.view(-1, 1, 1))


def input_gradient(gradient: Tensor, weight: Tensor, size: tuple[int, int], shape: Geometry) -> Tensor:
    """The gradient of a convolution's input, of `size` pixels, from that of its output [N, O, H', W']."""
    output, groups = (gradient.shape[2], gradient.shape[3]), shape.groups
    inputs = groups * weight.shape[1]
    sizes = len(gradient), inputs, *size
    result = torch.empty(sizes, dtype=gradient.dtype, device=gradient.device, memory_format=_format(gradient, weight))
    if gradient.numel() == 0:
        return result.zero_()
    scale, image_units = _group_scales(gradient, groups)
    weights, weight_units = quantised(weight.unflatten(0, (groups, -1)), (1, 3, 4))
    whole = weights.flatten(0, 1)
    count(lambda: counts(gradient, gradient * scale, (0, 2, 3)), lambda: counts(weight, whole, (1, 2, 3)))
    if weight.shape[:2] == (groups, 1):
        height, width = (n + 2 * p for n, p in zip(size, shape.padding, strict=True))
        padded = torch.zeros(len(gradient), inputs, height, width, dtype=torch.float64, device=gradient.device)
        integers, kernels = gradient.mul(scale).round_().double(), whole.double().flatten(2)
        for number, tap in enumerate(shape.taps()):
            shape.at(padded, tap, output).addcmul_(integers, kernels[:, :, number, None])
        inside = pad(padded, [-n for n in shape.around]).mul_(image_units.view(len(gradient), -1, 1, 1))
        return result.copy_(inside.mul_(weight_units.view(1, -1, 1, 1)))
    along = zip(shape.kernel, shape.stride, shape.padding, shape.dilation, size, strict=True)
    ways = [_phases(*each) for each in along]
    (before, after), (left, right) = (_reach(phases, n) for phases, n in zip(ways, output, strict=True))
    last, parts = result.permute(0, 2, 3, 1), []
    for row in ways[0]:
        for column in ways[1]:
            pixels = last[:, row.pixel :: shape.stride[0], column.pixel :: shape.stride[1]]
            if not (row.taps and column.taps):
                pixels.zero_()
                continue
            kernels = weights[:, :, :, row.elements, column.elements].flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)
            windows = Windows(
                (len(row.taps), len(column.taps)), (1, 1), (row.apart, column.apart), (row.count, column.count),
                (row.first + before, column.first + left),
            )  # fmt: skip
            parts.append((windows, kernels, pixels))
    units, around = (image_units, weight_units.view(groups, -1)), (left, right, before, after)
    exactly(lambda method: _correlate(method, gradient, scale, around, units, parts), gradient.device)
    return result


@dataclass(frozen=True)
class Phase:
    """The pixels of an input, `stride` apart, that meet the same elements of the kernel, along one dimension."""

    pixel: int  # the first one
    count: int
    taps: list[int]  # elements of the kernel, the last first, so that the pixels of the output that they meet go up
    first: int  # pixel of the output that the first tap meets for the first pixel; negative before the image
    apart: int  # pixels of the output between two taps

    @property
    def elements(self) -> slice:
        return slice(self.taps[-1], self.taps[0] + 1, self.taps[0] - self.taps[1] if len(self.taps) > 1 else 1)


def _phases(kernel: int, stride: int, padding: int, dilation: int, size: int) -> list[Phase]:
    phases = []
    for pixel in range(min(stride, size)):
        taps = [tap for tap in reversed(range(kernel)) if (pixel + padding - tap * dilation) % stride == 0]
        meets = [(pixel + padding - tap * dilation) // stride for tap in taps]
        apart = meets[1] - meets[0] if len(meets) > 1 else 1
        phases.append(Phase(pixel, -(-(size - pixel) // stride), taps, meets[0] if meets else 0, apart))
    return phases


def _reach(phases: list[Phase], size: int) -> tuple[int, int]:
    """Zeros before and after an output of `size` pixels that windows of all phases need."""
    used = [phase for phase in phases if phase.taps]
    last = max(phase.first + phase.apart * (len(phase.taps) - 1) + phase.count for phase in used)
    return max(0, *(-phase.first for phase in used)), max(0, last - size)


def weight_gradient(gradient: Tensor, x: Tensor, shape: Geometry) -> Tensor:
    """The gradient of a convolution's weights, [O, C / groups, *kernel], from that of its output and its input."""
    output, groups, channels = (gradient.shape[2], gradient.shape[3]), shape.groups, gradient.shape[1]
    size = (channels, x.shape[1] // groups, *shape.kernel)
    if gradient.numel() == 0:
        return x.new_zeros(size)
    if gradient.numel() // channels > MOST_TERMS:
        raise UserError(f"portable arithmetic: a weight's gradient sums more than {MOST_TERMS} products")
    gradient_scale, gradient_units = scales(amax_over(gradient, (0, 2, 3)))
    scale, image_units = scales(amax_over(x, (0, 2, 3)))
    count(lambda: counts(gradient, gradient * gradient_scale, (1, 2, 3)), lambda: counts(x, x * scale, (1, 2, 3)))
    if size[:2] == (groups, 1):
        padded = pad(x.mul(scale).round_(), shape.around).double()
        whole = gradient.mul(gradient_scale).round_().double()
        sums = [(shape.at(padded, tap, output) * whole).sum((0, 2, 3)) for tap in shape.taps()]
        total = torch.stack(sums, 1).mul_(gradient_units.view(-1, 1)).mul_(image_units.view(-1, 1))
        return total.view(size).float()
    windows = Windows(shape.kernel, shape.stride, shape.dilation, output)

    def products(method: Method) -> Tensor:
        found = None
        for chunk in _runs(x, len(x), output[0] * output[1] * max(x.shape[1] * windows.taps, channels)):
            left = _slices(method, gradient[chunk], gradient_scale, (0, 0, 0, 0))
            right = _slices(method, x[chunk], scale, shape.around)
            rows = tuple(part.flatten(0, 2).unflatten(1, (groups, -1)).permute(1, 2, 0) for part in left)
            rows = tuple(part[0] if groups == 1 else part for part in rows)
            found = joined(multiply(method, rows, tuple(windows.of(part, groups) for part in right)), found)
        assert found is not None
        return found

    whole = exactly(products, x.device).view(groups, -1, windows.taps, size[1])
    whole.mul_(gradient_units.view(groups, -1, 1, 1)).mul_(image_units.view(groups, 1, 1, -1))
    return whole.flatten(0, 1).transpose(1, 2).float().reshape(size)


@dataclass(frozen=True)
class Windows:
    """What a product over padded images [N, H, W, C] takes of them; sizes are (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    apart: tuple[int, int]  # pixels between two elements of the kernel
    output: tuple[int, int]
    first: tuple[int, int] = (0, 0)  # pixel of the first window's corner

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    def of(self, images: Tensor, groups: int, rows: slice = slice(None)) -> Tensor:
        """Windows of some rows of the output: [N * rows * W', kernel * C], or with several groups in front of it."""
        count, _, _, channels = images.shape
        an_image, row, pixel, _ = images.stride()
        begin, end, _ = rows.indices(self.output[0])
        size = (groups, count, end - begin, self.output[1], *self.kernel, channels // groups)
        (down, right), (apart_y, apart_x), (y, x) = self.stride, self.apart, self.first
        strides = (channels // groups, an_image, row * down, pixel * right, row * apart_y, pixel * apart_x, 1)
        corner = images.storage_offset() + (y + begin * down) * row + x * pixel
        windows = images.as_strided(size, strides, corner)
        length = self.taps * channels // groups
        return windows[0].reshape(-1, length) if groups == 1 else windows.reshape(groups, -1, length)


def _correlate(
    method: Method, images: Tensor, scale: Tensor, around: tuple[int, ...], units: tuple[Tensor, Tensor],
    parts: list[tuple[Windows, Tensor, Tensor]],
) -> Tensor:  # fmt: skip
    """Products of windows of images with kernels, into views of a result; a chunk at a time, which fits a cache.

    Args:
        images: float32 [N, C, H, W], with `scale` [N, C or 1, 1, 1].
        around: Zeros to the left, right, above and below.
        units: 2**-s of the images, [N, groups] in some shape, and of the kernels, [groups, O / groups].
        parts: Windows, integers of the kernels [groups, kernel * C, O], and for results a view [N, H', W', groups * O].
    """
    image_units, kernel_units = units
    groups, wide = len(kernel_units), 16 * min(kernel_units.numel(), 512)
    one = images.new_ones(1, 1, 1)
    prepared = [
        (each, tuple(part[0] if groups == 1 else part for part in method.prepare(k, one)), out)
        for each, k, out in parts
    ]
    per_image = max(w.output[0] * w.output[1] * max(w.taps * images.shape[1], wide) for w, _, _ in parts)
    for chunk in _runs(images, len(images), per_image):
        left = _slices(method, images[chunk], scale[chunk], around)
        down = image_units.view(-1, groups)[chunk]
        for windows, kernels, out in prepared:
            width = windows.output[1] * max(windows.taps * images.shape[1], wide)
            for rows in _runs(images, windows.output[0], width * len(down)):
                terms = multiply(method, tuple(windows.of(part, groups, rows) for part in left), kernels)
                place = out[chunk, rows]
                if groups == 1:
                    scaled(terms, down, kernel_units, place)
                    continue
                sums = joined(terms).view(groups, len(down), -1, kernel_units.shape[1]).transpose(0, 1)
                sums.mul_(down[:, :, None, None]).mul_(kernel_units.unsqueeze(1))
                place.copy_(sums.transpose(1, 2).reshape(place.shape))
    return images


def _runs(of: Tensor, count: int, size: int) -> list[slice]:
    """Runs of at most a chunk, of things of a size, on the device of a tensor."""
    step = max(1, at_a_time(of.device, _CHUNK) // max(size, 1))
    return [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _slices(method: Method, images: Tensor, scale: Tensor, around: tuple[int, ...]) -> Operand:
    """Integers of images [N, C, H, W] with zeros around them, as a method takes them: [N, H, W, C] without gaps."""
    last = images.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    parts = method.prepare(last, scale.view(-1, *scale.shape[-3:]).permute(0, 2, 3, 1).contiguous())
    return tuple(pad(part, (0, 0, *around)) for part in parts) if any(around) else parts


def _group_scales(images: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """2**s for each image and channel, or each image, [N, C or 1, 1, 1], and 2**-s for each image and group."""
    scale, units = scales(amax_over(images.unflatten(1, (groups, -1)), (2, 3, 4)))
    if groups == 1:
        return scale.squeeze(1), units
    return scale.expand(-1, -1, images.shape[1] // groups, -1, -1).flatten(1, 2), units


def _format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """That of torch's own convolutions: channels last where the input or the weights are."""
    is_last = any(t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in (x, weight))
    return torch.channels_last if is_last else torch.contiguous_format

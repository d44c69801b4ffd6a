"""Boxes of images and their resampling; rotation, distortion, brightness, contrast and noise of training images.

The formulas of the changes are those of NNabla's ImageAugmentation (sony/nnabla, image_augmentation.cpp), the framework
of Sony's records.
"""

# Two things differ from NNabla's: a box is cut out first (`augment`), so a rotation repeats the box's border where it
# would bring in pixels from outside; and noise is the sum of four uniform draws, normal enough and portable.

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..recipe.data_schema import Augment
from ..rng import AUGMENT, NOISE, keyed_hash, keyed_uniform
from .types import Float32, Float64, Int64, Pixels, Region

# Only +, *, / and square roots are used in draws: they are exact to the last bit on every machine, while two
# mathematics libraries may round an exponential, a logarithm or a cosine differently.

# Numbers of a sample's draws, after those of `augment`.
_ROTATION, _DISTORTION, _NOISE, _BRIGHTNESS, _CONTRAST = 43, 44, 45, 46, 56
_CENTRE = 0.5  # the grey that contrast does not change, from NNabla's ImageNet example
_TERMS = 30  # terms of the series for the angle of a rotation, at most pi


def power(base: float, exponent: float) -> float:
    """base ** exponent for an exponent in [0, 1), cut to 16 bits."""
    # The binary digits of the exponent select factors from base ** 1/2, base ** 1/4, ...
    result, bits = 1.0, int(exponent * 65536)
    for root, bit in _roots(base):
        if bits & bit:
            result *= root
    return result


@lru_cache(maxsize=16)  # a recipe has a few bases
def _roots(base: float) -> tuple[tuple[float, int], ...]:
    return tuple((base := math.sqrt(base), 1 << bit) for bit in range(15, -1, -1))


def log_uniform(low: float, high: float, draw: float) -> float:
    """A value from `low` to `high`, uniform in its logarithm, from a uniform draw in [0, 1)."""
    return low * power(high / low, draw)


def cosine_and_sine(angle: float, terms: int) -> tuple[float, float]:
    """By their series; `terms` must be enough for the largest angle."""
    term, sums = 1.0, [0.0, 0.0]
    for k in range(terms):
        sums[k % 2] += term if k % 4 < 2 else -term
        term *= angle / (k + 1)
    return sums[0], sums[1]


class Warps(NamedTuple):
    """The changes of n samples in shape and tone."""

    angles: Float64  # [n], radians
    distortions: Float64  # [n], above -1; at 0 straight lines stay straight, above it the middle grows
    brightness: Float64  # [n, channels], added to values in 0..1
    contrast: Float64  # [n, channels], factors about a middle grey
    noise: Float64  # [n], standard deviations for values in 0..1
    keys: Int64  # [n, 3], seed, epoch and index of each sample, for the noise of its pixels


def draw_warps(augment: Augment, channels: int, seed: int, epochs: Int64, indices: Int64) -> Warps | None:
    """The warps of the samples at `indices` [n] in their `epochs` [n]; None if the recipe has none."""
    if not (augment.rotation or augment.distortion or augment.brightness or augment.noise or augment.contrast > 1):
        return None

    def draw(number: int) -> Float64:
        return keyed_uniform(AUGMENT, seed, epochs, indices, number)

    def by_channel(number: int) -> Float64:
        numbers = number + np.arange(channels) * augment.by_channel
        return keyed_uniform(AUGMENT, seed, epochs[:, None], indices[:, None], numbers)

    widest = power(math.e, augment.distortion)
    most = augment.contrast
    return Warps(
        angles=augment.rotation * (2 * draw(_ROTATION) - 1),
        distortions=np.array([power(widest * widest, u) / widest - 1 for u in draw(_DISTORTION).tolist()]),
        brightness=augment.brightness * (2 * by_channel(_BRIGHTNESS) - 1),
        contrast=np.array([[power(most * most, u) / most for u in row] for row in by_channel(_CONTRAST)]),
        noise=augment.noise * draw(_NOISE),
        keys=np.stack([np.full_like(indices, seed), epochs, indices], axis=1),
    )


def bend(image: Pixels, angle: float, distortion: float) -> Pixels:
    """Rotates and distorts an image uint8 [channels, height, width] about its middle, by bilinear interpolation."""
    if angle == 0 and distortion == 0:
        return image
    rows, columns = image.shape[1:]
    middle_y, middle_x = (rows - 1) / 2, (columns - 1) / 2
    y = (np.arange(rows)[:, None] - middle_y) / (rows / 2)
    x = (np.arange(columns)[None, :] - middle_x) / (columns / 2)
    # The distance of a point from the middle grows with its square; division keeps the corners at their own scale.
    scale = (1 + distortion * (x * x + y * y)) / (1 + distortion)
    cosine, sine = cosine_and_sine(angle, _TERMS)
    x, y = x * scale * (columns / 2), y * scale * (rows / 2)
    # For each pixel of the result the point of the image that it shows; beyond an edge the edge's pixel is repeated.
    from_x = np.clip(cosine * x - sine * y + middle_x, 0, columns - 1)
    from_y = np.clip(sine * x + cosine * y + middle_y, 0, rows - 1)
    left, top = from_x.astype(np.int64), from_y.astype(np.int64)
    right, bottom = np.minimum(left + 1, columns - 1), np.minimum(top + 1, rows - 1)
    u, v = from_x - left, from_y - top
    upper = image[:, top, left] * (1 - u) + image[:, top, right] * u
    lower = image[:, bottom, left] * (1 - u) + image[:, bottom, right] * u
    return np.asarray(np.floor(upper * (1 - v) + lower * v + 0.5).astype(np.uint8))


def tone(plane: Float32, warps: Warps, at: int, channel: int) -> None:
    """Changes brightness, contrast and noise of a channel of sample `at`, in place: float32 [height, width], to 255."""
    contrast = warps.contrast[at, channel]
    plane *= np.float32(contrast)
    plane += np.float32(255 * ((warps.brightness[at, channel] - _CENTRE) * contrast + _CENTRE))
    if warps.noise[at] > 0:
        seed, epoch, index = warps.keys[at].tolist()
        plane += (255 * warps.noise[at] * _normal(plane.shape, seed, epoch, index, channel)).astype(np.float32)


def _normal(shape: tuple[int, ...], *words: int) -> Float64:
    """Draws of mean 0 and variance 1: for each pixel the sum of the four 16-bit parts of a hash."""
    bits = keyed_hash(NOISE, *words, np.arange(math.prod(shape)))
    total = sum(((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48))
    # Each part has the mean 32,767.5 and the variance 65,536^2 / 12, so four have the deviation 65,536 / sqrt(3).
    return np.asarray((total - 4 * 32767.5) * (math.sqrt(3) / 65536)).reshape(shape)


def scaled(height: int, width: int, shorter: int) -> Region:
    """The whole image with its shorter side scaled to `shorter` (the longer one rounded down, as torchvision does)."""
    side = min(height, width)
    # Of an image more than four times as long as wide only the middle: the centre crop that follows never shows more,
    # and an image of a single row would need gigabytes.
    tall, wide = min(height, 4 * side), min(width, 4 * side)
    return Region((height - tall) // 2, (width - wide) // 2, tall, wide, shorter * tall // side, shorter * wide // side)


def render(image: Pixels, region: Region) -> Pixels:
    """The region of an image uint8 [height, width, channels], scaled by bilinear interpolation with antialiasing.

    It is uint8 [channels, rows, columns], contiguous; each value within one level of Pillow's bilinear resize.
    """
    # Always a copy, because `image` may lie in a decoder's scratch memory, which the next image overwrites.
    return np.array(resample(image, region).transpose(2, 0, 1), order="C")


def resample(image: Pixels, region: Region) -> Pixels:
    """As `render`, but uint8 [rows, columns, channels]; a view of the image if its size stays."""
    # Cut first, then scaled: pixels outside the box don't bleed in, as in torchvision.
    box = image[region.top : region.top + region.height, region.left : region.left + region.width]
    if (region.rows, region.columns) == (region.height, region.width):
        return box
    if region.exact:
        return _scaled_exactly(box, region.rows, region.columns)
    # torch's kernel for uint8 runs on the calling thread alone and releases the interpreter's lock, so that the threads
    # of the loader resize in parallel.
    planes = torch.from_numpy(np.require(box, requirements=["C", "W"])[None]).permute(0, 3, 1, 2)
    resized = np.empty((1, region.rows, region.columns, box.shape[2]), np.uint8)
    # As torch.nn.functional.interpolate(planes, ..., mode="bilinear", antialias=True), which has no `out`: without it
    # the kernel ends by separating the channels, pixel by pixel.
    out = torch.from_numpy(resized).permute(0, 3, 1, 2)
    torch.ops.aten._upsample_bilinear2d_aa.out(planes, resized.shape[1:3], False, None, None, out=out)
    return resized[0]


def _scaled_exactly(image: Pixels, rows: int, columns: int) -> Pixels:
    """Rows first, rounded to uint8, then columns: float32 operations, neighbours in their order."""
    for axis, out in enumerate((rows, columns)):
        place, weight, total = _neighbours(image.shape[axis], out)
        values = np.zeros((*image.shape[:axis], out, *image.shape[axis + 1 :]), np.float32)
        along = (-1, 1, 1)[: 3 - axis]  # one value for each row, or column
        for each, share in zip(place, weight, strict=True):
            values += image.take(each, axis) * share.reshape(along)
        values /= total.reshape(along)
        image = (values + np.float32(0.5)).astype(np.uint8)
    return image


@lru_cache(maxsize=256)
def _neighbours(length: int, out: int) -> tuple[Int64, Float32, Float32]:
    """The pixels [taps, out] that each one of the result is made of, their weights, and the sums of these."""
    # Positions count in 1 / (2 * out) of a pixel, so that the weights, of a triangle as wide as a pixel of the result
    # or two of the image, are whole numbers.
    reach, centre = 2 * max(length, out), (2 * np.arange(out) + 1) * length
    place = (centre - reach - out) // (2 * out) + 1 + np.arange(reach // out + 1)[:, None]
    weight = (reach - abs((2 * place + 1) * out - centre)).clip(0) * ((place >= 0) & (place < length))
    return place.clip(0, length - 1), weight.astype(np.float32), weight.sum(0).astype(np.float32)


def cut(image: Pixels, size: tuple[int, int], corner: tuple[float, float] | None) -> Pixels:
    """Rows x columns out of [..., height, width]; `corner` in [0, 1) says how far down and right, None the middle."""
    rows, columns = size
    height, width = image.shape[-2:]
    if corner is None:
        top, left = round((height - rows) / 2), round((width - columns) / 2)  # as torchvision's CenterCrop rounds
    else:
        top, left = int(corner[0] * (height - rows + 1)), int(corner[1] * (width - columns + 1))
    return image[..., top : top + rows, left : left + columns]

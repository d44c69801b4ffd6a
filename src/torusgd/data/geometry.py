"""Rotation, distortion, brightness, contrast and noise of training images, keyed as the changes of `augment`.

The formulas are those of NNabla's ImageAugmentation (sony/nnabla, image_augmentation.cpp), the framework of Sony's
records. Two things differ: a box is cut out first (`augment`), so that what a rotation would bring in from outside it
is its border's pixel; and the noise is the sum of four uniform draws, which is normal enough and the same on every
machine. Only +, *, / and square roots are used, as in `augment`.
"""

import math
from dataclasses import dataclass

import numpy as np

from ..recipe.data_schema import Augment
from ..rng import AUGMENT, NOISE, keyed_hash, keyed_uniform
from .augment import power
from .types import Float32, Float64, Int64, Pixels

# Numbers of a sample's draws, after those of `augment`.
_ROTATION, _DISTORTION, _NOISE, _BRIGHTNESS, _CONTRAST = 43, 44, 45, 46, 56
_CENTRE = 0.5
"""the grey that contrast leaves as it is; of NNabla's ImageNet example"""


@dataclass(frozen=True)
class Warps:
    """What is done to each of n samples.

    Args:
        angles: float64 [n], radians.
        distortions: float64 [n], above -1: 0 leaves straight lines straight, above it the middle grows.
        brightness: float64 [n, channels], added to values in 0..1.
        contrast: float64 [n, channels], factors about a middle grey.
        noise: float64 [n], standard deviations for values in 0..1.
        keys: int64 [n, 3], seed, epoch and index of each sample, for its pixels' noise.
    """

    angles: Float64
    distortions: Float64
    brightness: Float64
    contrast: Float64
    noise: Float64
    keys: Int64


def draw_warps(augment: Augment, channels: int, seed: int, epochs: Int64, indices: Int64) -> Warps | None:
    """The warps of the samples at `indices` [n] in their `epochs` [n]; None where the recipe asks for none."""
    if not (augment.rotation or augment.distortion or augment.brightness or augment.noise or augment.contrast > 1):
        return None

    def draw(number: int) -> Float64:
        return keyed_uniform(AUGMENT, seed, epochs, indices, number)

    def by_channel(number: int) -> Float64:
        numbers = number + np.arange(channels) * augment.by_channel
        return keyed_uniform(AUGMENT, seed, epochs[:, None], indices[:, None], numbers)

    widest = power(math.e, augment.distortion)
    distortions = [power(widest * widest, u) / widest - 1 for u in draw(_DISTORTION).tolist()]
    contrast = [[power(augment.contrast**2, u) / augment.contrast for u in row] for row in by_channel(_CONTRAST)]
    keys = np.stack([np.full_like(indices, seed), epochs, indices], axis=1)
    return Warps(
        angles=augment.rotation * (2 * draw(_ROTATION) - 1),
        distortions=np.array(distortions),
        brightness=augment.brightness * (2 * by_channel(_BRIGHTNESS) - 1),
        contrast=np.array(contrast),
        noise=augment.noise * draw(_NOISE),
        keys=keys,
    )


def bend(image: Pixels, angle: float, distortion: float) -> Pixels:
    """Rotates and distorts an image uint8 [channels, height, width] about its middle, by bilinear interpolation."""
    if angle == 0 and distortion == 0:
        return image
    rows, columns = image.shape[1:]
    middle_y, middle_x = (rows - 1) / 2, (columns - 1) / 2
    y = (np.arange(rows)[:, None] - middle_y) / (rows / 2)
    x = (np.arange(columns)[None, :] - middle_x) / (columns / 2)
    # A point's distance from the middle grows with its square, and the corners' scale is that of the border.
    scale = (1 + distortion * (x * x + y * y)) / (1 + distortion)
    cosine, sine = _cosine_and_sine(angle)
    x, y = x * scale * (columns / 2), y * scale * (rows / 2)
    from_x = np.clip(cosine * x - sine * y + middle_x, 0, columns - 1)
    from_y = np.clip(sine * x + cosine * y + middle_y, 0, rows - 1)
    left, top = from_x.astype(np.int64), from_y.astype(np.int64)
    right, bottom = np.minimum(left + 1, columns - 1), np.minimum(top + 1, rows - 1)
    u, v = from_x - left, from_y - top
    upper = image[:, top, left] * (1 - u) + image[:, top, right] * u
    lower = image[:, bottom, left] * (1 - u) + image[:, bottom, right] * u
    return np.asarray(np.floor(upper * (1 - v) + lower * v + 0.5).astype(np.uint8))


def tone(plane: Float32, warps: Warps, at: int, channel: int) -> None:
    """Brightness, contrast and noise of one channel of the sample `at`, in place: float32 [height, width], 0 to 255."""
    contrast = warps.contrast[at, channel]
    plane *= np.float32(contrast)
    plane += np.float32(255 * ((warps.brightness[at, channel] - _CENTRE) * contrast + _CENTRE))
    if warps.noise[at] > 0:
        seed, epoch, index = warps.keys[at].tolist()
        plane += (255 * warps.noise[at] * _normal(plane.shape, seed, epoch, index, channel)).astype(np.float32)


def _normal(shape: tuple[int, ...], *words: int) -> Float64:
    """Draws of mean 0 and variance 1: sums of the four 16-bit parts of a hash for each pixel."""
    bits = keyed_hash(NOISE, *words, np.arange(math.prod(shape)))
    total = sum(((bits >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48))
    return np.asarray((total - 4 * 32767.5) * (math.sqrt(3) / 65536)).reshape(shape)


def _cosine_and_sine(angle: float) -> tuple[float, float]:
    """By their series, of an angle from -pi to pi: to a last bit the same on every machine."""
    cosine, sine, term = 1.0, 0.0, 1.0
    for degree in range(1, 30):
        term *= angle / degree
        if degree % 2:
            sine += term if degree % 4 == 1 else -term
        else:
            cosine += term if degree % 4 == 0 else -term
    return cosine, sine

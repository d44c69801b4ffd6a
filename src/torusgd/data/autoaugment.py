"""RandAugment and TrivialAugment: changes of a finished training image in form and colour, drawn for each sample.

The 14 changes and their ranges are torchvision's (RandAugment: Cubuk et al., arXiv 1909.13719; TrivialAugmentWide:
Mueller and Hutter, arXiv 2103.10158), with nearest-neighbour pixels and black beyond the edges; a grey level may differ
by one from torchvision's.
"""

# They are made of integers, and of products and sums that are rounded once each, so the bits are the same on every
# machine.

import math
from dataclasses import dataclass

import numpy as np

from ..recipe.data_schema import Augment
from ..rng import POLICY, keyed_uniform
from .geometry import cosine_and_sine
from .types import Int64, Pixels

STRONGEST = 30  # the largest strength; 0 is the smallest
OPERATIONS = (
    "identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
_TERMS = 32  # terms of the series for cosine and sine: more than a float64 resolves at 135 degrees


@dataclass(frozen=True)
class Ranges:
    """The extent of each change at the largest strength."""

    shear: float  # columns a row, and rows a column
    pixels: int  # length of a shift
    share: float  # length of a shift as a fraction of the side, if `pixels` is 0
    degrees: float
    factor: float  # distance from 1 of the factor of brightness, colour, contrast and sharpness
    bits: int  # of eight, removed by posterizing


RAND = Ranges(shear=0.3, pixels=0, share=150 / 331, degrees=30.0, factor=0.9, bits=4)
TRIVIAL = Ranges(shear=0.99, pixels=32, share=0.0, degrees=135.0, factor=0.99, bits=6)


def draw_policy(augment: Augment, seed: int, epochs: Int64, indices: Int64) -> Int64 | None:
    """The changes of the samples at `indices` [n] in their `epochs` [n]; None without a policy.

    They are int64 [n, changes, 3]: index in `OPERATIONS`, strength and sign (0 or 1) of each.
    """
    if augment.policy == "none":
        return None
    changes = augment.operations if augment.policy == "randaugment" else 1
    # Three draws a change: which one, how strong, which direction.
    numbers = np.arange(3 * changes)
    draws = keyed_uniform(POLICY, seed, epochs[:, None], indices[:, None], numbers).reshape(-1, changes, 3)
    drawn = (draws * (len(OPERATIONS), STRONGEST + 1, 2)).astype(np.int64)
    if augment.policy == "randaugment":
        drawn[..., 1] = augment.magnitude
    return drawn


def apply_policy(images: Pixels, augment: Augment, drawn: Int64) -> Pixels:
    """Images [n, channels, height, width] after the changes that `draw_policy` returned for them, as a new array."""
    ranges = RAND if augment.policy == "randaugment" else TRIVIAL
    out = np.empty_like(images)
    for place, (image, changes) in enumerate(zip(images, drawn.tolist(), strict=True)):
        changed = image
        for operation, strength, sign in changes:
            changed = change(changed, OPERATIONS[operation], strength, sign, ranges)
        out[place] = changed
    return out


def change(image: Pixels, operation: str, strength: int, sign: int, ranges: Ranges) -> Pixels:
    """A changed copy of an image, uint8 [channels, height, width].

    `operation` is one of `OPERATIONS`, `strength` 0 to `STRONGEST`, `sign` 0 or 1, the direction of a change with two.
    """
    share = (strength if sign else -strength) / STRONGEST
    if operation in ("shear-x", "shear-y", "translate-x", "translate-y", "rotate"):
        return _moved(image, operation, share, ranges)
    if operation in ("brightness", "color", "contrast", "sharpness"):
        factor = 1 + ranges.factor * share
        # Two products and a sum in float32, each rounded once: the same bits on every machine.
        opposite = np.asarray(_opposite(image, operation), dtype=np.float32) * np.float32(1 - factor)
        return (image * np.float32(factor) + opposite).clip(0, 255).astype(np.uint8)
    return _levels(image, operation, strength, ranges)


def _levels(image: Pixels, operation: str, strength: int, ranges: Ranges) -> Pixels:
    """Each value of a plane replaced by another; the image itself for `identity`."""
    if operation == "posterize":
        bits = (2 * strength * ranges.bits + STRONGEST) // (2 * STRONGEST)  # to the nearest
        return image & np.uint8(0xFF << bits & 0xFF)
    if operation == "solarize":
        # From the threshold 255 - 255 * strength / STRONGEST on.
        bright = STRONGEST * (255 - image.astype(np.int64)) <= 255 * strength
        return np.where(bright, 255 - image, image)
    if operation == "autocontrast":
        return np.stack([_stretched(plane) for plane in image])
    if operation == "equalize":
        return np.stack([_equalized(plane) for plane in image])
    return image


def _moved(image: Pixels, operation: str, share: float, ranges: Ranges) -> Pixels:
    """The image shifted, sheared or rotated, by nearest neighbours."""
    height, width = image.shape[1:]
    # Coordinates of pixel centres; each pixel of the result shows the point that the change would bring to it.
    rows, columns = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
    if operation == "shear-x":
        columns = columns + ranges.shear * share * rows
    elif operation == "shear-y":
        rows = rows + ranges.shear * share * columns
    elif operation == "translate-x":
        columns = columns + int((ranges.pixels or ranges.share * width) * share)
    elif operation == "translate-y":
        rows = rows + int((ranges.pixels or ranges.share * height) * share)
    else:
        cosine, sine = cosine_and_sine(ranges.degrees * share * math.pi / 180, _TERMS)
        down, right = rows - height / 2, columns - width / 2
        rows, columns = down * cosine + right * sine + height / 2, right * cosine - down * sine + width / 2
    # The pixels at these points, black outside the image.
    down, right = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    inside = (down >= 0) & (down < height) & (right >= 0) & (right < width)
    picked = image[:, down.clip(0, height - 1), right.clip(0, width - 1)]
    return np.where(inside, picked, np.uint8(0))


def _opposite(image: Pixels, operation: str) -> Pixels | float:
    """The image without any brightness, colour, contrast or sharpness, towards or away from which it is blended."""
    if operation == "brightness":
        return 0.0
    if operation == "sharpness":
        return _smooth(image)
    grey = image
    if len(image) == 3:
        red, green, blue = image.astype(np.int64)
        grey = ((2989 * red + 5870 * green + 1140 * blue) // 10000).astype(np.uint8)[None]  # ITU-R 601's luma
    return grey if operation == "color" else int(grey.sum(dtype=np.int64)) / grey.size


def _smooth(image: Pixels) -> Pixels:
    """Each pixel mixed of 5/13 of itself and 1/13 of each neighbour; the edge stays as it is."""
    if min(image.shape[1:]) < 3:
        return image
    wide = image.astype(np.int64)
    # The middle counts five times: four here, once with its neighbours.
    total = 4 * wide[:, 1:-1, 1:-1]
    for down in (0, 1, 2):
        for right in (0, 1, 2):
            total += wide[:, down : wide.shape[1] - 2 + down, right : wide.shape[2] - 2 + right]
    out = image.copy()
    out[:, 1:-1, 1:-1] = (2 * total + 13) // 26  # total / 13, rounded to the nearest
    return out


def _stretched(plane: Pixels) -> Pixels:
    """The values of a plane spread from 0 to 255."""
    low, high = int(plane.min()), int(plane.max())
    if low == high:
        return plane
    return ((plane.astype(np.int64) - low) * 255 // (high - low)).astype(np.uint8)


def _equalized(plane: Pixels) -> Pixels:
    """The values of a plane spread so that ranges of equal length have as many pixels, as in Pillow's equalize."""
    counts = np.bincount(plane.reshape(-1), minlength=256)
    # The brightest level is left out of the step: it would map beyond 255.
    step = int(counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
    if step == 0:
        return plane
    table = (np.cumsum(counts) - counts + step // 2) // step
    return table.clip(0, 255).astype(np.uint8)[plane]

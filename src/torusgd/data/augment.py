"""Random changes of training images: crops, mirrors, policies, erasing, mixing with another of the virtual worker.

The 14 changes of the policies and their ranges are torchvision's (RandAugment: Cubuk et al., arXiv 1909.13719;
TrivialAugmentWide: Mueller and Hutter, arXiv 2103.10158), with nearest-neighbour pixels and black beyond the edges; a
grey level may differ by one from torchvision's.
"""

import math
from typing import NamedTuple

import numpy as np

from .. import arithmetic
from ..recipe.data_schema import Augment
from ..rng import ALTERNATE, AUGMENT, ERASE, MIX, POLICY, keyed_integer, keyed_uniform
from .geometry import Warps, cosine_and_sine, draw_warps, log_uniform
from .types import Bools, Float32, Float64, Int64, Pixels, Region

_ATTEMPTS = 10  # boxes drawn until one fits, as in torchvision's RandomResizedCrop and RandomErasing
# Each draw is keyed by (seed, epoch, sample), never by a rank or a batch, and made of products, quotients and square
# roots, which have the same bits on every machine. Each draw of a sample has a number of its own, so that no kind of
# change depends on another: one for the mirror, two for the shift or the cut, four for each attempt at a box;
# `geometry` has those from 43 on.
_MIRROR, _DOWN, _RIGHT, _BOX = 0, 1, 2, 3
_AREA, _ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)
# Draws until Johnk's method accepts one; with alpha 1/2, the worst, all fail once in 10 ** 21 images.
_BETA_ATTEMPTS = 32
_CHOICE, _ROW, _COLUMN, _SHARE = 0, 1, 2, 3

# Changes of a policy are made of integers, and of products and sums that are rounded once each.
STRONGEST = 30  # the largest strength; 0 is the smallest
OPERATIONS = (
    "identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness", "color", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
_TERMS = 32  # terms of the series for cosine and sine: more than a float64 resolves at 135 degrees


class Ranges(NamedTuple):
    """The extent of each change at the largest strength."""

    shear: float  # columns a row, and rows a column
    pixels: int  # length of a shift
    share: float  # length of a shift as a fraction of the side, if `pixels` is 0
    degrees: float
    factor: float  # distance from 1 of the factor of brightness, colour, contrast and sharpness
    bits: int  # of eight, removed by posterizing


RAND = Ranges(shear=0.3, pixels=0, share=150 / 331, degrees=30.0, factor=0.9, bits=4)
TRIVIAL = Ranges(shear=0.99, pixels=32, share=0.0, degrees=135.0, factor=0.99, bits=6)


class Changes(NamedTuple):
    """The changes of n samples; None: there is no such change."""

    boxes: Float64 | None = None  # [n, attempts, 4], the draws of `random_region`, with crop: resized
    moves: Int64 | None = None  # [n, 2], rows and columns of the padded image to leave out, with crop: shift
    corners: Float64 | None = None  # [n, 2] in [0, 1), how far down and right the cut lies, with crop: random
    warps: Warps | None = None
    mirrored: Bools = np.zeros(0, np.bool_)  # [n], or empty: none of them
    policy: Int64 | None = None  # [n, changes, 3] from `draw_policy`


def draw_changes(augment: Augment, channels: int, seed: int, epochs: Int64, indices: Int64) -> Changes:
    """The changes of the samples at `indices` [n] in their `epochs` [n]."""
    # Batch 5: each draw is a function of (seed, epoch, index), never of a rank or a clock.
    boxes = moves = corners = None
    keys, sides = (AUGMENT, seed, epochs[:, None], indices[:, None]), np.array([_DOWN, _RIGHT])
    if augment.crop == "resized":
        boxes = keyed_uniform(*keys, _BOX + np.arange(4 * _ATTEMPTS)).reshape(len(indices), _ATTEMPTS, 4)
    if augment.crop == "shift":
        moves = keyed_integer(2 * augment.shift + 1, *keys, sides)
    if augment.crop == "random":
        corners = keyed_uniform(*keys, sides)
    if augment.flip == "alternating":
        # The draw has no epoch in its key, and the epoch's parity turns it: two epochs in a row show both ways.
        mirrored = (keyed_uniform(ALTERNATE, seed, indices) < 0.5) ^ (epochs % 2 == 1)
    else:
        mirrored = keyed_uniform(AUGMENT, seed, epochs, indices, _MIRROR) < augment.flip
    warps = draw_warps(augment, channels, seed, epochs, indices)
    return Changes(boxes, moves, corners, warps, mirrored, draw_policy(augment, seed, epochs, indices))


def random_region(height: int, width: int, size: tuple[int, int], augment: Augment, draws: Float64) -> Region:
    """A box of random area and aspect (Szegedy et al., arXiv 1409.4842), to be scaled to `size`, rows and columns.

    `draws` are one sample's, float64 [attempts, 4] in [0, 1): area, aspect, top, left; the first box that fits counts.
    """
    low, high = augment.aspect
    for u_area, u_aspect, u_top, u_left in draws.tolist():
        area = height * width * (augment.area[0] + (augment.area[1] - augment.area[0]) * u_area)
        aspect = log_uniform(low, high, u_aspect)  # 3/4 is as likely as 4/3
        tall, wide = math.floor(math.sqrt(area / aspect) + 0.5), math.floor(math.sqrt(area * aspect) + 0.5)
        if 0 < tall <= height and 0 < wide <= width:
            return Region(int(u_top * (height - tall + 1)), int(u_left * (width - wide + 1)), tall, wide, *size)
    # None of the ten fits: the largest centred box whose aspect is allowed, as in torchvision.
    tall, wide = min(height, max(1, int(width / low))), min(width, max(1, int(height * high)))
    return Region((height - tall) // 2, (width - wide) // 2, tall, wide, *size)


def shift(images: Pixels, pixels: int, moves: Int64) -> Pixels:
    """Images [n, channels, height, width] padded with `pixels` zeros all round, then cut at `moves` [n, 2]."""
    padded = np.pad(images, ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels)))
    # Views of all windows of the padded images cost no memory; the index copies one for each image.
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[2:], axis=(2, 3))
    return np.ascontiguousarray(windows[np.arange(len(images)), :, moves[:, 0], moves[:, 1]])


def mirror(images: Pixels, mirrored: Bools) -> Pixels:
    """The images [n, channels, height, width], the chosen ones mirrored left to right."""
    if not mirrored.any():
        return images
    turned = images if mirrored.all() else images[mirrored]
    if images.shape[-1] % 8 != 0:
        turned = turned[..., ::-1]
    else:
        # Reversing words of eight pixels and then the bytes of each word is three times as fast as pixel by pixel.
        turned = np.ascontiguousarray(turned).view(np.uint64)[..., ::-1].byteswap().view(np.uint8)
    if mirrored.all():
        return turned
    images = images.copy()
    images[mirrored] = turned
    return images


def erase(images: Float32, augment: Augment, seed: int, epochs: Int64, indices: Int64) -> None:
    """Sets a random box of chosen images [n, channels, height, width] to 0, the mean, in place (arXiv 1708.04896)."""
    if not augment.erase:
        return
    height, width = images.shape[2:]
    draws = keyed_uniform(ERASE, seed, epochs[:, None], indices[:, None], np.arange(1 + 4 * _ATTEMPTS))
    for image, (chosen, *rest) in zip(images, draws.tolist(), strict=True):
        if chosen >= augment.erase:
            continue
        for u_area, u_aspect, u_top, u_left in np.reshape(rest, (_ATTEMPTS, 4)).tolist():
            area = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * u_area)
            aspect = log_uniform(*_ASPECT, u_aspect)
            tall, wide = math.floor(math.sqrt(area * aspect) + 0.5), math.floor(math.sqrt(area / aspect) + 0.5)
            # A box smaller than the image both ways, as in torchvision.
            if 0 < tall < height and 0 < wide < width:
                top, left = int(u_top * (height - tall + 1)), int(u_left * (width - wide + 1))
                image[:, top : top + tall, left : left + wide] = 0
                break


def mix(images: Float32, augment: Augment, seed: int, epochs: Int64, indices: Int64) -> Float32 | None:
    """Blends images with their partners (mixup, arXiv 1710.09412) or pastes a box of them (CutMix, arXiv 1905.04899).

    `images` are one virtual worker's, [n, channels, height, width]; with both kinds, each image draws one of them.
    Returns the weight of each image's own pixels, float32 [n]; None if the recipe mixes nothing.
    """
    if not augment.mixup and not augment.cutmix:
        return None
    draws = keyed_uniform(MIX, seed, epochs[:, None], indices[:, None], np.arange(_SHARE + 2 * _BETA_ATTEMPTS))
    pasted = np.full(len(images), not augment.mixup)
    if augment.mixup and augment.cutmix:
        pasted = draws[:, _CHOICE] < 0.5
    height, width = images.shape[2:]
    # Image i is mixed with image n - 1 - i, as in timm: so the recipe and the position in the stream decide the pair,
    # on any number of ranks. A copy, since each image is the partner of one that changes before or after it.
    partners = images[::-1].copy()
    shares = np.empty(len(images), dtype=np.float32)
    for i in range(len(images)):
        alpha, key = augment.cutmix if pasted[i] else augment.mixup, (seed, int(epochs[i]), int(indices[i]))
        # Of u ** (1 / alpha) as a product of u's, which needs no library's power; or by portable arithmetic.
        by_products = alpha <= 1 and abs(round(1 / alpha) - 1 / alpha) <= 1e-9
        share = beta(alpha, draws[i, _SHARE:]) if by_products else arithmetic.beta(alpha, MIX, *key)
        shares[i] = share
        if pasted[i]:
            rows = _span(height, math.sqrt(1 - share), float(draws[i, _ROW]))
            columns = _span(width, math.sqrt(1 - share), float(draws[i, _COLUMN]))
            images[i, :, rows, columns] = partners[i, :, rows, columns]
            # The edges may have cut the box, so the weight is that of the pixels that were pasted.
            shares[i] = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
        else:
            images[i] *= shares[i]
            images[i] += partners[i] * (np.float32(1) - shares[i])
    return shares


def beta(alpha: float, draws: Float64) -> float:
    """A draw from Beta(alpha, alpha) (1 / alpha is whole) by Johnk's method, from draws in [0, 1), two an attempt."""
    if alpha == 1:
        return float(draws[0])
    for u, v in draws.reshape(-1, 2).tolist():
        x, y = math.prod([u] * round(1 / alpha)), math.prod([v] * round(1 / alpha))
        if 0 < x + y <= 1:
            return x / (x + y)
    return 0.5


def _span(side: int, ratio: float, centre: float) -> slice:
    """A stretch of `ratio` of a side about a centre in [0, 1), cut off at the edges."""
    half, middle = int(side * ratio) // 2, int(side * centre)
    return slice(max(0, middle - half), min(side, middle + half))


def draw_policy(augment: Augment, seed: int, epochs: Int64, indices: Int64) -> Int64 | None:
    """Index in `OPERATIONS`, strength and sign (0 or 1) of each change, int64 [n, changes, 3]; None: no policy."""
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
    out = images.copy()
    for image, changes in zip(out, drawn.tolist(), strict=True):
        for operation, strength, sign in changes:
            image[...] = change(image, OPERATIONS[operation], strength, sign, ranges)
    return out


def change(image: Pixels, operation: str, strength: int, sign: int, ranges: Ranges) -> Pixels:
    """A copy of an image, uint8 [channels, height, width], after one of `OPERATIONS`; `sign`, 0 or 1, is its way."""
    share = (strength if sign else -strength) / STRONGEST
    if operation in ("shear-x", "shear-y", "translate-x", "translate-y", "rotate"):
        return _moved(image, operation, share, ranges)
    if operation in ("brightness", "color", "contrast", "sharpness"):
        factor = 1 + ranges.factor * share
        # Two products and a sum in float32, each rounded once: the same bits on every machine.
        opposite = np.asarray(_opposite(image, operation), dtype=np.float32) * np.float32(1 - factor)
        return (image * np.float32(factor) + opposite).clip(0, 255).astype(np.uint8)
    # The others replace each value of a plane by another.
    if operation == "posterize":
        bits = (2 * strength * ranges.bits + STRONGEST) // (2 * STRONGEST)  # to the nearest
        return image & np.uint8(0xFF << bits & 0xFF)
    if operation == "solarize":
        # From the threshold 255 - 255 * strength / STRONGEST on.
        bright = STRONGEST * (255 - image.astype(np.int64)) <= 255 * strength
        return np.where(bright, 255 - image, image)
    by_plane = {"autocontrast": _stretched, "equalize": _equalized}.get(operation)
    return image if by_plane is None else np.stack([by_plane(plane) for plane in image])


def _moved(image: Pixels, operation: str, share: float, ranges: Ranges) -> Pixels:
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
    return np.where(inside, image[:, down.clip(0, height - 1), right.clip(0, width - 1)], np.uint8(0))


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
    low, high = int(plane.min()), int(plane.max())
    return plane if low == high else ((plane.astype(np.int64) - low) * 255 // (high - low)).astype(np.uint8)


def _equalized(plane: Pixels) -> Pixels:
    """The values of a plane spread so that ranges of equal length have as many pixels, as in Pillow's equalize."""
    counts = np.bincount(plane.reshape(-1), minlength=256)
    # The brightest level is left out of the step: it would map beyond 255.
    step = int(counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
    if step == 0:
        return plane
    return ((np.cumsum(counts) - counts + step // 2) // step).clip(0, 255).astype(np.uint8)[plane]

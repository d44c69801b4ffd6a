"""Random changes of training images: crops, mirrors, erasing, and mixing with another image of the virtual worker."""

import math
from dataclasses import dataclass

import numpy as np

from .. import arithmetic
from ..recipe.data_schema import Augment
from ..rng import ALTERNATE, AUGMENT, ERASE, MIX, keyed_integer, keyed_uniform
from .autoaugment import draw_policy
from .geometry import Warps, draw_warps, log_uniform
from .types import Bools, Float32, Float64, Int64, Pixels, Region

_ATTEMPTS = 10  # boxes drawn until one fits, as in torchvision's RandomResizedCrop
# Each draw is keyed by (seed, epoch, sample), never by a rank or a batch, and made of products, quotients and square
# roots, which have the same bits on every machine. Each draw of a sample has a number of its own, so that no kind of
# change depends on another: one for the mirror, two for the shift or the cut, four for each attempt at a box;
# `geometry` has those from 43 on.
_MIRROR, _DOWN, _RIGHT, _BOX = 0, 1, 2, 3
_BOXES = 10  # boxes drawn until one fits, as in torchvision's RandomErasing
_AREA, _ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)
# Draws until Johnk's method accepts one; with alpha 1/2, the worst, all fail once in 10 ** 21 images.
_BETA_ATTEMPTS = 32
_CHOICE, _ROW, _COLUMN, _SHARE = 0, 1, 2, 3


@dataclass(frozen=True)
class Changes:
    """The changes of n samples; None: the recipe has no such change."""

    boxes: Float64 | None  # [n, attempts, 4], the draws of `random_region`, with crop: resized
    moves: Int64 | None  # [n, 2], rows and columns of the padded image to leave out, with crop: shift
    corners: Float64 | None  # [n, 2] in [0, 1), how far down and right the cut lies, with crop: random
    warps: Warps | None
    mirrored: Bools  # [n]
    policy: Int64 | None  # [n, changes, 3] from `draw_policy`


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

    `draws` are one sample's, float64 [attempts, 4] in [0, 1): area, aspect, top and left. The first box that fits is
    taken.
    """
    low, high = augment.aspect
    for u_area, u_aspect, u_top, u_left in draws.tolist():
        area = height * width * (augment.area[0] + (augment.area[1] - augment.area[0]) * u_area)
        aspect = log_uniform(low, high, u_aspect)  # 3/4 is as likely as 4/3
        tall, wide = math.floor(math.sqrt(area / aspect) + 0.5), math.floor(math.sqrt(area * aspect) + 0.5)
        if 0 < tall <= height and 0 < wide <= width:
            top, left = int(u_top * (height - tall + 1)), int(u_left * (width - wide + 1))
            return Region(top, left, tall, wide, *size)
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
    if mirrored.all():
        return _reversed(images)
    images = images.copy()
    images[mirrored] = _reversed(images[mirrored])
    return images


def _reversed(images: Pixels) -> Pixels:
    if images.shape[-1] % 8 != 0:
        return images[..., ::-1]
    # Reversing words of eight pixels and then the bytes of each word is three times as fast as pixel by pixel.
    return np.ascontiguousarray(images).view(np.uint64)[..., ::-1].byteswap().view(np.uint8)


def erase(images: Float32, augment: Augment, seed: int, epochs: Int64, indices: Int64) -> None:
    """Sets a random box of the chosen images [n, channels, height, width] to zero, the mean, in place.

    Zhong et al., arXiv 1708.04896; `augment.erase` is the probability.
    """
    if not augment.erase:
        return
    height, width = images.shape[2:]
    draws = keyed_uniform(ERASE, seed, epochs[:, None], indices[:, None], np.arange(1 + 4 * _BOXES))
    for image, (chosen, *rest) in zip(images, draws.tolist(), strict=True):
        if chosen >= augment.erase:
            continue
        for u_area, u_aspect, u_top, u_left in np.reshape(rest, (_BOXES, 4)).tolist():
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
        share = beta(alpha, draws[i, _SHARE:]) if is_by_products(alpha) else arithmetic.beta(alpha, MIX, *key)
        shares[i] = share
        if pasted[i]:
            rows, columns = (
                _span(side, math.sqrt(1 - share), float(draws[i, number]))
                for side, number in ((height, _ROW), (width, _COLUMN))
            )
            images[i, :, rows, columns] = partners[i, :, rows, columns]
            # The edges may have cut the box, so the weight is that of the pixels that were pasted.
            shares[i] = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
        else:
            images[i] *= shares[i]
            images[i] += partners[i] * (np.float32(1) - shares[i])
    return shares


def is_by_products(alpha: float) -> bool:
    """Whether u ** (1 / alpha) is a product of u's, and needs no library's power.

    >>> is_by_products(0.2), is_by_products(0.8)
    (True, False)
    """
    return alpha <= 1 and abs(round(1 / alpha) - 1 / alpha) <= 1e-9


def beta(alpha: float, draws: Float64) -> float:
    """A draw from Beta(alpha, alpha) by Johnk's method, from uniform draws in [0, 1), two for each attempt.

    Alpha is 1, or one over a whole number (`is_by_products`).

    >>> beta(1.0, np.array([0.25, 0.5]))
    0.25
    """
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

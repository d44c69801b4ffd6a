"""Random changes of training images. Each draw is keyed by (seed, epoch, sample), never by a rank or a batch."""

import math
from dataclasses import dataclass

import numpy as np

from ..recipe.data_schema import Augment
from ..rng import ALTERNATE, AUGMENT, keyed_integer, keyed_uniform
from .autoaugment import draw_policy
from .geometry import Warps, draw_warps, log_uniform
from .types import Bools, Float64, Int64, Pixels, Region

_ATTEMPTS = 10
"""boxes drawn until one fits, as in torchvision's RandomResizedCrop"""
# Each draw of a sample has a number of its own, so that no kind of change depends on another: one for the mirror, two
# for the shift or the cut, four for each attempt at a box; `geometry` has those from 43 on.
_MIRROR, _DOWN, _RIGHT, _BOX = 0, 1, 2, 3


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
    warps = draw_warps(augment, channels, seed, epochs, indices)
    mirrored = _mirrored(augment, seed, epochs, indices)
    return Changes(boxes, moves, corners, warps, mirrored, draw_policy(augment, seed, epochs, indices))


def _mirrored(augment: Augment, seed: int, epochs: Int64, indices: Int64) -> Bools:
    if augment.flip != "alternating":
        return keyed_uniform(AUGMENT, seed, epochs, indices, _MIRROR) < augment.flip
    # The draw has no epoch in its key, and the epoch's parity turns it: two epochs in a row show an image both ways.
    return (keyed_uniform(ALTERNATE, seed, indices) < 0.5) ^ (epochs % 2 == 1)


def random_region(height: int, width: int, size: tuple[int, int], augment: Augment, draws: Float64) -> Region:
    """A box of random area and aspect (Szegedy et al., arXiv 1409.4842), to be scaled to `size`.

    Args:
        size: Rows and columns that the network takes.
        draws: One sample's, float64 [attempts, 4] in [0, 1): area, aspect, top and left of each attempt. The first
            box that fits is taken; if none does, the largest centred box whose aspect is allowed.
    """
    low, high = augment.aspect
    for u_area, u_aspect, u_top, u_left in draws.tolist():
        area = height * width * (augment.area[0] + (augment.area[1] - augment.area[0]) * u_area)
        aspect = log_uniform(low, high, u_aspect)  # 3/4 is as likely as 4/3
        tall, wide = math.floor(math.sqrt(area / aspect) + 0.5), math.floor(math.sqrt(area * aspect) + 0.5)
        if 0 < tall <= height and 0 < wide <= width:
            top, left = int(u_top * (height - tall + 1)), int(u_left * (width - wide + 1))
            return Region(top, left, tall, wide, *size)
    # None of the ten fits: the largest centred box, as in torchvision.
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

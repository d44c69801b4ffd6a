"""Changes of finished training images: random erasing, and mixup and CutMix with another image of the virtual worker.

Image i of a virtual worker's n is mixed with image n - 1 - i, as in timm: so the recipe and the position in the stream
decide the pair, on any number of ranks. Each image draws its own weight, keyed by (seed, epoch, sample); draws are made
of products, quotients and square roots, which have the same bits on every machine.
"""

import math

import numpy as np

from .. import arithmetic
from ..recipe.data_schema import Augment
from ..rng import ERASE, MIX, keyed_uniform
from .geometry import log_uniform
from .types import Float32, Float64, Int64

_ATTEMPTS = 32
"""draws until Johnk's method accepts one; with alpha 1/2, the worst, all fail once in 10 ** 21 images"""
_CHOICE, _ROW, _COLUMN, _SHARE = 0, 1, 2, 3
_BOXES = 10
"""boxes drawn until one fits, as in torchvision's RandomErasing"""
_AREA, _ASPECT = (0.02, 1 / 3), (0.3, 1 / 0.3)


def erase(images: Float32, augment: Augment, seed: int, epochs: Int64, indices: Int64) -> None:
    """Sets a random box of the chosen images to zero, the mean (Zhong et al., arXiv 1708.04896), in place.

    Args:
        images: [n, channels, height, width], normalised.
        augment: Its `erase` is the probability.
        seed, epochs, indices: The keys of the draws; epochs and indices [n].
    """
    if not augment.erase:
        return
    height, width = images.shape[2:]
    numbers = np.arange(1 + 4 * _BOXES)
    draws = keyed_uniform(ERASE, seed, epochs[:, None], indices[:, None], numbers)
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

    Args:
        images: One virtual worker's, [n, channels, height, width]; changed in place. Image i's partner is n - 1 - i.
        augment: Its `mixup` and `cutmix`; with both, each image draws one of them.
        seed, epochs, indices: The keys of the draws; epochs and indices [n].

    Returns:
        float32 [n], the weight of each image's own pixels; None if the recipe mixes nothing.
    """
    if not augment.mixup and not augment.cutmix:
        return None
    numbers = np.arange(_SHARE + 2 * _ATTEMPTS)
    draws = keyed_uniform(MIX, seed, epochs[:, None], indices[:, None], numbers)
    pasted = np.full(len(images), not augment.mixup)
    if augment.mixup and augment.cutmix:
        pasted = draws[:, _CHOICE] < 0.5
    height, width = images.shape[2:]
    # A copy, since each image is the partner of one that changes before or after it.
    partners = images[::-1].copy()
    shares = np.empty(len(images), dtype=np.float32)
    for i in range(len(images)):
        alpha, key = augment.cutmix if pasted[i] else augment.mixup, (seed, int(epochs[i]), int(indices[i]))
        share = beta(alpha, draws[i, _SHARE:]) if is_by_products(alpha) else arithmetic.beta(alpha, MIX, *key)
        if pasted[i]:
            rows, columns = (
                _span(side, math.sqrt(1 - share), float(draws[i, number]))
                for side, number in ((height, _ROW), (width, _COLUMN))
            )
            images[i, :, rows, columns] = partners[i, :, rows, columns]
            # The edges may have cut the box, so the weight is that of the pixels that were pasted.
            share = 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
            shares[i] = share
        else:
            shares[i] = share
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
    """A draw from Beta(alpha, alpha) by Johnk's method.

    Args:
        alpha: 1, or one over a whole number (`is_by_products`).
        draws: Uniform in [0, 1), two for each attempt.

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

"""From sample indices to a batch of tensors: read, decode, augment, normalise.

An image's tensor depends on (seed, epoch, index) alone, bit for bit: never on the other images of its batch, on
the thread, or on which of a source's reading methods was used.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RunError, UserError
from ..keyed import SUBSTITUTE, keyed_integer
from ..recipe import Data
from . import augment as random_changes
from .sources import ArraySource, CorruptImage, RegionSource, Source
from .view import Choose, Region, centre, render, scaled

Pixels = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]
T = TypeVar("T")

log = logging.getLogger(__name__)

_PAUSES = (0.1, 0.5)  # seconds before a failed read is tried again
_SUBSTITUTES = 16  # undecodable images in a row; then something else is wrong


@dataclass(frozen=True)
class Batch:
    """Images ready for the network.

    Args:
        images: float32 [n, channels, size, size], contiguous, normalised.
        targets: int64 [n], labels.
        kept: int64 [n], the positions of these images in the request; shorter than the request only where
            evaluation left out undecodable ones.
        replaced: How many of these images stand in for undecodable ones.
    """

    images: torch.Tensor
    targets: torch.Tensor
    kept: Int64
    replaced: int


class Pipeline:
    """Makes batches from a source as a recipe's `data` says. Safe to use from several threads.

    Args:
        source: Training or held-out images.
        data: The recipe's section.
        seed: The recipe's seed.
    """

    def __init__(self, source: Source, data: Data, seed: int) -> None:
        self.source = source
        self._data = data
        self._seed = seed
        # Two roundings for each value, a product and a sum: equal bits in any batch and at any alignment.
        mean, std = np.array(data.mean), np.array(data.std)
        self._scale = (1 / (255 * std)).astype(np.float32)[:, None, None]
        self._offset = (-mean / std).astype(np.float32)[:, None, None]

    def training_batch(self, indices: Int64, epochs: Int64, augment: bool) -> Batch:
        """The images at `indices` [n] as epoch `epochs` [n] sees them.

        An undecodable image is replaced by one that a hash of (seed, epoch, index, attempt) names, and counted.

        Args:
            augment: False: with the validation preprocessing (Final Polishing).

        Raises:
            OSError: An image can't be read, after further attempts.
            RunError: One substitute after the other is undecodable.
            UserError: An image's size or channels don't fit the recipe.
        """
        changes = self._data.augment
        if augment and changes.crop == "resized":
            draws = random_changes.box_draws(self._seed, epochs, indices)
            size = self._data.image_size
            chosen: list[Choose] = [
                partial(random_changes.random_region, size=size, augment=changes, draws=row) for row in draws
            ]
        else:
            chosen = [self._validation_region] * len(indices)
        used = indices.copy()
        images = self._whole_batch(indices) if chosen[:1] == [self._validation_region] else None
        if images is None:
            images = self._empty(len(indices))
            for at, choose in enumerate(chosen):
                images[at], used[at] = self._image_or_substitute(int(indices[at]), int(epochs[at]), choose)
        if augment and changes.crop == "shift":
            images = random_changes.shift(images, changes.shift, self._seed, epochs, indices)
        if augment and changes.flip > 0:
            random_changes.flip(images, changes.flip, self._seed, epochs, indices)
        return self._batch(images, used, np.arange(len(indices)), int((used != indices).sum()))

    def validation_batch(self, indices: Int64) -> Batch:
        """The images at `indices` [n], shorter side scaled to `data.resize`, middle `data.image_size` cut out.

        Undecodable images are left out and named in the log; `kept` tells which remain.

        Raises:
            OSError: An image can't be read, after further attempts.
            UserError: An image's size or channels don't fit the recipe.
        """
        kept = np.arange(len(indices))
        images = self._whole_batch(indices)
        if images is None:
            images = self._empty(len(indices))
            decodable = np.ones(len(indices), dtype=bool)
            for at, index in enumerate(indices.tolist()):
                try:
                    images[at] = self._image(index, self._validation_region)
                except CorruptImage as error:
                    decodable[at] = False
                    log.warning("left out of evaluation: %s", error)
            images, kept = images[decodable], kept[decodable]
        return self._batch(images, indices[kept], kept, 0)

    def _empty(self, count: int) -> Pixels:
        size = self._data.image_size
        return np.empty((count, self._data.channels, size, size), np.uint8)

    def _batch(self, images: Pixels, indices: Int64, kept: Int64, replaced: int) -> Batch:
        out = np.empty(images.shape, np.float32)
        block = max(1, (1 << 18) // max(1, images[:1].size))  # so that an image's three passes meet in the cache
        for start in range(0, len(images), block):
            part = out[start : start + block]
            part[...] = images[start : start + block]
            part *= self._scale
            part += self._offset
        targets = torch.from_numpy(self.source.labels[indices])
        return Batch(torch.from_numpy(out), targets, kept, replaced)

    def _whole_batch(self, indices: Int64) -> Pixels | None:
        """The images in the validation preprocessing without a loop, where the source holds them in that size."""
        source, size = self.source, self._data.image_size
        if not isinstance(source, ArraySource) or source.shape[:2] != (size, size):
            return None
        if self._data.resize not in (None, size):
            return None
        images = _retried(lambda: source.read_many(indices))
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def _image_or_substitute(self, index: int, epoch: int, choose: Choose) -> tuple[Pixels, int]:
        taken = index
        for attempt in range(_SUBSTITUTES + 1):
            try:
                return self._image(taken, choose), taken
            except CorruptImage as error:
                last = error
                log.warning("replaced in epoch %d: %s", epoch, error)
                taken = int(keyed_integer(len(self.source), SUBSTITUTE, self._seed, epoch, index, attempt))
        raise RunError(f"{_SUBSTITUTES} substitutes in a row can't be decoded either, the last: {last}") from last

    def _image(self, index: int, choose: Choose) -> Pixels:
        """One image, uint8 [channels, size, size]."""
        source, channels = self.source, self._data.channels
        if isinstance(source, RegionSource):
            image = _retried(lambda: source.read_region(index, choose))
        else:
            pixels = _retried(lambda: source.read(index))
            if pixels.ndim != 3 or pixels.shape[2] != channels:
                raise UserError(
                    f"data.channels: the recipe says {channels}, image {index} is of shape {list(pixels.shape)}"
                    " (height, width, channels)"
                )
            image = render(pixels, choose(*pixels.shape[:2]))
        return centre(image, self._data.image_size)

    def _validation_region(self, height: int, width: int) -> Region:
        size, resize = self._data.image_size, self._data.resize
        if resize is not None:
            return scaled(height, width, resize)
        if (height, width) != (size, size):
            raise UserError(
                f"data.resize: null wants images of {size} x {size} pixels, but there is one of {width} x {height};"
                " set data.resize to the shorter side before the centre crop"
            )
        return Region(0, 0, height, width, height, width)


def _retried(read: Callable[[], T]) -> T:
    for pause in _PAUSES:
        try:
            return read()
        except OSError as error:
            log.warning("reading again in %.1f s: %s", pause, error)
            time.sleep(pause)
    return read()

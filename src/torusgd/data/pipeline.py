"""From sample indices to a batch of tensors: read, decode, augment, normalise.

An image's tensor depends on (seed, epoch, index) alone, bit for bit: never on the other images of its batch, on
the thread, or on which of a source's reading methods was used. Only mixing joins images, those of one virtual worker.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from ..errors import RunError, UserError
from ..recipe.data_schema import Data
from ..recipe.section import sides
from ..rng import SUBSTITUTE, keyed_integer
from . import augment as random_changes
from .augment import Changes
from .mixing import erase, mix
from .policy import apply_policy
from .types import ArraySource, Choose, CorruptImage, Float32, Int64, Pixels, Region, RegionSource, Source
from .view import centre, cut_at, render, scaled

T = TypeVar("T")
Cut = Callable[[Pixels], Pixels]
"""from an image [channels, height, width] to what the network takes of it"""

log = logging.getLogger(__name__)

_PAUSES = (0.1, 0.5)  # seconds before a failed read is tried again
_SUBSTITUTES = 16  # undecodable images in a row; then something else is wrong


@dataclass(frozen=True, eq=False)
class Batch:
    """Images ready for the network.

    Args:
        images: float32 [n, channels, height, width], contiguous, normalised.
        targets: int64 [n], labels.
        kept: int64 [n], the positions of these images in the request; shorter than the request only where
            evaluation left out undecodable ones.
        replaced: How many of these images stand in for undecodable ones.
        partners: int64 [n], the labels that images were mixed with; None where none is mixed.
        shares: float32 [n], the share of each image's own label.
    """

    images: torch.Tensor
    targets: torch.Tensor
    kept: Int64
    replaced: int
    partners: torch.Tensor | None = None
    shares: torch.Tensor | None = None


class Pipeline:
    """Makes batches from a source as a recipe's `data` says. Safe to use from several threads.

    Args:
        source: Training or held-out images.
        data: The recipe's section.
        seed: The recipe's seed.
    """

    def __init__(self, source: Source, data: Data, seed: int) -> None:
        self.source = source
        self._arrays = source if isinstance(source, ArraySource) else None
        self._regions = source if isinstance(source, RegionSource) else None
        self._data = data
        self._size = sides(data.image_size)
        self._seed = seed
        # Two roundings for each value, a product and a sum: equal bits in any batch and at any alignment.
        mean, std = np.array(data.mean), np.array(data.std)
        self._scale = (1 / (255 * std)).astype(np.float32)
        self._offset = (-mean / std).astype(np.float32)

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
        drawn = random_changes.draw_changes(self._data.augment, self._seed, epochs, indices) if augment else None
        out = self._empty(len(indices))
        used = indices.copy()
        if (images := self._whole_batch(indices, drawn)) is not None:
            self._finish(images, drawn, slice(None), out)
        else:
            for at, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
                image, used[at] = self._image_or_substitute(index, epoch, self._region(drawn, at), self._cut(drawn, at))
                self._finish(image[None], drawn, slice(at, at + 1), out)
        batch = self._batch(out, used, np.arange(len(indices)), int((used != indices).sum()))
        if not augment:
            return batch
        erase(out, self._data.augment, self._seed, epochs, indices)
        shares = mix(out, self._data.augment, self._seed, epochs, indices)
        if shares is None:
            return batch
        return replace(batch, partners=batch.targets.flip(0), shares=torch.from_numpy(shares))

    def validation_batch(self, indices: Int64) -> Batch:
        """The images at `indices` [n], shorter side scaled to `data.resize`, middle `data.image_size` cut out.

        Undecodable images are left out and named in the log; `kept` names those that remain.

        Raises:
            OSError: An image can't be read, after further attempts.
            UserError: An image's size or channels don't fit the recipe.
        """
        out = self._empty(len(indices))
        kept = np.arange(len(indices))
        if (images := self._whole_batch(indices, None)) is not None:
            self._finish(images, None, slice(None), out)
        else:
            decodable = np.ones(len(indices), dtype=bool)
            for at, index in enumerate(indices.tolist()):
                try:
                    image = self._image(index, self._validation_region, self._centre)
                except CorruptImage as error:
                    decodable[at] = False
                    log.warning("left out of evaluation: %s", error)
                else:
                    self._finish(image[None], None, slice(at, at + 1), out)
            if not decodable.all():
                out, kept = out[decodable], kept[decodable]
        return self._batch(out, indices[kept], kept, 0)

    def _empty(self, count: int) -> Float32:
        # torch's memory, since numpy asks the kernel for huge pages, which cost more to clear than an image to make.
        return torch.empty(count, self._data.channels, *self._size).numpy()

    def _batch(self, out: Float32, indices: Int64, kept: Int64, replaced: int) -> Batch:
        targets = self.source.labels[indices].astype(np.int64)
        return Batch(torch.from_numpy(out), torch.from_numpy(targets), kept, replaced)

    def _whole_batch(self, indices: Int64, drawn: Changes | None) -> Pixels | None:
        """The images at their final size without a loop, uint8 [n, channels, height, width], where that can be."""
        source = self._arrays
        if source is None or source.shape[:2] != self._size:
            return None
        if self._data.resize not in (None, min(self._size)) or (drawn is not None and drawn.boxes is not None):
            return None
        images = _retried(lambda: source.read_many(indices))
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def _finish(self, images: Pixels, drawn: Changes | None, at: slice, out: Float32) -> None:
        """Change and normalise the images [m, channels, height, width] at these positions of the batch."""
        if drawn is not None and drawn.moves is not None:
            images = random_changes.shift(images, self._data.augment.shift, drawn.moves[at])
        if drawn is not None:
            images = random_changes.mirror(images, drawn.mirrored[at])
            if drawn.policy is not None:
                images = apply_policy(images, self._data.augment, drawn.policy[at])
        # Plane by plane, so that the three passes over a large image meet in the cache.
        block = max(1, (1 << 18) // max(1, images[:1].size))
        for start in range(0, len(images), block):
            some = slice(start, start + block)
            for channel in range(images.shape[1]):
                plane = out[at][some, channel]
                plane[...] = images[some, channel]
                plane *= self._scale[channel]
                plane += self._offset[channel]

    def _region(self, drawn: Changes | None, at: int) -> Choose:
        if drawn is None or drawn.boxes is None:
            return self._validation_region
        return partial(random_changes.random_region, size=self._size, augment=self._data.augment, draws=drawn.boxes[at])

    def _cut(self, drawn: Changes | None, at: int) -> Cut:
        if drawn is None or drawn.corners is None:
            return self._centre
        down, right = drawn.corners[at].tolist()
        return partial(cut_at, size=self._size, corner=(down, right))

    def _centre(self, image: Pixels) -> Pixels:
        return centre(image, self._size)

    def _image_or_substitute(self, index: int, epoch: int, choose: Choose, cut: Cut) -> tuple[Pixels, int]:
        taken = index
        for attempt in range(_SUBSTITUTES + 1):
            try:
                return self._image(taken, choose, cut), taken
            except CorruptImage as error:
                last = error
                log.warning("replaced in epoch %d: %s", epoch, error)
                taken = int(keyed_integer(len(self.source), SUBSTITUTE, self._seed, epoch, index, attempt))
        raise RunError(f"{_SUBSTITUTES} substitutes in a row can't be decoded either, the last: {last}") from last

    def _image(self, index: int, choose: Choose, cut: Cut) -> Pixels:
        """One image, uint8 [channels, height, width]."""
        if (regions := self._regions) is not None:
            image = _retried(lambda: regions.read_region(index, choose))
        else:
            pixels = _retried(lambda: self.source.read(index))
            if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != self._data.channels:
                raise UserError(
                    f"data.channels: the recipe says {self._data.channels}, so images are to be uint8 [height, width,"
                    f" {self._data.channels}], but image {index} is {pixels.dtype} {list(pixels.shape)}"
                )
            image = render(pixels, choose(*pixels.shape[:2]))
        return cut(image)

    def _validation_region(self, height: int, width: int) -> Region:
        rows, columns = self._size
        if self._data.resize is not None:
            return scaled(height, width, self._data.resize)
        if (height, width) != self._size:
            raise UserError(
                f"data.resize: null wants images of {columns} x {rows} pixels, but there is one of {width} x {height};"
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

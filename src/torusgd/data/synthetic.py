"""Images made on the fly from their index, learnable and of any size, so that every recipe runs anywhere."""

import numpy as np

from ..errors import UserError
from ..rng import SYNTHETIC, keyed_hash, keyed_integer
from .types import Int64, Pixels

_PATTERN, _MOVE, _NOISE = range(3)
_GRID = 4  # a class is a pattern of 4 x 4 tiles
_BLOCK = 1 << 15  # random words made at a time, so that they stay in the cache


class Synthetic:
    """An `ArraySource`: a pattern of coloured tiles for each class, moved round by a keyed offset, in keyed noise.

    An image is a pure function of (seed, split, index), made with integers alone. Labels take turns.

    Args:
        shape: Height, width and channels.
        split: 0 for training, 1 for held-out images; they share their classes' patterns.
        noise: The noise's share of a pixel, from 0 to 1 (noise alone).
    """

    def __init__(
        self, count: int, classes: int, shape: tuple[int, int, int], seed: int, split: int, noise: float
    ) -> None:
        self.labels: Int64 = np.arange(count, dtype=np.int64) % classes
        self.classes = tuple(str(label) for label in range(classes))
        self.shape = shape
        self._key = (SYNTHETIC, seed, split)
        self._noise = round(noise * 256)
        tile = np.ogrid[:classes, :_GRID, :_GRID, : shape[2]]
        self._tiles = keyed_integer(256, SYNTHETIC, seed, _PATTERN, *tile).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self.read_many(np.array([index]))[0]

    def read_many(self, indices: Int64) -> Pixels:
        images = np.empty((len(indices), *self.shape), np.uint8)
        block = max(1, _BLOCK * 8 // images[0].size) if len(indices) else 1
        for start in range(0, len(indices), block):
            images[start : start + block] = self._make(indices[start : start + block])
        return images

    def _make(self, indices: Int64) -> Pixels:
        height, width, channels = self.shape
        rows = self._moved(indices, height, 0)
        columns = self._moved(indices, width, 1)
        lines = self._tiles[self.labels[indices][:, None, None], np.arange(_GRID)[:, None], columns[:, None, :]]
        pattern = lines[np.arange(len(indices))[:, None], rows]
        size = height * width * channels
        words = keyed_hash(*self._key, _NOISE, indices[:, None], np.arange(-(-size // 8)))
        noise = words.astype("<u8", copy=False).view(np.uint8)[:, :size].reshape(pattern.shape)
        mixed = pattern * np.uint16(256 - self._noise) + noise * np.uint16(self._noise)
        return (mixed >> np.uint16(8)).astype(np.uint8)

    def _moved(self, indices: Int64, side: int, axis: int) -> Int64:
        """The tile of each pixel along one side after the move, [n, side]."""
        offsets = keyed_integer(side, *self._key, _MOVE, indices, axis)
        return (np.arange(side) + offsets[:, None]) % side * _GRID // side


def open_synthetic(
    train_images: int, eval_images: int, classes: int, shape: tuple[int, int, int], seed: int, noise: float = 0.5
) -> tuple[Synthetic, Synthetic]:
    """Training and held-out images of the same classes, uint8 of the given shape (height, width, channels).

    Raises:
        UserError: `noise` is not a number from 0 to 1.
    """
    if isinstance(noise, bool | str) or not 0 <= noise <= 1:
        raise UserError(f"data.options.noise: a number from 0 to 1, got {noise!r}")
    train, held_out = (
        Synthetic(count, classes, shape, seed, split, noise) for split, count in enumerate((train_images, eval_images))
    )
    return train, held_out

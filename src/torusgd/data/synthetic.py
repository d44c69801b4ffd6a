"""Images made on the fly from their index, so that every recipe runs anywhere: tiles (`synthetic`) and `frames`.

Both can be learned, are of any size, and are made with integers alone: the same bits on every machine.
"""

from abc import ABC, abstractmethod

import numpy as np

from ..rng import FRAMES, SYNTHETIC, keyed_hash, keyed_integer
from .types import Int32, Int64, Pixels, UInt16

_PATTERN, _MOVE, _NOISE = range(3)
_GRID = 4  # tiles a side in the pattern of a class
_BLOCK = 1 << 15  # random words made at a time: more would not stay in the cache

SEQUENCE = 200  # frames of a sequence: two seconds of speech at 100 frames a second
_MEAN, _FIRST, _NEXT, _CHOICE, _STAY, _FRAME_NOISE = range(6)
_STATES = 3  # of a unit
_FOLLOWERS = 16  # units that may come after a unit
_SHORTEST, _LONGEST = 3, 9  # frames in one state
_AVERAGE = np.array([1, 4, 6, 4, 1], np.uint16)  # weights of the means of five frames, in sixteenths
_REACH = len(_AVERAGE) // 2
_SEQUENCES = 1 << 12  # made at a time


Shape = tuple[int, int, int]  # height, width and channels of an image


class _Made(ABC):
    """What both sources have in common: images are made by `read_many` alone."""

    labels: Int64

    def __init__(self, classes: int, shape: Shape, key: tuple[int, ...], noise: int) -> None:
        self.classes, self.shape = tuple(map(str, range(classes))), shape
        self._key, self._noise = key, noise

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self.read_many(np.array([index]))[0]

    @abstractmethod
    def read_many(self, indices: Int64) -> Pixels: ...

    def _noisy(self, values: Pixels | UInt16, kind: int, *words: Int64) -> Pixels:
        """Values [..., n] in noise that is keyed by `words` [...]."""
        # A hash has eight bytes, the noise of eight values; the last word may be cut.
        count = values.shape[-1]
        bits = keyed_hash(*self._key, kind, *(word[..., None] for word in words), np.arange(-(-count // 8)))
        noise = bits.astype("<u8", copy=False).view(np.uint8)[..., :count]
        mixed = values * np.uint16(256 - self._noise) + noise * np.uint16(self._noise)
        return (mixed >> np.uint16(8)).astype(np.uint8)


class Synthetic(_Made):
    """An `ArraySource`: a pattern of coloured tiles for each class, rolled by a keyed offset, in keyed noise.

    An image is a pure function of (seed, split, index); split 0 is for training, and both have the same patterns.
    Labels take turns. The weight of the noise in a pixel is 0 to 256 (noise alone).
    """

    def __init__(self, count: int, classes: int, shape: Shape, seed: int, split: int, noise: int) -> None:
        super().__init__(classes, shape, (SYNTHETIC, seed, split), noise)
        self.labels = np.arange(count, dtype=np.int64) % classes
        tile = np.ogrid[:classes, :_GRID, :_GRID, : shape[2]]
        self._tiles = keyed_integer(256, SYNTHETIC, seed, _PATTERN, *tile).astype(np.uint8)

    def read_many(self, indices: Int64) -> Pixels:
        images = np.empty((len(indices), *self.shape), np.uint8)
        block = max(1, _BLOCK * 8 // images[0].size) if len(indices) else 1
        for start in range(0, len(indices), block):
            images[start : start + block] = self._make(indices[start : start + block])
        return images

    def _make(self, indices: Int64) -> Pixels:
        rows, columns = (self._moved(indices, side, axis) for axis, side in enumerate(self.shape[:2]))
        # First the columns of each tile row, then the rows: two look-ups in place of one of every pixel.
        lines = self._tiles[self.labels[indices][:, None, None], np.arange(_GRID)[:, None], columns[:, None, :]]
        pattern = lines[np.arange(len(indices))[:, None], rows]
        return self._noisy(pattern.reshape(len(indices), -1), _NOISE, indices).reshape(pattern.shape)

    def _moved(self, indices: Int64, side: int, axis: int) -> Int64:
        """The tile of each pixel along one side after the move, [n, side]."""
        return (np.arange(side) + keyed_integer(side, *self._key, _MOVE, indices, axis)[:, None]) % side * _GRID // side


class Frames(_Made):
    """An `ArraySource` like speech: windows of consecutive frames, labelled with the state of the middle frame.

    A window (frames, and values of a frame) is a pure function of (seed, split, index); split 0 is for training, and
    both have the same states. The weight of the noise in a value is 0 to 256 (noise alone).
    """

    # A sequence walks through units, as speech through phones in context. A unit is three states from left to right,
    # each held for a few frames; a Markov chain chooses the next unit. Every state (a class) has a mean vector; a frame
    # is the binomial average of the means around it, so that states run into each other, in keyed noise. Sample i is
    # frame i of all sequences end to end. Each of them has further frames before its first and after its last sample,
    # for windows alone.
    def __init__(self, count: int, classes: int, shape: Shape, seed: int, split: int, noise: int) -> None:
        window = shape[:2]  # frames have one channel, whatever the recipe says
        super().__init__(classes, (*window, 1), (FRAMES, seed, split), noise)
        self._means = keyed_integer(256, FRAMES, seed, _MEAN, *np.ogrid[:classes, : window[1]]).astype(np.uint8)
        sequences = -(-count // SEQUENCE)
        length = SEQUENCE + window[0] - 1 + 2 * _REACH
        self._states = np.empty((sequences, length), np.int32)
        for start in range(0, sequences, _SEQUENCES):
            block = np.arange(start, min(start + _SEQUENCES, sequences))
            self._states[block] = walk(block, length, classes, seed, split)
        middle = _REACH + window[0] // 2
        self.labels = self._states[:, middle : middle + SEQUENCE].reshape(-1)[:count].astype(np.int64)

    def read_many(self, indices: Int64) -> Pixels:
        height, width, _ = self.shape
        sequence, first = np.divmod(indices[:, None], SEQUENCE)
        frames = first + np.arange(height)
        # Weights sum to 16, so uint16 holds every partial sum: 16 x 255.
        smooth = np.zeros((len(indices), height, width), np.uint16)
        for offset, weight in enumerate(_AVERAGE):
            smooth += weight * self._means[self._states[sequence, frames + offset]]
        return self._noisy(smooth >> np.uint16(4), _FRAME_NOISE, sequence, frames)[..., None]


def walk(sequences: Int64, length: int, classes: int, seed: int, split: int) -> Int32:
    """The state of each frame of some sequences, int32 [len(sequences), length]."""
    units = -(-classes // _STATES)
    visits = -(-length // (_STATES * _SHORTEST))  # enough even if every state is left at once
    path = np.empty((len(sequences), visits), np.int64)
    path[:, 0] = keyed_integer(units, FRAMES, seed, _FIRST, split, sequences)
    for visit in range(1, visits):
        choice = keyed_integer(_FOLLOWERS, FRAMES, seed, _CHOICE, split, sequences, visit)
        # A unit has a few followers, the same each time: the chain, unlike free draws, can be learned.
        path[:, visit] = keyed_integer(units, FRAMES, seed, _NEXT, path[:, visit - 1], choice)
    # The last unit may have fewer states than three; it stays in its last one.
    states = np.minimum(_STATES * path[..., None] + np.arange(_STATES), classes - 1).reshape(len(sequences), -1)
    # How long each state lasts, and from that where each sequence begins in the flat run of all frames.
    places = np.arange(states.shape[1])
    stays = _SHORTEST + keyed_integer(_LONGEST - _SHORTEST + 1, FRAMES, seed, _STAY, split, sequences[:, None], places)
    total = stays.sum(axis=1)
    starts = np.cumsum(total) - total
    return np.repeat(states.ravel(), stays.ravel())[starts[:, None] + np.arange(length)].astype(np.int32)

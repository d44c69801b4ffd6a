"""Labelled frame sequences made on the fly, like speech: windows of frames in, the state of the middle frame out.

A sequence walks through units, as speech through phones in context. A unit is three states from left to right, each
held for a few frames; which unit comes next is a Markov chain. Every state (a class) has a mean vector; a frame is the
binomial average of the means round it, so that states run into each other, in keyed noise.
"""

import numpy as np

from ..errors import UserError
from ..rng import FRAMES, keyed_hash, keyed_integer
from .types import Int32, Int64, Pixels

SEQUENCE = 200
"""frames of a sequence: two seconds of speech at 100 frames a second"""

_MEAN, _FIRST, _NEXT, _CHOICE, _STAY, _NOISE = range(6)
_STATES = 3  # of a unit
_FOLLOWERS = 16  # units that may come after a unit
_SHORTEST, _LONGEST = 3, 9  # frames in one state
_AVERAGE = np.array([1, 4, 6, 4, 1], np.uint16)  # of the means of five frames, in sixteenths
_REACH = len(_AVERAGE) // 2
_BLOCK = 1 << 12  # sequences made at a time


class Frames:
    """An `ArraySource`: windows of consecutive frames, labelled with the state of the middle frame.

    A window is a pure function of (seed, split, index), made with integers alone; sample i is frame i of the sequences
    laid end to end, each of which begins and ends in frames that only windows see.

    Args:
        window: Frames of a sample and values of a frame, the height and the width of the image.
        split: 0 for training, 1 for held-out frames; they share the units, their followers and the means.
        noise: The noise's share of a value, from 0 to 1 (noise alone).
    """

    def __init__(self, count: int, classes: int, window: tuple[int, int], seed: int, split: int, noise: float) -> None:
        self.classes = tuple(str(label) for label in range(classes))
        self.shape = (*window, 1)
        self._key = (FRAMES, seed, split)
        self._noise = round(noise * 256)
        means = keyed_integer(256, FRAMES, seed, _MEAN, *np.ogrid[:classes, : window[1]])
        self._means = means.astype(np.uint8)
        sequences = -(-count // SEQUENCE)
        length = SEQUENCE + window[0] - 1 + 2 * _REACH
        self._states = np.empty((sequences, length), np.int32)
        for start in range(0, sequences, _BLOCK):
            block = np.arange(start, min(start + _BLOCK, sequences))
            self._states[block] = walk(block, length, classes, seed, split)
        middle = _REACH + window[0] // 2
        self.labels: Int64 = self._states[:, middle : middle + SEQUENCE].reshape(-1)[:count].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self.read_many(np.array([index]))[0]

    def read_many(self, indices: Int64) -> Pixels:
        height, width, _ = self.shape
        sequence, first = np.divmod(indices[:, None], SEQUENCE)
        frames = first + np.arange(height)
        smooth = np.zeros((len(indices), height, width), np.uint16)
        for offset, weight in enumerate(_AVERAGE):
            smooth += weight * self._means[self._states[sequence, frames + offset]]
        words = keyed_hash(*self._key, _NOISE, sequence[..., None], frames[..., None], np.arange(-(-width // 8)))
        noise = words.astype("<u8", copy=False).view(np.uint8)[..., :width]
        mixed = (smooth >> np.uint16(4)) * np.uint16(256 - self._noise) + noise * np.uint16(self._noise)
        return (mixed >> np.uint16(8)).astype(np.uint8)[..., None]


def walk(sequences: Int64, length: int, classes: int, seed: int, split: int) -> Int32:
    """The state of each frame of some sequences, int32 [len(sequences), length]."""
    units = -(-classes // _STATES)
    visits = -(-length // (_STATES * _SHORTEST))  # enough even if every state is left at once
    path = np.empty((len(sequences), visits), np.int64)
    path[:, 0] = keyed_integer(units, FRAMES, seed, _FIRST, split, sequences)
    for visit in range(1, visits):
        choice = keyed_integer(_FOLLOWERS, FRAMES, seed, _CHOICE, split, sequences, visit)
        path[:, visit] = keyed_integer(units, FRAMES, seed, _NEXT, path[:, visit - 1], choice)
    # The last unit may have fewer states than three; it stays in its last one.
    states = np.minimum(_STATES * path[..., None] + np.arange(_STATES), classes - 1).reshape(len(sequences), -1)
    places = np.arange(states.shape[1])
    stays = _SHORTEST + keyed_integer(_LONGEST - _SHORTEST + 1, FRAMES, seed, _STAY, split, sequences[:, None], places)
    total = stays.sum(axis=1)
    starts = np.cumsum(total) - total
    return np.repeat(states.ravel(), stays.ravel())[starts[:, None] + np.arange(length)].astype(np.int32)


def open_frames(
    train: int, held_out: int, classes: int, window: tuple[int, int], seed: int, noise: float = 0.5
) -> tuple[Frames, Frames]:
    """So many training and held-out windows of the same classes, uint8 [frames, values, 1].

    Raises:
        UserError: `noise` is not a number from 0 to 1.
    """
    if isinstance(noise, bool | str) or not 0 <= noise <= 1:
        raise UserError(f"data.options.noise: a number from 0 to 1, got {noise!r}")
    pair = (Frames(count, classes, window, seed, split, noise) for split, count in enumerate((train, held_out)))
    first, second = pair
    return first, second

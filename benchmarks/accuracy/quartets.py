"""A harder set than Fashion-MNIST, drawn from it by key: four pictures in one image of 56 pixels a side, 100 classes.

The upper left and the lower right picture are the class, 10 a + b; the other two are clutter. Of the 60,000 training
pictures 5,000 by key are for validation, so that no picture is in both; held-out images are of held-out pictures.

It is a source of a recipe: `data.source=benchmarks.accuracy.quartets:quartets`, with `--data` as for Fashion-MNIST.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from torusgd.data.arrays import open_mnist
from torusgd.data.types import ArraySource, Int64, Pixels
from torusgd.errors import UserError
from torusgd.rng import VALIDATION, keyed_permutation

VALIDATION_PICTURES = 5_000
_KEY = {"train": 1, "validation": 2, "held-out": 3}
Part = Literal["train", "validation", "held-out"]


def drawn(part: Part, pictures: Int64, count: int) -> Int64:
    """Indices of the four pictures of each image, int64 [count, 4]: each position goes through all pictures in turn."""
    rounds = -(-count // len(pictures))
    columns = [
        np.concatenate([pictures[keyed_permutation(len(pictures), VALIDATION, _KEY[part], position, turn)]
                        for turn in range(rounds)])[:count]
        for position in range(4)
    ]  # fmt: skip
    return np.stack(columns, axis=1)


def parts(count: int) -> dict[str, Int64]:
    """Indices of the training pictures that are trained on, and of those for validation, of `count`."""
    order = keyed_permutation(count, VALIDATION, 0)
    return {"train": np.sort(order[VALIDATION_PICTURES:]), "validation": np.sort(order[:VALIDATION_PICTURES])}


class Quartets:
    """Images of four pictures each."""

    def __init__(self, pictures: ArraySource, members: Int64) -> None:
        names, (height, width, channels) = pictures.classes, pictures.shape
        self.classes = tuple(f"{one}, {other}" for one in names for other in names)
        self.labels = len(names) * pictures.labels[members[:, 0]] + pictures.labels[members[:, 3]]
        self.shape = 2 * height, 2 * width, channels
        self._pictures, self._members = pictures, members

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        """One image, uint8 [height, width, channels]."""
        return self.read_many(np.array([index]))[0]

    def read_many(self, indices: Int64) -> Pixels:
        """The images at `indices` [n], uint8 [n, height, width, channels]."""
        one, two, three, four = (self._pictures.read_many(column) for column in self._members[indices].T)
        return np.concatenate([np.concatenate([one, two], axis=2), np.concatenate([three, four], axis=2)], axis=1)


def quartets(path: Path | None, split: str, images: int = 15_000, of: str = "validation") -> Quartets:
    """The source of a recipe; `of` says whether evaluations are of validation or of held-out pictures."""
    if path is None or of not in ("validation", "held-out"):
        raise UserError("quartets: needs --data, and data.options.of of validation or held-out")
    training, held_out = open_mnist(path)
    if split == "eval" and of == "held-out":
        return Quartets(held_out, drawn("held-out", np.arange(len(held_out)), len(held_out)))
    part: Part = "train" if split == "train" else "validation"
    pictures = parts(len(training))[part]
    return Quartets(training, drawn(part, pictures, images if part == "train" else len(pictures)))

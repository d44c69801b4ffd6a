"""Sources as a user would write them, named in recipes by the tests as tests.data.own:NAME."""

from pathlib import Path

import numpy as np

from torusgd.data import CorruptImage


class Stripes:
    """Images of several sizes; those in `corrupt` can't be decoded, those in `unreadable` fail that many times."""

    def __init__(self, count: int, corrupt: tuple[int, ...] = (), unreadable: dict[int, int] | None = None) -> None:
        self.classes = ("a", "b", "c")
        self.labels: np.ndarray = np.arange(count, dtype=np.int32) % 3
        self.corrupt = set(corrupt)
        self.unreadable = dict(unreadable or {})
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        self.reads.append(index)
        if self.unreadable.get(index, 0) > 0:
            self.unreadable[index] -= 1
            raise OSError(f"stripe {index} is out of reach")
        if index in self.corrupt:
            raise CorruptImage(index, "torn")
        height, width = 20 + index % 7, 20 + index % 5
        return np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)


def stripes(path: Path | None, split: str, count: int = 30) -> Stripes:
    return Stripes(count if split == "train" else count // 2)


def incomplete(path: Path | None, split: str) -> object:
    return object()


def mislabelled(path: Path | None, split: str) -> Stripes:
    source = Stripes(10)
    source.labels = source.labels + 1
    return source

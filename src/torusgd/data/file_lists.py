"""What is in a data set, found once a machine: lists of names as arrays, which its processes map instead of copying.

A list of 14 million file names takes 1.3 GB of Python objects, and to make it a walk over a file system that all ranks
share. So lists are made of plain arrays, and whoever opens a source says who makes them (`Once`): without ranks the
caller itself, in a run one rank of each machine (`train.host_share`).
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .types import Int64, Pixels

_ERRORS = "surrogateescape"
"""as Python has it for file names that are no UTF-8"""
_TRAIN, _EVAL, _TEST = (
    re.compile(rf"(^|[^a-z])({words})([^a-z]|$)", re.IGNORECASE)
    for words in ("train|training", "val|valid|validation|eval", "test")
)
Arrays = dict[str, npt.NDArray[Any]]
Progress = Callable[[int], object]
"""called now and then while arrays are made, with a number that grows"""


class Once(Protocol):
    """Gives the arrays that `make` makes; of several processes that call it one may make them for all.

    Every process calls it the same number of times. What `make` raises is raised wherever it was called.
    """

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays: ...


def make_here(make: Callable[[Progress], Arrays]) -> Arrays:
    """This process makes the arrays for itself."""
    return make(lambda done: None)


class Names(Sequence[str]):
    """Names as bytes, one after another with a NUL between two.

    Args:
        text: uint8 [bytes].
        ends: int64 [names], where each name ends.

    >>> names = Names(*names_as_arrays([["a.jpg", "b.jpg"], ["c.jpg"]]))
    >>> names[-1], list(names[:2]), bytes(names.text[:5])
    ('c.jpg', ['a.jpg', 'b.jpg'], b'a.jpg')
    """

    def __init__(self, text: Pixels, ends: Int64) -> None:
        self.text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Names": ...

    def __getitem__(self, index: int | slice) -> "str | Names":
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            assert (first, step) == (0, 1), "only the first names are ever taken"
            return Names(self.text[: self._ends[stop - 1] if stop else 0], self._ends[:stop])
        place = range(len(self))[index]
        begin = int(self._ends[place - 1]) + 1 if place else 0
        return self.text[begin : self._ends[place]].tobytes().decode(errors=_ERRORS)


def names_as_arrays(runs: Iterable[Sequence[str]]) -> tuple[Pixels, Int64]:
    """Runs of names as the arguments of `Names`; a run of names is dropped before the next one is made."""
    pieces, lengths = [], [np.empty(0, dtype=np.int64)]
    for run in runs:
        encoded = [name.encode(errors=_ERRORS) for name in run]
        lengths.append(np.array([len(name) for name in encoded], dtype=np.int64))
        pieces += [b"\0".join(encoded)] if encoded else []
    joined = np.concatenate(lengths)
    ends = np.cumsum(joined) + np.arange(len(joined))
    return np.frombuffer(b"\0".join(pieces), dtype=np.uint8), ends


def files_under(path: Path) -> list[str]:
    """The files in a folder and its sub-folders, as seen from it, sorted; hidden ones left out.

    Raises:
        UserError: It is no folder.
    """
    if not path.is_dir():
        raise UserError(f"{path}: is no folder; give the folder that holds the files")
    files = (file.relative_to(path) for file in path.rglob("*"))
    return sorted(file.as_posix() for file in files if not any(part.startswith((".", "_")) for part in file.parts))


def says_split(name: str) -> bool:
    """Whether a file's name or its folders' says of which split it is.

    >>> says_split("data/train-00000-of-00002.parquet"), says_split("trainers/README.md")
    (True, False)
    """
    return any(words.search(name) for words in (_TRAIN, _EVAL, _TEST))


def files_by_split(path: Path, names: Iterable[str], suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """Of a folder's files (`files_under`) those with these suffixes, by the split that their name or sub-folder says.

    Returns:
        `train` and `eval` (of those named val, validation or eval, or else test), sorted.

    Raises:
        UserError: One of the two has no file.
    """
    files = [name for name in names if name.lower().endswith(suffixes)]
    if not files:
        raise UserError(f"{path}: holds no {' or '.join(suffixes)} file")
    train = [name for name in files if _TRAIN.search(name)]
    rest = [name for name in files if not _TRAIN.search(name)]
    held_out = [name for name in rest if _EVAL.search(name)] or [name for name in rest if _TEST.search(name)]
    for word, found in (("train", train), ("val", held_out)):
        if not found:
            wanted = f"train-0000{suffixes[0]} and val-0000{suffixes[0]}"
            raise UserError(f"{path}: no {suffixes[0]} file has {word} in its name; wanted are names such as {wanted}")
    return {"train": train, "eval": held_out}

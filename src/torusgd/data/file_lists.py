"""Lists of what a data set holds: files, splits, classes and labels, as arrays that the ranks of a machine share."""

# A list of 14 million file names takes 1.3 GB as Python strings, and a walk over a file system that all ranks use. So a
# list is a few plain arrays, made by one process of a machine (`Once`).

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

from ..errors import UserError, as_user_error, suggest
from ..untrusted import check_regular, read_text
from .types import Int64, Pixels

MOST_CLASSES = 1_000_000
SPLITS = ("train", "eval")
_ERRORS = "surrogateescape"  # Python's way with file names that are not UTF-8
_TRAIN, _EVAL, _TEST = (
    re.compile(rf"(^|[^a-z])({words})([^a-z]|$)", re.IGNORECASE)
    for words in ("train|training", "val|valid|validation|eval", "test")
)
Arrays = dict[str, npt.NDArray[Any]]
Progress = Callable[[int], object]  # a callback for long listings; its argument is a count that grows

# Returns the arrays that its argument returns; of several processes one may make them for all. Every process calls it
# the same number of times. An exception in the making reaches every caller.
Once = Callable[[Callable[[Progress], Arrays]], Arrays]


def make_here(make: Callable[[Progress], Arrays]) -> Arrays:
    """The `Once` of a process on its own."""
    return make(lambda done: None)


def read_arrays(file: Path) -> Arrays:
    """The arrays of a safetensors file, mapped into memory, so that all processes share one copy."""
    return {name: tensor.numpy() for name, tensor in load_file(check_regular(file)).items()}


class Names:
    """A list of names in two arrays: their bytes with a NUL between two, and where each name ends.

    >>> names = Names.of(Names.arrays("files", [["a.jpg", "b.jpg"], ["c.jpg"]]), "files")
    >>> names[-1], list(names), names.first(2).tobytes()
    ('c.jpg', ['a.jpg', 'b.jpg', 'c.jpg'], b'a.jpg\\x00b.jpg')
    """

    def __init__(self, text: Pixels, ends: Int64) -> None:
        self._text, self._ends = text, ends

    @classmethod
    def of(cls, arrays: Arrays, key: str) -> "Names":
        """The list that `Names.arrays` packed under this key."""
        return cls(arrays[f"{key} text"], arrays[f"{key} ends"])

    @staticmethod
    def arrays(key: str, runs: Iterable[Sequence[str]]) -> Arrays:
        """Runs of names as two arrays, `KEY text` and `KEY ends`; each run is freed before the next one is made."""
        pieces, lengths = list[bytes](), [np.empty(0, dtype=np.int64)]
        for run in runs:
            encoded = [name.encode(errors=_ERRORS) for name in run]
            lengths.append(np.array([len(name) for name in encoded], dtype=np.int64))
            pieces += [b"\0".join(encoded)] if encoded else []
        joined = np.concatenate(lengths)
        text = np.frombuffer(bytearray(b"\0").join(pieces), dtype=np.uint8)
        # Before a name's end stand all earlier names, and one NUL after each of them.
        return {f"{key} text": text, f"{key} ends": np.cumsum(joined) + np.arange(len(joined))}

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        slot = range(len(self))[index]
        begin = int(self._ends[slot - 1]) + 1 if slot else 0
        return self._text[begin : self._ends[slot]].tobytes().decode(errors=_ERRORS)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def first(self, count: int) -> Pixels:
        """The bytes of the first `count` names, with a NUL between two."""
        return self._text[: self._ends[count - 1] if count else 0]


def read_classes(file: Path) -> dict[str, str]:
    """The classes of a text file, one a line, label 0 first: display names, which follow after a tab, by own names."""
    with as_user_error(f"{file}: can't be read as a list of classes", of=(OSError, ValueError)):
        lines = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    classes: dict[str, str] = {}
    for line in lines:
        key, _, name = line.partition("\t")
        if key in classes:
            raise UserError(f"{file}: lists {key!r} twice; one class a line")
        classes[key] = name.strip() or key
    if not classes:
        raise UserError(f"{file}: lists no class; one class a line")
    return classes


def number_labels(
    splits: Mapping[str, Sequence[str]], listed: Mapping[str, str] | None, where: str, are_names: bool = False
) -> tuple[tuple[str, ...], dict[str, Int64]]:
    """The class names by label, and the labels as numbers, int64 [images] by split, of a data set with texts as labels.

    If all labels are whole numbers, they stay as they are. Otherwise, and as `are_names` says of folders', they are
    class names, numbered in the order of the list (`read_classes`), or else sorted. UserError, which begins with
    `where`, if a label is not among the classes, or may be a number or a name of the list.
    """
    distinct = {split: set(labels) for split, labels in splits.items()}
    known = set().union(*distinct.values())
    # Labels of ten digits and more are names, such as WordNet's or a shop's numbers; 01 and 1 are two of them.
    if not are_names and all(re.fullmatch("0|[1-9][0-9]{0,8}", label) for label in known):
        if listed is not None and known <= listed.keys() and [*listed] != [str(n) for n in range(len(listed))]:
            what = "the labels are numbers from 0, or names of the list, which has them in another order"
            raise UserError(f"{where}: {what}; rename the classes, or list 0, 1, 2 and so on")
        numbers = {split: np.array(list(map(int, labels)), dtype=np.int64) for split, labels in splits.items()}
        largest = max(int(each.max(initial=-1)) for each in numbers.values())
        if largest >= (len(listed) if listed is not None else MOST_CLASSES):
            most = f"{len(listed)} classes are listed" if listed is not None else f"the limit is {MOST_CLASSES} classes"
            raise UserError(f"{where}: a label of {largest}, but {most}; labels count from 0")
        return tuple(listed.values() if listed is not None else map(str, range(largest + 1))), numbers
    if not are_names and (listed is None or not known <= listed.keys()):
        below = [label for label in known if re.fullmatch("-0*[1-9][0-9]*", label)]
        if below and all(re.fullmatch("-?[0-9]+", label) for label in known):
            remedy = "labels count from 0; number them anew, or leave images without a label out"
            raise UserError(f"{where}: a label of {min(below, key=int)}, but {remedy}")
    listed = listed if listed is not None else {key: key for key in sorted(distinct["train"])}
    number_of = {key: number for number, key in enumerate(listed)}
    for split, found in distinct.items():
        for label in sorted(found - number_of.keys()):
            raise UserError(f"{where}: an image of {split} is of class {label!r}{suggest(label, listed)}")
    numbers = {s: np.array([number_of[label] for label in labels], dtype=np.int64) for s, labels in splits.items()}
    return tuple(listed.values()), numbers


def files_under(path: Path) -> list[str]:
    """The files under a folder, as paths from it, sorted, without hidden ones; UserError if it is no folder."""
    if not path.is_dir():
        raise UserError(f"{path}: is no folder; give the folder that holds the files")
    files = (file.relative_to(path) for file in path.rglob("*"))
    return sorted(file.as_posix() for file in files if not any(part.startswith((".", "_")) for part in file.parts))


def says_split(name: str) -> bool:
    """Whether the name of a file, or of its folder, says which split it belongs to.

    >>> says_split("data/train-00000-of-00002.parquet"), says_split("trainers/README.md")
    (True, False)
    """
    return any(words.search(name) for words in (_TRAIN, _EVAL, _TEST))


def files_by_split(path: Path, names: Iterable[str], suffixes: tuple[str, ...]) -> dict[str, list[str]]:
    """The files with these suffixes (in small letters) by split, `train` and `eval`, which name or sub-folder says.

    `eval` has those named val, validation or eval, or else test; UserError if a split has no file.
    """
    files = [name for name in names if name.lower().endswith(suffixes)]
    if not files:
        raise UserError(f"{path}: holds no {' or '.join(suffixes)} file")
    train = list(filter(_TRAIN.search, files))
    rest = [name for name in files if not _TRAIN.search(name)]
    # Of files named val and test, test stays unused: it is for the last measurement, and often has no labels.
    held_out = list(filter(_EVAL.search, rest)) or list(filter(_TEST.search, rest))
    for word, found in (("train", train), ("val", held_out)):
        if not found:
            wanted = f"train-0000{suffixes[0]} and val-0000{suffixes[0]}"
            raise UserError(f"{path}: no {suffixes[0]} file has {word} in its name; wanted are names such as {wanted}")
    return {"train": train, "eval": held_out}

"""Picture files that a list names: CSV files of paths and labels, or the class folders of several data sets at once."""

import csv
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ..errors import UserError
from .classes import number_labels, read_classes
from .decode import load_decoders
from .file_lists import Arrays, Names, Once, Progress, make_here, names_as_arrays
from .pictures import PictureFiles, class_folders, pictures_in
from .types import Int64

PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
LABELS = ("label", "labels", "class", "class_name", "target", "category")
"""names of columns, in small letters; the first that a list has counts"""
_EVERY = 10_000

Rows = tuple[list[str], list[str]]
"""paths, and the label of each as a text"""


class ListedImages(PictureFiles):
    """A source of picture files that lie anywhere.

    Args:
        root: The folder from which the paths are seen.
        names: The paths.
        classes, labels, channels: See `EncodedImages`.
    """

    def __init__(self, root: Path, names: Names, classes: Sequence[str], labels: Int64, channels: int) -> None:
        super().__init__(classes, labels, channels)
        self.root, self.names = root, names

    def file(self, index: int) -> str:
        """Where an image lies."""
        return os.path.join(self.root, self.names[index])


Both = tuple[ListedImages, ListedImages]


def open_list(
    path: Path,
    channels: int,
    train: str = "train.csv",
    eval: str = "val.csv",
    classes: str | None = None,
    once: Once = make_here,
) -> Both:
    """Images that two CSV files name, in their order.

    A file has a column of paths, seen from its folder, and one of labels, numbers or names. A head line may name them
    (`PATHS`, `LABELS`); without one they are the first two. A file named .tsv has tabs between.

    Args:
        path: The folder of the two files.
        channels: See `EncodedImages`.
        train: The list of training images, seen from that folder.
        eval: That of held-out ones.
        classes: A file in the folder that lists the classes, see `read_classes`. None: numbers, or sorted names.
        once: Who reads the lists.

    Raises:
        UserError: A file is missing or is no such list, or a label is not among the classes.
    """
    lists = {"train": path / train, "eval": path / eval}
    listed = path / classes if classes is not None else None

    def look(progress: Progress) -> Arrays:
        rows = {split: _read(file, progress) for split, file in lists.items()}
        return _as_arrays(rows, listed, path)

    return _open(path, channels, once(look))


def open_folders(path: Path, channels: int, classes: str | None = None, once: Once = make_here) -> Both:
    """Images of several data sets, PATH/SET/train/CLASS/*.jpg and PATH/SET/val/CLASS/*.jpg, set by set.

    A class is what is called the same in any set. The sets may be links to folders elsewhere.

    Args:
        path, channels, classes, once: As of `open_list`.

    Raises:
        UserError: No set has training images, or none held-out ones, or a class has no training image.
    """
    return _open(path, channels, once(partial(_look_through, path, path / classes if classes is not None else None)))


def _open(path: Path, channels: int, found: Arrays) -> Both:
    load_decoders()
    classes = Names(found["classes text"], found["classes ends"])
    train, held_out = (
        ListedImages(path, Names(found[f"{s} text"], found[f"{s} ends"]), classes, found[f"{s} labels"], channels)
        for s in ("train", "eval")
    )
    return train, held_out


def _as_arrays(rows: dict[str, Rows], listed: Path | None, path: Path) -> Arrays:
    names = read_classes(listed) if listed is not None else None
    classes, labels = number_labels({split: each[1] for split, each in rows.items()}, names, str(path))
    arrays: Arrays = {f"{split} labels": each for split, each in labels.items()}
    for split, texts in (("classes", classes), *((split, each[0]) for split, each in rows.items())):
        arrays[f"{split} text"], arrays[f"{split} ends"] = names_as_arrays([texts])
    return arrays


def _read(file: Path, progress: Progress) -> Rows:
    paths, labels = list[str](), list[str]()
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ",")
            at, label_at = 0, 1
            for number, row in enumerate(rows):
                cells = [cell.strip() for cell in row]
                if number == 0 and (columns := _columns([cell.lower() for cell in cells])) is not None:
                    at, label_at = columns
                elif any(cells):
                    if len(cells) <= max(at, label_at) or not cells[at] or not cells[label_at] or "\0" in cells[at]:
                        raise UserError(f"{file}: line {rows.line_num} has no path and label")
                    paths.append(cells[at])
                    labels.append(cells[label_at])
                if number % _EVERY == 0:
                    progress(number)
    except UserError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: can't be read as a list of paths and labels ({error})") from error
    return paths, labels


def _columns(head: Sequence[str]) -> tuple[int, int] | None:
    """The places of the paths and of the labels in a head line; None: it is none."""
    found = [next((head.index(name) for name in known if name in head), None) for known in (PATHS, LABELS)]
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def _look_through(path: Path, listed: Path | None, progress: Progress) -> Arrays:
    rows: dict[str, Rows] = {"train": ([], []), "eval": ([], [])}
    for split, folder in (("train", "train"), ("eval", "val")):
        for file, label in _pictures(path, folder):
            rows[split][0].append(file)
            rows[split][1].append(label)
            if len(rows[split][0]) % _EVERY == 0:
                progress(len(rows[split][0]))
        if not rows[split][0]:
            raise UserError(f"{path}: no image in {path}/SET/{folder}/CLASS/*.jpg of any SET")
    return _as_arrays(rows, listed, path)


def _pictures(path: Path, split: str) -> Iterator[tuple[str, str]]:
    """The files of a split, as seen from `path`, and the class of each."""
    for one in class_folders(path):
        if (root := path / one / split).is_dir():
            for folder in class_folders(root):
                for name in pictures_in(root / folder):
                    yield f"{one}/{split}/{folder}/{name}", folder

"""JPEG and PNG files on a disk: the sources `folder`, `folders` and `csv`."""

import csv
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, as_user_error, is_transient
from ..untrusted import check_regular, is_there
from .decode import MOST_BYTES, EncodedImages, Undecodable, load_decoders
from .file_lists import Arrays, Names, Once, Progress, make_here, number_labels, read_classes
from .types import Int64

SUFFIXES = (".jpg", ".jpeg", ".png")
# Column names of a CSV file, in small letters; the first one that the file has counts.
PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
LABELS = ("label", "labels", "class", "class_name", "target", "category")
_EVERY = 10_000  # files between two reports of progress

Rows = tuple[list[str], list[str]]  # paths, and the label of each as a text


class PictureFiles(EncodedImages):
    """A source of picture files; names are paths from `root` or, with `folders` (by label), from that of the class."""

    def __init__(
        self, root: Path, names: Names, classes: Sequence[str], labels: Int64, channels: int,
        folders: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(classes, labels, channels)
        self.root, self.names, self._folders = root, names, folders

    def where(self, index: int) -> str:
        # The folder of a class is stored once, not with each name: 14 million names would grow by a half.
        folder = self._folders[self.labels[index]] if self._folders is not None else ""
        return os.path.join(self.root, folder, self.names[index])

    def encoded(self, index: int) -> bytes:
        return read_picture(self.where(index))

    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        digest.update(self.names.first(len(self)).data)
        digest.update(repr([_size(self.where(index)) for index in sample.tolist()]).encode())


Pair = tuple[PictureFiles, PictureFiles]


def _size(file: str) -> int:
    with as_user_error(f"{file}: is listed, but can't be read"):
        return os.stat(file).st_size


def read_picture(file: str) -> bytes:
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    with open(file, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Undecodable("no plain file")
        if found.st_size > MOST_BYTES:
            raise Undecodable(f"{found.st_size} bytes; at most {MOST_BYTES} are read")
        return stream.readall()


def open_folder(path: Path, channels: int, once: Once = make_here, classes: str | None = None) -> Pair:
    """Training images from PATH/train/CLASS/, held-out ones from PATH/val/CLASS/, sorted by name.

    `classes` is a file in PATH that lists the class folders (`read_classes`); None: all folders of train/, sorted.
    """
    return _open((path / "train", path / "val"), channels, once, partial(_list_folder, path, classes))


def open_folders(path: Path, channels: int, once: Once = make_here, classes: str | None = None) -> Pair:
    """Images of several data sets, PATH/SET/train/CLASS/*.jpg and PATH/SET/val/CLASS/*.jpg, set by set.

    Folders of one name in several sets are one class; each set may lack some classes, and may be a link to a folder.
    """
    return _open((path, path), channels, once, partial(_list_folders, path, path / classes if classes else None))


def open_csv(
    path: Path, channels: int, once: Once = make_here,
    train: str = "train.csv", eval: str = "val.csv", classes: str | None = None,
) -> Pair:  # fmt: skip
    """Images that two CSV files list, in their order.

    `train`, `eval` and `classes` (as of `open_folder`) are files in PATH. A list has a column of paths, which start
    from its folder, and one of labels, numbers or names: those that a head line names (`PATHS`, `LABELS`), else the
    first two. In a file named .tsv, tabs separate columns.
    """
    lists = {"train": path / train, "eval": path / eval}

    def look(progress: Progress) -> Arrays:
        rows = {split: _read_csv(file, progress) for split, file in lists.items()}
        return _numbered(rows, path / classes if classes else None, path)

    return _open((lists["train"].parent, lists["eval"].parent), channels, once, look)


def _open(roots: tuple[Path, Path], channels: int, once: Once, look: Callable[[Progress], Arrays]) -> Pair:
    load_decoders()
    found = once(look)
    classes = list(Names.of(found, "classes"))
    folders = list(Names.of(found, "folders")) if "folders text" in found else None
    train, held_out = (
        PictureFiles(root, Names.of(found, split), classes, found[f"{split} labels"], channels, folders)
        for root, split in zip(roots, ("train", "eval"), strict=True)
    )
    return train, held_out


def _list_folder(path: Path, classes: str | None, progress: Progress) -> Arrays:
    roots = {"train": path / "train", "eval": path / "val"}
    for root in roots.values():
        if not root.is_dir():
            raise UserError(
                f"{path}: has no folder {root.name}; wanted are train/CLASS/*.jpg and val/CLASS/*.jpg: of one set of "
                "class folders, move a tenth of each class to val"
            )
    inferred = class_folders(roots["train"])
    listed = {name: name for name in inferred} if classes is None else read_classes(path / classes)
    for folder in listed:
        file, wanted = path / str(classes), roots["train"] / folder
        if Path(folder).name != folder:
            raise UserError(f"{file}: {folder!r} is no plain folder name; one class folder a line")
        if folder not in inferred:
            raise UserError(f"{file}: lists {folder!r}, but there is no folder {wanted}")
    # A listed subset may leave classes out on purpose; a folder of val/ alone is a mistake.
    if classes is None and (unknown := set(class_folders(roots["eval"])) - set(listed)):
        raise UserError(f"{roots['eval'] / min(unknown)}: a class that {roots['train']} doesn't have")
    found = Names.arrays("folders", [list(listed)]) | Names.arrays("classes", [list(listed.values())])
    for split, root in roots.items():
        found |= list_pictures(root, list(listed), split, progress)
    counts = np.bincount(found["train labels"], minlength=len(listed))
    if not counts.all():
        empty = roots["train"] / list(listed)[int(counts.argmin())]
        raise UserError(f"{empty}: no JPEG or PNG file; remove the folder or fill it")
    return found


def list_pictures(root: Path, folders: Sequence[str], split: str, progress: Progress = lambda done: None) -> Arrays:
    """The picture files in class folders: `Names.arrays` under the name of the split, and `SPLIT labels`, int64."""
    counts = []

    def runs() -> Iterator[list[str]]:
        for number, folder in enumerate(folders):
            names = _pictures_in(root / folder)
            counts.append(len(names))
            progress(number)
            yield names

    return Names.arrays(split, runs()) | {f"{split} labels": np.arange(len(folders), dtype=np.int64).repeat(counts)}


def _list_folders(path: Path, listed: Path | None, progress: Progress) -> Arrays:
    rows: dict[str, Rows] = {"train": ([], []), "eval": ([], [])}
    for split, name in (("train", "train"), ("eval", "val")):
        files, labels = rows[split]
        for one in class_folders(path):
            root = path / one / name
            for folder in class_folders(root) if is_there(root) else ():
                found = _pictures_in(root / folder)
                files += [f"{one}/{name}/{folder}/{file}" for file in found]
                labels += [folder] * len(found)
                progress(len(files))
        if not files:
            raise UserError(f"{path}: no image in {path}/SET/{name}/CLASS/*.jpg of any SET")
    return _numbered(rows, listed, path, are_names=True)


def _numbered(rows: Mapping[str, Rows], listed: Path | None, path: Path, are_names: bool = False) -> Arrays:
    names = read_classes(listed) if listed is not None else None
    classes, labels = number_labels({split: each[1] for split, each in rows.items()}, names, str(path), are_names)
    arrays = Names.arrays("classes", [classes])
    for split, (files, _) in rows.items():
        arrays |= Names.arrays(split, [files]) | {f"{split} labels": labels[split]}
    return arrays


def _read_csv(file: Path, progress: Progress) -> Rows:
    paths, labels = list[str](), list[str]()
    what, kinds = f"{file}: can't be read as a list of paths and labels", (OSError, ValueError, csv.Error)
    with as_user_error(what, of=kinds), check_regular(file).open(encoding="utf-8-sig", newline="") as stream:
        rows = csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ",")
        places = 0, 1
        for number, row in enumerate(rows):
            cells = [cell.strip() for cell in row]
            if number == 0 and (columns := _columns([cell.lower() for cell in cells], file)) is not None:
                places = columns
            elif any(cells):
                path, label = (cells[place] if place < len(cells) else "" for place in places)
                if not path or not label or "\0" in path:
                    raise UserError(f"{file}: line {rows.line_num} has no path and label")
                if number == 0 and not path.lower().endswith(SUFFIXES) and not os.path.exists(file.parent / path):
                    remedy = f"if it is a head line, call its columns {PATHS[0]} and {LABELS[0]}"
                    raise UserError(f"{file}: line 1 names {path!r}, but there is no such file; {remedy}")
                paths.append(path)
                labels.append(label)
            if number % _EVERY == 0:
                progress(number)
    return paths, labels


def _columns(head: Sequence[str], file: Path) -> tuple[int, int] | None:
    """The indices of the paths' and the labels' columns; None: this is no head line. UserError if one has no name."""
    found = [next((head.index(name) for name in known if name in head), None) for known in (PATHS, LABELS)]
    if (found[0] is None) != (found[1] is None):
        what, known = ("paths", PATHS) if found[0] is None else ("labels", LABELS)
        remedy = f"call it {known[0]}, or put the line {PATHS[0]},{LABELS[0]} above"
        raise UserError(f"{file}: its head line {','.join(head)!r} has no column of {what}; {remedy}")
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def class_folders(root: Path) -> list[str]:
    """The names of the folders in `root`, sorted, without hidden ones; UserError if there is none."""
    names = sorted(entry.name for entry in _entries(root) if _is(entry.is_dir))
    if not names:
        raise UserError(f"{root}: has no class folders; wanted is {root.name}/CLASS/*.jpg")
    return names


def _pictures_in(folder: Path) -> list[str]:
    """The names of the picture files in a folder, sorted, its sub-folders left out; none if there is no folder."""
    entries = _entries(folder) if is_there(folder) else []
    pictures = [entry for entry in entries if entry.name.lower().endswith(SUFFIXES)]
    # A link to a file that is gone, too: its image can't be read, and a run says so.
    files = [each for each in pictures if _is(each.is_file) or (each.is_symlink() and not _is(each.is_dir))]
    # Sorted: file systems list in any order, and labels and the stream of samples depend on it.
    return sorted(entry.name for entry in files)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with as_user_error(f"{folder}: can't be listed"), os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError as error:  # a link that leads to itself, or where this user may not look
        if is_transient(error):  # else the folder of a class would be missing without a word
            raise
        return False

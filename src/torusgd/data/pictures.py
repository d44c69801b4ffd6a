"""A folder a class of JPEG and PNG files: the ImageNet layout, train/CLASS/*.jpg and val/CLASS/*.jpg."""

import os
import stat
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ..errors import UserError
from .classes import read_classes
from .decode import Undecodable, load_decoders
from .encoded_source import MOST_BYTES, EncodedImages
from .file_lists import Arrays, Names, Once, Progress, make_here, names_as_arrays

SUFFIXES = (".jpg", ".jpeg", ".png")
LISTED = ("text", "ends", "labels")
"""what `list_pictures` gives"""


class PictureFiles(EncodedImages):
    """A source of picture files; a source of its own says where each lies."""

    @abstractmethod
    def file(self, index: int) -> str:
        """Where an image lies."""

    def where(self, index: int) -> str:
        return self.file(index)

    def encoded(self, index: int) -> bytes:
        return read_picture(self.file(index))


class Folder(PictureFiles):
    """A source of picture files in a folder a class.

    Args:
        root: The folder of the class folders.
        folders: The class folders' names, by label.
        classes: The class names, by label.
        channels: See `EncodedImages`.
        listed: As `list_pictures` gives it; None: found here.
    """

    def __init__(
        self, root: Path, folders: Sequence[str], classes: Sequence[str], channels: int, listed: Arrays | None = None
    ) -> None:
        listed = list_pictures(root, folders) if listed is None else listed
        super().__init__(classes, listed["labels"], channels)
        self.root = root
        self._folders = tuple(folders)
        self.names = Names(listed["text"], listed["ends"])

    def file(self, index: int) -> str:
        """Where an image lies."""
        return os.path.join(self.root, self._folders[self.labels[index]], self.names[index])


def read_picture(file: str) -> bytes:
    """The bytes of a picture's file; raises as `EncodedImages.encoded`."""
    with open(file, "rb", buffering=0, opener=_at_once) as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Undecodable("no plain file")
        if found.st_size > MOST_BYTES:
            raise Undecodable(f"{found.st_size} bytes; at most {MOST_BYTES} are read")
        return stream.readall()


def _at_once(file: str, flags: int) -> int:
    """Opens a file without waiting for it, which a pipe would ask for."""
    return os.open(file, flags | os.O_NONBLOCK)


def open_folder(path: Path, channels: int, classes: str | None = None, once: Once = make_here) -> tuple[Folder, Folder]:
    """Training images from PATH/train/CLASS/, held-out ones from PATH/val/CLASS/, in the order of sorted names.

    Args:
        path: See above.
        channels: See `Folder`.
        classes: A text file in PATH that lists the class folders, one a line, the first being label 0; a name to
            show may follow after a tab. Folders that it leaves out are not used. None: all of train/, sorted.
        once: Who looks what is there.

    Raises:
        UserError: The layout is another one, a class has no training image, or simplejpeg and OpenCV are missing.
    """
    load_decoders()
    found = once(partial(_look, path, classes))
    folders, names = (Names(found[f"{what} text"], found[f"{what} ends"]) for what in ("folders", "classes"))
    train, val = (
        Folder(path / split, folders, names, channels, {key: found[f"{split} {key}"] for key in LISTED})
        for split in ("train", "val")
    )
    return train, val


def _look(path: Path, classes: str | None, progress: Progress) -> Arrays:
    """All that `open_folder` must know of the file system."""
    train, val = path / "train", path / "val"
    for root in (train, val):
        if not root.is_dir():
            raise UserError(f"{path}: has no folder {root.name}; wanted are train/CLASS/*.jpg and val/CLASS/*.jpg")
    inferred = class_folders(train)
    folders, names = (inferred, inferred) if classes is None else _listed(path, classes)
    for folder in folders:
        if folder not in inferred:
            raise UserError(f"{path / str(classes)}: lists {folder!r}, but there is no folder {train / folder}")
    if classes is None and (unknown := set(class_folders(val)) - set(folders)):
        raise UserError(f"{val / min(unknown)}: a class that {train} doesn't have")
    found = {
        f"{root.name} {key}": v for root in (train, val) for key, v in list_pictures(root, folders, progress).items()
    }
    counts = np.bincount(found["train labels"], minlength=len(folders))
    if not counts.all():
        empty = train / folders[int(counts.argmin())]
        raise UserError(f"{empty}: no JPEG or PNG file; remove the folder or fill it")
    for what, texts in (("folders", folders), ("classes", names)):
        found[f"{what} text"], found[f"{what} ends"] = names_as_arrays([texts])
    return found


def list_pictures(root: Path, folders: Sequence[str], progress: Progress = lambda done: None) -> Arrays:
    """The picture files in the class folders: `text` and `ends` of their `Names`, and `labels`, int64 [files]."""
    counts = []

    def runs() -> Iterator[list[str]]:
        for number, folder in enumerate(folders):
            names = pictures_in(root / folder)
            counts.append(len(names))
            progress(number)
            yield names

    text, ends = names_as_arrays(runs())
    return {"text": text, "ends": ends, "labels": np.repeat(np.arange(len(folders), dtype=np.int64), counts)}


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the folders in `root`, sorted; hidden ones left out.

    Raises:
        UserError: There is none.
    """
    names = [entry.name for entry in _entries(root) if _is(entry.is_dir)]
    if not names:
        raise UserError(f"{root}: has no class folders; wanted is {root.name}/CLASS/*.jpg")
    return tuple(sorted(names))


def pictures_in(folder: Path) -> list[str]:
    """The names of the picture files right in the folder, sorted; none where the folder is missing."""
    if not folder.is_dir():
        return []
    return sorted(
        entry.name for entry in _entries(folder) if entry.name.lower().endswith(SUFFIXES) and _is(entry.is_file)
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{folder}: can't be listed ({error.strerror})") from error


def _is(what: Callable[[], bool]) -> bool:
    try:
        return what()
    except OSError:  # a link that leads round
        return False


def _listed(path: Path, classes: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders and names from the file of the option `classes`."""
    listed = read_classes(path / classes)
    for folder in listed:
        if Path(folder).name != folder:
            raise UserError(f"{path / classes}: {folder!r} is no plain folder name; one class folder a line")
    return tuple(listed), tuple(listed.values())

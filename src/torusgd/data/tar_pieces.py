"""What a walk through tar files finds, and how one that was broken off goes on.

ImageNet's training file holds a tar file for each of its 1,000 classes, and the walk through all of them takes minutes.
What each of them holds is kept in a file of its own, written whole or not at all. After a kill the same command reads
those files, and walks through the rest.
"""

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..untrusted import check_archive
from ..weights import replacing
from .file_lists import Arrays, Names, names_as_arrays
from .npz import read_arrays


@dataclass
class Images:
    """Images of a tar file, in the order in which they lie there."""

    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    """of each image its offset and its bytes in the tar file, and the CRC-32 of its header"""

    def extend(self, more: "Images") -> None:
        """Adds those of another piece behind these."""
        self.names += more.names
        self.labels += more.labels
        self.places += more.places

    def arrays(self) -> Arrays:
        """As arrays, to be kept."""
        names, ends = names_as_arrays([self.names])
        labels, label_ends = names_as_arrays([self.labels])
        places = np.array(self.places, dtype=np.int64).reshape(-1, 3)
        return {"names": names, "ends": ends, "labels": labels, "label ends": label_ends, "places": places}

    @classmethod
    def of(cls, arrays: Arrays) -> "Images":
        """Those of which `arrays` are; KeyError or ValueError where they are no images'."""
        names = list(Names(arrays["names"], arrays["ends"]))
        labels = list(Names(arrays["labels"], arrays["label ends"]))
        places = [(offset, size, header) for offset, size, header in arrays["places"].tolist()]
        if not len(names) == len(labels) == len(places):
            raise ValueError("another number of places than of names")
        return cls(names, labels, places)


class Pieces:
    """Keeps the images of pieces of tar files until all have been walked through.

    Args:
        folder: Where they are kept, made if it isn't there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, piece: str, walk: Callable[[], Images]) -> Images:
        """The images of a piece, from its file if that is there and whole; or else by `walk`, and then it is kept.

        Args:
            piece: The name of the file. Whatever the result depends on must be in it.
            walk: Finds the images.

        Raises:
            UserError: The folder can't be written.
        """
        file = self._folder / f"{piece}.npz"
        try:
            check_archive(file)
            return Images.of(read_arrays(file))
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            pass  # there is none, or what a full disk or the loss of power left of it
        found = walk()
        try:
            self._folder.mkdir(exist_ok=True)
            with replacing(file) as temporary, temporary.open("wb") as stream:
                np.savez(stream, allow_pickle=False, **found.arrays())
        except OSError as error:
            raise UserError(f"{file}: can't be written: {error.strerror or error}; the same command goes on") from error
        return found

    def delete(self) -> None:
        """Removes what was kept, once the whole is written."""
        shutil.rmtree(self._folder, ignore_errors=True)

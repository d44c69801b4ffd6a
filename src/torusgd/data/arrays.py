"""Images in memory or memory-mapped: .npz and .npy files, and the digits that scikit-learn ships."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError, in_one_line
from ..rng import SPLIT, keyed_permutation
from ..untrusted import check_swelling
from .file_lists import Once, make_here
from .npz import map_array
from .types import Int64, Pixels

SPLITS = ("train", "eval")
HELD_OUT_DIGITS = 360
_DIGITS = "datasets/data/digits.csv.gz"
"""in scikit-learn's package: a row an image, 64 pixels and the label"""
_MOST_CLASSES = 1_000_000


@dataclass(frozen=True, eq=False)
class Images:
    """An `ArraySource` over one array.

    Args:
        images: uint8 [n, height, width, channels], possibly memory-mapped.
        labels: int64 [n].
        classes: Names by label.
    """

    images: Pixels
    labels: Int64
    classes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self.images[index]

    def read_many(self, indices: Int64) -> Pixels:
        return self.images[indices]


def class_names(names: str | None, labels: Int64) -> tuple[str, ...]:
    """The names that an option gives, separated by commas; without it the numbers from 0 to the largest label.

    Raises:
        UserError: A label that is no class's number.
    """
    if names is None:
        if labels.max(initial=0) >= _MOST_CLASSES:
            raise UserError(f"data: a label of {labels.max()}; labels are whole numbers from 0, below {_MOST_CLASSES}")
        return tuple(str(label) for label in range(int(labels.max(initial=-1)) + 1))
    return tuple(name.strip() for name in names.split(","))


def open_arrays(path: Path, names: str | None = None, once: Once = make_here) -> tuple[Images, Images]:
    """Arrays `train_images`, `train_labels`, `eval_images` and `eval_labels`.

    Images are uint8 [n, height, width] or [n, height, width, channels], labels whole numbers [n] from 0.

    Args:
        path: An .npz file, or a folder with one .npy file for each (train_images.npy ...). Both are memory-mapped, so
            that the processes of a machine share one copy.
        names: Class names separated by commas.
        once: Who unpacks an .npz that is compressed.

    Raises:
        UserError: An array is missing, damaged, of another type or shape; or would have to be unpickled.
    """
    keys = [f"{split}_{what}" for split in SPLITS for what in ("images", "labels")]
    mapped = {key: _map(path, key) for key in keys}
    found = {key: array for key, array in mapped.items() if array is not None}
    found |= once(lambda progress: {key: _unpack(path, key) for key in keys if key not in found})
    pair = []
    for split in SPLITS:
        images, labels = found[f"{split}_images"], found[f"{split}_labels"]
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise UserError(
                f"{path}: {split}_images must be uint8 [n, height, width] or [n, height, width, channels],"
                f" got {images.dtype} {list(images.shape)}"
            )
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
            raise UserError(
                f"{path}: {split}_labels must be {len(images)} whole numbers, got {labels.dtype} {list(labels.shape)}"
            )
        pair.append((images if images.ndim == 4 else images[..., None], labels.astype(np.int64)))
    classes = class_names(names, np.concatenate([labels for _, labels in pair]))
    train, held_out = (Images(images, labels, classes) for images, labels in pair)
    return train, held_out


def open_digits() -> tuple[Images, Images]:
    """The handwritten digits of scikit-learn, real data without a download: 1,437 training and 360 held-out images.

    Images are uint8 [8, 8, 1], classes "0" to "9". The split is fixed, so that runs of every seed are measured on the
    same images.

    Raises:
        UserError: scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError("data.source: digits need scikit-learn; pip install 'torusgd[digits]'")
    # The package's own file, read without importing the package: that takes 2 s, in each rank.
    table = np.loadtxt(Path(package.submodule_search_locations[0], _DIGITS), delimiter=",", dtype=np.int64)
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # values 0..16 in the file
    labels = table[:, -1]
    names = tuple(str(digit) for digit in range(10))
    order = keyed_permutation(len(labels), SPLIT, 0)
    train, held_out = np.sort(order[HELD_OUT_DIGITS:]), np.sort(order[:HELD_OUT_DIGITS])
    return Images(images[train], labels[train], names), Images(images[held_out], labels[held_out], names)


def _map(path: Path, name: str) -> npt.NDArray[Any] | None:
    """An array where it lies; None: it is compressed, or not there."""
    with _telling(path, name):
        if path.is_dir():
            return np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return map_array(path, f"{name}.npy")


def _unpack(path: Path, name: str) -> npt.NDArray[Any]:
    with _telling(path, name), np.load(path, allow_pickle=False) as archive:
        stored = archive.zip.getinfo(f"{name}.npy")
        check_swelling(stored.file_size, stored.compress_size)
        return archive[name]


@contextmanager
def _telling(path: Path, name: str) -> Iterator[None]:
    member = path / f"{name}.npy" if path.is_dir() else path
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{path}: needs the array {member.name}") from error
    except KeyError as error:
        raise UserError(f"{path}: has no array {name}; save it with np.savez(path, {name}=...)") from error
    except Exception as error:  # whatever a parser of a foreign file comes to, numpy's, zipfile's or zlib's
        reason = in_one_line(error)
        raise UserError(f"{member}: can't load {name} ({reason}); arrays of plain numbers are wanted") from error

"""Images in memory or memory-mapped: .npz and .npy files, and the digits that scikit-learn ships."""

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from ..rng import SPLIT, keyed_permutation
from .npz import map_array
from .types import Int64, Pixels

SPLITS = ("train", "eval")
HELD_OUT_DIGITS = 360


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
    """The names that an option gives, separated by commas; without it the numbers from 0 to the largest label."""
    if names is None:
        return tuple(str(label) for label in range(int(labels.max(initial=-1)) + 1))
    return tuple(name.strip() for name in names.split(","))


def open_arrays(path: Path, names: str | None = None) -> tuple[Images, Images]:
    """Arrays `train_images`, `train_labels`, `eval_images` and `eval_labels`.

    Images are uint8 [n, height, width] or [n, height, width, channels], labels whole numbers [n] from 0.

    Args:
        path: An .npz file, or a folder with one .npy file for each (train_images.npy ...). Both are memory-mapped, so
            that the processes of a machine share one copy; only an .npz that is compressed is read by each of them.
        names: Class names separated by commas.

    Raises:
        UserError: An array is missing, damaged, of another type or shape; or would have to be unpickled.
    """
    found = {(split, what): _load(path, f"{split}_{what}") for split in SPLITS for what in ("images", "labels")}
    pair = []
    for split in SPLITS:
        images, labels = found[split, "images"], found[split, "labels"]
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
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UserError("data.source: digits need scikit-learn; pip install 'torusgd[digits]'") from error
    bunch = load_digits()
    images = np.round(bunch.images * (255 / 16)).astype(np.uint8)[..., None]  # values 0..16 in the file
    labels = bunch.target.astype(np.int64)
    names = tuple(str(name) for name in bunch.target_names)
    order = keyed_permutation(len(labels), SPLIT, 0)
    train, held_out = np.sort(order[HELD_OUT_DIGITS:]), np.sort(order[:HELD_OUT_DIGITS])
    return Images(images[train], labels[train], names), Images(images[held_out], labels[held_out], names)


def _load(path: Path, name: str) -> npt.NDArray[Any]:
    member = path / f"{name}.npy" if path.is_dir() else path
    try:
        if path.is_dir():
            return np.load(member, mmap_mode="r", allow_pickle=False)
        mapped = map_array(path, f"{name}.npy")
        if mapped is not None:
            return mapped
        with np.load(member, allow_pickle=False) as archive:
            return archive[name]
    except FileNotFoundError as error:
        raise UserError(f"{path}: needs the array {member.name}") from error
    except KeyError as error:
        raise UserError(f"{path}: has no array {name}; save it with np.savez(path, {name}=...)") from error
    except (ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{member}: can't load {name} ({error}); arrays of plain numbers are wanted") from error

"""Images as arrays: .npz and .npy files (`numpy`), the four files of MNIST (`mnist`), scikit-learn's digits."""

import gzip
import math
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from ..errors import UserError, in_one_line
from ..rng import SPLIT, keyed_permutation
from ..untrusted import check_regular, check_swelling
from .file_lists import MOST_CLASSES, SPLITS, Arrays, Once, make_here
from .types import Int64, Pixels

HELD_OUT_DIGITS = 360
_DIGITS = "datasets/data/digits.csv.gz"  # in scikit-learn's package: a row an image, 64 pixels and the label
_MOST_BYTES = 1 << 34


@dataclass(frozen=True, eq=False)
class Images:
    """An `ArraySource` over one array."""

    images: Pixels  # [n, height, width, channels], possibly memory-mapped
    labels: Int64  # [n]
    classes: tuple[str, ...]  # names by label

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self.images[index]

    def read_many(self, indices: Int64) -> Pixels:
        return self.images[indices]


Pair = tuple[Images, Images]


def _pair(arrays: Arrays, names: str | None) -> Pair:
    """Both splits of the arrays `SPLIT_images` and `SPLIT_labels`; `names` as of `open_numpy`."""
    if names is not None:
        classes = tuple(name.strip() for name in names.split(","))
    else:
        largest = max(int(arrays[f"{split}_labels"].max(initial=-1)) for split in SPLITS)
        if largest >= MOST_CLASSES:
            raise UserError(f"data: a label of {largest}; labels are whole numbers from 0, below {MOST_CLASSES}")
        classes = tuple(map(str, range(largest + 1)))
    train, held_out = (Images(arrays[f"{split}_images"], arrays[f"{split}_labels"], classes) for split in SPLITS)
    return train, held_out


def open_numpy(path: Path, once: Once = make_here, names: str | None = None) -> Pair:
    """Arrays `train_images`, `train_labels`, `eval_images` and `eval_labels`, never unpickled.

    Images are uint8 [n, height, width] or [n, height, width, channels], labels whole numbers [n] from 0. `path` is a
    folder with one .npy file for each, which all processes map, or an .npz file, which one process of a machine reads.
    `names` are class names separated by commas; None: the numbers from 0 to the largest label.
    """
    if path.is_dir():
        return _pair(_load(path), names)
    return _pair(once(lambda _: {key: np.ascontiguousarray(array) for key, array in _load(path).items()}), names)


def _load(path: Path) -> Arrays:
    arrays: Arrays = {}
    for split in SPLITS:
        images, labels = (_read_numpy(path, f"{split}_{what}") for what in ("images", "labels"))
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            wanted = "uint8 [n, height, width] or [n, height, width, channels]"
            raise UserError(f"{path}: {split}_images must be {wanted}, got {images.dtype} {list(images.shape)}")
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
            wanted = f"{len(images)} whole numbers, got {labels.dtype} {list(labels.shape)}"
            raise UserError(f"{path}: {split}_labels must be {wanted}")
        arrays[f"{split}_images"] = images if images.ndim == 4 else images[..., None]
        arrays[f"{split}_labels"] = labels.astype(np.int64)
    return arrays


def _read_numpy(path: Path, name: str) -> npt.NDArray[Any]:
    file = path / f"{name}.npy" if path.is_dir() else path
    try:
        check_regular(file)
        if path.is_dir():
            return np.load(file, mmap_mode="r", allow_pickle=False)
        with np.load(file, allow_pickle=False) as archive:
            stored = archive.zip.getinfo(f"{name}.npy")
            # A few bytes of zeros, compressed, could fill the memory.
            check_swelling(stored.file_size, stored.compress_size)
            return archive[name]
    except FileNotFoundError as error:
        raise UserError(f"{path}: needs the array {file.name}") from error
    except KeyError as error:
        raise UserError(f"{path}: has no array {name}; save it with np.savez(path, {name}=...)") from error
    except Exception as error:  # any exception that numpy's, zipfile's or zlib's parser raises for a foreign file
        reason = in_one_line(error)
        raise UserError(f"{file}: can't load {name} ({reason}); arrays of plain numbers are wanted") from error


def open_mnist(path: Path, names: str | None = None) -> Pair:
    """The four IDX files of MNIST in a folder, as uint8 [n, height, width, 1] in memory; `names` as of `open_numpy`."""
    arrays: Arrays = {}
    for split, stem in (("train", "train"), ("eval", "t10k")):
        parts = (("images", 3), ("labels", 1))
        images, labels = (read_idx(find_idx(path, f"{stem}-{part}", dims), dims) for part, dims in parts)
        if len(images) != len(labels):
            raise UserError(f"{path}: {len(images)} images but {len(labels)} labels in the files {stem}-*")
        arrays |= {f"{split}_images": images[..., None], f"{split}_labels": labels.astype(np.int64)}
    return _pair(arrays, names)


def find_idx(path: Path, stem: str, dims: int) -> Path:
    """The file of that name, as MNIST and its successors spell it, with or without .gz."""
    for name in (f"{stem}-idx{dims}-ubyte", f"{stem}.idx{dims}-ubyte"):
        for file in (path / name, path / f"{name}.gz"):
            if file.is_file():
                return file
    raise UserError(f"{path}: has no {stem}-idx{dims}-ubyte, with or without .gz; --data is the folder that holds it")


def read_idx(file: Path, dims: int) -> Pixels:
    """An IDX file of unsigned bytes with so many dims; UserError if its header says another kind or length."""
    begin, is_packed = 4 + 4 * dims, file.suffix == ".gz"
    try:
        with cast(IO[bytes], gzip.open(file) if is_packed else file.open("rb")) as stream:
            header = stream.read(begin)
            if len(header) < begin or header[:4] != bytes((0, 0, 8, dims)):  # 8: uint8
                raise UserError(f"{file}: no IDX file of unsigned bytes with {dims} dims (its first bytes differ)")
            shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, begin, 4))
            size, stored = math.prod(shape), file.stat().st_size
            if size > _MOST_BYTES:
                raise UserError(f"{file}: its header says {size} bytes, at most {_MOST_BYTES} are read")
            check_swelling(size, stored)
            # The header is not trusted with memory: of a plain file the length is known, of a gzip file no more than
            # one byte beyond what the header says is unpacked.
            found = stored - begin
            if is_packed or found == size:
                content = stream.read(size + 1)
                found = len(content)
            if found != size:
                has = "more" if found > size else f"only {found}"
                raise UserError(f"{file}: its header {list(shape)} says {size} bytes, it has {has}; fetch it again")
            return np.frombuffer(content, np.uint8).reshape(shape)
    except UserError:  # a ValueError of our own
        raise
    except (gzip.BadGzipFile, EOFError, zlib.error, MemoryError, ValueError) as error:
        raise UserError(f"{file}: damaged ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"{file}: can't be read: {error.strerror}") from error


def open_digits() -> Pair:
    """scikit-learn's digits, real data without a download: 1,437 training and 360 held-out images, uint8 [8, 8, 1]."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError("data.source: digits need scikit-learn; pip install scikit-learn (the extra digits)")
    # The package's own file, read without importing the package: that takes 2 s, in each rank.
    table = np.loadtxt(Path(package.submodule_search_locations[0], _DIGITS), delimiter=",", dtype=np.int64)
    images = np.round(table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)  # values 0..16 in the file
    # Chosen by a keyed permutation, so that runs of every seed are measured on the same images; then in file order.
    held_out, train = map(np.sort, np.split(keyed_permutation(len(table), SPLIT, 0), [HELD_OUT_DIGITS]))
    classes = tuple("0123456789")
    return Images(images[train], table[train, -1], classes), Images(images[held_out], table[held_out, -1], classes)

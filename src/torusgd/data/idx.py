"""IDX files, the format of MNIST and Fashion-MNIST, plain or gzipped."""

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from ..errors import UserError
from ..untrusted import check_swelling
from .arrays import Images, class_names
from .types import Pixels

_UINT8 = 0x08
_MOST_BYTES = 1 << 34


def open_idx(path: Path, names: str | None = None) -> tuple[Images, Images]:
    """A folder with train-images-idx3-ubyte, train-labels-idx1-ubyte and the same of t10k, each plain or .gz.

    Args:
        names: Class names separated by commas.

    Returns:
        Training and held-out images, uint8 [n, height, width, 1], in memory.

    Raises:
        UserError: A file is missing, damaged, or does not fit its header.
    """
    arrays = {}
    for split, stem in (("train", "train"), ("eval", "t10k")):
        images = read_idx(find_idx(path, f"{stem}-images", 3), dims=3)
        labels = read_idx(find_idx(path, f"{stem}-labels", 1), dims=1)
        if len(images) != len(labels):
            raise UserError(f"{path}: {len(images)} images but {len(labels)} labels in the files {stem}-*")
        arrays[split] = images[..., None], labels.astype(np.int64)
    classes = class_names(names, np.concatenate([labels for _, labels in arrays.values()]))
    return Images(*arrays["train"], classes), Images(*arrays["eval"], classes)


def find_idx(path: Path, stem: str, dims: int) -> Path:
    """The file of that name as MNIST's and its kin's are written, with or without .gz."""
    for name in (f"{stem}-idx{dims}-ubyte", f"{stem}.idx{dims}-ubyte"):
        for file in (path / name, path / f"{name}.gz"):
            if file.is_file():
                return file
    raise UserError(f"{path}: has no {stem}-idx{dims}-ubyte, with or without .gz; --data is the folder that holds it")


def read_idx(file: Path, dims: int) -> Pixels:
    """One IDX file of unsigned bytes with so many dims.

    Raises:
        UserError: Its header is not of that kind, or the file is longer or shorter than the header says.
    """
    try:
        with cast(IO[bytes], gzip.open(file) if file.suffix == ".gz" else file.open("rb")) as stream:
            header = stream.read(4 + 4 * dims)
            if len(header) < 4 + 4 * dims or header[:4] != bytes((0, 0, _UINT8, dims)):
                raise UserError(f"{file}: no IDX file of unsigned bytes with {dims} dims (its first bytes differ)")
            shape = tuple(int.from_bytes(header[at : at + 4], "big") for at in range(4, 4 + 4 * dims, 4))
            size = math.prod(shape)
            if size > _MOST_BYTES:
                raise UserError(f"{file}: its header says {size} bytes, at most {_MOST_BYTES} are read")
            stored = file.stat().st_size
            if file.suffix != ".gz" and size + len(header) != stored:
                has = f"only {stored - len(header)}" if stored - len(header) < size else "more"
                raise UserError(f"{file}: its header {list(shape)} says {size} bytes, it has {has}; fetch it again")
            check_swelling(size, stored)
            content = stream.read(size + 1)  # one more than there may be; never all that a gzip file may swell to
    except (EOFError, gzip.BadGzipFile, zlib.error, MemoryError) as error:
        raise UserError(f"{file}: damaged ({error}); fetch it again") from error
    except OSError as error:
        raise UserError(f"{file}: can't be read: {error.strerror}") from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error}); fetch it again") from error
    if len(content) != size:
        more = "more" if len(content) > size else f"only {len(content)}"
        raise UserError(f"{file}: its header {list(shape)} says {size} bytes, it has {more}; fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)

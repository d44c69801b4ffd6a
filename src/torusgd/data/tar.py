"""Images in tar files, each fetched by one read at the place that the index names: the source `tar`.

The read takes the member's header along, whose CRC-32 the index has: a tar file that was written anew since then is
told, wherever its images lie now.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any, Protocol

import numpy as np

from ..errors import UserError, in_one_line
from ..storage import Store, url_of
from .bucket_cache import RemoteFiles, cache_bytes, fetch_index
from .decode import Undecodable, load_decoders
from .encoded_source import MOST_BYTES, EncodedImages
from .file_lists import Arrays, Names
from .npz import read_arrays
from .tar_index import BLOCK, FILE, FORMAT, SPLITS
from .types import Int64

_KINDS = {
    "names text": "uint8", "names ends": "int64", "shards text": "uint8", "shards ends": "int64",
    "shard sizes": "int64", "shard": "int32", "offset": "int64", "size": "int64", "header": "uint32", "labels": "int64",
}  # fmt: skip
"""the arrays of a split, and their dtypes"""
_ATTEMPTS = 4
"""at an image, since a bucket, or a cache before it, may answer with what was there before"""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the images of a split lie, by index."""

    shard: Any
    """int32 [images], the number of the tar file"""
    offset: Int64
    """of the image's first byte in it"""
    size: Int64
    """bytes"""
    header: Any
    """uint32 [images], the CRC-32 of the member's header, which ends where the image begins"""


class Files(Protocol):
    """The tar files of a split, on a disk or in a bucket."""

    def where(self, shard: int) -> str:
        """A tar file, for people."""

    def lengths(self) -> list[int]:
        """The bytes of each tar file; OSError where one isn't there."""

    def read(self, index: int, head: int) -> bytes:
        """An image with the `head` bytes before it, shorter where the file ends; OSError as it comes."""

    def forget(self, index: int) -> None:
        """Says that what was read of an image was not what it must be."""


class LocalFiles:
    """Tar files in a folder.

    Args:
        root: The folder.
        names: Theirs.
        places: Where the images lie.
    """

    def __init__(self, root: Path, names: Sequence[str], places: Places) -> None:
        self._files = [os.path.join(root, name) for name in names]
        self._places = places

    def where(self, shard: int) -> str:
        return self._files[shard]

    def lengths(self) -> list[int]:
        return [os.stat(file).st_size for file in self._files]

    def read(self, index: int, head: int) -> bytes:
        places = self._places
        number = os.open(self._files[places.shard[index]], os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(number, head + int(places.size[index]), int(places.offset[index]) - head)
        finally:
            os.close(number)

    def forget(self, index: int) -> None:
        """Nothing is kept."""


class Shards(EncodedImages):
    """A source of the images in tar files.

    Args:
        root: The folder or URL of the tar files, for messages.
        files: The tar files.
        names: The images' names in them.
        places: Where the images lie.
        classes, labels, channels: See `EncodedImages`.
    """

    def __init__(
        self,
        root: str,
        files: Files,
        names: Names,
        places: Places,
        classes: Sequence[str],
        labels: Int64,
        channels: int,
    ) -> None:
        super().__init__(classes, labels, channels)
        self.names = names
        self._root, self._files, self._places = root, files, places

    @cached_property
    def mark(self) -> str:
        """See `MarkedSource`."""
        digest = hashlib.sha256(self.names.text.data)
        digest.update(np.ascontiguousarray(self._places.size, dtype="<i8").data)
        return digest.hexdigest()

    def where(self, index: int) -> str:
        return f"{self._files.where(self._places.shard[index])}: {self.names[index]}"

    def encoded(self, index: int) -> bytes:
        size = int(self._places.size[index])
        if size > MOST_BYTES:
            raise Undecodable(f"{size} bytes; at most {MOST_BYTES} are read")
        for _ in range(_ATTEMPTS):
            data = self._files.read(index, BLOCK)
            if len(data) == BLOCK + size and zlib.crc32(data[:BLOCK]) == self._places.header[index]:
                return data[BLOCK:]
            self._files.forget(index)
        raise changed(self._files.where(self._places.shard[index]), self._root)


class RemoteShards(Shards):
    """Those of a bucket, which are read ahead; see `Shards`."""

    _files: RemoteFiles

    def expect(self, indices: Int64) -> None:
        """See `ForeseeingSource`."""
        self._files.expect((index for index in indices.tolist() if self._places.size[index] <= MOST_BYTES), BLOCK)


def open_shards(path: Path, channels: int, index: str = FILE) -> tuple[Shards, Shards]:
    """Training and held-out images in tar files, in the order of the index.

    Args:
        path: The folder of the tar files, or the URL of a bucket or a web server (see `storage.url_of`).
        channels: See `EncodedImages`.
        index: The index's file, seen from there.

    Raises:
        UserError: There is no index, it is damaged or not that of these files, or a package is missing.
    """
    load_decoders()
    url = url_of(path)
    store = Store(url) if url is not None else None
    file = path / index if store is None else fetch_index(store, index)
    root = str(path) if store is None else store.url
    arrays = read_index(file, root)
    classes = Names(arrays["classes text"], arrays["classes ends"])
    train, held_out = (_split(arrays, split, root, store, file, classes, channels) for split in SPLITS)
    return train, held_out


def read_index(file: Path, root: str) -> Arrays:
    """The arrays of an index, mapped, each of the kind that it must be.

    Args:
        file: The index.
        root: The folder of the tar files, for messages.

    Raises:
        UserError: It isn't there, or is none.
    """
    anew = f"write it {'anew ' if file.exists() else ''}with: torusgd data index {quote(root)}"
    try:
        arrays = read_arrays(file)
        if arrays["format"].tolist() != [FORMAT]:
            raise ValueError("of another version of torusgd")
        for split in SPLITS:
            _check({key: arrays[f"{split} {key}"] for key in _KINDS})
        _check_names(arrays["classes text"], arrays["classes ends"])
    except FileNotFoundError:
        raise UserError(f"{file}: there is no index of the tar files; {anew}") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file}: no whole index ({in_one_line(error)}); {anew}") from None
    return arrays


def changed(file: str, folder: str) -> UserError:
    """What is said of a tar file that is not the one of the index."""
    return UserError(f"{file}: was changed since its index was written; give again: torusgd data index {quote(folder)}")


def _check(split: Arrays) -> None:
    for key, kind in _KINDS.items():
        if split[key].dtype != kind or split[key].ndim != 1:
            raise ValueError(f"{key} are {split[key].dtype} {list(split[key].shape)}")
    images, shards = len(split["names ends"]), len(split["shards ends"])
    for key in ("shard", "offset", "size", "header", "labels"):
        if len(split[key]) != images:
            raise ValueError(f"{key} of {len(split[key])} images, names of {images}")
    _check_names(split["names text"], split["names ends"])
    _check_names(split["shards text"], split["shards ends"])
    shard, offset, size, lengths = split["shard"], split["offset"], split["size"], split["shard sizes"]
    if len(lengths) != shards or (images and not 0 <= shard.min() <= shard.max() < shards):
        raise ValueError("images in tar files that it doesn't list")
    if images and (offset.min() < BLOCK or size.min() < 0 or (size > lengths[shard] - offset).any()):
        raise ValueError("images beyond the ends of their tar files")
    for name in Names(split["shards text"], split["shards ends"]):
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise ValueError(f"a tar file {name!r}")


def _check_names(text: Any, ends: Any) -> None:
    if (len(ends) and (ends[0] < 0 or ends[-1] > len(text))) or (np.diff(ends) < 1).any():
        raise ValueError("names that overlap")


def _split(
    arrays: Arrays, split: str, root: str, store: Store | None, index: Path, classes: Sequence[str], channels: int
) -> Shards:
    found = {key: arrays[f"{split} {key}"] for key in _KINDS}
    names = list(Names(found["shards text"], found["shards ends"]))
    places = Places(found["shard"], found["offset"], found["size"], found["header"])
    images = Names(found["names text"], found["names ends"])
    files: Files
    if store is None:
        files, kind = LocalFiles(Path(root), names, places), Shards
    else:
        folder = index.parent / split
        files = RemoteFiles(store, names, places.shard, places.offset, places.size, folder, cache_bytes())
        kind = RemoteShards
    try:
        lengths = files.lengths()
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}, though the index lists it") from error
    for number, (length, expected) in enumerate(zip(lengths, found["shard sizes"].tolist(), strict=True)):
        if length != expected:
            raise changed(files.where(number), root)
    return kind(root, files, images, places, classes, found["labels"], channels)

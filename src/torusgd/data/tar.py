"""Images in tar files, each read in one piece by its offset in the index: the source `tar`.

Each read includes the member's header, whose CRC-32 is in the index: so a tar file that was written anew since then is
found out, even if its images lie elsewhere now.
"""

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

import numpy as np
import safetensors

from ..errors import UserError, in_one_line
from ..storage import Store, url_of
from .bucket_cache import RemoteFiles, fetch_index
from .decode import Undecodable, load_decoders
from .encoded_source import MOST_BYTES, EncodedImages
from .file_lists import Arrays, Names, Once, make_here, read_arrays
from .tar_index import BLOCK, FILE, FORMAT, SPLITS, checksum
from .types import Int64

_KINDS = {
    "names text": "uint8", "names ends": "int64", "shards text": "uint8", "shards ends": "int64",
    "shard sizes": "int64", "shard": "int32", "offset": "int64", "size": "int64", "header": "uint32", "labels": "int64",
}  # fmt: skip
"""the arrays of a split, and their dtypes"""
_ATTEMPTS = 4
"""reads of an image, since a bucket, or a cache before it, may answer with an old version"""


class Shards(EncodedImages):
    """A source of the images in tar files of a folder.

    Args:
        root: The folder or URL of the tar files.
        split: The arrays of one split, from `read_index`.
        classes, channels: As of `EncodedImages`.
    """

    def __init__(self, root: str, split: Arrays, classes: Sequence[str], channels: int) -> None:
        super().__init__(classes, split["labels"], channels)
        self.names = Names.of(split, "names")
        self._root = root
        self._files = [os.path.join(root, name) for name in Names.of(split, "shards")]
        self._shard, self._offset, self._size, self._header = (
            split[key] for key in ("shard", "offset", "size", "header")
        )

    def lengths(self) -> list[int]:
        """The bytes of each tar file; OSError if one isn't there."""
        return [os.stat(file).st_size for file in self._files]

    def check(self, expected: Sequence[int]) -> None:
        """UserError if a tar file is missing, or has not the length that the index expects."""
        try:
            lengths = self.lengths()
        except OSError as error:
            raise UserError(f"{error.filename}: {error.strerror}, though the index lists it") from error
        for file, length, size in zip(self._files, lengths, expected, strict=True):
            if length != size:
                raise self._changed(file)

    def where(self, index: int) -> str:
        return f"{self._files[self._shard[index]]}: {self.names[index]}"

    def encoded(self, index: int) -> bytes:
        size = int(self._size[index])
        if size > MOST_BYTES:
            raise Undecodable(f"{size} bytes; at most {MOST_BYTES} are read")
        # The first read may come from the cache; after `_forget` the next one goes to the bucket.
        for _ in range(_ATTEMPTS):
            data = self._read(index)
            if len(data) == BLOCK + size and zlib.crc32(data[:BLOCK]) == self._header[index]:
                return data[BLOCK:]
            self._forget(index)
        raise self._changed(self._files[self._shard[index]])

    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        # Names and sizes are in the index, so no tar file is read; `sample` is not needed.
        known = hashlib.sha256(self.names.first(len(self.names)).data)
        known.update(np.ascontiguousarray(self._size, dtype="<i8").data)
        digest.update(known.hexdigest().encode())

    def _read(self, index: int) -> bytes:
        """The header and the bytes of an image, less if the file ends before."""
        file = os.open(self._files[self._shard[index]], os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, BLOCK + int(self._size[index]), int(self._offset[index]) - BLOCK)
        finally:
            os.close(file)

    def _forget(self, index: int) -> None:
        """Drops cached bytes of an image that were not the right ones; a folder has no cache."""

    def _changed(self, file: str) -> UserError:
        again = f"give again: torusgd data index {quote(self._root)}"
        return UserError(f"{file}: was changed since its index was written; {again}")


class RemoteShards(Shards):
    """A source of the images in tar files of a bucket, which are read ahead and cached on disk.

    Args:
        store: The bucket.
        cache: The folder for this split's cache.
        split, classes, channels: As of `Shards`.
    """

    reads_ahead = True

    def __init__(self, store: Store, cache: Path, split: Arrays, classes: Sequence[str], channels: int) -> None:
        super().__init__(store.url, split, classes, channels)
        names = list(Names.of(split, "shards"))
        self._remote = RemoteFiles(store, names, self._shard, self._offset, self._size, BLOCK, cache)

    def lengths(self) -> list[int]:
        return self._remote.lengths()

    def expect(self, indices: Int64) -> None:
        self._remote.expect(index for index in indices.tolist() if self._size[index] <= MOST_BYTES)

    def _read(self, index: int) -> bytes:
        return self._remote.read(index)

    def _forget(self, index: int) -> None:
        self._remote.forget(index)


def open_shards(path: Path, channels: int, once: Once = make_here, index: str = FILE) -> tuple[Shards, Shards]:
    """Training and held-out images in tar files, in the order of the index.

    Args:
        path: The folder of the tar files, or the URL of a bucket or a web server (`storage.url_of`).
        channels: As of `EncodedImages`.
        once: Not needed, since every process maps the index.
        index: The index's file, as a path from there.

    Raises:
        UserError: There is no index, it is damaged or of other files, or a package is missing.
    """
    load_decoders()
    url = url_of(path)
    store = Store(url) if url is not None else None
    file = path / index if store is None else fetch_index(store, index)
    root = str(path) if store is None else store.url
    arrays = read_index(file, root)
    classes = list(Names.of(arrays, "classes"))
    pair = []
    for name in SPLITS:
        split = {key: arrays[f"{name} {key}"] for key in _KINDS}
        source = (
            Shards(root, split, classes, channels)
            if store is None
            else RemoteShards(store, file.parent / name, split, classes, channels)
        )
        source.check(split["shard sizes"].tolist())
        pair.append(source)
    return pair[0], pair[1]


def read_index(file: Path, root: str) -> Arrays:
    """The arrays of an index, mapped and checked.

    Args:
        file: The index.
        root: The folder of the tar files, for messages.

    Raises:
        UserError: It isn't there, or is damaged.
    """
    anew = f"write it {'anew ' if file.exists() else ''}with: torusgd data index {quote(root)}"
    try:
        arrays = read_arrays(file)
        if arrays["format"].tolist() != [FORMAT]:
            raise ValueError("of another version of torusgd")
        if arrays["checksum"].tolist() != [checksum(arrays)]:
            raise ValueError("its checksum is another one")
        for split in SPLITS:
            _check({key: arrays[f"{split} {key}"] for key in _KINDS})
        _check_names(arrays["classes text"], arrays["classes ends"])
    except FileNotFoundError:
        raise UserError(f"{file}: there is no index of the tar files; {anew}") from None
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UserError(f"{file}: no whole index ({in_one_line(error)}); {anew}") from None
    return arrays


def _check(split: Arrays) -> None:
    """ValueError unless every index, offset and name of a split lies within its bounds: a file is untrusted."""
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
    for name in Names.of(split, "shards"):
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise ValueError(f"a tar file {name!r}")


def _check_names(text: Any, ends: Any) -> None:
    if (len(ends) and (ends[0] < 0 or ends[-1] > len(text))) or (np.diff(ends) < 1).any():
        raise ValueError("names that overlap")

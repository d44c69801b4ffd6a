"""Images in tar files of a folder or a bucket, each read in one piece by its offset in the index: the source `tar`.

Images of a bucket are read ahead, and cached on a local disk that a machine's ranks share.
"""

import hashlib
import logging
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

import numpy as np
import safetensors

from ..errors import UserError, as_user_error, in_one_line, is_transient
from ..storage import CACHE, Store, cache_folder, unusable, url_of
from ..weights import replacing
from .decode import MOST_BYTES, EncodedImages, Undecodable, load_decoders
from .file_lists import SPLITS, Arrays, Names, read_arrays
from .tar_index import BLOCK, COLUMNS, FILE, FORMAT, KINDS, checksum
from .types import Int64

_ATTEMPTS = 4  # reads of an image, since a bucket, or a cache before it, may answer with an old version

THREADS = 32  # concurrent reads: a bucket answers after 20 to 50 ms, whatever the size
_MOST_AHEAD = 4096  # images that are read before they are needed
_CACHE_GIB, _DEFAULT_GIB = "TORUSGD_CACHE_GIB", 64.0
_COUNT_EVERY = 256

log = logging.getLogger(__name__)


class Shards(EncodedImages):
    """A source of the images in tar files of a folder (`root`); `split` are the arrays of one, from `read_index`."""

    def __init__(self, root: str, split: Arrays, classes: Sequence[str], channels: int) -> None:
        super().__init__(classes, split["labels"], channels)
        self.names = Names.of(split, "names")
        self._root = root
        self._files = [os.path.join(root, name) for name in Names.of(split, "shards")]
        self._shard, self._offset, self._size, self._header = (split[key] for key in COLUMNS)

    def lengths(self) -> list[int]:
        """The bytes of each tar file; OSError if one isn't there."""
        return [os.stat(file).st_size for file in self._files]

    def check(self, expected: Sequence[int]) -> None:
        """UserError if a tar file is missing, or has not the length that the index expects; RunError for an outage."""
        try:
            lengths = self.lengths()
        except OSError as error:
            if is_transient(error):
                raise unusable(f"{self._root}: can't be read", error) from error
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
        # Each read includes the member's header, whose CRC-32 is in the index: so a tar file that was written anew
        # since then is found out, even if its images lie elsewhere now.
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
        with open(self._files[self._shard[index]], "rb", buffering=0) as file:
            return os.pread(file.fileno(), BLOCK + int(self._size[index]), int(self._offset[index]) - BLOCK)

    def _forget(self, index: int) -> None:
        """Drops cached bytes of an image that were not the right ones; a folder has no cache."""

    def _changed(self, file: str) -> UserError:
        return UserError(f"{file}: was changed since its index was written; {_remedy(self._root, 'anew ')}")


class RemoteShards(Shards):
    """A source of the images in tar files of a bucket, cached in a folder of this split; a new index has a new one."""

    reads_ahead = True

    def __init__(self, store: Store, cache: Path, split: Arrays, classes: Sequence[str], channels: int) -> None:
        super().__init__(store.url, split, classes, channels)
        self._store, self._objects = store, list(Names.of(split, "shards"))
        most = cache_bytes()
        self._cache = RangeCache(cache, self._size, most) if most else None
        self._ahead: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "torusgd-bucket")

    def lengths(self) -> list[int]:
        listed = self._store.sizes()
        if set(self._objects) <= listed.keys():
            return [listed[name] for name in self._objects]
        return list(self._pool.map(self._store.size, self._objects))

    def expect(self, indices: Int64) -> None:
        with self._lock:
            for index in indices.tolist():
                if index not in self._ahead and self._size[index] <= MOST_BYTES:
                    self._ahead[index] = self._pool.submit(self._fetch, index)
            # The oldest go first: a plan that changed, as when ranks leave, has left them behind.
            while len(self._ahead) > _MOST_AHEAD:
                self._ahead.popitem(last=False)[1].cancel()

    def _read(self, index: int) -> bytes:
        with self._lock:
            ahead = self._ahead.pop(index, None)
        return ahead.result() if ahead is not None else self._fetch(index)

    def _forget(self, index: int) -> None:
        if self._cache is not None:
            self._cache.drop(index)

    def _fetch(self, index: int) -> bytes:
        shard, begin, size = int(self._shard[index]), int(self._offset[index]) - BLOCK, BLOCK + int(self._size[index])
        if self._cache is not None and (cached := self._cache.get(index, shard, begin, size)) is not None:
            return cached
        data = self._store.read(self._objects[shard], begin, begin + size)
        if self._cache is not None:
            self._cache.put(index, shard, begin, data)
        return data


class RangeCache:
    """Ranges of files, of these sizes, on a local disk, up to `most` bytes; several processes share a folder."""

    # Each file has a sparse copy here, in which a range has the offset that it has in the original.
    # A range is known by its number in the index, and verified by a CRC-32: so processes that write need no agreement,
    # and what a crash left half written is fetched again.
    # Every epoch reads every image once, so no image is worth more than another: a full cache stays as it is. That
    # saves as many reads as any other rule, and more than to evict the image that was not read for the longest time.

    def __init__(self, folder: Path, sizes: Int64, most: int) -> None:
        self._folder, self._sizes, self._most = folder, sizes, most
        self._puts, self._is_full = 0, False
        with as_user_error(f"{folder}: can't hold a cache", f"set {CACHE} to another folder", (OSError, ValueError)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "checksums").touch()
            with open(folder / "checksums", "r+b") as file:
                # Zeros, and no hole: on a full disk a write into one, through the map, would end the process.
                file.write(bytes(max(0, 4 * len(sizes) - file.seek(0, os.SEEK_END))))
                file.truncate(4 * len(sizes))
            self._sums = np.memmap(folder / "checksums", np.uint32, "r+", 0, (len(sizes),))

    def get(self, number: int, file: int, begin: int, size: int) -> bytes | None:
        """The bytes of a range; None: it is not cached."""
        expected = int(self._sums[number])
        if not expected:
            return None
        with suppress(OSError), open(self._folder / f"{file}.tar", "rb", buffering=0) as copy:
            data = os.pread(copy.fileno(), size, begin)
            # Another process may be writing this range, or a crash may have left half of it.
            if _sum(data) == expected:
                return data
        return None

    def put(self, number: int, file: int, begin: int, data: bytes) -> None:
        # To add up all sizes takes milliseconds with a million images, so the bound is checked now and then.
        if self._puts % _COUNT_EVERY == 0:
            self._is_full = self._is_full or int(self._sizes[self._sums != 0].sum()) >= self._most
        self._puts += 1
        if self._is_full:
            return
        try:
            handle = os.open(self._folder / f"{file}.tar", os.O_WRONLY | os.O_CREAT, 0o666)
            with os.fdopen(handle, "wb", buffering=0):  # which truncates nothing
                os.pwrite(handle, data, begin)
            # After the data: a crash in between leaves a 0, and the range is fetched again.
            self._sums[number] = _sum(data)
        except OSError as error:
            log.warning("%s: caches no more images: %s", self._folder, error)
            self._is_full = True

    def drop(self, number: int) -> None:
        self._sums[number] = 0


def _sum(data: bytes) -> int:
    return zlib.crc32(data) or 1  # 0 says that nothing is there


def cache_bytes() -> int:
    """The size of the cache of one split of a data set: TORUSGD_CACHE_GIB, or else 64 GiB."""
    text = os.environ.get(_CACHE_GIB, str(_DEFAULT_GIB))
    try:
        if not 0 <= (gib := float(text)) < float("inf"):
            raise ValueError
    except ValueError:
        raise UserError(f"{_CACHE_GIB} = {text}: must be a number of GiB, 0 for no cache") from None
    return int(gib * 2**30)


def _remedy(root: str, again: str = "") -> str:
    """What gives an index to the tar files of a folder, or of a URL, where none can be made."""
    if url_of(Path(root)) is None:
        return f"write it {again}with: torusgd data index {quote(root)}"
    return f"write it {again}where the tar files are, with torusgd data index, and copy it beside them"


def fetch_index(store: Store, name: str = FILE, again: bool = False) -> Path:
    """A local copy of a bucket's index, fetched once for each version of it, or `again`; UserError if it can't be."""
    try:
        # The version is part of the key: a new index has a new cache, and no old range can enter it.
        key = hashlib.sha256(f"{store.url}\0{name}\0{store.version(name)}".encode()).hexdigest()[:32]
        file = cache_folder() / key / FILE
        if again or not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary:
                store.get(name, temporary)
    except FileNotFoundError:
        raise UserError(f"{store.url}/{name}: there is no index; {_remedy(store.url)}") from None
    except OSError as error:
        raise unusable(f"{store.url}/{name}: can't be fetched", error) from error
    return file


def open_shards(path: Path, channels: int, index: str = FILE) -> tuple[Shards, Shards]:
    """Images in tar files, in the order of the index, which is a path from the folder or URL of these files."""
    load_decoders()
    store = Store(url) if (url := url_of(path)) is not None else None
    file, root = (path / index, str(path)) if store is None else (fetch_index(store, index), store.url)
    try:
        arrays = read_index(file, root)
    except UserError:
        if store is None:
            raise
        arrays = read_index(fetch_index(store, index, again=True), root)  # the copy may be what was damaged
    pair = list[Shards]()
    for name in SPLITS:
        own = {key: arrays[f"{name} {key}"] for key in KINDS}, list(Names.of(arrays, "classes")), channels
        pair.append(Shards(root, *own) if store is None else RemoteShards(store, file.parent / name, *own))
        pair[-1].check(arrays[f"{name} shard sizes"].tolist())
    return pair[0], pair[1]


def read_index(file: Path, root: str) -> Arrays:
    """The arrays of an index, mapped and checked; UserError, with `root` in its remedy, if it isn't whole."""
    anew = _remedy(root, "anew " if file.exists() else "")
    try:
        arrays = read_arrays(file)
        if arrays["format"].tolist() != [FORMAT]:
            raise ValueError("of another version of torusgd")
        if arrays["checksum"].tolist() != [checksum(arrays)]:
            raise ValueError("its checksum is another one")
        for split in SPLITS:
            _check({key: arrays[f"{split} {key}"] for key in KINDS})
        _check_names(arrays["classes text"], arrays["classes ends"])
    except FileNotFoundError:
        raise UserError(f"{file}: there is no index of the tar files; {anew}") from None
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UserError(f"{file}: no whole index ({in_one_line(error)}); {anew}") from None
    return arrays


def _check(split: Arrays) -> None:
    """ValueError unless every index, offset and name of a split lies within its bounds: a file is untrusted."""
    for key, kind in KINDS.items():
        if split[key].dtype != kind or split[key].ndim != 1:
            raise ValueError(f"{key} are {split[key].dtype} {list(split[key].shape)}")
    images, shards = len(split["names ends"]), len(split["shards ends"])
    for key in (*COLUMNS, "labels"):
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

"""Tar shards in a bucket: ranges of them are read ahead, and kept on a local disk that a machine's ranks share.

What is kept is found again by the image's number in the index and a CRC-32 of its bytes, so that nothing has to be
agreed upon between the processes that write, and what a crash has left half written is fetched again.

In each epoch every image is read once, so no image is worth more than another: a cache that is full stays as it is,
which spares as much as any other rule, and more than to throw out what was not read for the longest time.
"""

import hashlib
import logging
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..storage import CACHE, Store, cache_folder
from ..weights import replacing
from .tar_index import FILE
from .types import Int64

THREADS = 32
"""ranges under way at a time: a bucket answers after 20 to 50 ms, whatever is asked"""
_MOST_AHEAD = 4096
"""images that are read before they are asked for"""
_CACHE_GIB = "TORUSGD_CACHE_GIB"
_DEFAULT_GIB = 64.0
_COUNT_EVERY = 256

log = logging.getLogger(__name__)


def cache_bytes() -> int:
    """How much of one split of a data set is kept: TORUSGD_CACHE_GIB, or else 64 GiB."""
    text = os.environ.get(_CACHE_GIB, str(_DEFAULT_GIB))
    try:
        if (gib := float(text)) < 0:
            raise ValueError
    except ValueError:
        raise UserError(f"{_CACHE_GIB} = {text}: must be a number of GiB, 0 to keep nothing") from None
    return int(gib * 2**30)


def fetch_index(store: Store, name: str = FILE) -> Path:
    """A local copy of a data set's index, fetched once for each version of it.

    Raises:
        UserError: There is none, or it can't be read.
    """
    try:
        key = hashlib.sha256(f"{store.url}\0{name}\0{store.version(name)}".encode()).hexdigest()[:32]
        file = cache_folder() / key / FILE
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary:
                store.get(name, temporary)
    except FileNotFoundError:
        raise UserError(
            f"{store.url}/{name}: there is no index; write it where the tar files are, with torusgd data index, and "
            "copy it beside them"
        ) from None
    except OSError as error:
        raise UserError(f"{store.url}/{name}: can't be fetched: {error}") from error
    return file


class RemoteFiles:
    """The tar files of one split in a store.

    Args:
        store: Where they are.
        names: Theirs.
        offsets, sizes, shards: Of each image: its place, as the index has it, and the number of its tar file.
        folder: Of the cache; a new index makes a new one.
        most: Bytes that the cache may take.
    """

    def __init__(
        self, store: Store, names: Sequence[str], shards: Int64, offsets: Int64, sizes: Int64, folder: Path, most: int
    ) -> None:
        self._store, self._names = store, names
        self._shards, self._offsets, self._sizes = shards, offsets, sizes
        self._cache = RangeCache(folder, sizes, most) if most else None
        self._ahead: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "torusgd-bucket")

    def where(self, shard: int) -> str:
        """A tar file, for people."""
        return f"{self._store.url}/{self._names[shard]}"

    def lengths(self) -> list[int]:
        """The bytes of each tar file; raises as `Store.size`."""
        listed = self._store.sizes()
        if set(self._names) <= listed.keys():
            return [listed[name] for name in self._names]
        return list(self._pool.map(self._store.size, self._names))

    def read(self, index: int, head: int) -> bytes:
        """An image with the `head` bytes before it; raises as `Store.read`."""
        with self._lock:
            ahead = self._ahead.pop(index, None)
        return ahead.result() if ahead is not None else self._read(index, head)

    def expect(self, indices: Iterable[int], head: int) -> None:
        """Begins to read images that will be asked for soon."""
        with self._lock:
            for index in indices:
                if index not in self._ahead:
                    self._ahead[index] = self._pool.submit(self._read, index, head)
            while len(self._ahead) > _MOST_AHEAD:  # of shares that nobody came for
                self._ahead.popitem(last=False)[1].cancel()

    def forget(self, index: int) -> None:
        """Drops what is kept of an image, since it was not what it must be."""
        if self._cache is not None:
            self._cache.drop(index)

    def _read(self, index: int, head: int) -> bytes:
        shard, begin = int(self._shards[index]), int(self._offsets[index]) - head
        size = int(self._sizes[index]) + head
        if self._cache is not None and (kept := self._cache.get(index, shard, begin, size)) is not None:
            return kept
        data = self._store.read(self._names[shard], begin, begin + size)
        if self._cache is not None:
            self._cache.put(index, shard, begin, data)
        return data


class RangeCache:
    """Ranges of files on a local disk, by number; several processes use one folder at a time.

    Each file stands here as a sparse one, in which the ranges lie where they lie in the original.

    Args:
        folder: Made if it isn't there.
        sizes: Bytes of each range, about.
        most: Bytes in all.
    """

    def __init__(self, folder: Path, sizes: Int64, most: int) -> None:
        self._folder, self._sizes, self._most = folder, sizes, most
        self._puts = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "kept", "ab") as file:
                if file.tell() != 4 * len(sizes):
                    file.truncate(4 * len(sizes))
            self._sums = np.memmap(folder / "kept", np.uint32, "r+", 0, (len(sizes),))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: can't keep copies there ({error}); set {CACHE} to another folder") from error
        self._is_full = False

    def get(self, number: int, file: int, begin: int, size: int) -> bytes | None:
        """The bytes of a range; None: they are not kept."""
        expected = int(self._sums[number])
        if not expected:
            return None
        with suppress(OSError):
            handle = os.open(self._folder / f"{file}.tar", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(handle, size, begin)
            finally:
                os.close(handle)
            if _sum(data) == expected:
                return data
        return None

    def put(self, number: int, file: int, begin: int, data: bytes) -> None:
        """Keeps a range, while there is room."""
        if self._puts % _COUNT_EVERY == 0:
            self._is_full = self._is_full or int(self._sizes[self._sums != 0].sum()) >= self._most
        self._puts += 1
        if self._is_full:
            return
        try:
            handle = os.open(self._folder / f"{file}.tar", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(handle, data, begin)
            finally:
                os.close(handle)
            self._sums[number] = _sum(data)
        except OSError as error:
            log.warning("%s: keeps no more copies: %s", self._folder, error)
            self._is_full = True

    def drop(self, number: int) -> None:
        """Forgets a range."""
        self._sums[number] = 0


def _sum(data: bytes) -> int:
    return zlib.crc32(data) or 1  # 0 says that nothing is there

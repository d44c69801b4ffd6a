"""Tar shards in a bucket: their images are read ahead, and cached on a local disk that a machine's ranks share.

The cache finds an image by its number in the index and verifies a CRC-32 of its bytes: so processes that write need no
agreement, and an image that a crash left half written is fetched again.

Every epoch reads every image once, so no image is worth more than another: a full cache stays as it is. That saves as
many reads as any other rule, and more than to evict the image that was not read for the longest time.
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
from .types import Int32, Int64

THREADS = 32
"""concurrent reads: a bucket answers after 20 to 50 ms, whatever the size"""
_MOST_AHEAD = 4096
"""images that are read before they are needed"""
_CACHE_GIB = "TORUSGD_CACHE_GIB"
_DEFAULT_GIB = 64.0
_COUNT_EVERY = 256

log = logging.getLogger(__name__)


def cache_bytes() -> int:
    """The size of the cache of one split of a data set: TORUSGD_CACHE_GIB, or else 64 GiB."""
    text = os.environ.get(_CACHE_GIB, str(_DEFAULT_GIB))
    try:
        if (gib := float(text)) < 0:
            raise ValueError
    except ValueError:
        raise UserError(f"{_CACHE_GIB} = {text}: must be a number of GiB, 0 for no cache") from None
    return int(gib * 2**30)


def fetch_index(store: Store, name: str = FILE) -> Path:
    """A local copy of a data set's index, fetched once for each version of it.

    Raises:
        UserError: There is none, or it can't be read.
    """
    try:
        # The version is part of the key: a new index has a new cache, and no old range can enter it.
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
    """Byte ranges of the files of one split in a store, each read ahead, and cached on a local disk.

    Args:
        store: Where the files are.
        names: Theirs.
        files, begins, sizes: Of each range: the number of its file, its first byte, its length.
        head: Bytes before each range that are read with it.
        folder: Of the cache; a new index has a new one.
    """

    def __init__(
        self, store: Store, names: Sequence[str], files: Int32, begins: Int64, sizes: Int64, head: int, folder: Path
    ) -> None:
        self._store, self._names, self._head = store, names, head
        self._files, self._begins, self._sizes = files, begins, sizes
        most = cache_bytes()
        self._cache = RangeCache(folder, sizes, most) if most else None
        self._ahead: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "torusgd-bucket")

    def lengths(self) -> list[int]:
        """The bytes of each file; raises as `Store.size`."""
        listed = self._store.sizes()
        if set(self._names) <= listed.keys():
            return [listed[name] for name in self._names]
        return list(self._pool.map(self._store.size, self._names))

    def read(self, index: int) -> bytes:
        """One range and its head, shorter if its file ends before; raises as `Store.read`."""
        with self._lock:
            ahead = self._ahead.pop(index, None)
        return ahead.result() if ahead is not None else self._fetch(index)

    def expect(self, indices: Iterable[int]) -> None:
        """Starts to read ranges that are needed soon."""
        with self._lock:
            for index in indices:
                if index not in self._ahead:
                    self._ahead[index] = self._pool.submit(self._fetch, index)
            # The oldest go first: a plan that changed, as when ranks leave, has left them behind.
            while len(self._ahead) > _MOST_AHEAD:
                self._ahead.popitem(last=False)[1].cancel()

    def forget(self, index: int) -> None:
        """Drops a range from the cache, since its bytes were not the right ones."""
        if self._cache is not None:
            self._cache.drop(index)

    def _fetch(self, index: int) -> bytes:
        file, begin = int(self._files[index]), int(self._begins[index]) - self._head
        size = int(self._sizes[index]) + self._head
        if self._cache is not None and (cached := self._cache.get(index, file, begin, size)) is not None:
            return cached
        data = self._store.read(self._names[file], begin, begin + size)
        if self._cache is not None:
            self._cache.put(index, file, begin, data)
        return data


class RangeCache:
    """Ranges of files on a local disk, by number; several processes use one folder at a time.

    Each file has a sparse copy here, in which a range has the offset that it has in the original.

    Args:
        folder: Made if it isn't there.
        sizes: Bytes of each range.
        most: Bytes in all.
    """

    def __init__(self, folder: Path, sizes: Int64, most: int) -> None:
        self._folder, self._sizes, self._most = folder, sizes, most
        self._puts = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "checksums", "ab") as file:
                if file.tell() != 4 * len(sizes):
                    file.truncate(4 * len(sizes))
            self._sums = np.memmap(folder / "checksums", np.uint32, "r+", 0, (len(sizes),))
        except (OSError, ValueError) as error:
            raise UserError(f"{folder}: can't hold a cache ({error}); set {CACHE} to another folder") from error
        self._is_full = False

    def get(self, number: int, file: int, begin: int, size: int) -> bytes | None:
        """The bytes of a range; None: it is not cached."""
        expected = int(self._sums[number])
        if not expected:
            return None
        with suppress(OSError):
            handle = os.open(self._folder / f"{file}.tar", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = os.pread(handle, size, begin)
            finally:
                os.close(handle)
            # Another process may be writing this range, or a crash may have left half of it.
            if _sum(data) == expected:
                return data
        return None

    def put(self, number: int, file: int, begin: int, data: bytes) -> None:
        """Stores a range, while there is room."""
        # To add up all sizes takes milliseconds with a million images, so the bound is checked now and then.
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
            # After the data: a crash in between leaves a 0, and the range is fetched again.
            self._sums[number] = _sum(data)
        except OSError as error:
            log.warning("%s: caches no more images: %s", self._folder, error)
            self._is_full = True

    def drop(self, number: int) -> None:
        """Removes a range."""
        self._sums[number] = 0


def _sum(data: bytes) -> int:
    return zlib.crc32(data) or 1  # 0 says that nothing is there

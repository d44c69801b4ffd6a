"""Arrays that one process of each machine makes and the ranks there map: lists of files, what is unpacked in memory.

Who makes them, the launcher or else the first rank of the machine, writes them into a file without a name, in memory,
which the others open by way of the kernel's list of that process's open files. So they are in memory once, nothing can
be left behind, and nobody but the user can open them. If a rank can't (another kernel than Linux, containers that
hide processes from each other), it makes the arrays itself.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.numpy import save

from ..comm.base import Liveness
from ..comm.connection import hosts_of
from ..comm.groups import Group
from ..data.file_lists import Arrays, Progress, read_arrays
from ..errors import UserError


class KeptArrays:
    """A `data.file_lists.Once` of a process that starts ranks on its machine: what it makes it holds for them."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """files with the arrays of each call, as long as this process lives"""

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays:
        """See `Once`."""
        arrays = make(lambda done: None)
        if hasattr(os, "memfd_create"):
            self.paths.append(f"/proc/{os.getpid()}/fd/{_write(arrays)}")
        return arrays


class MappedArrays:
    """A `data.file_lists.Once` of a rank alone, which maps what its launcher has made.

    No rank waits for another in it, so it serves those that join a run at work as well.

    Args:
        paths: Of the launcher's `KeptArrays`, or of another rank's; beyond them the arrays are made here.
    """

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)
        self._left = iter(self.paths)

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays:
        """See `Once`."""
        with suppress(OSError, StopIteration):
            return read_arrays(Path(next(self._left)))
        return make(lambda done: None)


class HostShare:
    """A `data.file_lists.Once` of a run's ranks, each of which calls it.

    Args:
        world: All ranks.
        liveness: Learns of progress, and for what this rank waits.
        what: For which it waits, such as "the list of images".
        where: Where it is, for people.
        key: Says which arrays. Ranks that want others, such as those of another folder, make their own; that they
            should not is for the comparison of the ranks to find.
        keeps: Processes that a rank starts later may map the arrays too, as long as the rank that made them lives.

    Attributes:
        paths: Files in which such processes find the arrays of each call.
    """

    def __init__(self, world: Group, liveness: Liveness, what: str, where: str, key: str, keeps: bool = False) -> None:
        self._world, self._liveness, self._what, self._where = world, liveness, what, where
        self._keeps, self.paths = keeps, list[str]()
        self._key = int.from_bytes(hashlib.sha256(key.encode(errors="surrogateescape")).digest()[:7], "big")

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays:
        """See `Once`."""
        self._progress(0)
        rank, keys = self._world.rank, self._world.all_gather(torch.tensor([self._key]))
        # The first rank of each pair (machine, arrays) makes them for the others of that pair.
        owners = list(zip(hosts_of(self._world), map(int, keys), strict=True))
        first, arrays, file = owners.index(owners[rank]), None, -1
        if first == rank:
            with suppress(OSError, UserError):  # which each rank finds, and reports, itself
                arrays = make(self._progress)
                if (self._keeps or owners.count(owners[rank]) > 1) and hasattr(os, "memfd_create"):
                    file = _write(arrays)
        process, number = self._world.all_gather(torch.tensor([os.getpid(), file]))[first].tolist()
        path = f"/proc/{process}/fd/{number}"
        if number >= 0:
            with suppress(OSError):
                arrays = read_arrays(Path(path))
        if arrays is None:
            arrays = make(self._progress)
        if self._keeps:
            self.paths.append(path)
            return arrays
        # The file has no name: it is gone with its last descriptor, so all must have opened it before it is closed.
        self._world.barrier()
        if file >= 0:
            os.close(file)
        return arrays

    def _progress(self, done: int) -> None:
        self._liveness.progress("data", 0, done)
        self._liveness.outside(self._what, self._where)


def _write(arrays: Arrays) -> int:
    """The number of an open file that holds the arrays; in memory until it is closed and nobody maps it any more."""
    file = os.memfd_create("torusgd", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(save(arrays))
    return file

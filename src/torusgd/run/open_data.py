"""The images of a run on one rank: found, opened, and read ahead by threads or processes.

Lists of files, and what is unpacked in memory, are arrays that one process of each machine makes, the launcher or else
the first rank there, and the ranks of that machine map (`data.file_lists.Once`).
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.numpy import save

from ..comm.base import Liveness
from ..comm.connection import hosts_of
from ..comm.groups import Group
from ..data.file_lists import Arrays, Progress, read_arrays
from ..data.loader import Loader, LoaderProcesses, open_pipeline
from ..data.order import StreamOrder
from ..data.pipeline import Pipeline, allocate_by_torch
from ..data.registry import decode_on_gpu, open_sources
from ..data.to_device import BytePipeline, allocate_pinned, can_normalise_later
from ..errors import UserError
from ..recipe.compatibility import LOADER_PROCESSES, NVJPEG, check
from ..runtime import loader_threads
from .job import Job, images_at, setup_of


class LauncherArrays:
    """A `Once` of a process that starts ranks on its machine: what it makes it holds for them."""

    def __init__(self) -> None:
        self.paths: list[str] = []  # files with the arrays of each call, as long as this process lives

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays:
        arrays = make(lambda done: None)
        if hasattr(os, "memfd_create"):
            self.paths.append(f"/proc/{os.getpid()}/fd/{_write(arrays)}")
        return arrays


class MappedArrays:
    """A `Once` of a rank alone, which maps what its launcher, or another rank, has made; it makes the rest."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self.paths = tuple(paths)
        self._left = iter(self.paths)

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays:
        with suppress(OSError, StopIteration):
            return read_arrays(Path(next(self._left)))
        return make(lambda done: None)


class HostShare:
    """A `Once` of a run's ranks, each of which calls it, and waits for the list of images `where`, for people.

    The `key` says which arrays: ranks that want others make their own. With `keeps` processes that a rank starts later
    find the arrays in `paths`, as long as the rank that made them lives.
    """

    def __init__(self, world: Group, liveness: Liveness, where: str, key: str, keeps: bool = False) -> None:
        self._world, self._liveness, self._where = world, liveness, where
        self._keeps, self.paths = keeps, list[str]()
        self._key = int.from_bytes(hashlib.sha256(key.encode(errors="surrogateescape")).digest()[:7], "big")

    def __call__(self, make: Callable[[Progress], Arrays]) -> Arrays:
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
        with suppress(OSError):
            arrays = read_arrays(Path(path)) if number >= 0 else arrays
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
        self._liveness.outside("the list of images", self._where)


def _write(arrays: Arrays) -> int:
    """The number of an open file in memory that holds the arrays."""
    # It has no name, so nothing can be left behind, and others open it by way of the kernel's list of this process's
    # open files, which only the same user can. If that fails (another kernel than Linux, containers that hide processes
    # from each other) a rank makes the arrays itself. It stays until it is closed and nobody maps it any more.
    file = os.memfd_create("torusgd", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(save(arrays))
    return file


@dataclass(frozen=True)
class Data:
    """The images of a run; they know of no ranks, and so stay open when the ranks change."""

    training: Pipeline
    held_out: Pipeline
    loader: Loader
    processes: LoaderProcesses | None  # makers of the loader's batches; None: its threads make them

    def close(self) -> None:
        self.loader.close()
        if self.processes is not None:
            self.processes.close()


def open_data(job: Job, device: torch.device, liveness: Liveness, once: MappedArrays | HostShare | None = None) -> Data:
    """Opens the images of a job; UserError if they can't be used. `once` lists them; None: this process does."""
    check(setup_of(job, device=device.type), {NVJPEG, LOADER_PROCESSES})
    recipe, once = job.recipe, once or MappedArrays()
    liveness.outside("the list of images", images_at(job))
    train, held_out = open_sources(recipe.data, job.data, recipe.seed, once)
    if recipe.data.decoder == "nvjpeg":
        train, held_out = decode_on_gpu((train, held_out), device)
    is_gpu = device.type == "cuda"
    make = BytePipeline if is_gpu and can_normalise_later(recipe.data.augment) else Pipeline
    allocate = allocate_pinned if is_gpu else allocate_by_torch
    training, processes, threads = make(train, recipe.data, recipe.seed, allocate), None, loader_threads(device)
    if job.options.loader_processes:
        threads = job.options.loader_processes  # each of which waits for a process
        opened = partial(open_pipeline, make, recipe.data, job.data, recipe.seed, MappedArrays(once.paths))
        processes = LoaderProcesses(training, opened, threads)
    order = StreamOrder(len(train), recipe.seed, recipe.data.augment.repeats)
    evaluated = (BytePipeline if is_gpu else Pipeline)(held_out, recipe.held_out_data, recipe.seed, allocate)
    return Data(training, evaluated, Loader(processes or training, order, threads, ahead=threads + 3), processes)

"""Processes that make a rank's batches, since threads of one interpreter share its lock and not all cores.

Each process opens the images for itself, by the lists that its machine has already (`listing.Once`), and makes one
batch at a time. What it makes are the bits of `Pipeline`, in memory that it shares with the rank: only a few numbers go
through a pipe. A process holds none of the rank's connections, and ends when the rank does.
"""

import logging
import mmap
import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RunError, UserError
from ..recipe.data_schema import Data
from ..recipe.section import ImageSizes
from ..signals import die_with_launcher, held_back, hold_back, how_it_ended
from .file_lists import Once
from .pipeline import Allocate, Batch, Pipeline
from .registry import open_sources
from .types import Int64

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""for a process to end by itself"""


@dataclass(frozen=True)
class Opener:
    """What a process must know to make the batches of a run."""

    make: Callable[..., Pipeline]
    """`Pipeline` or `upload.BytePipeline`"""
    data: Data
    path: Path | None
    seed: int
    once: Once
    """gives the lists of images without asking another rank"""

    def open(self, allocate: Allocate) -> Pipeline:
        """The pipeline; UserError where the images can't be used."""
        training, _ = open_sources(self.data, self.path, self.seed, self.once)
        return self.make(training, self.data, self.seed, allocate)


@dataclass(frozen=True)
class _Made:
    """A batch whose images lie in shared memory."""

    shape: tuple[int, ...]
    targets: Int64
    kept: Int64
    replaced: int
    partners: Int64 | None
    shares: npt.NDArray[np.float32] | None


class LoaderProcesses:
    """Makes training batches by a pipeline's copies in other processes, as many at a time as there are processes.

    Safe to use from several threads, each of which waits for its batch; `Loader` has as many.

    Args:
        pipeline: This process's own, in whose memory the batches arrive.
        opener: Opens the same one elsewhere.
        count: Processes, at least 1.

    Raises:
        UserError: The system has no memory that processes can share by a file without a name.
    """

    def __init__(self, pipeline: Pipeline, opener: Opener, count: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("runtime.loader_processes: needs Linux; leave it out, and threads make the batches")
        self._pipeline = pipeline
        # The server that they are forked from is one like the launcher's: it leaves nothing in the temporary folder.
        multiprocessing.set_forkserver_preload(["torusgd.ranks.forkserver_preload"])
        with held_back():
            self._all = [_Process(opener) for _ in range(count)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        # Before this process waits for its children, as it does at its end, and they for its word.
        self.close = Finalize(self, _close, (self._all,), exitpriority=10)

    @property
    def reads_ahead(self) -> bool:
        """See `Pipeline`."""
        return self._pipeline.reads_ahead

    def expect(self, indices: Int64) -> None:
        """See `Pipeline`: this process fetches ahead, into the cache on disk that all share."""
        self._pipeline.expect(indices)

    def training_batch(self, indices: Int64, epochs: Int64, augment: bool, sizes: ImageSizes | None = None) -> Batch:
        """See `Pipeline`; RunError also where a process has ended, or its source raised what no source may."""
        process = self._idle.get()
        try:
            made = process.ask((indices, epochs, augment, sizes))
            images, message = self._pipeline.memory(made.shape)
            np.copyto(images, process.memory.array(made.shape, self._pipeline.dtype))
        finally:
            self._idle.put(process)
        batch = Batch(
            torch.from_numpy(images),
            torch.from_numpy(made.targets),
            made.kept,
            made.replaced,
            None if made.partners is None else torch.from_numpy(made.partners),
            None if made.shares is None else torch.from_numpy(made.shares),
            self._pipeline.table,
        )
        return self._pipeline.joined(batch, message)


class SharedMemory:
    """Memory without a name that two processes map, and that grows with what is asked of it.

    Args:
        file: Of `os.memfd_create`.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: mmap.mmap | None = None

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The memory's first bytes as an array; what was there stays."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
        return np.frombuffer(self._map, kind, int(np.prod(shape))).reshape(shape)


class _Process:
    """One of them, as the rank sees it."""

    def __init__(self, opener: Opener) -> None:
        self._file = file = os.memfd_create("torusgd-batch", os.MFD_CLOEXEC)
        self.memory = SharedMemory(file)
        context = multiprocessing.get_context("forkserver")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, f"/proc/{os.getpid()}/fd/{file}", opener))
        self._process.start()
        its.close()

    def ask(self, wanted: tuple[Any, ...]) -> _Made:
        """What it made of the arguments of `Pipeline.training_batch`."""
        try:
            self._pipe.send(wanted)
            made, lines = self._pipe.recv()
        except (EOFError, OSError):
            fewer = "fewer runtime.loader_processes take less memory"
            raise RunError(f"a process that makes batches {self._end()}; {fewer}") from None
        for line in lines:
            log.warning("%s", line)
        if isinstance(made, Exception):
            raise made
        assert isinstance(made, _Made)
        return made

    def end(self) -> None:
        """Tells it to end."""
        # By a word, since a pipe's end may live on in another child of this process, and then it never closes.
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()

    def join(self) -> None:
        """Waits until it has ended."""
        self._process.join(CLOSE_SECONDS)
        self._process.kill()
        self._process.join()
        os.close(self._file)

    def _end(self) -> str:
        self._process.join()
        return how_it_ended(self._process.exitcode or 0)


def _close(processes: list[_Process]) -> None:
    for process in processes:
        process.end()
    for process in processes:
        process.join()


class _Lines(logging.Handler):
    """Keeps what would go to the log, for the rank's own."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.kept: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        self.kept.append(record.getMessage())

    def take(self) -> list[str]:
        """What was kept since the last time."""
        taken, self.kept = self.kept, []
        return taken


def _serve(pipe: Connection, memory: str, opener: Opener) -> None:
    """Makes batches until the rank hangs up."""
    hold_back()  # a Ctrl-C reaches all processes of a terminal, and the rank may want another batch before it ends
    die_with_launcher()
    torch.set_num_threads(1)
    lines = _Lines()
    logging.getLogger("torusgd").addHandler(lines)
    shared = SharedMemory(os.open(memory, os.O_RDWR | os.O_CLOEXEC))
    pipeline: Pipeline | None = None
    made: _Made | Exception
    while (wanted := pipe.recv()) is not None:
        try:
            pipeline = pipeline or opener.open(shared.array)
            made = _without_images(pipeline.training_batch(*wanted))
        except (UserError, RunError, OSError) as error:
            made = error
        except Exception as error:
            made = RunError(f"a process that makes batches: {type(error).__name__}: {error}")
            made.add_note(traceback.format_exc())
        pipe.send((made, lines.take()))


def _without_images(batch: Batch) -> _Made:
    partners, shares = batch.partners, batch.shares
    return _Made(
        tuple(batch.images.shape),
        batch.targets.numpy(),
        batch.kept,
        batch.replaced,
        None if partners is None else partners.numpy(),
        None if shares is None else shares.numpy(),
    )

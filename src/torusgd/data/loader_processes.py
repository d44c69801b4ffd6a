"""Processes that make a rank's batches, since the threads of one interpreter share its lock and can't use all cores.

Each process opens the images for itself, from the lists that its machine has already (`Once`), and makes one batch at a
time, with the bits of `Pipeline`. Images go through memory that it shares with the rank, only a few numbers through a
pipe. A process holds none of the rank's connections, and ends when the rank does.
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
"""the time that a process has to end by itself"""


@dataclass(frozen=True)
class Opener:
    """The arguments with which a process opens the images of a run."""

    make: Callable[..., Pipeline]
    """`Pipeline` or `to_device.BytePipeline`"""
    data: Data
    path: Path | None
    seed: int
    once: Once
    """source of the lists of images; it must not need another rank"""

    def open(self, allocate: Allocate) -> Pipeline:
        """The pipeline; UserError if the images can't be used."""
        training, _ = open_sources(self.data, self.path, self.seed, self.once)
        return self.make(training, self.data, self.seed, allocate)


@dataclass(frozen=True)
class _Made:
    """A batch as it goes through the pipe; its images lie in shared memory."""

    shape: tuple[int, ...]
    kept: Int64
    replaced: int
    tensors: dict[str, npt.NDArray[Any]]
    """the other tensors of the batch, by name, as arrays: a pipe would move tensors by files of their own"""


class LoaderProcesses:
    """Makes training batches by copies of a pipeline in other processes, as many at a time as there are processes.

    Safe to use from several threads, each of which waits for its batch; `Loader` has as many.

    Args:
        pipeline: The one of this process, in whose memory the batches arrive.
        opener: Opens the same pipeline in another process.
        count: Processes, at least 1.

    Raises:
        UserError: The system has no memfd_create.
    """

    def __init__(self, pipeline: Pipeline, opener: Opener, count: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("runtime.loader_processes: needs Linux; leave it out, and threads make the batches")
        self._pipeline = pipeline
        # The launcher's preload: with it the fork server leaves nothing in the temporary folder.
        multiprocessing.set_forkserver_preload(["torusgd.ranks.forkserver_preload"])
        with held_back():
            self._all = [_Process(opener) for _ in range(count)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._all:
            self._idle.put(process)
        # At exit multiprocessing waits for all children, and these wait for a message: so this must run before.
        self.close = Finalize(self, _close, (self._all,), exitpriority=10)

    @property
    def reads_ahead(self) -> bool:
        """As of `Pipeline`."""
        return self._pipeline.reads_ahead

    def expect(self, indices: Int64) -> None:
        """As `Pipeline.expect`: this process reads ahead, into the cache on disk that all processes share."""
        self._pipeline.expect(indices)

    def training_batch(self, indices: Int64, epochs: Int64, augment: bool, sizes: ImageSizes | None = None) -> Batch:
        """As `Pipeline.training_batch`; RunError also if a process has ended, or met an unknown exception."""
        process = self._idle.get()
        try:
            made = process.make((indices, epochs, augment, sizes))
            memory, message = self._pipeline.memory(made.shape)
            # Copied out, since the process writes its next batch into the same memory.
            np.copyto(memory, process.memory.array(made.shape, self._pipeline.dtype))
        finally:
            self._idle.put(process)
        tensors = {name: torch.from_numpy(array) for name, array in made.tensors.items()}
        images = torch.from_numpy(memory)
        batch = Batch(images, kept=made.kept, replaced=made.replaced, table=self._pipeline.table, **tensors)
        return self._pipeline.joined(batch, message)


class SharedMemory:
    """Memory that two processes map, and that grows when a larger array is needed.

    Args:
        file: Of `os.memfd_create`.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: mmap.mmap | None = None

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The first bytes of the memory as an array; they are not cleared."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        # The side that needs more lengthens the file; the other one maps it again once its array is larger.
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
        return np.frombuffer(self._map, kind, int(np.prod(shape))).reshape(shape)


class _Process:
    """The rank's side of one process."""

    def __init__(self, opener: Opener) -> None:
        self._file = file = os.memfd_create("torusgd-batch", os.MFD_CLOEXEC)
        self.memory = SharedMemory(file)
        context = multiprocessing.get_context("forkserver")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, f"/proc/{os.getpid()}/fd/{file}", opener))
        self._process.start()
        its.close()

    def make(self, wanted: tuple[Any, ...]) -> _Made:
        """Has the process make a batch from the arguments of `Pipeline.training_batch`."""
        try:
            self._pipe.send(wanted)
            made, lines = self._pipe.recv()
        except (EOFError, OSError):
            fewer = "fewer runtime.loader_processes take less memory"
            self._process.join()
            end = how_it_ended(self._process.exitcode or 0)
            raise RunError(f"a process that makes batches {end}; {fewer}") from None
        for line in lines:
            log.warning("%s", line)
        if isinstance(made, Exception):
            raise made
        assert isinstance(made, _Made)
        return made

    def end(self) -> None:
        """Requests its end."""
        # By a message: another child of this process may hold an end of the pipe, which then never closes.
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()

    def join(self) -> None:
        """Waits until it has ended."""
        self._process.join(CLOSE_SECONDS)
        self._process.kill()
        self._process.join()
        os.close(self._file)


def _close(processes: list[_Process]) -> None:
    for process in processes:
        process.end()
    for process in processes:
        process.join()


class _Lines(logging.Handler):
    """Collects lines for the rank's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Adds a line."""
        self.lines.append(record.getMessage())


def _serve(pipe: Connection, memory: str, opener: Opener) -> None:
    """Makes batches until the rank sends None."""
    hold_back()  # a Ctrl-C reaches all processes of a terminal, and the rank may need another batch before it ends
    die_with_launcher()
    torch.set_num_threads(1)
    handler = _Lines()
    logging.getLogger("torusgd").addHandler(handler)
    shared = SharedMemory(os.open(memory, os.O_RDWR | os.O_CLOEXEC))
    pipeline: Pipeline | None = None
    made: _Made | Exception
    while (wanted := pipe.recv()) is not None:
        try:
            # Opened with the first batch, so that an error reaches the rank as that of a batch does.
            pipeline = pipeline or opener.open(shared.array)
            batch = pipeline.training_batch(*wanted)
            named = {"targets": batch.targets, "partners": batch.partners, "shares": batch.shares}
            tensors = {name: tensor.numpy() for name, tensor in named.items() if tensor is not None}
            made = _Made(tuple(batch.images.shape), batch.kept, batch.replaced, tensors)
        except (UserError, RunError, OSError) as error:
            made = error
        except Exception as error:
            made = RunError(f"a process that makes batches: {type(error).__name__}: {error}")
            made.add_note(traceback.format_exc())
        pipe.send((made, handler.lines))
        handler.lines = []

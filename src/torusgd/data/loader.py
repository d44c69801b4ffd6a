"""Batches made in the background while the network computes, by threads of the rank or by processes of its own."""

import logging
import math
import mmap
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from logging.handlers import QueueHandler
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
from .order import StreamOrder
from .pipeline import Allocate, Batch, Pipeline
from .registry import open_sources
from .types import Int64

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # the time that a process has to end by itself
FROZEN_SECONDS = 5.0  # from one look at a process that sends nothing to the next
Open = Callable[[Allocate], Pipeline]


@dataclass(frozen=True)
class Share:
    """One virtual worker's samples of a step: the stream's positions start..start+count-1."""

    step: int
    worker: int
    start: int
    count: int
    augment: bool
    sizes: ImageSizes | None = None  # None: those of the pipeline's data


class Loader:
    """Makes the batches of shares with a pool of threads, at most `ahead` of them at a time.

    It knows no ranks and no position: the caller of `take` says which shares are likely to follow, so that ranks may
    come, go and take over virtual workers between two steps. `wait_seconds` is the consumer's time in `take`, in all.

    >>> loader = Loader(pipeline, StreamOrder(len(source), seed=0), threads=1, ahead=2)  # doctest: +SKIP
    >>> shares = [Share(step, 0, 32 * step, 32, augment=True) for step in range(10)]  # doctest: +SKIP
    >>> for share in shares:  # doctest: +SKIP
    ...     batch = loader.take(share, following=shares[share.step + 1 :])
    """

    # Decoding, resizing and array arithmetic release the interpreter's lock; for more cores than that serves there is
    # `LoaderProcesses`. Neither changes a bit of a batch. `ahead` is the bound on memory.
    def __init__(self, pipeline: "Pipeline | LoaderProcesses", order: StreamOrder, threads: int, ahead: int) -> None:
        if threads < 1 or ahead < 1:
            raise ValueError(f"threads and ahead must be at least 1, got {threads} and {ahead}")
        self.wait_seconds = 0.0
        self._pipeline, self._order, self._ahead = pipeline, order, ahead
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="torusgd-loader")
        self._pending: dict[Share, Future[Batch]] = {}

    def take(self, share: Share, following: Iterable[Share] = ()) -> Batch:
        """The batch of a share; as many of those that follow are begun as there is room for, others are dropped."""
        # Batch 2: made by a thread before anyone needs it.
        wanted = [share, *islice(following, self._ahead - 1)]
        # Shares that follow no longer, since ranks have left or joined, must not fill the bound on memory.
        for stale in self._pending.keys() - set(wanted):
            self._pending.pop(stale).cancel()
        for each in wanted:
            if each not in self._pending:
                self._pending[each] = self._pool.submit(self._make, each)
                # The pool may have no free thread for some time; the reads of a bucket begin at once.
                if self._pipeline.reads_ahead:
                    self._pipeline.expect(self._order.at(each.start, each.count)[0])
        started = time.perf_counter()
        try:
            return self._pending.pop(share).result()
        finally:
            self.wait_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Drops all batches under way and ends the threads; a batch being made is finished first."""
        self._pending = {}
        self._pool.shutdown(cancel_futures=True)

    def _make(self, share: Share) -> Batch:
        indices, epochs = self._order.at(share.start, share.count)
        return self._pipeline.training_batch(indices, epochs, share.augment, share.sizes)


def open_pipeline(
    make: Callable[..., Pipeline], data: Data, path: Path | None, seed: int, once: Once, allocate: Allocate
) -> Pipeline:
    """`Pipeline` or `to_device.BytePipeline` of a run's training images; `once` must not need another rank."""
    training, _ = open_sources(data, path, seed, once)
    return make(training, data, seed, allocate)


class LoaderProcesses:
    """Makes training batches by copies of a pipeline (`open_`) in other processes; safe to use from several threads."""

    # The threads of one interpreter share its lock and can't use all cores. Each process opens the images for itself,
    # from the lists that its machine has already (`Once`), and makes one batch at a time, with the bits of `Pipeline`.
    # Images go through memory that it shares with the rank, only a few numbers through a pipe. Each thread of the
    # caller waits for its batch; `Loader` has as many as there are processes.
    def __init__(self, pipeline: Pipeline, open_: Open, count: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UserError("runtime.loader_processes: needs Linux; leave it out, and threads make the batches")
        self._pipeline, self.reads_ahead = pipeline, pipeline.reads_ahead
        self.expect = pipeline.expect  # this process reads ahead, into the cache on disk that all processes share
        # torch, once for all of them; and the launcher's preload, with which nothing is left in the temporary folder.
        multiprocessing.set_forkserver_preload([__name__, "torusgd.ranks.forkserver_preload"])
        with held_back():
            self._all = [_Process(open_) for _ in range(count)]
        self._idle = SimpleQueue[_Process]()
        for process in self._all:
            self._idle.put(process)
        # At exit multiprocessing waits for all children, and these wait for a message: so this must run before.
        self.close = Finalize(self, _close, (self._all,), exitpriority=10)

    def training_batch(self, indices: Int64, epochs: Int64, augment: bool, sizes: ImageSizes | None = None) -> Batch:
        """As `Pipeline.training_batch`; RunError also if a process has ended, or met an unknown exception."""
        process = self._idle.get()
        try:
            shape, known, arrays = process.make((indices, epochs, augment, sizes))
            memory, message = self._pipeline.memory(shape)
            # Copied out, since the process writes its next batch into the same memory.
            np.copyto(memory, process.memory.array(shape, self._pipeline.dtype))
        finally:
            self._idle.put(process)
        known |= {name: torch.from_numpy(array) for name, array in arrays.items()}
        return self._pipeline.joined(Batch(torch.from_numpy(memory), table=self._pipeline.table, **known), message)


class SharedMemory:
    """Memory of `os.memfd_create` that two processes map, and that grows when a larger array is needed."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._map: mmap.mmap | None = None

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The first bytes of the memory as an array; they are not cleared."""
        kind, count = np.dtype(dtype), math.prod(shape)
        size = count * kind.itemsize
        # The side that needs more lengthens the file; the other one maps it again once its array is larger.
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, size)
            self._map = mmap.mmap(self._file, size)
        return np.frombuffer(self._map, kind, count).reshape(shape)


class _Process:
    def __init__(self, open_: Open) -> None:
        self._open = open_
        self._file = os.memfd_create("torusgd-batch", os.MFD_CLOEXEC)
        self.memory = SharedMemory(self._file)
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(its, f"/proc/{os.getpid()}/fd/{self._file}", self._open))
        self._process.start()
        its.close()

    def make(self, wanted: tuple[Any, ...]) -> Any:
        """A batch of `Pipeline.training_batch`: its images' shape, other fields, and tensors as arrays, by name."""
        try:
            made, lines = self._exchange(wanted)
        except (EOFError, OSError):
            # A second end at the same batch has the same reason, most likely too little memory.
            log.warning("%s, and another one takes its place", self._end())
            try:
                with held_back():
                    self._start()
                made, lines = self._exchange(wanted)
            except (EOFError, OSError):
                end = self._end()
                raise RunError(f"{end} twice in a row; fewer runtime.loader_processes take less memory") from None
        for line in lines:
            log.warning("%s", line)
        if isinstance(made, Exception):
            raise made
        return made

    def _exchange(self, wanted: tuple[Any, ...]) -> Any:
        self._pipe.send(wanted)
        is_suspended = False
        while not self._pipe.poll(FROZEN_SECONDS):
            # Nobody would send it on, and this rank would wait for it as for a disk. Twice, since a whole run may have
            # been suspended, and this process is the first of them to go on.
            was, is_suspended = is_suspended, _is_suspended(self._process.pid or 0)
            if was and is_suspended:
                log.warning("a process that makes batches is suspended (SIGSTOP), and is ended")
                self._process.kill()
        return self._pipe.recv()

    def _end(self) -> str:
        """How the process has ended, whose pipe is closed."""
        self._pipe.close()
        self._process.join()
        return f"a process that makes batches {how_it_ended(self._process.exitcode or 0)}"

    def request_end(self) -> None:
        # By a message: another child of this process may hold an end of the pipe, which then never closes.
        with suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()

    def join(self) -> None:
        self._process.join(CLOSE_SECONDS)
        self._process.kill()
        self._process.join()
        os.close(self._file)


def _is_suspended(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _close(processes: list[_Process]) -> None:
    for process in processes:
        process.request_end()
    for process in processes:
        process.join()


def _received(pipe: Connection) -> Any:
    """The next message; None also if the rank that would send it has ended."""
    with suppress(EOFError, OSError):
        return pipe.recv()
    return None


def _serve(pipe: Connection, memory: str, open_: Open) -> None:
    """Makes batches until the rank sends None."""
    hold_back()  # a Ctrl-C reaches all processes of a terminal, and the rank may need another batch before it ends
    die_with_launcher()
    torch.set_num_threads(1)
    lines = SimpleQueue[logging.LogRecord]()
    handler = QueueHandler(lines)
    handler.setLevel(logging.WARNING)
    logging.getLogger("torusgd").addHandler(handler)
    try:
        shared = SharedMemory(os.open(memory, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:  # the rank has ended meanwhile
        return
    pipeline: Pipeline | None = None
    made: Any
    while (wanted := _received(pipe)) is not None:
        try:
            # Opened with the first batch, so that an error reaches the rank as that of a batch does.
            pipeline = pipeline or open_(shared.array)
            batch = pipeline.training_batch(*wanted)
            # As arrays: a pipe would move tensors by files.
            arrays = {name: tensor.numpy() for name, tensor in batch.labels().items()}
            made = tuple(batch.images.shape), {"positions": batch.positions, "replaced": batch.replaced}, arrays
        except (UserError, RunError, OSError) as error:
            made = error
        except Exception as error:
            made = RunError(f"a process that makes batches: {type(error).__name__}: {error}")
            made.add_note(traceback.format_exc())
        with suppress(OSError):  # the rank has ended meanwhile, and the next message is None
            pipe.send((made, [lines.get().getMessage() for _ in range(lines.qsize())]))

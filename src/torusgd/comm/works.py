"""What is under way, as a `Work` whose errors are ours: with Gloo, with NCCL, or in a thread of this process."""

import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

from .base import CommError, CommTimeout, ConnectionLost, Work

# seconds by which a backend's clock may end a wait before ours: it takes whole milliseconds
SLACK = 2e-3
# file and line of the backend's source, before its message
_SOURCE_LINE = re.compile(r"^\[[^]]*] ")


def comm_error(error: RuntimeError, where: str, begin: float, limit: float) -> CommError:
    # An error of the backend as one of ours, by when it came and not by its text.
    # After `limit` seconds since `begin` nobody has answered; an error that comes sooner is a connection that was
    # closed.
    if isinstance(error, CommError):
        return error
    if time.perf_counter() - begin >= limit - SLACK:
        return CommTimeout(f"no answer within {limit:.3g} s")
    reason = _SOURCE_LINE.sub("", (str(error).splitlines() or [""])[0]).split(". ")[0]
    # SIGKILL 5: the kernel has closed the dead rank's connections, so whoever waits for its message comes here.
    return ConnectionLost(f"the connection to {where} is lost: {reason}")


class Followed(Work):
    """Work, and a function for the caller's stream once it has arrived; `wait` takes the place of its own."""

    def __init__(
        self, work: Work, follow: Callable[[], object], wait: Callable[[float | None], object] | None = None
    ) -> None:
        self._work, self._wait = work, wait or work.wait
        self._follow: Callable[[], object] | None = follow

    def wait(self, limit: float | None = None) -> None:
        self._wait(limit)
        if self._follow is not None:
            self._follow()
            self._follow = None

    def done(self) -> bool:
        return self._work.done()

    def ended(self) -> float | None:
        return self._work.ended()


class PendingMessage:
    """A message between two members on its way. A wait with a limit that runs out closes the whole group."""

    def __init__(self, work: dist.Work, peer: str, timeout: float) -> None:
        self._work, self._peer, self._timeout = work, peer, timeout
        self._ended: float | None = None

    def wait(self, limit: float | None = None) -> None:
        begin = time.perf_counter()
        try:
            # Torch takes whole milliseconds, and 0 as the group's own timeout.
            self._work.wait(timedelta(milliseconds=0 if limit is None else max(1, round(1e3 * limit))))
        except RuntimeError as error:
            raise comm_error(error, self._peer, *self._patience(begin, limit)) from error
        self._note_end()

    def done(self) -> bool:
        return self._work.is_completed()

    def ended(self) -> float | None:
        return self._ended

    def _patience(self, begin: float, limit: float | None) -> tuple[float, float]:
        # Since when the backend has waited, and how many seconds it does.
        return begin, self._timeout if limit is None else limit

    def _note_end(self, _: object = None) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()


class PendingCollective(PendingMessage):
    """A collective of Gloo on its way; those of NCCL are enqueued."""

    def __init__(self, work: dist.Work, timeout: float) -> None:
        super().__init__(work, "the group", timeout)
        self._begin = time.perf_counter()
        with suppress(RuntimeError):  # Gloo's reduce-scatter has no future: it ended when it was waited for
            work.get_future().add_done_callback(self._note_end)

    def _patience(self, begin: float, limit: float | None) -> tuple[float, float]:
        # The backend counts its timeout from when it began the collective, and our limit from when we wait.
        if limit is None or time.perf_counter() - self._begin >= self._timeout:
            return self._begin, self._timeout
        return begin, limit


@cache
def nccl_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def enqueue(device: torch.device, tensors: Sequence[torch.Tensor], function: Callable[[], object]) -> Work:
    """Runs `function`, which gives NCCL work on `tensors` of a GPU, after all that was enqueued there before."""
    # A kernel of NCCL occupies a part of its GPU until every rank of its communicator has come. If two ranks launch the
    # kernels of two communicators in different orders, and neither GPU has room for both, they wait for each other for
    # ever (NCCL's user guide, "Using multiple NCCL communicators concurrently"). So whatever a process gives to NCCL is
    # launched on one stream of the GPU, each operation after the end of the one before. The ranks make their calls in
    # one order, and so do their GPUs. Operations that could overlap do not; in return no setting of NCCL decides
    # whether a run stands still.
    current, stream = torch.cuda.current_stream(device), nccl_stream(device)
    if current != stream:
        stream.wait_stream(current)
        for tensor in tensors:
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        function()
    return Enqueued(stream.record_event())


class Enqueued(Work):
    """Work that a GPU has been given: `wait` makes the current stream wait for it, and never the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, limit: float | None = None) -> None:
        self._event.wait()

    def done(self) -> bool:
        return self._event.query()


class LaneWork:
    """Work of an engine's thread, `carry_out`: `run` there, `wait` on the caller's."""

    def __init__(self, carry_out: Callable[[], object]) -> None:
        self._carry_out, self._finished = carry_out, threading.Event()
        self._error: Exception | None = None
        self._ended = 0.0

    def run(self) -> None:
        try:
            self._carry_out()
        except Exception as error:
            self._error = error
        self._ended = time.perf_counter()
        self._finished.set()

    def wait(self, limit: float | None = None) -> None:
        if not self._finished.wait(limit):
            raise CommTimeout(f"no answer within {limit:.3g} s")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()

    def ended(self) -> float | None:
        return self._ended


Lane = queue.SimpleQueue[LaneWork | None]


def start_lane() -> tuple[Lane, threading.Thread]:
    # A thread that carries out tasks in turn until it finds None. While it waits it holds nothing of a task: process
    # groups and futures are for the main thread to free.
    lane = Lane()

    def run() -> None:
        while (task := lane.get()) is not None:
            task.run()
            del task

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return lane, thread

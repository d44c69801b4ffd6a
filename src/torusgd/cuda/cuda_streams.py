"""Work that is captured as CUDA graphs, and the CUDA streams on which it runs: that of all else, or several at once.

A small pass leaves a GPU half empty (16 images keep 40 % of an H100 busy, docs/gpu.md). Exact sums mind no order, so
two virtual workers' passes may run at the same time, each on a stream of its own (`runtime.cuda_streams`). What two
such passes may not share, and who sees to it:

    gradients, activations    a stream's graphs have a pool of memory of their own
    images, targets, losses   each captured pass has its own, and batch norm's statistics too (`graphs`)
    random numbers            a graph reads its seed from memory of the generator with which it was captured, which the
                              host fills before a replay: so each stream has a generator of its own
    cuBLAS's workspace        torch keeps one for each stream: so a graph is captured on the stream on which it runs
    the sums                  nobody adds but the stream of all else, pass by pass, each after an event of its stream:
                              so no kernel needs atomic additions, and all that follows the sums follows them there;
                              but for a last pass that adds by itself (`ready_events`), which begins after all others

Events order the streams among themselves; the host waits for none of them.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch

from ..kernels import tables_aside


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Does the work again, with what its memory holds now."""


class PassStream(Protocol):
    """Where passes run, one at a time; several of them beside one another."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Makes a graph of work that waits for nothing on the host; the work is not done meanwhile.

        Raises:
            RuntimeError: The work can't be captured.
        """

    def release(self) -> None:
        """Lets the next work begin when all has ended that the stream of all else has been given until now."""

    def run(self, work: Callable[[], None]) -> None:
        """Gives the stream work, whose random numbers are the stream's own."""

    def join(self) -> None:
        """Has the stream of all else go on when the work that this one was given has ended."""


class GraphMemory:
    """What graphs share, no two of which run at a time; each of them holds it.

    Torch keeps a pool of memory for as long as something lies in it, such as cuBLAS's workspace, but takes no new graph
    into one whose last graph has ended: it would refuse that capture.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()


class CudaGraph:
    """Work captured on the current GPU; it is not done meanwhile.

    Args:
        work: Waits for nothing on the host.
        memory: Of the graphs of one stream.
        stream: On which it is captured; None: one that torch keeps for captures.

    Raises:
        RuntimeError: The work can't be captured; it says why.
    """

    def __init__(self, work: Callable[[], None], memory: GraphMemory, stream: torch.cuda.Stream | None = None) -> None:
        self._graph, self._memory = torch.cuda.CUDAGraph(), memory
        # A node of autograd that an earlier pass has made, and somebody still holds, keeps that pass's stream; torch
        # refuses to capture it, unless it may move it to the stream that is captured (from torch 2.13 on).
        if hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
            torch.autograd.graph.set_override_stale_capture_stream(True)
        device, before = torch.cuda.current_device(), torch.cuda.current_stream()
        try:
            # The threads that load images may go on to ask for pinned memory.
            with (
                tables_aside(torch.device("cuda", device)) as self._tables,
                torch.cuda.graph(self._graph, pool=memory.pool, stream=stream, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError as error:
            # Where a capture fails torch leaves its stream the current one, and its allocator in the belief that the
            # capture goes on: then memory that two streams have used would never be free again.
            torch.cuda.set_stream(before)
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(device, memory.pool)
            raise _cause(error) from None
        self._tables.fill()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


def _cause(error: RuntimeError) -> RuntimeError:
    """What ended a capture, where torch's own end of it failed too, and tells no more than that."""
    return error.__context__ if isinstance(error.__context__, RuntimeError) else error


class _Memories:
    """The memory of the graphs that are there, or new memory where there are none any more."""

    def __init__(self) -> None:
        self._last: Callable[[], GraphMemory | None] = lambda: None

    def take(self) -> GraphMemory:
        """For a graph that is about to be captured."""
        memory = self._last() or GraphMemory()
        self._last = weakref.ref(memory)
        return memory


_of_main_streams = _Memories()
"""all their graphs run on the stream of all else, no two of them at a time"""


class MainStream:
    """Passes one at a time, on the stream of all else.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._default = torch.cuda.default_generators[index]
        # A capture that fails leaves its generator in the belief that the capture goes on; torch's own stays whole.
        self._random = self._default.clone_state()
        self._memories = _of_main_streams
        self._captures_on: torch.cuda.Stream | None = None

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `PassStream`."""
        with self._own_random():
            return CudaGraph(work, self._memories.take(), self._captures_on)

    def release(self) -> None:
        """See `PassStream`: it has begun."""

    def run(self, work: Callable[[], None]) -> None:
        """See `PassStream`."""
        with self._own_random():
            work()

    def join(self) -> None:
        """See `PassStream`: it is that stream."""

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """Whatever draws from torch's generator of this GPU, or seeds it, meanwhile has the stream's own."""
        usual = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._random)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(usual)


class SideStream(MainStream):
    """Passes on a stream of their own, beside those of other streams.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device, self._memories = device, _Memories()
        self._stream = self._captures_on = torch.cuda.Stream(device)
        self._released, self._done = torch.cuda.Event(), torch.cuda.Event()

    def release(self) -> None:
        """See `PassStream`."""
        self._released.record(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None]) -> None:
        """See `PassStream`."""
        self._stream.wait_event(self._released)
        with torch.cuda.stream(self._stream):
            super().run(work)
        self._done.record(self._stream)

    def join(self) -> None:
        """See `PassStream`."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


def pass_streams(device: torch.device, count: int) -> list[PassStream]:
    """So many streams on a GPU; one is that of all else."""
    return [MainStream(device)] if count == 1 else [SideStream(device) for _ in range(count)]

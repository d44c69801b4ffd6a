"""When each bucket's sums are whole, told from within a CUDA graph, so that all-reduces leave during the last pass.

A stream that waits for another waits for all that it was given, and a graph is one piece of work. But a pass has the
gradients of its last layers long before those of its first. So the graph of a step's last pass records an event after
each bucket, which is a node of the graph (torch calls such an event external), and each all-reduce, which is in no
graph, waits for that of its bucket. The collectives themselves are not captured: torch's watchdog does not see a
captured one (pytorch#103503), and a group can't be ended while a graph with its collectives lives.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_streams import CudaGraph, GraphMemory

_ROUNDS = 3
_CYCLES = 2_000_000
"""of the GPU's clock, about a millisecond, in which a stream that did not wait would be found out"""


class ReadyEvents:
    """Events of one graph, which is replayed once a step at most, and a stream that waits for them.

    Args:
        device: A GPU.
        buckets: Their number.
    """

    def __init__(self, device: torch.device, buckets: int) -> None:
        self._device = device
        self._events = [torch.cuda.Event(external=True) for _ in range(buckets)]
        self._stream = torch.cuda.Stream(device)

    def record(self, bucket: int) -> None:
        """While the graph is captured: here the bucket's sums are whole."""
        self._events[bucket].record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, bucket: int) -> Iterator[None]:
        """After a replay was asked for: work that is given meanwhile begins when that replay has come to the bucket."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._events[bucket])
            yield


def ready_events(device: torch.device, buckets: int) -> ReadyEvents | None:
    """Events for a GPU's graphs; None where such an event is unknown, or was not waited for when it was tried."""
    try:
        return ReadyEvents(device, buckets) if _are_waited_for(device) else None
    except (RuntimeError, TypeError):  # a graph that can't be captured; a torch whose events are never external
        return None


def _are_waited_for(device: torch.device) -> bool:
    """Whether a stream sees what a graph did before its event, in each of several replays.

    Nobody would notice an all-reduce that now and then leaves too early, so the GPU has to show it once a run.
    """
    count, seen = torch.zeros((), device=device), torch.zeros(_ROUNDS, device=device)
    events = ReadyEvents(device, buckets=1)

    def work() -> None:
        torch.cuda._sleep(_CYCLES)
        count.add_(1)
        events.record(0)

    main = torch.cuda.current_stream(device)
    graph = CudaGraph(work, GraphMemory())
    for place in seen:
        graph.replay()
        with events.after(0):
            place.copy_(count)
        main.wait_stream(events._stream)
    return seen.tolist() == list(range(1, _ROUNDS + 1))

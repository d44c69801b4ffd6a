"""One order on a GPU for all that NCCL has under way, whatever communicator it belongs to.

A kernel of NCCL occupies a part of its GPU until every rank of its communicator has come. If two ranks launch the
kernels of two communicators in different orders, and neither GPU has room for both, they wait for each other for ever
(NCCL's user guide, "Using multiple NCCL communicators concurrently"). So whatever a process gives to NCCL is launched
on one stream of the GPU, each operation after the end of the one before. The ranks make their calls in one order, and
so do their GPUs. Operations that could overlap do not; in return no setting of NCCL decides whether a run stands still.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch


class LaunchOrder:
    """The order of NCCL's work on one GPU.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def enqueue(self, tensors: Sequence[torch.Tensor], function: Callable[[], object]) -> "Enqueued":
        """Runs `function` with the order's stream current; the host waits for nothing.

        Args:
            tensors: What it reads and writes. On the GPU it begins after all that the caller has enqueued.
            function: It enqueues work on the current stream, or waits there for work on other streams. What it begins
                by way of a `Group` is a part of the same work.
        """
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)
            for tensor in tensors:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            function()
        return Enqueued(self._stream.record_event())


class Enqueued:
    """Work that a GPU has been given: `wait` makes the current stream wait for it, and never the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, limit: float | None = None) -> None:
        """See `Work`."""
        self._event.wait()

    def done(self) -> bool:
        """See `Work`."""
        return self._event.query()

    def ended(self) -> float | None:
        """See `Work`; only the GPU knows."""
        return None


@cache
def launch_order(device: torch.device) -> LaunchOrder:
    """The one order of this process on a GPU."""
    return LaunchOrder(device)

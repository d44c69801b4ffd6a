"""Messages on their way: how long they took, how long somebody waited for them, and for whom nobody waits longer.

A message that is on its way while nobody waits is hidden behind computation. All seconds are of this rank's clock.
"""

import time
from collections.abc import Callable
from functools import partial
from math import inf, nan

import torch
from torch.profiler import record_function

from .base import AllReduce, CommTimeout, Done, Liveness, Work
from .works import Enqueued, Followed

SLICE = 0.25  # seconds between two looks of a wait at who is late


class Monitor:
    """Adds up the times of messages; a wait for one looks at `liveness`, and raises CommTimeout once a rank is late."""

    def __init__(self, liveness: Liveness | None = None) -> None:
        self.liveness = liveness or Liveness()
        # Seconds in all with at least one message on its way; nan if the time of an arrival is unknown (NCCL)
        self.on_way = 0.0
        self.waited = self._until = 0.0

    def watch(self, work: Work, left: float | None = None) -> Work:
        """Watches a message that left at `left` (None: now); use the returned work in its place."""
        if isinstance(work, Done):
            return work
        since = time.perf_counter() if left is None else left
        return Followed(work, lambda: self.arrived(since, work.ended()), partial(self._wait, work))

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's values on the host; the tensor itself if it is there already."""
        # From a GPU it waits for all work of the current stream. NCCL's messages are among it, for which the host waits
        # nowhere else: so this is where a lost rank is found.
        return self.start_to_host(tensor)()

    def start_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins `to_host`, and returns a function that waits for it; the current stream may receive work meanwhile."""
        if tensor.device.type == "cpu":
            return lambda: tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # else the copy would block the host
        host.copy_(tensor, non_blocking=True)
        copied = _Copied(torch.cuda.current_stream(tensor.device).record_event())

        def wait() -> torch.Tensor:
            _wait_in_slices(copied, self.liveness, inf)
            return host

        return wait

    def over(self, allreduce: AllReduce) -> AllReduce:
        return _WatchedAllReduce(self, allreduce)

    def arrived(self, left: float, ended: float | None) -> None:
        """Adds a message that was on its way from `left` to `ended`."""
        if ended is None:
            self.on_way = nan
            return
        # Messages overlap: only what is later than all that was counted before is new.
        self.on_way += max(0.0, ended - max(left, self._until))
        self._until = max(self._until, ended)

    def _wait(self, work: Work, limit: float | None) -> None:
        begin = time.perf_counter()
        with record_function("wait for messages"):
            _wait_in_slices(work, self.liveness, begin + (inf if limit is None else limit))
        self.waited += time.perf_counter() - begin


def hidden_share(on_way: float, waited: float) -> float | None:
    """The fraction of the time with messages on their way in which nobody waited; None without messages, or unknown."""
    return min(1.0, max(0.0, 1 - waited / on_way)) if on_way > 0 else None


class _Copied(Enqueued):
    def wait(self, limit: float | None = None) -> None:
        deadline = time.perf_counter() + (inf if limit is None else limit)
        while not self._event.query():
            if time.perf_counter() >= deadline:
                raise CommTimeout("the GPU has not come so far")
            time.sleep(0)  # other threads, the heartbeat's among them, take turns


def _wait_in_slices(work: Work, liveness: Liveness, deadline: float) -> None:
    # Waits until the work is done, a rank is late, or it is too late (time.perf_counter).
    while True:
        try:
            work.wait(max(0.0, min(SLICE, deadline - time.perf_counter())))
            return
        except CommTimeout:
            if work.done():  # it has arrived meanwhile, or its own group gave up: then this wait raises the error
                work.wait()
                return
            if time.perf_counter() >= deadline:
                raise
        if late := liveness.late():
            raise CommTimeout("; ".join(map(str, late)), late)


class _WatchedAllReduce:
    def __init__(self, monitor: Monitor, allreduce: AllReduce) -> None:
        self.name, self._monitor, self._allreduce = allreduce.name, monitor, allreduce

    def start(self, tensor: torch.Tensor) -> Work:
        # Gradient 6: a message leaves; from here on its time is measured and late ranks are found.
        left = time.perf_counter()
        return self._monitor.watch(self._allreduce.start(tensor), left)

    def close(self) -> None:
        self._allreduce.close()


Mark = Callable[[], float]  # seconds (time.perf_counter) at which the device reached a point; to be called once it has


# On a CPU a point is reached when the program gets there. A GPU receives its work in advance: the program's own times
# say when work was launched, on a loaded GPU long before it is done, and would call the wrong rank slow. So an event is
# recorded there, and its time is read later.
class DeviceClock:
    """Marks points in the work of one device; a GPU's events count from the last `set`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self.set()

    def set(self) -> None:
        """Compares the two clocks; to be called with nothing under way on the device."""
        if self._is_cuda:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._began = time.perf_counter()

    def mark(self) -> Mark:
        """The point after all work that the current stream has received so far."""
        if not self._is_cuda:
            now = time.perf_counter()
            return lambda: now
        # `elapsed_time` is in milliseconds and needs both events to have happened.
        event, origin, began = torch.cuda.Event(enable_timing=True), self._origin, self._began
        event.record()
        return lambda: began + 1e-3 * origin.elapsed_time(event)

"""When a device has reached a point of its work, in seconds of this process' clock.

On a CPU that is when the program gets there. A GPU receives its work in advance: the program's own times say when
work was launched, on a loaded GPU long before it is done, and would call the wrong rank slow. There an event is
recorded, and its time is read later, so that nobody waits for it.
"""

import time
from collections.abc import Callable

import torch

Mark = Callable[[], float]
"""seconds (time.perf_counter) at which the device reached a point; to be called once it has"""


class DeviceClock:
    """Marks points in the work of one device; a GPU's events count from the last `set`."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._origin: torch.cuda.Event | None = None
        self._began = 0.0
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
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        origin, began = self._origin, self._began
        assert origin is not None
        return lambda: began + 1e-3 * origin.elapsed_time(event)

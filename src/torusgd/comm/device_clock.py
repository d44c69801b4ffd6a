"""When a device has come to a place in its work, as seconds of this process' clock.

On a CPU that is when the program comes there. A GPU is given its work in advance: the program's own times say when
work was launched, on a loaded GPU long before it is done, and would call the wrong rank slow. There an event is
recorded, and its time is asked for later, so that nobody waits for it.
"""

import time
from collections.abc import Callable

import torch

Mark = Callable[[], float]
"""when the device came to a place (as time.perf_counter tells it); to be asked once it has been there"""


class DeviceClock:
    """Marks places in the work of one device.

    Args:
        device: A GPU's events count from the last `set`.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._origin: torch.cuda.Event | None = None
        self._began = 0.0
        self.set()

    def set(self) -> None:
        """Now, with nothing under way on the device: the two clocks are compared."""
        if self._is_cuda:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._began = time.perf_counter()

    def mark(self) -> Mark:
        """The place after all that the current stream has been given so far."""
        if not self._is_cuda:
            now = time.perf_counter()
            return lambda: now
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        origin, began = self._origin, self._began
        assert origin is not None
        return lambda: began + 1e-3 * origin.elapsed_time(event)

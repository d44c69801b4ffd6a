"""Signals of a rank: SIGTERM and SIGINT ask for a stop after the current step; a rank dies with its launcher."""

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class StopFlag:
    """Remembers that this process was asked to stop; call it to ask."""

    def __init__(self) -> None:
        self.signal = 0

    def install(self) -> None:
        """Takes SIGTERM and SIGINT (main thread only)."""
        for number in EXIT_CODES:
            signal.signal(number, self._remember)

    def __call__(self) -> bool:
        return self.signal != 0

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


def die_with_parent(parent: int) -> None:
    """Ends this process at once when its launcher (a process id) is gone: no orphan goes on or writes a checkpoint."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)

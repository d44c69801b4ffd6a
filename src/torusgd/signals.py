"""Signals: SIGTERM, SIGINT, SIGHUP and SIGUSR1 request a stop, and nothing outlives the process that started it.

A process without a training state ends at once (`Stopped`); a rank finishes its step first (`StopFlag`).
"""

import ctypes
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType

from .errors import warn

# Signal of schedulers and of a run's own time limit that a job's time is nearly over.
OUT_OF_TIME = signal.SIGUSR1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, OUT_OF_TIME)
# Exit code of a process that a signal stopped, less the signal's number.
EXIT_BASE = 128
# Exit code (EX_TEMPFAIL of sysexits.h) if its time was over: the same command continues.
EXIT_AGAIN = 75
REPEAT_SECONDS = 3.0
_COUNTS = Path("/proc/vmstat")


def exit_code(number: int) -> int:
    """The exit code of a process that a stop signal ended.

    >>> exit_code(signal.SIGTERM), exit_code(signal.SIGUSR1)
    (143, 75)
    """
    return EXIT_AGAIN if number == OUT_OF_TIME else EXIT_BASE + number


def how_it_ended(code: int) -> str:
    """The end of a process in words, by its exit code as multiprocessing gives it: minus the number of a signal.

    >>> how_it_ended(-9), how_it_ended(3)
    ('was ended by SIGKILL', 'ended with exit code 3')
    """
    is_signal = -code in set(signal.Signals)
    return f"was ended by {signal.Signals(-code).name}" if is_signal else f"ended with exit code {code}"


class MemoryKills:
    """Whether the kernel has ended processes of this machine for lack of memory since this was made (Linux only)."""

    def __init__(self) -> None:
        self._before = self._count()

    def __call__(self) -> bool:
        return self._count() > self._before

    def _count(self) -> int:
        with suppress(OSError, ValueError):
            return int(dict(line.split() for line in _COUNTS.read_text().splitlines()).get("oom_kill", 0))
        return 0


def stop_after(seconds: float) -> None:
    _after(seconds, os.kill, os.getpid(), OUT_OF_TIME)


def leave_within(seconds: float, code: int = 0) -> threading.Timer:
    """Ends this process, whose work is done, with a line if a thread keeps it for so many seconds; can be cancelled.

    Ranks of torusgd's own launcher are ended by that; nobody watches those of torchrun once their heartbeat is over.
    """

    def leave() -> None:
        who = f"rank {os.environ['RANK']} on {socket.gethostname()}" if "RANK" in os.environ else "the command"
        with suppress(OSError):
            warn(f"{who} ends only now, {seconds:g} s after its work was done")
        os._exit(code)

    return _after(seconds, leave)


def _after(seconds: float, call: Callable[..., object], *arguments: object) -> threading.Timer:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
    return timer


class Stopped(BaseException):
    """A stop signal came. Not an Exception, so that no handler of errors catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_stop(again: float = 5.0) -> list[int]:
    """Makes a stop signal raise `Stopped` in the main thread, and once more after `again` seconds; those that came."""
    came = list[int]()

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # Some modules catch every exception while they are imported, and the stop with it.
        _after(again, os.kill, os.getpid(), number)
        raise Stopped(number)

    _take(stop)
    return came


def end_on_stop() -> None:
    """Makes a stop signal end this process at once and silently."""
    _take(signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Stop signals wait until the block's end; a process started in it never gets them, until it takes them."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def hold_back() -> None:
    """Stop signals never come to this process, nor to one that it starts, until it takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


class StopFlag:
    """Whether a stop of this process was requested, by a signal or by `also`; call it to find out."""

    def __init__(self, also: Callable[[], bool] = lambda: False) -> None:
        self.signal = 0
        self._also = also

    def install(self) -> None:
        """Takes the stop signals (main thread only)."""

        def remember(number: int, frame: FrameType | None) -> None:
            # The first one counts: it decides the exit code.
            self.signal = self.signal or number

        _take(remember)

    def __call__(self) -> bool:
        return self.signal != 0 or self._also()


@contextmanager
def asking_to_stop(ask: Callable[[], object], seconds: float) -> Iterator[StopFlag]:
    """In this block a stop signal calls `ask`; after so many seconds, or another signal, it raises `Stopped`."""
    flag = StopFlag()
    first = 0.0
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), flag.signal))
    timer.daemon = True

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not flag():
            first = time.monotonic()
            flag.signal = number
            ask()
            timer.start()
        # `timeout` and others send their signal twice, to the process and to its group.
        elif time.monotonic() - first > REPEAT_SECONDS:
            raise Stopped(flag.signal)

    old = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    _take(stop)
    try:
        yield flag
    finally:
        timer.cancel()
        for number, handler in old.items():
            signal.signal(number, handler)


def die_with_launcher() -> None:
    """Ends this rank at once when the process that started it through multiprocessing is gone."""
    launcher = parent_process()
    assert launcher is not None, "called in a process of multiprocessing"

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="torusgd-launcher-watch").start()
    die_with_parent(os.getppid())  # the fork server, without which the launcher can't learn of this rank's end


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the thread of process `parent` that started it ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call, and nothing would tell this process
        os._exit(1)


def remove_empty_cache() -> None:
    """Removes, at the end of a process, the folder for compiled code that torch has made on import, if it is empty."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    if os.path.dirname(cache) == tempfile.gettempdir():
        with suppress(OSError):
            os.rmdir(cache)


def _take(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in STOP_SIGNALS:
        # nohup has SIGHUP ignored, and so it stays.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

"""The one way in which tests wait for something that another process or thread does."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tests.run.processes import Process

T = TypeVar("T")


def until(
    check: Callable[[], T | None], what: str, process: "Process | None" = None, timeout: float = 240,
    pause: float = 0.01, state: Callable[[], object] = lambda: "",
) -> T:  # fmt: skip
    """What `check` gives once that is true; AssertionError after `timeout` seconds, or if the process ends before.

    `state` is shown if it takes too long.
    """
    end = time.monotonic() + timeout
    while not (found := check()):
        printed = process.output if process else state()
        assert process is None or process.popen.poll() is None, f"ended before {what}\n{printed}"
        assert time.monotonic() < end, f"not within {timeout} s: {what}\n{printed}"
        time.sleep(pause)
    return found

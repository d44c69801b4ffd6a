"""What Gloo and NCCL have under way, as a `Work` whose errors are ours."""

import re
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from .base import CommError, CommTimeout, ConnectionLost

SLACK = 2e-3
"""seconds by which a backend's clock may end a wait before ours: it takes whole milliseconds"""
_PLACE = re.compile(r"^\[[^]]*] ")
"""file and line of the backend's source, before its message"""


class BackendMessage:
    """A message between two members on its way. A wait with a limit that is not kept closes the whole group."""

    def __init__(self, work: dist.Work, peer: str, timeout: float) -> None:
        self._work, self._peer, self._timeout = work, peer, timeout
        self._ended: float | None = None

    def wait(self, limit: float | None = None) -> None:
        """See `Work`."""
        begin = time.perf_counter()
        try:
            if limit is None:
                self._work.wait()
            else:
                self._work.wait(_duration(limit))
        except RuntimeError as error:
            raise comm_error(error, self._peer, begin, self._timeout if limit is None else limit) from error
        if self._ended is None:
            self._ended = time.perf_counter()

    def done(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()

    def ended(self) -> float | None:
        """See `Work`."""
        return self._ended


class BackendCollective:
    """A collective on its way."""

    def __init__(self, work: dist.Work, device: torch.device, timeout: float) -> None:
        self._work, self._on_host, self._timeout = work, device.type == "cpu", timeout
        self._begin = time.perf_counter()
        self._ended: float | None = None
        if self._on_host:
            with suppress(RuntimeError):  # Gloo's reduce-scatter has no future: it ended when it was waited for
                work.get_future().add_done_callback(self._note_end)

    def wait(self, limit: float | None = None) -> None:
        """See `Work`."""
        begin = time.perf_counter()
        try:
            if limit is None or not self._on_host:
                self._work.wait()
            else:
                self._work.wait(_duration(limit))
        except RuntimeError as error:
            # The backend counts its timeout from when it began the collective, and our limit from when we wait.
            if limit is None or time.perf_counter() - self._begin >= self._timeout:
                begin, limit = self._begin, self._timeout
            raise comm_error(error, "the group", begin, limit) from error
        self._note_end()

    def done(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()

    def ended(self) -> float | None:
        """See `Work`."""
        return self._ended

    def _note_end(self, _: object = None) -> None:
        if self._on_host and self._ended is None:
            self._ended = time.perf_counter()


def _duration(limit: float) -> timedelta:
    """For torch, which takes whole milliseconds, and 0 as no limit."""
    return timedelta(milliseconds=max(1, round(1e3 * limit)))


def comm_error(error: RuntimeError, where: str, begin: float, limit: float) -> CommError:
    """An error of the backend as one of ours, by when it came and not by its text.

    After `limit` seconds since `begin` nobody has answered; an error that comes sooner is a connection that was closed.
    """
    if isinstance(error, CommError):
        return error
    if time.perf_counter() - begin >= limit - SLACK:
        return CommTimeout(f"no answer within {limit:.3g} s")
    reason = _PLACE.sub("", (str(error).splitlines() or [""])[0]).split(". ")[0]
    return ConnectionLost(f"the connection to {where} is lost: {reason}")

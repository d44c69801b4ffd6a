"""Messages on their way: how long they took, how long somebody waited for them, and how long anybody may.

What is on its way and not waited for is hidden behind computation; both are seconds of this rank's clock.
"""

import time
from math import nan

import torch

from .base import AllReduce, CommTimeout, Done, Work


class Monitor:
    """Notes the messages that it is shown, in the order in which they leave."""

    def __init__(self) -> None:
        self.on_way = 0.0
        """seconds in all with at least one message on its way; nan where nobody can tell when it came (NCCL)"""
        self.waited = 0.0
        """seconds in all that `wait` took"""
        self.limit: float | None = None
        """seconds that a `wait` may take from now on before it raises CommTimeout, beyond those since the wait
        before it (the others may work as long again as this rank has); None: the group's own timeout"""
        self.last_wait = time.perf_counter()
        """when a `wait` ended last"""
        self._until = 0.0

    def watch(self, work: Work, left: float | None = None) -> Work:
        """A message that left at `left` (time.perf_counter; None: just now); use the answer in its place."""
        return work if isinstance(work, Done) else _Watched(self, work, time.perf_counter() if left is None else left)

    def over(self, allreduce: AllReduce) -> AllReduce:
        """The same all-reduce, all of whose messages are watched."""
        return _WatchedAllReduce(self, allreduce)

    def arrived(self, left: float, ended: float | None) -> None:
        """A message that was waited for has been on its way from `left` to `ended` (time.perf_counter)."""
        if ended is None:
            self.on_way = nan
            return
        self.on_way += max(0.0, ended - max(left, self._until))
        self._until = max(self._until, ended)


def hidden_share(on_way: float, waited: float) -> float | None:
    """The share of the time with messages on their way that nobody waited; None without messages, or unknown.

    >>> hidden_share(on_way=0.2, waited=0.05)
    0.75
    """
    return min(1.0, max(0.0, 1 - waited / on_way)) if on_way > 0 else None


class _Watched:
    def __init__(self, monitor: Monitor, work: Work, left: float) -> None:
        self._monitor, self._work, self._left = monitor, work, left
        self._noted = False

    def wait(self, limit: float | None = None) -> None:
        begin = time.perf_counter()
        if limit is None and self._monitor.limit is not None:
            limit = self._monitor.limit + begin - self._monitor.last_wait
        try:
            self._work.wait(limit)
        except CommTimeout:
            raise CommTimeout(f"no answer within {limit:.0f} s") from None
        self._monitor.last_wait = time.perf_counter()
        self._monitor.waited += self._monitor.last_wait - begin
        if not self._noted:
            self._noted = True
            self._monitor.arrived(self._left, self._work.ended())

    def done(self) -> bool:
        return self._work.done()

    def ended(self) -> float | None:
        return self._work.ended()


class _WatchedAllReduce:
    def __init__(self, monitor: Monitor, allreduce: AllReduce) -> None:
        self.name = allreduce.name
        self._monitor, self._allreduce = monitor, allreduce

    def start(self, tensor: torch.Tensor) -> Work:
        left = time.perf_counter()
        return self._monitor.watch(self._allreduce.start(tensor), left)

    def close(self) -> None:
        self._allreduce.close()

"""How long a small message to the next rank and back takes, now and then and off the step's path.

An all-reduce over one slow link takes as long on every rank, so nobody can tell from it whose link it was. A rank with
a slow link is slow in both pairs that it belongs to; its neighbours are so in one.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..comm.groups import group_of

_BYTES = 1 << 16
_TRIPS = 3
"""of which the quickest counts: the first may wait for a neighbour that has not begun"""
_PATIENCE = 600.0
"""seconds after which a neighbour that doesn't answer is left alone, for good"""
_CLEAR = 1.5
"""a link that takes so many times the median is to blame"""


class Links:
    """Times this rank's trips in a thread and a Gloo group of its own; every rank makes one, at the same time."""

    def __init__(self) -> None:
        self._group = group_of().duplicate(_PATIENCE)
        self._rank, self._size = self._group.rank, self._group.size
        self.seconds = 0.0
        """there and back, of the last measurement that ended; 0: none has"""
        self._asked = threading.Semaphore(0)
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True, name="torusgd-links")
        self._thread.start()

    def measure(self) -> None:
        """Begins a measurement; every rank calls it after the same step."""
        self._asked.release()

    def close(self) -> None:
        """Ends the thread, with what it has begun; every rank calls it."""
        self._is_closing = True
        self._asked.release()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(RuntimeError):  # a neighbour is lost: the step's own messages tell it
            while self._asked.acquire() and not self._is_closing:
                self.seconds = self._measure()

    def _measure(self) -> float:
        """Pairs take turns, so that a rank is in one at a time: what it measures is that pair alone."""
        before, seconds = (self._rank - 1) % self._size, 0.0
        for turn in range(3):
            if self._turn(self._rank) == turn:
                seconds = self._ask((self._rank + 1) % self._size)
            elif self._turn(before) == turn:
                self._answer(before)
        return seconds

    def _turn(self, rank: int) -> int:
        """Of the pair of a rank and the next one."""
        return 2 if self._size % 2 and rank == self._size - 1 else rank % 2

    def _ask(self, peer: int) -> float:
        load, replies = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(_TRIPS)
        received = [self._group.receive(reply, peer) for reply in replies.split(1)]
        times = []
        for reply in received:
            begin = time.perf_counter()
            self._group.send(load, peer).wait()
            reply.wait()
            times.append(time.perf_counter() - begin)
        return min(times)

    def _answer(self, peer: int) -> None:
        loads = torch.zeros(_TRIPS, _BYTES, dtype=torch.uint8)
        for load in [self._group.receive(load, peer) for load in loads.unbind()]:
            load.wait()
            self._group.send(torch.zeros(1), peer).wait()


def slow_link(seconds: Sequence[float]) -> int | None:
    """The rank whose link is slow, from all ranks' seconds to the next one and back; None where none stands out.

    >>> slow_link([0.01, 0.05, 0.06, 0.01])
    2
    """
    if len(seconds) < 3 or min(seconds) <= 0:
        return None
    both = [min(seconds[rank - 1], seconds[rank]) for rank in range(len(seconds))]
    worst = max(range(len(both)), key=lambda rank: both[rank])
    return worst if both[worst] > _CLEAR * sorted(both)[len(both) // 2] else None

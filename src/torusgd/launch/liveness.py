"""Who is gone: when a rank finds that another is lost, all that are left say so in the ranks' common store.

The one that finds it first can't know who it was: in a ring a frozen rank holds up everybody alike.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..comm.groups import Group

POLL_SECONDS = 1.0
"""from one look for a call to the next"""
ANSWER_SECONDS = 3.0
"""for the others to answer"""
STORE_SECONDS = 5.0
"""after which the store, which rank 0 or torchrun holds, counts as out of reach"""
_CALLED = "called"

T = TypeVar("T")


class RollCall:
    """Answers a call in a thread of its own, whatever the rank is waiting for; to be made by every rank."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks
        self._store = PrefixStore("roll-call", _get_default_store())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True, name="torusgd-roll-call")
        self._thread.start()

    def missing(self) -> list[int] | None:
        """Calls, and gives the ranks that didn't answer; None where the store can't be reached."""
        if within(STORE_SECONDS, self._call) is None:
            return None
        self._stop.wait(ANSWER_SECONDS)
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        return within(STORE_SECONDS, lambda: [rank for rank in others if not self._store.check([str(rank)])])

    def close(self) -> None:
        """Ends the thread. An interpreter that ends while a thread asks the store aborts the process."""
        self._stop.set()
        self._thread.join(STORE_SECONDS)

    def _call(self) -> list[int]:
        self._store.set(_CALLED, "")
        return []

    def _answer(self) -> None:
        try:
            while not self._stop.wait(POLL_SECONDS):
                if self._store.check([_CALLED]):
                    self._store.set(str(self._ranks.rank), "")
                    return
        except RuntimeError:  # the store is gone with the process that held it
            return


def within(seconds: float, function: Callable[[], T]) -> T | None:
    """The result of `function`, which may hang; None where it fails or takes too long."""
    found: list[T] = []

    def call() -> None:
        with suppress(RuntimeError):
            found.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None

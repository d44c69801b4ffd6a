"""Heartbeats: each rank tells, about once a second, that it is alive and what it is doing.

A rank beats from a thread of its own, whatever its main thread is doing. A beat is a short JSON record under the rank's
key of the ranks' common store (`roll_call.Beat`); `roll_call` says who reads the beats and who is late.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from itertools import count
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm.base import LateRank
from .generations import Generations
from .roll_call import BEAT_SECONDS, STORE_KEY, Beat, Follower, Limits, Unchanged, Watch

QUIET_SECONDS = 2.0
"""without progress, after which a beat carries the rank's stack"""
GRACE_SECONDS = 5.0
"""that the main thread has to notice a late rank by itself, before `on_late` is called"""
_FRAMES = 6


class Heartbeat:
    """This rank's beats, and its `Liveness`: made by the main thread of a rank, whose stack it shows.

    Args:
        store: Common to all ranks of this attempt. The thread uses a connection of its own, since a blocked call of
            another thread would hold up the beats.
        rank: Of this process.
        limits: See `Limits`.
        watched: The ranks to watch: all, this one among them, where this rank calls the roll; else none.
        on_late: Called once, from the thread, if the main thread does not ask `late` although ranks are late: it is
            blocked in a wait that asks nobody.
        tell: Called from the thread with a line for people, such as what all ranks wait for.
        follows: The rank that calls the roll; None: this one, or the launcher.
        generations: That the main thread follows; None: the ranks never change.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        limits: Limits,
        watched: Iterable[int] = (),
        on_late: Callable[[list[LateRank]], None] = lambda late: None,
        tell: Callable[[str], object] = lambda line: None,
        follows: int | None = None,
        generations: Generations | None = None,
    ) -> None:
        own: Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=limits.beat))
        self.store = own
        """a connection that no wait of the main thread holds up; calls on it must be short"""
        self._store, self._rank, self._limits, self._on_late = PrefixStore(STORE_KEY, own), rank, limits, on_late
        self.watch: Watch | Follower = (
            Watch(own, watched, limits) if follows is None else Follower(own, follows, limits)
        )
        self.generations = generations
        self._tell = tell
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._place, self._failed, self._ended = ("start", 0, 0), "", False
        self._outside = "", ""
        self._unit_began: float | None = None
        self._longest = 0.0
        self._units = self._asked = 0  # the thread compares them with those of its last beat
        self._late: list[LateRank] = []
        self._forsaken = -1  # the last generation of which ranks are known to be lost
        self._is_known = False  # to the main thread, that ranks are late
        self._rounds, self._thread_silence = 0, Unchanged()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="torusgd-heartbeat")
        self._thread.start()

    def progress(self, phase: str, step: int, unit: int) -> None:
        """See `Liveness`."""
        self._end_unit()
        self._place, self._unit_began, self._outside = (phase, step, unit), time.monotonic(), ("", "")
        self._units += 1

    def outside(self, what: str, where: str) -> None:
        """See `Liveness`."""
        self._unit_began, self._outside = None, (what, where)  # how long a disk takes says nothing of units of work

    def late(self) -> list[LateRank]:
        """See `Liveness`."""
        self._end_unit()
        self._asked += 1
        late = self._late
        if self._thread_silence.seconds(self._rounds) > self._limits.beat and not late:
            late = [_unreachable("no answer")]
        if self.generations is not None and self._forsaken == self.generations.number >= 0:
            return [LateRank("ranks were lost, says the launcher")]
        self._is_known = self._is_known or bool(late)
        return late

    def ranks_change(self) -> bool:
        """See `Liveness`."""
        return self.generations is not None and self.generations.is_planned

    def lacks_ranks(self) -> bool:
        """See `Liveness`."""
        return self.generations is not None and self.generations.waits

    @property
    def lost(self) -> tuple[int, ...]:
        """See `Liveness`."""
        return self.generations.lost if self.generations is not None else ()

    def fail(self, why: str) -> None:
        """Lets all others know that this rank will not answer any more; it goes on beating until `close`."""
        self._failed = why

    def close(self) -> None:
        """The last beat: nobody needs to wait for this rank. Ends the thread.

        An interpreter that ends while a thread asks the store would abort the process.
        """
        self._ended = True
        self._stop.set()
        self._thread.join(BEAT_SECONDS + GRACE_SECONDS)

    def _end_unit(self) -> None:
        if self._unit_began is not None:
            self._longest = max(self._longest, time.monotonic() - self._unit_began)
            self._unit_began = None

    def _run(self) -> None:
        idle, lateness, asked, worked = Unchanged(), Unchanged(), 0, time.process_time()
        try:
            for number in count(1):
                is_last = self._stop.is_set()
                quiet = idle.seconds(self._units)
                if not quiet:
                    worked = time.process_time()
                busy = (time.process_time() - worked) / quiet if quiet else 0.0
                self._beat(number, quiet, busy, waits=self._asked != asked)
                if is_last:
                    self.watch.publish(is_last=True)
                    return
                asked = self._asked
                self._late = self.watch.look()
                self._look_at_generation()
                self.watch.publish()
                if told := self.watch.outside_wait():
                    self._tell(told)
                self._rounds = number
                if lateness.seconds(bool(self._late)) > GRACE_SECONDS and self._late:
                    self._call_on_late()
                self._stop.wait(BEAT_SECONDS)
        except RuntimeError as error:  # the store is gone with the process that held it
            self._late = [_unreachable(str(error).splitlines()[0])]
            if not self._stop.wait(GRACE_SECONDS):
                self._call_on_late()

    def _look_at_generation(self) -> None:
        if self.generations is not None:
            number = self.generations.number
            self._forsaken = number if self.generations.is_forsaken(self.store) else -1

    def _call_on_late(self) -> None:
        if not self._is_known:
            self._is_known = True
            self._on_late(self._late)

    def _beat(self, number: int, idle: float, busy: float, waits: bool) -> None:
        phase, step, unit = self._place
        stack = self._stack() if idle > QUIET_SECONDS and not waits else ""
        longest, failed, ended = self._longest, self._failed, self._ended
        what, where = self._outside
        beat = Beat(
            number, self._host, phase, step, unit, idle, longest, waits, busy, what, where, stack, failed, ended
        )
        self._store.set(str(self._rank), json.dumps(asdict(beat)))

    def _stack(self) -> str:
        """The innermost frames of the main thread, without those inside torch that lead to them."""
        shown: list[str] = []
        frame = sys._current_frames().get(self._main)
        while frame is not None and len(shown) < _FRAMES:
            code = frame.f_code
            if not shown or "/torch/" not in code.co_filename:
                shown.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
            frame = frame.f_back
        return " < ".join(shown)


def _unreachable(reason: str) -> LateRank:
    return LateRank(f"the store that all ranks share can't be reached ({reason})")

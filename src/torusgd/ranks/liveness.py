"""Who is late: the heartbeats of all ranks, and the roll call by which they are read.

Each rank beats about once a second: a short JSON record in the ranks' common store (`Beat`) says what it is doing. The
launcher watches its own ranks (`Watch`). If somebody else has launched them, rank 0 alone reads all beats and publishes
what it found as one record, which the others read (`Follower`).

Two rules say who is late. A rank without a new beat for `Limits.beat` seconds is frozen or lost. If no rank at all has
made progress for ten times the longest unit of work that any has finished, and at least for `Limits.stuck` seconds, the
run is stuck. So healthy ranks may differ by hours, as long as one of them makes progress.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count, islice
from pathlib import Path

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import store_keys as keys
from ..comm.base import LateRank, Liveness
from .generations import Generations

# Seconds from one beat to the next, and from one look at the others' beats to the next.
BEAT_SECONDS = 1.0
# Seconds without a beat, after which a rank counts as lost once another has found that connections are closed.
SILENT_SECONDS = 5.0
# Times the longest unit of work that may pass without progress.
UNITS = 10
# Seconds that a first unit may take while the rank's process computes.
FIRST_UNIT = 3600.0
# Fraction of one core's time that a process uses if it computes.
BUSY = 0.1
# For what a rank waits while torch compiles, which may be at any step: what is compiled is for one shape of images.
COMPILER, COMPILED = "the compiler", "compile: true, each block of the network, once for each shape of images"
# Seconds after which a wait for something outside the run is reported, and again whenever it has doubled.
REPORTED = 60.0
# Late ranks that are named, so that a line, and the record that all ranks read, stay short.
MOST_NAMED = 16
# Seconds without progress, after which a beat carries the rank's stack.
QUIET_SECONDS = 2.0
# Seconds that the main thread has to notice a late rank by itself, before `on_late` is called.
GRACE_SECONDS = 5.0
_FRAMES = 6

Report = Callable[[str], object]  # takes a line for people


@dataclass(frozen=True)
class Limits:
    """Seconds after which ranks are given up."""

    beat: float = 25.0  # without a heartbeat
    start: float = 120.0  # for all ranks to meet, and from there until a first unit of work is done
    stuck: float = 60.0  # without progress of any rank, at least; math.inf if ranks do not report progress
    outside: float = 600.0  # without progress, while ranks wait for a disk


@dataclass(frozen=True)
class Beat:
    """What a rank says about itself; `progress` of `Liveness` has phase, step and unit, `outside` what and where."""

    number: int
    host: str
    phase: str = ""
    step: int = 0
    unit: int = 0
    idle: float = 0.0
    longest: float = 0.0  # seconds of the longest unit that was finished; 0: none was
    waits: bool = False
    busy: float = 0.0  # fraction of one core that the process has used since the last progress
    what: str = ""
    where: str = ""
    stack: str = ""
    failed: str = ""  # why it will not answer any more, in one line
    ended: bool = False  # nobody needs to wait for it


class Watch:
    """Reads the beats of some ranks, about once a second, and says who is late."""

    def __init__(self, store: Store, ranks: Iterable[int], limits: Limits) -> None:
        self._store, self._limits = PrefixStore(keys.BEATS, store), limits
        self.beats: dict[int, Beat | None] = dict.fromkeys(ranks)  # the last of each rank; None before the first
        self._silence = {rank: Unchanged() for rank in self.beats}
        self._report_after, self._number = REPORTED, 0
        self._last: list[LateRank] = []

    def look(self) -> list[LateRank]:
        """Reads all beats, and gives the ranks that are late by now; DistError if the store can't be reached."""
        names = {rank: keys.BEAT.format(rank=rank) for rank in self.beats}
        # A read of a key that is not there would wait for it.
        present = [r for r, beat in self.beats.items() if beat is not None or self._store.check([names[r]])]
        records = self._store.multi_get([names[r] for r in present]) if present else []
        for rank, record in zip(present, records, strict=True):
            self.beats[rank] = Beat(**json.loads(record))
        # By whether a beat is another one than before, and by the clock of this process: those of the hosts need not
        # agree.
        for rank, beat in self.beats.items():
            self._silence[rank].seconds(beat)
        self._last = (self._silent() or self._stuck())[:MOST_NAMED]
        return self._last

    def publish(self, is_last: bool = False) -> None:
        """Leaves for the followers what the last look found."""
        if self.beats:
            self._number += 1
            # One record for all followers: N ranks that read N beats each would be N^2 reads a second. So N beats, and
            # N records of a few bytes, pass through the store.
            late = [asdict(each) for each in self._last]
            silent = list(islice(self.silent(SILENT_SECONDS), MOST_NAMED))
            self._store.set(keys.ROLL, json.dumps([self._number, late, silent, is_last]))

    def follow(self, ranks: Iterable[int]) -> None:
        """Watches these ranks too, from now on."""
        for rank in ranks:
            self.beats[rank], self._silence[rank] = None, Unchanged()

    def forget(self, ranks: Iterable[int]) -> None:
        for rank in self.beats.keys() & {*ranks}:
            del self.beats[rank], self._silence[rank]

    def silent(self, seconds: float) -> list[int]:
        """The ranks that have not beaten for so long, and have neither ended nor failed."""
        over = {r for r, beat in self.beats.items() if beat is not None and (beat.ended or beat.failed)}
        return [r for r, quiet in self._silence.items() if quiet.last > seconds and r not in over]

    def present(self, seconds: float) -> list[int]:
        """The ranks that have beaten within so many seconds, and have not ended."""
        over = {r for r, beat in self.beats.items() if beat is not None and beat.ended}
        return [r for r, quiet in self._silence.items() if quiet.last <= seconds and r not in over]

    def _silent(self) -> list[LateRank]:
        late = []
        for rank, beat in self.beats.items():
            quiet = self._silence[rank].last
            if beat is None and quiet > self._limits.start:
                late.append(LateRank(f"has not begun within {self._limits.start:g} s", rank))
            elif beat is not None and beat.failed:
                late.append(_late(rank, beat, f"ended: {beat.failed}"))
            elif beat is not None and not beat.ended and quiet > self._limits.beat:
                late.append(_late(rank, beat, f"no heartbeat for {self._limits.beat:g} s, frozen or lost"))
        return late

    def outside_wait(self) -> str:
        """A line that says for what the ranks have long waited outside the run; empty if there is no news."""
        working = self._working()
        # As long as one rank makes progress, the others' disks hold up nobody.
        idle = min((beat.idle for beat in working.values()), default=0.0)
        blocked = {rank: beat for rank, beat in working.items() if not beat.waits}
        if idle < REPORTED or not blocked or not all(beat.what for beat in blocked.values()):
            self._report_after = REPORTED
            return ""
        if idle < self._report_after:
            return ""
        self._report_after = 2 * idle
        who = "all ranks have" if len(blocked) == len(working) else f"rank {', '.join(map(str, blocked))} has"
        beat = next(iter(blocked.values()))
        return f"{who} waited for {beat.what} for {idle:.0f} s: {beat.where}"

    def _stuck(self) -> list[LateRank]:
        if not (known := self._working()):
            return []
        # In synchronous training a hung rank stops all others within a step. So a rank that waits for others is a
        # victim. If all wait, for a message that nobody sends, nobody can be set apart, and all are named.
        blamed = {rank: beat for rank, beat in known.items() if not beat.waits}
        longest = max(beat.longest for beat in known.values())
        # By what this run has needed so far: a unit may be a millisecond or an hour.
        limit = max(self._limits.stuck, UNITS * longest if longest else self._limits.start)
        if blamed and all(beat.what for beat in blamed.values()):  # a new start would not mend their disk
            limit = max(limit, self._limits.outside)
        # Compilers and a first batch of large images compute for long before anything is done.
        begins = [beat for beat in blamed.values() if beat.what == COMPILER or not (longest or beat.what)]
        if any(beat.busy >= BUSY for beat in begins):
            limit = max(limit, FIRST_UNIT)
        # The least idle rank counts: as long as one makes progress the others may only be waiting for it.
        idle = min(beat.idle for beat in known.values())
        if idle <= limit:
            return []
        late, hint = [], "" if longest else f" (runtime.start_timeout: {self._limits.start:g})"
        for rank, beat in blamed.items():
            waits = f"waits for {beat.what} since {beat.idle:.0f} s ({beat.where})"
            why = waits if beat.what else f"no progress for {beat.idle:.0f} s"
            late.append(_late(rank, beat, f"{why}, at {beat.stack}{hint}"))
        everyone = f"waits for others since {idle:.0f} s, as all do"
        return late or [_late(rank, beat, everyone) for rank, beat in known.items()]

    def _working(self) -> dict[int, Beat]:
        """The last beats of the ranks that have not ended; empty as long as one of them has not begun."""
        beats = {rank: beat for rank, beat in self.beats.items() if beat is None or not beat.ended}
        return {} if None in beats.values() else {rank: beat for rank, beat in beats.items() if beat is not None}


class Follower(Watch):
    """Reads no beats but what the rank that calls the roll, `caller`, has found, and watches that rank alone."""

    def __init__(self, store: Store, caller: int, limits: Limits) -> None:
        super().__init__(store, (), limits)
        self._caller, self._unchanged, self._lost, self._is_over = caller, Unchanged(), list[int](), False

    def look(self) -> list[LateRank]:
        if self._number or self._store.check([keys.ROLL]):
            self._number, late, self._lost, self._is_over = json.loads(self._store.get(keys.ROLL))
            self._last = [LateRank(**each) for each in late]
        quiet, limits = self._unchanged.seconds(self._number), self._limits
        if self._is_over:
            return []
        if not self._number and quiet > limits.start:
            return [LateRank(f"has not begun within {limits.start:g} s", self._caller)]
        if self._number and quiet > limits.beat:
            return [LateRank(f"no heartbeat for {limits.beat:g} s, frozen or lost", self._caller)]
        return self._last

    def silent(self, seconds: float) -> list[int]:
        if self._is_over:
            return []
        return [self._caller] if self._unchanged.last > seconds else self._lost  # found after SILENT_SECONDS


class Unchanged:
    """For how long a value has not changed, by this process' clock."""

    def __init__(self) -> None:
        self._value: object = None
        self._looked, self.last = time.monotonic(), 0.0  # `last`: seconds at the last look

    def seconds(self, value: object) -> float:
        now = time.monotonic()
        # Not more than two beats from one question to the next: a process that was suspended itself (Ctrl-Z, a laptop's
        # lid) blames nobody for the time that it did not look.
        self.last = self.last + min(now - self._looked, 2 * BEAT_SECONDS) if value == self._value else 0.0
        self._value, self._looked = value, now
        return self.last


def _late(rank: int, beat: Beat, why: str) -> LateRank:
    return LateRank(why, rank, beat.host, beat.phase, beat.step)


class Heartbeat(Liveness):
    """This rank's beats, and its `Liveness`: made by the main thread of a rank, whose stack it shows."""

    def __init__(
        self,
        store: Store,  # common to all ranks of this attempt
        rank: int,
        limits: Limits,
        watched: Iterable[int] = (),  # if this rank calls the roll all, this one among them
        on_late: Callable[[list[LateRank]], None] = lambda late: None,  # from the thread, once: the main one is blocked
        report: Report = lambda line: None,  # called from the thread, such as with what all ranks wait for
        follows: int | None = None,  # the rank that calls the roll; None: this one, or the launcher
        generations: Generations | None = None,  # followed by the main thread; None: the ranks never change
    ) -> None:
        # A connection of its own, since a blocked call of another thread would hold up the beats.
        own: Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=limits.beat))
        self.store = own  # connection that no wait of the main thread holds up; calls on it must be short
        self._store, self._rank, self._limits, self._on_late = PrefixStore(keys.BEATS, own), rank, limits, on_late
        self.watch = Watch(own, watched, limits) if follows is None else Follower(own, follows, limits)
        self.generations = generations or Generations(own)  # whose number stays -1, as long as none is announced
        self._report = report
        self._main, self._host = threading.get_ident(), socket.gethostname()
        self._doing, self._outside, self._failed, self._ended = ("start", 0, 0), ("", ""), "", False
        self._unit_began: float | None = None
        self._longest = 0.0
        # Counters in place of flags that somebody would have to reset: the thread compares them with those of its last
        # beat, and so needs no lock.
        self._units = self._looks = self._rounds = 0
        self._late: list[LateRank] = []
        self._forsaken = -1  # the last generation of which ranks are known to be lost
        self._is_known = False  # to the main thread, that ranks are late
        self._thread_silence, self._stop = Unchanged(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="torusgd-heartbeat")
        self._thread.start()

    def progress(self, phase: str, step: int, unit: int) -> None:
        self._end_unit()
        self._doing, self._unit_began, self._outside = (phase, step, unit), time.monotonic(), ("", "")
        self._units += 1

    def outside(self, what: str, where: str) -> None:
        self._unit_began, self._outside = None, (what, where)  # how long a disk takes says nothing of units of work

    def compiles(self) -> None:
        # Not a unit, whose time would be the measure of those that follow.
        self._unit_began, self._outside = None, (COMPILER, COMPILED)
        self._units += 1

    def late(self) -> list[LateRank]:
        self._end_unit()
        self._looks += 1
        late = self._late
        # The thread itself may hang in a store that does not answer; then this thread must not wait for it for ever.
        if self._thread_silence.seconds(self._rounds) > self._limits.beat and not late:
            late = [_unreachable("no answer")]
        if self._forsaken == self.generations.number >= 0:
            return [LateRank("the launcher reports lost ranks")]
        self._is_known = self._is_known or bool(late)
        return late

    def ranks_change(self) -> bool:
        return self.generations.is_planned

    def lacks_ranks(self) -> bool:
        return self.generations.waits

    @property
    def lost(self) -> tuple[int, ...]:
        return self.generations.lost

    def fail(self, why: str) -> None:
        """Lets all others know that this rank will not answer any more; it goes on beating until `close`."""
        self._failed = why

    def close(self) -> None:
        """The last beat: nobody needs to wait for this rank. Ends the thread."""
        self._ended = True
        self._stop.set()
        # An interpreter that ends while a thread waits for the store would abort the process.
        self._thread.join(BEAT_SECONDS + GRACE_SECONDS)

    def _end_unit(self) -> None:
        if self._unit_began is not None:
            self._longest = max(self._longest, time.monotonic() - self._unit_began)
            self._unit_began = None

    def _run(self) -> None:
        # A thread, so that a rank beats whatever its main thread is doing.
        idle, lateness, looks, worked = Unchanged(), Unchanged(), 0, _processor_seconds()
        try:
            for number in count(1):
                is_last, quiet = self._stop.is_set(), idle.seconds(self._units)
                if not quiet:  # processor time counts from the last progress, as the seconds do
                    worked = _processor_seconds()
                busy = (_processor_seconds() - worked) / quiet if quiet else 0.0
                self._beat(number, quiet, busy, waits=self._looks != looks)
                if is_last:
                    self.watch.publish(is_last=True)
                    return
                looks = self._looks
                self._late = self.watch.look()
                generation = self.generations.number
                self._forsaken = generation if self.generations.has_lost_ranks(self.store) else -1
                self.watch.publish()
                if line := self.watch.outside_wait():
                    self._report(line)
                self._rounds = number
                # The main thread may be in a wait that asks nobody; then this thread ends the process.
                if lateness.seconds(bool(self._late)) > GRACE_SECONDS and self._late:
                    self._call_on_late()
                self._stop.wait(BEAT_SECONDS)
        except RuntimeError as error:  # the store is gone with the process that held it
            self._late = [_unreachable(str(error).splitlines()[0])]
            if not self._stop.wait(GRACE_SECONDS):
                self._call_on_late()

    def _call_on_late(self) -> None:
        if not self._is_known:
            self._is_known = True
            self._on_late(self._late)

    def _beat(self, number: int, idle: float, busy: float, waits: bool) -> None:
        # Only the stack of a rank that may be to blame is of interest, and a beat is short without it.
        stack = self._stack() if idle > QUIET_SECONDS and not waits else ""
        doing = number, self._host, *self._doing, idle, self._longest, waits, busy, *self._outside, stack
        self._store.set(keys.BEAT.format(rank=self._rank), json.dumps(asdict(Beat(*doing, self._failed, self._ended))))

    def _stack(self) -> str:
        """The innermost frames of the main thread, without those inside torch that lead to them."""
        shown, frame = list[str](), sys._current_frames().get(self._main)
        while frame is not None and len(shown) < _FRAMES:
            code = frame.f_code
            if not shown or "/torch/" not in code.co_filename:
                shown.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
            frame = frame.f_back
        return " < ".join(shown)


def _processor_seconds() -> float:
    return sum(os.times()[:4])  # with those of children that have ended: a C++ compiler's


def _unreachable(reason: str) -> LateRank:
    return LateRank(f"the ranks' common store can't be reached ({reason})")

"""Heartbeats: who is late is named, with phase and stack; who makes progress never is, however slow."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import pytest
from tests.polling import until
from torch._C._distributed_c10d import HashStore, Store

from torusgd.comm.base import LateRank
from torusgd.ranks import liveness
from torusgd.ranks.liveness import COMPILED, COMPILER, Beat, Follower, Heartbeat, Limits, Watch
from torusgd.ranks.rank import serve_store

LIMITS = Limits(beat=30, start=100, stuck=60)


class Clock:
    """A watch on the beats of ranks 0 and 1, and a clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.store = 0.0, HashStore()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = Watch(self.store, [0, 1], LIMITS)
        self.number = 0

    def look(self, *beats: Beat | None, seconds: float = 1.0) -> list[LateRank]:
        """What is late once these beats (None: no new one) have come, so many seconds after the last look."""
        self.now += seconds
        self.number += 1
        for rank, beat in enumerate(beats):
            if beat is not None:
                self.store.set(f"beats/{rank}", json.dumps(asdict(replace(beat, number=self.number))))
        return self.watch.look()

    def looks(self, *beats: Beat | None, seconds: int) -> list[LateRank]:
        """One look a second; what is late at the end, and nobody before."""
        for _ in range(seconds - 1):
            assert self.look(*beats) == []
        return self.look(*beats)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


BEAT = Beat(0, "a", "train", 7, 3)


def test_a_suspended_watcher_blames_nobody_and_a_rank_without_a_beat_is_named(clock: Clock) -> None:
    clock.look(BEAT, BEAT)
    assert clock.look(None, None, seconds=3600.0) == []
    assert clock.looks(BEAT, None, seconds=10) == []
    clock.look(BEAT, BEAT)
    (late,) = clock.looks(BEAT, None, seconds=31)
    assert str(late) == "rank 1 on a in train of step 7: no heartbeat for 30 s, frozen or lost"
    assert clock.watch.silent(5) == [1]
    clock.watch = Watch(clock.store, [0, 2], LIMITS)
    (late,) = clock.looks(BEAT, None, seconds=100 + 1)
    assert str(late) == "rank 2: has not begun within 100 s"


def test_ranks_that_make_progress_may_differ_by_hours(clock: Clock) -> None:
    waiting, working = replace(BEAT, longest=1.0, waits=True), replace(BEAT, longest=1.0)
    for seconds in range(4000):
        assert clock.look(replace(waiting, idle=float(seconds)), replace(working, idle=seconds % 50)) == []


@pytest.mark.parametrize(("longest", "limit"), [(0.0, 100), (1.0, 60), (9.0, 90)], ids=["first unit", "minute", "long"])
def test_a_hung_rank_is_named_with_its_stack_who_waits_is_not(clock: Clock, longest: float, limit: float) -> None:
    waiting = replace(BEAT, longest=longest, waits=True, idle=limit + 1)
    hung = replace(BEAT, longest=longest, idle=limit, stack="forward (slow.py:7)")
    assert clock.look(waiting, hung) == []
    (late,) = clock.look(waiting, replace(hung, idle=limit + 1))
    hint = "" if longest else " (runtime.start_timeout: 100)"
    where = f"at forward (slow.py:7){hint}"
    assert str(late) == f"rank 1 on a in train of step 7: no progress for {limit + 1} s, {where}"
    assert [late.rank for late in clock.look(waiting, waiting)] == [0, 1], "all that wait for each other"


def test_a_rank_that_has_ended_is_not_late_and_one_that_has_failed_is_at_once(clock: Clock) -> None:
    assert clock.looks(BEAT, replace(BEAT, ended=True), seconds=1) == []
    assert clock.looks(BEAT, None, seconds=100) == []
    assert clock.watch.present(30) == [0]
    (late,) = clock.look(replace(BEAT, failed="the disk is full"), None)
    assert late.why == "ended: the disk is full"


def test_those_that_follow_the_roll_call_learn_who_is_late_and_watch_its_caller(clock: Clock) -> None:
    caller, follower = Watch(clock.store, [0, 1], LIMITS), Follower(clock.store, 0, LIMITS)

    def look(*beats: Beat | None, publishes: bool = True) -> list[LateRank]:
        clock.look(*beats)
        caller.look()
        if publishes:
            caller.publish()
        return follower.look()

    assert look(BEAT, BEAT) == []
    for _ in range(6):
        assert look(BEAT, None) == []
    assert follower.silent(5) == [1]
    for _ in range(25):
        late = look(BEAT, None)
    assert late == caller.look()
    assert late[0].rank == 1
    for _ in range(6):
        look(BEAT, BEAT, publishes=False)
    assert follower.silent(5) == [0]
    for _ in range(25):
        late = look(BEAT, BEAT, publishes=False)
    assert [str(each) for each in late] == ["rank 0: no heartbeat for 30 s, frozen or lost"]
    caller.publish(is_last=True)
    assert look(None, None, publishes=False) == []


def test_few_of_many_late_ranks_are_named_and_a_rank_alone_that_hangs(clock: Clock) -> None:
    many = Watch(clock.store, range(100), LIMITS)
    for _ in range(102):
        clock.now += 1
        many.look()
    assert len(many.look()) == liveness.MOST_NAMED
    alone = Watch(clock.store, [0], LIMITS)
    clock.look(replace(BEAT, longest=1.0, idle=61.0, stack="forward (slow.py:7)"))
    assert [late.why for late in alone.look()] == ["no progress for 61 s, at forward (slow.py:7)"]


def test_a_wait_for_a_disk_is_told_and_given_up_late(clock: Clock) -> None:
    reading = replace(BEAT, longest=1.0, what="images", where="/data")
    told = []
    for seconds in range(601):
        beat = replace(reading, idle=float(seconds))
        assert clock.look(beat, replace(beat, waits=seconds > 300)) == []
        told.append(clock.watch.outside_wait())
    whos = (("all ranks have", 60), ("all ranks have", 120), ("all ranks have", 240), ("rank 0 has", 480))
    assert [line for line in told if line] == [f"{who} waited for images for {t} s: /data" for who, t in whos]
    late = clock.look(replace(reading, idle=601.0), replace(BEAT, longest=1.0, waits=True, idle=601.0))
    assert [str(each) for each in late] == ["rank 0 on a in train of step 7: waits for images since 601 s (/data), at "]
    assert clock.look(replace(reading, idle=1.0), reading) == []
    assert not clock.watch.outside_wait()


def test_a_rank_that_computes_has_an_hour_for_its_first_unit_and_one_that_hangs_has_not(clock: Clock) -> None:
    for seconds in range(3601):
        busy = replace(BEAT, idle=float(seconds), busy=0.9)
        assert clock.look(busy, replace(busy, waits=True)) == []
    (late,) = clock.look(replace(BEAT, idle=101.0, busy=0.01), replace(BEAT, idle=101.0, waits=True))
    assert late.rank == 0


def test_a_rank_that_compiles_has_ten_minutes_a_block_at_any_step_and_an_hour_while_it_computes(clock: Clock) -> None:
    compiling = replace(BEAT, longest=1.0, what=COMPILER, where=COMPILED)
    for seconds in range(601):
        assert clock.look(replace(compiling, idle=float(seconds)), replace(BEAT, waits=True, idle=float(seconds))) == []
    for seconds in range(601, 3601):
        beat = replace(compiling, idle=float(seconds), busy=0.2)
        assert clock.look(beat, replace(BEAT, waits=True, idle=float(seconds))) == []
    (late,) = clock.look(replace(compiling, idle=601.0), replace(BEAT, waits=True, idle=601.0))
    assert str(late).startswith("rank 0 on a in train of step 7: waits for the compiler since 601 s (compile: true, ")


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Heartbeat]]:
    """Makes heartbeats of ranks of this process, 20 a second."""
    for name, seconds in (("BEAT", 0.05), ("QUIET", 0.1), ("GRACE", 0.5)):
        monkeypatch.setattr(liveness, f"{name}_SECONDS", seconds)
    common, made = serve_store(), list[Heartbeat]()

    def make(*arguments: Any, store: Store = common) -> Heartbeat:
        made.append(Heartbeat(store, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_rank_that_sleeps_in_a_loop_is_found_with_phase_and_stack(beating: Callable[..., Heartbeat]) -> None:
    release, made = Event(), list[Heartbeat]()

    def hang_in_a_loop() -> None:
        made.append(beating(1, limits))
        made[0].progress("train", 5, 0)
        made[0].progress("train", 6, 0)
        while not release.wait(0.01):
            pass

    limits = Limits(beat=30, start=2, stuck=1)
    other = Thread(target=hang_in_a_loop)
    other.start()
    until(lambda: made, "it has a heartbeat")
    mine = beating(0, limits, [0, 1])
    mine.progress("train", 6, 0)
    (late,) = until(mine.late, "somebody is late")
    release.set()
    other.join()
    assert (late.rank, late.phase, late.step) == (1, "train", 6)
    assert "hang_in_a_loop (test_liveness.py:" in late.why


def test_what_is_compiled_is_progress_and_computing_by_a_child_of_the_process_too(
    beating: Callable[..., Heartbeat],
) -> None:
    mine = beating(0, LIMITS, [0])
    mine.progress("train", 5, 0)

    def last() -> Beat:
        return mine.watch.beats[0] or BEAT

    until(lambda: last().idle > 0.1, "a beat without progress")
    of_compiler = 0.0, COMPILER, "train", 5, 0.0

    def tells_of_the_compiler() -> bool:
        mine.compiles()
        return (last().idle, last().what, last().phase, last().step, last().longest) == of_compiler

    until(tells_of_the_compiler, "a beat that tells of the compiler, and of progress")
    mine.progress("train", 5, 1)
    until(lambda: last().what == "", "another unit")
    subprocess.run([sys.executable, "-c", "for _ in range(10_000_000): pass"], check=True, timeout=60)
    until(lambda: last().busy > 0.1, "the child's time")


def test_a_main_thread_that_asks_nobody_is_told_by_a_call(beating: Callable[..., Heartbeat]) -> None:
    told = list[list[LateRank]]()
    mine = beating(0, LIMITS, [1], told.append)
    other = beating(1, LIMITS)
    other.fail("a defect")
    until(lambda: told, "the call")
    assert [late.why for late in told[0]] == ["ended: a defect"]
    assert mine.late() == told[0]


def test_a_blocked_call_of_the_main_thread_does_not_hold_up_the_beats(beating: Callable[..., Heartbeat]) -> None:
    store = serve_store()
    beating(0, LIMITS, store=store)
    blocked = Thread(target=store.wait, args=(["never"], timedelta(seconds=60)))
    blocked.start()
    other = store.clone()  # type: ignore[attr-defined]  # torch does not declare it
    watch, numbers = Watch(other, [0], LIMITS), set[int]()

    def has_beaten_five_times() -> bool:
        watch.look()
        numbers.update(beat.number for beat in watch.beats.values() if beat is not None)
        return len(numbers) > 5

    until(has_beaten_five_times, "five beats")
    assert blocked.is_alive()
    other.set("never", "")
    blocked.join()

"""The lock of a run in a bucket: fsspec's in memory here; slow tests have real servers, which decide by themselves."""

import itertools
import os
import re
import socket
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from tests.messages import refuses
from tests.polling import until

from torusgd.errors import RunError, UserError
from torusgd.rundir import lease as module
from torusgd.rundir.lease import Lease
from torusgd.storage import Store

URL = "memory://runs/locked"


@pytest.fixture
def machine(memory_bucket: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a machine's view of the lock."""
    monkeypatch.setattr(module, "RENEW", 0.02)
    monkeypatch.setattr(module, "POLL", 0.05)
    monkeypatch.setattr(module, "EXPIRES", 30.0)  # of a holder at work a sign is seen long before

    def on(name: str, lines: list[str] | None = None) -> Lease:
        """One that holds it, if there are lines to tell of that."""
        (tmp_path / name).mkdir(exist_ok=True)
        lease = Lease(Store(URL), tmp_path / name)
        if lines is not None:
            lease.acquire(lines.append)
        return lease

    return on


def in_use() -> AbstractContextManager[object]:
    me = f"process {os.getpid()} on {socket.gethostname()} since "
    return pytest.raises(UserError, match=re.escape(f"--out {URL}: in use by {me}"))


def see_as_now(monkeypatch: pytest.MonkeyPatch, lease: Lease) -> None:
    """Has a machine see the lock once more as it is now, whatever becomes of it."""
    usual, found = lease.newest, lease.newest()

    def newest() -> Any:
        monkeypatch.setattr(lease, "newest", usual)
        return found

    monkeypatch.setattr(lease, "newest", newest)


def test_a_holder_that_is_gone_is_outlived_and_then_kept_from_writing(machine, monkeypatch) -> None:
    monkeypatch.setattr(module, "EXPIRES", 0.2)
    lines: list[str] = []
    first, second, third = (machine(name, lines) for name in "abc")
    assert len(lines) == 2
    third.check()
    for late in (first, second):
        with pytest.raises(RunError, match=re.escape(f"{URL}: process {os.getpid()} on ")):
            late.check()
    assert [name for name in Store(URL).sizes() if name.startswith(".lease")] == [".lease-00000003.json"]


def test_a_holder_at_work_keeps_others_out_and_a_start_on_the_same_machine_need_not_wait(machine: Any) -> None:
    lines: list[str] = []
    machine("a", lines)
    machine("a", lines)  # whoever held it is gone, since the folder's own lock is free
    assert not lines
    first = machine("a", lines)
    with first.renewed(print):
        with in_use():
            machine("b", lines)
        first.check()
    machine("b", lines)
    (line,) = lines  # what was given back is taken at once
    assert line.endswith("waiting 30 s for a sign of life")


def test_of_several_that_find_it_free_one_gets_it(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    second = machine("b")
    see_as_now(monkeypatch, second)
    first = machine("a", [])
    with first.renewed(print), in_use():
        second.acquire(lambda line: None)


def test_a_number_that_others_have_held_and_deleted_meanwhile_is_not_taken(machine, monkeypatch) -> None:
    slow = machine("slow")
    see_as_now(monkeypatch, slow)
    with machine("a", []).renewed(print):
        pass
    second = machine("b", [])  # deletes the first's
    with second.renewed(print), in_use():
        slow.acquire(lambda line: None)
    assert second.newest()[0] == 2


@pytest.mark.timeout(120)
def test_a_lock_that_is_not_listed_yet_is_seen(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Store, "sizes", lambda self: {})
        first = machine("a", [])
        with first.renewed(print), in_use():
            machine("b", [])
        machine("a", [])
    monkeypatch.setattr(module, "EXPIRES", 0.2)
    first = machine("a", [])
    listed = Store(URL).sizes()
    machine("b", [])
    monkeypatch.setattr(Store, "sizes", lambda self: listed)
    with pytest.raises(RunError, match="has taken over"):
        first.check()


def test_a_holder_of_another_version_is_waited_for_and_seen_at_work(machine: Any) -> None:
    lines, other, is_done = list[str](), Store(URL), threading.Event()

    def beat() -> None:
        beats = 0
        while not is_done.wait(0.02):
            beats += 1
            other.write(".lease-00000001.json", b'{"newer": %d}' % beats)

    other.write(".lease-00000001.json", b'{"newer": 0}')
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    refuses("a lock of another version", machine, "a", lines, about=f"--out {URL}")
    is_done.set()
    thread.join()
    assert len(lines) == 1


def test_a_holder_that_was_held_up_writes_nothing_more(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXPIRES", 0.2)
    late, other, calls = machine("a", []), machine("b", []), list[str]()
    with late.renewed(print, lambda: calls.append("written")):
        until(lambda: "lease" not in [thread.name for thread in threading.enumerate()], "it gives up")
    assert not calls
    other.check()


def test_an_answer_that_was_lost_is_no_refusal(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    pipe, calls = MemoryFileSystem.pipe_file, itertools.count()

    def loses(self: Any, path: str, value: bytes, **more: Any) -> None:
        pipe(self, path, value, **more)
        if next(calls) == 0:
            raise RuntimeError("the connection was cut")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", loses)
    monkeypatch.setattr("torusgd.storage.PAUSES", (0.0,))
    assert Store(URL).create("x", b"mine")
    assert not Store(URL).create("x", b"yours")
    assert Store(URL).read("x") == b"mine"


def test_what_lies_beside_is_called_and_may_fail(machine: Any) -> None:
    first, calls = machine("a", []), list[None]()

    def beside() -> None:
        calls.append(None)
        raise OSError("503 Slow Down")

    with first.renewed(print, beside):
        until(lambda: len(calls) >= 3, "it is called three times")
    assert first.newest()[1].released


def test_the_end_of_a_run_does_not_wait_for_a_bucket_that_does_not_answer(machine, monkeypatch) -> None:
    monkeypatch.setattr(module, "GIVE_BACK", 0.1)
    asks, answers, lines = threading.Event(), threading.Event(), list[str]()
    first = machine("a", lines)

    def ask_and_wait() -> None:
        asks.set()
        answers.wait(240)

    with first.renewed(lines.append, ask_and_wait):
        assert asks.wait(240)
    thread = next(thread for thread in threading.enumerate() if thread.name == "lease")
    assert lines == [f"{URL}: no answer for 0.1 s; the next run there waits 30 s for it"]
    answers.set()
    thread.join(240)
    assert first.newest()[1].released

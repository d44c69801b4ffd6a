"""What a run's folder tells of it, and what can be asked of a run through it, by one line where nothing can."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from tests.commands import ran
from tests.disks import blind
from tests.run.runs import before_steps
from tests.step.trainers import job_of, run_of

from torusgd import locks
from torusgd.comm.base import Liveness
from torusgd.errors import UserError
from torusgd.run import trained_weights
from torusgd.rundir import run_view
from torusgd.rundir.run_dir import RunDir
from torusgd.rundir.run_view import STOP, WORKERS, RunRequests, read_status, write_request
from torusgd.untrusted import is_there, read_text


def go(out: Path, meanwhile: Callable[[int], None] = lambda step: None, **more: Any) -> Any:
    """Trains four steps in this process, `meanwhile` before each; the result."""
    with RunDir(out).lock():
        run = run_of(job_of(out=out), **more)
        before_steps(run, meanwhile)
        return run.run()


class Phases(Liveness):
    """Notes what a rank does."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def progress(self, phase: str, step: int, unit: int) -> None:
        self.phases.append(phase)

    def outside(self, what: str, where: str) -> None:
        self.phases.append(what)


def test_a_run_tells_how_it_is_stops_as_asked_and_goes_on(tmp_path: Path, monkeypatch, run_cli, mistake) -> None:
    monkeypatch.setattr(run_view, "SECONDS", 0.0)
    seen: list[dict[str, Any]] = []

    def look_and_stop(step: int) -> None:
        seen.append(json.loads(run_cli("status", tmp_path, "--json")[1]))
        if step == 1:
            mistake("resize", tmp_path, "--workers", 5, TMP=tmp_path)
            (tmp_path / run_view.STATUS).write_text(json.dumps(seen[-1] | {"fixed_ranks": "so it is"}))
            mistake("resize", tmp_path, "--workers", 3, TMP=tmp_path)
        if step == 2:
            assert "step 2 of 4" in run_cli("status", tmp_path)[1]
            assert run_cli("stop", tmp_path, "--seconds", "0")[0] == 0

    assert go(tmp_path, look_and_stop).code == 130
    assert [(each["state"], each["step"]) for each in seen] == [("running", 0), ("running", 1), ("running", 2)]
    last = seen[-1]
    assert (last["host"], last["process"], last["shares"]) == (socket.gethostname(), os.getpid(), {"0": 4})
    assert last["images_per_second"] > 0
    code, told, _ = run_cli("status", tmp_path)
    assert (code, "was stopped after step 2; the same `torusgd train` goes on" in told) == (0, True)
    assert "there is nothing to stop" in run_cli("stop", tmp_path)[2]

    liveness = Phases()
    assert go(tmp_path, liveness=liveness).summary["steps"] == 4
    assert {"images", "train", "evaluate", "checkpoint", "polish"} <= {*liveness.phases}
    assert liveness.phases[-2:] == ["close", "the disk, or the servers of --track"]
    assert run_cli("status", tmp_path)[1].startswith("finished: 4 steps, top-1 ")
    mistake("stop", tmp_path, TMP=tmp_path)
    mistake("resize", tmp_path, "--workers", 2, TMP=tmp_path)


def test_one_line_for_a_folder_without_a_run_and_for_a_run_that_is_gone(tmp_path: Path, run_cli, mistake) -> None:
    (tmp_path / "no run").mkdir()
    (tmp_path / "no run" / "recipe.yaml").write_text("name: mine\n")
    for command, *words in (("status",), ("stop",), ("resize", "--workers", 2)):
        for folder in ("no run", "none"):
            mistake(command, tmp_path / folder, *words, TMP=tmp_path)
    (tmp_path / "recipe.yaml").write_text(run_view.HEAD + "\n")
    status = tmp_path / run_view.STATUS
    status.write_text(json.dumps({"step": 7, "phase": "train", "host": socket.gethostname()}))
    code, _, said = run_cli("status", tmp_path)
    assert (code, "is not running, its process is gone after step 7" in said) == (1, True)
    assert "its process is gone after step 7" in run_cli("stop", tmp_path)[2]
    status.write_text(json.dumps({"step": 7, "phase": "train", "host": "another"}))
    assert read_status(tmp_path).state == "running"  # where locks don't bind it
    os.utime(status, (0, time.time() - 3600))
    assert read_status(tmp_path).state == "gone"
    # Where a run says things that no run says, or such as steer a terminal.
    about = {"host": "another", "recipe": "mine\x1b[2J", "phase": "train", "step": 7, "steps": 9, "epoch": 0.5}
    about |= {"images_per_second": 3.0, "seconds_left": 4, "shares": {"0": 2}, "virtual_workers": 2, "process": 1}
    status.write_text(json.dumps(about | {"loss": None}))  # as after a step whose loss is not finite
    assert "mine\\x1b[2J: train, step 7 of 9, epoch 0.50, loss not finite\n" in run_cli("status", tmp_path)[1]
    odd: Any = ({"images_per_second": 10**400}, {"shares": []}, {"step": None, "virtual_workers": "two"})
    for news in odd:
        status.write_text(json.dumps(about | {"loss": 1.0} | news))
        command, *words = ("resize", "--workers", 2) if "virtual_workers" in news else ("status",)
        code, _, said = run_cli(command, tmp_path, *words)
        assert (code, "its status can't be read" in said, said.count("\n")) == (2, True, 1), news
    status.unlink()
    os.mkfifo(status)
    with pytest.raises(UserError, match=f"its status can't be read: {run_view.STATUS} is damaged"):
        read_status(tmp_path)
    status.unlink()
    for file in (status, tmp_path / "summary.json"):
        for text in ("[", "[]", "{}") if file.name == "summary.json" else ("[",):
            file.write_text(text)
            code, _, said = run_cli("status", tmp_path)
            assert (code, f"its status can't be read: {file.name} " in said) == (2, True)


def test_a_run_that_this_user_may_not_read_is_not_taken_for_none(tmp_path: Path, monkeypatch, mistake) -> None:
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    monkeypatch.setattr(run_view, "check_regular", Mock(side_effect=refused))
    monkeypatch.setattr(trained_weights, "list_checkpoints", Mock(side_effect=refused))
    for command in ("status", "report", "eval"):
        mistake(command, tmp_path, UNREADABLE=tmp_path)


def test_who_may_not_write_sees_whether_a_run_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locks.held(tmp_path, "it"):
        monkeypatch.setattr(locks, "FileLock", Mock(side_effect=PermissionError))
        assert locks.is_locked(tmp_path)
    (tmp_path / locks.HOLDER).write_text("a process that was killed")
    assert not locks.is_locked(tmp_path)


def test_a_request_is_found_once_and_only_since_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "SECONDS", 0.0)
    asked = RunRequests(tmp_path)
    assert (asked.to_stop(), asked.workers()) == (False, None)
    write_request(tmp_path / WORKERS, "3")
    assert (asked.workers(), asked.workers()) == (3, None)

    def read_as_another_comes(path: Path) -> str:
        write_request(tmp_path / WORKERS, "5")
        return read_text(path)

    with monkeypatch.context() as patch:
        patch.setattr(run_view, "read_text", read_as_another_comes)
        write_request(tmp_path / WORKERS, "3")
        assert asked.workers() == 3
    assert (asked.workers(), asked.workers()) == (5, None)
    write_request(tmp_path / STOP, "")
    assert asked.to_stop()
    for wrong in ("-1", "[", "true", "true and more", '"3"'):
        (tmp_path / ".workers").write_text(wrong)
        assert asked.workers() is None
        assert not list(tmp_path.glob(".workers*"))
    (tmp_path / ".workers").unlink(missing_ok=True)
    os.mkfifo(tmp_path / ".workers")  # whoever opens it waits for somebody to write
    assert asked.workers() is None
    run_view.forget_requests(tmp_path)
    assert not RunRequests(tmp_path).to_stop()


def test_a_disk_that_fails_a_moment_ends_no_run_and_loses_no_request(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_view, "SECONDS", 0.0)
    asked, files = RunRequests(tmp_path), [tmp_path / name for name in (STOP, WORKERS)]
    write_request(files[0], "")
    write_request(files[1], "3")
    failing = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with patch.multiple(Path, exists=failing, is_file=failing):  # as before Python 3.14
        assert (asked.to_stop(), asked.workers()) == (False, None)
    assert (asked.to_stop(), asked.workers()) == (True, 3)


def test_a_run_is_not_called_unfinished_as_its_summary_cannot_be_looked_for(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(run_view.HEAD)
    (tmp_path / "summary.json").write_text("{}")
    assert run_view.read_status(tmp_path).state == "finished"
    with blind(tmp_path / "summary.json"), pytest.raises(UserError, match="can't be read: Input/output error"):
        run_view.read_status(tmp_path)


def test_a_full_disk_keeps_nothing_of_a_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_some(path: Path, text: str) -> None:
        path.write_bytes(text[:5].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    told = run_view.StatusFile(tmp_path, {})
    told.update(now=True, step=1)
    monkeypatch.setattr(Path, "write_text", write_some)
    told.update(now=True, step=2)
    assert [path.name for path in tmp_path.iterdir()] == [run_view.STATUS]
    assert json.loads((tmp_path / run_view.STATUS).read_text())["step"] == 1


def test_who_asks_does_not_wait_for_torch() -> None:
    script = "import sys, torusgd.rundir.run_view; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    assert ran([sys.executable, "-c", script]).stdout == "set()\n"


def test_nobody_takes_for_missing_what_could_not_be_looked_for(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert not is_there(file)
    file.touch()
    assert is_there(file)
    assert not is_there(file / "in it")
    with pytest.raises(OSError, match="too long"):
        is_there(tmp_path / ("x" * 300))

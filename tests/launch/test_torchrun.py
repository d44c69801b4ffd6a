"""Ranks that torchrun or a script has started: the same weights as under our own launcher, and one of them speaks."""

import multiprocessing
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.comm.gloo_world import start_forkserver
from tests.polling import until
from tests.run.processes import (
    STEPS,
    Process,
    assert_told_once,
    children,
    held_port,
    is_alive,
    last_step,
    pauses,
    results,
    summary,
    torusgd_words,
    wait_for_step,
)

from torusgd.__main__ import main
from torusgd.comm import groups
from torusgd.launch import torchrun as torchrun_ranks
from torusgd.ranks.liveness import Limits


def torchrun(folder: Path, out: Path, recipe: Path, *options: str, flags: list[str]) -> Process:
    words = torusgd_words(out, recipe, *flags)
    assert words[1] == "-m"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(held_port()))
    return Process(folder, sys.executable, *launcher, *options, *words[1:])


class Forked:
    """A command in a process that is forked from one which has torch imported."""

    def __init__(self, folder: Path, words: list[str], environment: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_command, args=(folder, words, environment)
        )
        self._process.start()
        self.pid = self._process.pid or 0

    def end(self) -> int | None:
        self._process.join(240)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    @property
    def out(self) -> str:
        return (self._folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self._folder / "err").read_text()


def _command(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    sys.argv = words
    main()


def by_hand(folder: Path, out: Path, recipe: Path, size: int, flags: list[str]) -> list[Forked]:
    """Ranks whose variables a script has set."""
    start_forkserver()
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port())}
    words = torusgd_words(out, recipe, *flags)[2:]
    return [Forked(folder / str(rank), words, told | {"RANK": str(rank)}) for rank in range(size)]


def ours(process: Process) -> list[str]:
    """What torusgd says on the error stream of torchrun."""
    return [line for line in process.err.splitlines() if line.startswith("torusgd:")]


@pytest.mark.slow
def test_torchrun_restarts_and_passes_a_stop_on_then_ranks_started_by_hand_finish(
    tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]
) -> None:
    out, slow = tmp_path / "out", [*pauses(0.01), "--no-node-memory"]
    process = torchrun(tmp_path, out, recipe, "--max-restarts", "2", flags=slow)
    wait_for_step(out, 6, process)
    first = children(process.pid)
    os.kill(first[1], signal.SIGKILL)
    wait_for_step(out, 9, process)
    ranks = children(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    process.end()
    done = last_step(out)
    assert (out / "checkpoints" / f"step-{done:08d}").is_dir()
    assert not any(map(is_alive, ranks))
    assert process.out.count("4 virtual workers on 2 ranks") == 2  # rank 0 alone prints, in both attempts
    assert process.out.count("resumed from the checkpoint of step 4") == 1

    ranks_by_hand = by_hand(tmp_path, out, recipe, 3, slow)
    assert [process.end() for process in ranks_by_hand] == [0, 0, 0]
    told = summary(out)
    assert results(told) == undisturbed
    assert told["resumed_from"] == done
    assert told["world_size"] == 3
    assert_told_once(out, STEPS)
    assert "done: top-1 " in ranks_by_hand[0].out
    assert [process.out + process.err for process in ranks_by_hand[1:]] == ["", ""]


@pytest.mark.slow
def test_no_rank_outlives_a_killed_torchrun(tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    process = torchrun(tmp_path, out, recipe, flags=pauses(0.01))
    wait_for_step(out, 3, process)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.popen.kill()
    until(lambda: not any(map(is_alive, ranks)), "no orphan is left")


@pytest.mark.slow
def test_a_stop_of_one_rank_started_by_hand_stops_all_with_a_checkpoint(tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    ranks = by_hand(tmp_path, out, recipe, 2, pauses(0.01))
    until(lambda: last_step(out) >= 5, "step 5")
    os.kill(ranks[1].pid, signal.SIGINT)
    assert [process.end() for process in ranks] == [143, 130]
    assert (out / "checkpoints" / f"step-{last_step(out):08d}").is_dir()
    assert not any("Traceback" in process.err for process in ranks)


def test_a_lost_rank_ends_the_others_with_one_line(tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    ranks = by_hand(tmp_path, out, recipe, 3, pauses(0.01))
    until(lambda: last_step(out) >= 5, "step 5")
    ranks[1].kill()
    assert [ranks[0].end(), ranks[2].end()] == [1, 1]
    (line,) = (ranks[0].err + ranks[2].err).splitlines()
    assert re.fullmatch(
        r"torusgd: rank 1 was lost, says rank [02] on \S+; the same command goes on from the checkpoint of step 4", line
    )


def _meet_and_lose_rank_1(rank: int, port: str, told: Path) -> None:
    """A rank that has joined; rank 1 is killed when the store knows of it and before its connections are there."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    if rank == 1:
        patch.object(groups, "build", lambda *arguments, **keywords: os.kill(os.getpid(), signal.SIGKILL)).start()
    torchrun_ranks.run_joined(lambda *arguments: None, "cpu", Limits(beat=3, start=60))


@pytest.mark.slow
def test_a_rank_that_is_lost_while_they_meet_ends_the_others_in_time(tmp_path: Path) -> None:
    port, context = str(held_port()), multiprocessing.get_context("forkserver")
    ranks = [
        context.Process(target=_meet_and_lose_rank_1, args=(rank, port, tmp_path / str(rank))) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [1, -signal.SIGKILL]
    assert re.match(r"torusgd: .*rank 1.*, says rank 0 on ", (tmp_path / "0").read_text())


def _close_for_ever(port: str, told: Path) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    patch.object(groups.Group, "close", lambda self: threading.Event().wait()).start()
    torchrun_ranks.run_joined(lambda *arguments: None, "cpu", Limits(beat=1, start=60))


def test_a_rank_that_does_not_end_after_its_result_is_ended_with_a_line(tmp_path: Path) -> None:
    rank = multiprocessing.get_context("forkserver").Process(
        target=_close_for_ever, args=(str(held_port()), tmp_path / "err")
    )
    rank.start()
    rank.join(60)
    assert rank.exitcode == 0
    assert re.match(r"torusgd: rank 0 on \S+ ends only now", (tmp_path / "err").read_text())


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        pytest.param(
            ["--set", "virtual_workers=1"],
            2,
            "torusgd: workers = 2: the recipe has 1 virtual workers to share; use at most",
            marks=pytest.mark.slow,
        ),
        (["--set", "model={name: 'tests.run.slow:Broken'}"], 1, "torusgd: rank 1: KeyError: "),
    ],
    ids=["too many ranks", "a defect on rank 1"],
)
def test_one_rank_tells_why_all_end(tmp_path: Path, recipe: Path, flags: list[str], code: int, line: str) -> None:
    ranks = by_hand(tmp_path, tmp_path / "out", recipe, 2, flags)
    assert [process.end() for process in ranks] == [code, code]
    (told,) = (process.err for process in ranks if process.err)
    assert told.splitlines()[-1].startswith(line)
    assert told.count("Traceback") == (1 if code == 1 else 0)
    assert told.count("torusgd:") == 1


@pytest.mark.slow
def test_ranks_that_never_meet_end_with_one_line(tmp_path: Path, recipe: Path) -> None:
    impatient = tmp_path / "impatient.yaml"
    impatient.write_text(recipe.read_text().replace("runtime: {", "runtime: {start_timeout: 2, "))
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port()), "RANK": "1"}
    process = Process(tmp_path, *torusgd_words(tmp_path / "out", impatient), environment=told)
    assert process.end() == 1
    (line,) = process.err.splitlines()
    assert line.startswith("torusgd: rank 1 on ")
    assert f"the ranks did not meet at 127.0.0.1:{told['MASTER_PORT']} within 2 s: " in line

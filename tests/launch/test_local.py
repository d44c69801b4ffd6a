"""What happens to a run when its processes are stopped, killed or frozen: it goes on to the same weights."""

import os
import random
import re
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.commands import ran
from tests.launch.driven import kill
from tests.polling import until
from tests.run import processes
from tests.run.processes import Process, ended_well, is_alive, last_step, pauses, torusgd, wait_for_end, wait_for_step

from torusgd.launch.local import Restarts
from torusgd.ranks.failures import Failure, FailureKind

RESTARTS = ["--update", "sharded"]
"""a lost rank takes its shards along, so that all ranks start again; `test_elastic` has those that go on"""
LINE = "; the same command goes on from "


def test_progress_refills_the_budget_of_restarts_and_pauses_grow_without_it() -> None:
    lost, disk = (Failure(kind, 0, "a", "why") for kind in (FailureKind.RANK_LOST, FailureKind.DISK_ERROR))
    restarts = Restarts()
    assert [restarts.pause(lost, "step 4") for _ in range(11)] == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, None]
    assert [restarts.pause(lost, f"step {step}") for step in range(100)] == [0.0] * 100
    assert restarts.total == 110
    assert [restarts.pause(disk, reached) for reached in ("a", "b", "b")] == [0, 0, None]  # the same twice
    assert restarts.pause(Failure(FailureKind.RUN_ERROR, 0, "a", "diverged"), "c") is None


def with_pauses(folder: Path, recipe: Path) -> Process:
    return torusgd(folder, folder / "out", recipe, "--workers", "2", *pauses(0.01, 0.04))


def is_caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    with suppress(FileNotFoundError):
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return caught is not None and int(caught[1], 16) >> (number - 1) & 1 == 1
    return False


def assert_stopped(process: Process, code: int, line: str) -> None:
    assert process.end() == code, process.output
    assert re.fullmatch(f"torusgd: {line}\n", process.err)
    assert not any(map(is_alive, process.descendants()))


@pytest.mark.slow
def test_a_stop_while_ranks_are_being_started(tmp_path: Path, recipe: Path) -> None:
    process = with_pauses(tmp_path, recipe)
    until(lambda: is_caught(process.pid, signal.SIGHUP), "signals are taken", process)
    os.kill(process.pid, signal.SIGINT)  # the command's modules are being imported
    assert_stopped(process, 130, "stopped by SIGINT")

    process = with_pauses(tmp_path, recipe)
    until(process.ranks, "a rank is starting", process)
    os.killpg(process.pid, signal.SIGHUP)  # the terminal is closed
    assert_stopped(process, 129, rf"stopped by SIGHUP{LINE}(the checkpoint of step \d|the beginning)")


def test_a_stop_in_steps_and_evaluation_is_harmless(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    out = tmp_path / "out"
    process = with_pauses(tmp_path, recipe)
    wait_for_step(out, 6, process)
    os.kill(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does
    process.end()
    done = last_step(out)
    assert_stopped(process, 143, f"stopped by SIGTERM{LINE}the checkpoint of step {done}")
    assert 6 <= done < 10

    process = with_pauses(tmp_path, recipe)
    wait_for_step(out, 10, process)
    processes.wait_for_phase(out, "evaluate", process)
    os.killpg(process.pid, signal.SIGINT)
    assert_stopped(process, 130, f"stopped by SIGINT{LINE}the checkpoint of step 10")
    assert f"resumed from the checkpoint of step {done}" in process.out
    assert '"evaluation"' not in (out / "events.jsonl").read_text()

    processes.run_alone(out, recipe, "data.options={pause: 0.01, eval_pause: 0.04}")
    told = ended_well(out, undisturbed)
    assert (told["resumed_from"], told["restarts"], told["world_size"]) == (10, 0, 1)


@pytest.mark.slow
def test_kill_9_of_ranks_and_launchers_at_any_moment(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    draw, out = random.Random(20261121), tmp_path / "out"
    moments = sorted(draw.sample(range(27), 8))
    launchers = draw.sample(moments[:-1], 2)

    def start() -> Process:
        return torusgd(tmp_path, out, recipe, "--workers", str(draw.choice((2, 3))), *RESTARTS, *pauses(0.05))

    process = start()
    for moment in moments:
        until(lambda: process.ranks() and last_step(out) >= moment, f"step {moment}", process)  # noqa: B023
        time.sleep(draw.uniform(0, 0.1))
        everything = process.descendants()
        if moment in launchers:
            process.popen.kill()
            wait_for_end(everything)
            process = start()
        else:
            kill(draw.choice(until(process.ranks, "ranks are up", process)))
    assert ended_well(out, undisturbed, process)["restarts"] >= 1
    for line in process.err.splitlines():
        assert line.startswith("torusgd: rank ")
        assert re.search(r"; all ranks start again (in \d+ s )?from the checkpoint of step ", line)


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    out = tmp_path / "out"
    temporary = Path(tempfile.mkdtemp())  # a short path, since that of a socket holds 107 characters
    process = torusgd(tmp_path, out, recipe, "--workers", "3", *RESTARTS, *pauses(0.004, 0.04), TMPDIR=str(temporary))
    writing = out / "checkpoints"
    wait_for_step(out, 1, process)
    for _ in range(10):
        first = process.rank(out, 0)
        until(lambda: list(writing.glob(".step-*")), "a checkpoint is being written", process, pause=0.0005)
        kill(first)
        if list(writing.glob(".step-*")):
            break
    else:
        pytest.fail("never hit in the middle of a checkpoint")
    wait_for_step(out, 10, process)
    addresses = processes.listening([process.pid, *process.descendants()])
    assert len(addresses) >= 4  # the launcher's store, and Gloo on each rank
    assert set(addresses) <= processes.LOOPBACK
    os.kill(process.rank(out, 1), signal.SIGKILL)
    wait_for_step(out, 13, process)
    ranks = process.ranks()
    process.popen.kill()
    wait_for_end(ranks)
    until(lambda: not list(temporary.iterdir()), "nothing is left in the temporary folder")
    temporary.rmdir()

    process = torusgd(tmp_path, out, recipe, "--workers", "2", *pauses(0.004, 0.04))
    told = ended_well(out, undisturbed, process)
    assert told["resumed_from"] >= 8
    assert told["world_size"] == 2
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [f"step-{step:08d}" for step in (28, 30)]
    assert not [path.name for path in out.iterdir() if path.name.startswith(".model")]


def test_a_defect_on_one_rank_is_told_once_and_not_tried_again(tmp_path: Path, recipe: Path) -> None:
    flags = ["--set", "model={name: 'tests.run.slow:Broken'}"]
    process = torusgd(tmp_path, tmp_path / "out", recipe, "--workers", "2", *flags)
    assert (process.end(), process.err.count("Traceback")) == (1, 1), process.output
    assert 'KeyError: "a defect of the user\'s model"' in process.err
    assert process.err.splitlines()[-1].startswith("torusgd: rank 1: KeyError")
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.slow
def test_a_frozen_rank_is_found_and_a_second_run_is_kept_out(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """A run is suspended, started a second time meanwhile, and goes on with a rank that is frozen at step 6."""
    out, impatient = tmp_path / "out", tmp_path / "impatient.yaml"
    impatient.write_text(processes.RECIPE.replace("runtime: {", "runtime: {timeout: 5, "))
    process = torusgd(tmp_path, out, impatient, "--workers", "2", *pauses(0.01))
    wait_for_step(out, 6, process)
    os.killpg(process.pid, signal.SIGSTOP)  # as Ctrl-Z
    second = torusgd(tmp_path, out, impatient, "--workers", "2", *pauses(0.01))
    assert (second.end(), second.err.count("\n")) == (2, 1)
    assert f"in use by process {process.pid} on " in second.err
    time.sleep(6)  # longer than a heartbeat may be late
    victim = process.rank(out, 1)
    os.killpg(process.pid, signal.SIGCONT)
    os.kill(victim, signal.SIGSTOP)
    ended_well(out, undisturbed, process)
    late = r"torusgd: rank 1 on \S+ in \w+ of step \d+: no heartbeat for 5 s, frozen or lost; rank 0 goes on\n"
    assert re.fullmatch(late, process.err), "nobody was blamed for the time of the suspension"
    assert not is_alive(victim)


@pytest.mark.slow
def test_a_temporary_folder_with_too_long_a_name_is_told(tmp_path: Path, recipe: Path) -> None:
    """As clusters give each job one; a socket's path has about a hundred characters."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    process = torusgd(tmp_path / "told", tmp_path / "out", recipe, "--workers", "2", TMPDIR=str(folder))
    assert (process.end(), process.err.count("\n")) == (2, 1)
    assert "set TMPDIR to a folder with a short name" in process.err
    assert not (tmp_path / "out").exists()


def test_the_progress_line_on_a_terminal(tmp_path: Path, recipe: Path) -> None:
    words = [*processes.torusgd_words(tmp_path / "out", recipe), "--workers", "1", *pauses(0.002)]
    line = " ".join(f"'{word}'" for word in words)
    done = ran(["script", "-qec", line, "/dev/null"])
    assert re.search(r"(?s)stage 2/2.*images/s  data .*left", done.stdout)
    assert done.stdout.count("\x1b[?25h") >= done.stdout.count("\x1b[?25l")  # the cursor is back

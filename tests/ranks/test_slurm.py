"""Slurm's variables, its signal ahead of the end, and its queue; tests/launch/test_slurm_cluster.py has a real one."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.commands import command, put_command, ran
from tests.messages import refuses
from tests.run.runs import TINY, sets, train

from torusgd.errors import RunError, write_exit
from torusgd.ranks import slurm
from torusgd.run.saving import RunResult

STEP = {
    "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": "n[7-8]", "SLURM_STEP_TASKS_PER_NODE": "2,1",
}  # fmt: skip


def test_a_task_of_a_step_becomes_a_rank_and_any_other_process_starts_ranks_of_its_own() -> None:
    task = {**STEP, "SLURM_RESTART_COUNT": "2"}
    slurm.adopt_step(task)
    assert {name: task[name] for name in task.keys() - STEP.keys() - {"SLURM_RESTART_COUNT"}} == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n7",
        "MASTER_PORT": str(15000 + (123456 + 97) % 15000), "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    given = {**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
    slurm.adopt_step(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "5")

    batch_script = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    for other in (batch_script, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**STEP, "RANK": "0"}, dict[str, str]()):
        before = dict(other)  # `RANK` is of torchrun, started by srun
        slurm.adopt_step(other)
        assert other == before


def test_variables_that_make_no_sense_are_refused() -> None:
    tasks = "SLURM_STEP_TASKS_PER_NODE"
    for name, value in (("SLURM_PROCID", "x"), ("SLURM_STEP_NODELIST", ""), (tasks, "2"), (tasks, "two")):
        refuses(f"{name}={value}", slurm.adopt_step, {**STEP, name: value}, about=f"{name} = ")
    slurm.adopt_step({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x99999999999),1"})  # takes no memory for all of them


def put_scontrol(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put_command(folder / "scontrol", script)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")


def test_the_job_is_queued_again_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    put_scontrol(tmp_path, f'echo "$@" > "{tmp_path}/said"', monkeypatch)
    slurm.check_requeue()
    slurm.requeue()
    assert (tmp_path / "said").read_text() == "requeue 77\n"
    put_scontrol(tmp_path, "echo 'Requested operation is presently disabled' >&2; exit 1", monkeypatch)
    refuses("Slurm does not queue again", slurm.requeue, about="--requeue", kind=RunError)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    mistake("train", "digits", "--requeue", "--out", tmp_path / "run", TMP=tmp_path)


def test_exit_codes_and_the_line_for_schedulers(tmp_path: Path, run_cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunResult(signal=signal.SIGUSR1).code == 75
    assert RunResult(signal=signal.SIGTERM).code == 143
    monkeypatch.setenv("TORUSGD_EXIT_FILE", str(tmp_path / "exit.json"))
    assert run_cli("recipes")[0] == 0
    assert run_cli("train", "no-such-recipe")[0] == 2
    write_exit(75, "stopped")
    done, wrong, stopped = map(json.loads, (tmp_path / "exit.json").read_text().splitlines())
    assert done == {"code": 0, "reason": "done", "again": False}
    assert (wrong["code"], wrong["reason"][:23]) == (2, "recipe 'no-such-recipe'")
    assert stopped["again"]
    monkeypatch.setenv("TORUSGD_EXIT_FILE", str(tmp_path / "none" / "exit.json"))
    assert run_cli("recipes")[0] == 0


@pytest.mark.slow
def test_a_time_limit_ends_a_run_with_75(tmp_path: Path) -> None:
    settings = sets(*TINY, "stages=[{until: 100000st, images_per_worker: 3}]", "evaluate.every=null")
    words = command("train", "digits", "--out", tmp_path / "run", *settings, "--workers", "2", "--time-limit", "0.3")
    done = ran(words, code=75, env=os.environ | {"TORUSGD_EXIT_FILE": str(tmp_path / "exit.json")})
    assert "stopped by SIGUSR1" in done.stderr
    assert json.loads((tmp_path / "exit.json").read_text())["again"] is True


@pytest.mark.slow
def test_tasks_of_a_step_train_together(tmp_path: Path) -> None:
    """Processes that have Slurm's variables, and no launcher of ours or torch's."""
    arguments = command("train", "digits", "--out", tmp_path / "run", *sets(*TINY))
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    processes = [
        subprocess.Popen(arguments, env={**os.environ, **step, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
        for n in range(2)
    ]
    assert [process.wait(240) for process in processes] == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["weights_sha256"] == train(tmp_path / "own", *sets(*TINY))["weights_sha256"]

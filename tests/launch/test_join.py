"""Machines that join a run, whose launcher and agents are in this process: same weights; strangers get nothing."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests.commands import command, ran
from tests.launch.driven import Driven, job_of, noting
from tests.polling import until
from tests.run.processes import LOOPBACK, Process, ended_well, last_step, listening, pauses, torusgd, wait_for_end

from torusgd.errors import RunError, UserError
from torusgd.launch import node_agent
from torusgd.launch.local import TOKEN, Entrance
from torusgd.launch.node_agent import join_run
from torusgd.ranks.join import MOST_STRANGERS, RANKS_LOST, Channel, pass_on, read_token
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.job import Job
from torusgd.signals import STOP_SIGNALS

HERE = socket.gethostname()


def join(port: int, token: bytes, workers: int, data: Path | None = None) -> Future[int]:
    """`torusgd join` in a thread."""
    return ThreadPoolExecutor(1).submit(join_run, ("127.0.0.1", port), token, data, workers)


def end(agent: Future[int]) -> Any:
    """Its exit code, or its error."""
    return agent.exception(240) or agent.result()


class Gated(Driven):
    """A run that others may join, and that takes its time as long as its gate is closed."""

    def __init__(self, job: Job, drive: Callable[["Gated"], None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.channels: list[Channel] = []
        """of the agents, in the order in which they came"""

        def channel(*arguments: Any) -> Channel:
            self.channels.append(Channel(*arguments))
            return self.channels[-1]

        monkeypatch.setattr(node_agent, "warn", lambda line: None)
        monkeypatch.setattr(node_agent, "Channel", channel)
        super().__init__(job, drive, monkeypatch, Entrance(("127.0.0.1", 0)))

    def give_up(self) -> None:
        gate_of(self.job).unlink(missing_ok=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.line("join by torusgd join").split("127.0.0.1:")[1].split()[0])

    def token(self) -> bytes:
        """That of the run, once it listens."""
        return read_token(self.until(lambda: self.port and self.job.out / TOKEN))

    def wait_for_ranks(self, *ranks: str) -> None:
        self.until(lambda: set(self.shares()) == set(ranks))


def gate_of(job: Job) -> Path:
    return job.out.parent / "gate"


@pytest.fixture
def job(tmp_path: Path, recipe: Path) -> Job:
    """A run that takes its time as long as its gate is closed."""
    gate = tmp_path / "gate"
    gate.touch()
    own = ["data.source=tests.run.slow:Gated", f"data.options={{gate: '{gate}', pause: 0.15}}"]
    return job_of(tmp_path / "out", recipe, *own, workers=1, checkpoint_minutes=10)


def test_machines_join_and_are_lost_and_those_refused_disturb_nothing(job: Job, undisturbed, monkeypatch) -> None:
    ended, other = dict[str, Any](), job.out.parent / "other"
    other.mkdir()
    started = list[BaseProcess]()
    monkeypatch.setattr(node_agent, "start_rank", noting(started))

    def drive(run: Gated) -> None:
        silent = socket.create_connection(("127.0.0.1", run.port))  # says nothing as long as the run lasts
        with socket.create_connection(("127.0.0.1", run.port)) as garbage:
            garbage.sendall(b"GET / HTTP/1.0\r\n\r\n")
            ended["told"] = b"".join(iter(lambda: garbage.recv(4096), b""))
        ended["wrong token"] = end(join(run.port, b"w" * 64, 1))
        ended["other data"] = end(join(run.port, run.token(), 1, other))
        first = join(run.port, run.token(), 2)
        run.wait_for_ranks("0", "2", "3")
        run.channels[-1]._connection.shutdown(socket.SHUT_RDWR)
        ended["cut off"] = end(first)
        run.wait_for_ranks("0")
        second = join(run.port, run.token(), 1)
        run.wait_for_ranks("0", "4")
        for stop in STOP_SIGNALS:  # which reach all processes of a terminal, or of a job that is cancelled
            os.kill(started[-1].pid or 0, stop)
        gate_of(job).unlink()
        ended["second"] = end(second)
        silent.close()

    run = Gated(job, drive, monkeypatch)
    told = run.ended_as(undisturbed)
    assert (told["world_size"], told["lost_ranks"], told["restarts"]) == (2, [2, 3], 0)
    assert set(json.loads(ended["told"])) == {"torusgd", "nonce"}
    assert "doesn't take this machine" in str(ended["wrong token"])
    assert "another data set: data_sha256 is" in str(ended["other data"])
    assert [type(ended[each]) for each in ("wrong token", "other data", "cut off")] == [UserError, UserError, RunError]
    assert ended["second"] == 0
    assert run.lines[1].startswith("refused 127.0.0.1, which wanted to join: ")
    said = "\n".join(line for line in run.lines[1:] if not line.startswith("refused"))
    assert re.match(
        "rank 1 does not join: another data set.*\nranks 2, 3 join; ranks 0, 2, 3 go on\n"
        f"rank 2 on {HERE} was lost with its machine: .*; rank 0 goes on\nrank 4 joins; ranks 0, 4 go on", said
    )  # fmt: skip


def test_a_run_with_too_few_ranks_waits(job: Job, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = dict[str, Any]()

    def drive(run: Gated) -> None:
        run.until(lambda: run.status().get("phase") == "wait for ranks")  # before the first step: one core here
        first = join(run.port, run.token(), 2)
        run.wait_for_ranks("0", "1")  # no more than the most
        run.channels[-1]._connection.shutdown(socket.SHUT_RDWR)
        end(first)
        run.until(lambda: run.status().get("phase") == "wait for ranks")
        seen["checkpoints"] = len(list((job.out / "checkpoints").glob("step-*")))
        second = join(run.port, run.token(), 1)
        run.wait_for_ranks("0", "2")
        gate_of(job).unlink()
        seen["second"] = end(second)

    options = RuntimeOptions(workers_range=(2, 2), checkpoint_minutes=10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    run = Gated(replace(job, options=options), drive, monkeypatch)
    told = run.ended_as(undisturbed)
    assert (told["world_size"], told["lost_ranks"], told["restarts"]) == (2, [1], 0)
    assert (seen["checkpoints"], seen["second"]) == (1, 0)
    waits = "rank 0 waits for 1 more, of 2 that the run wants at least"
    assert [line.partition("; ")[2] or line for line in run.lines if "join by" not in line] == [
        waits, f"{HERE} joins with 1 of its 2 ranks: the run takes 2 at most", "ranks 0, 1 go on", waits,
        "ranks 0, 2 go on",
    ]  # fmt: skip


def test_a_joined_rank_cut_off_is_lost(job: Job, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    links, ended = list[socket.socket](), list[Any]()

    def noted(near: socket.socket, far: socket.socket) -> None:
        links.append(far)
        pass_on(near, far)

    monkeypatch.setattr(node_agent, "pass_on", noted)

    def drive(run: Gated) -> None:
        agent = join(run.port, run.token(), 1)
        run.wait_for_ranks("0", "1")
        for link in links:
            with suppress(OSError):  # it has ended already, with what it was for
                link.shutdown(socket.SHUT_RDWR)
        run.line("; rank 0 goes on")
        ended.append(end(agent))  # while the run goes on: its machine is free again
        gate_of(job).unlink()

    Gated(job, drive, monkeypatch).ended_as(undisturbed)
    assert str(ended[0]).endswith(RANKS_LOST)


@pytest.mark.slow
def test_the_first_starts_another_rank(job: Job, undisturbed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 writes the run's folder, which is on the first machine."""
    monkeypatch.setattr("torusgd.ranks.join.HANDSHAKE_SECONDS", 600.0)

    def drive(run: Gated) -> None:
        agent = join(run.port, run.token(), 1)
        run.wait_for_ranks("0", "1")
        for again in ("2", "3"):
            reached, away = last_step(job.out), ("127.0.0.2", 0)  # strangers, who hold up no rank that comes again
            silent = [socket.create_connection(("127.0.0.1", run.port), 9, away) for _ in range(MOST_STRANGERS)]
            run.started[-1].kill()
            run.wait_for_ranks(again, "1")
            run.until(lambda: last_step(job.out) > reached)  # noqa: B023
            for each in silent:
                each.close()
        gate_of(job).unlink()
        assert end(agent) == 0

    run = Gated(job, drive, monkeypatch)
    told = run.ended_as(undisturbed)
    assert (told["world_size"], told["lost_ranks"], told["restarts"], told["resumed_from"]) == (2, [0, 2], 0, 0)
    assert [line for line in run.lines if "takes its place" in line] == [
        "rank 0 was ended by SIGKILL; rank 2 takes its place on this machine; ranks 2, 1 go on",
        "rank 2 was ended by SIGKILL; rank 3 takes its place on this machine; ranks 3, 1 go on",
    ]


@pytest.mark.slow
def test_a_machine_is_killed_and_then_the_launcher(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    """As commands, so that everything of a machine dies at once."""
    out = tmp_path / "out"
    words = ["--workers", "1", "--listen", "127.0.0.1:0", *pauses(0.15)]
    root = torusgd(tmp_path / "root", out, recipe, *words)
    port = until(lambda: re.search(r"127\.0\.0\.1:(\d+) --token", root.err), "it listens", root)[1]
    join = command("join", f"127.0.0.1:{port}", "--workers", "2", "--token-file", out / TOKEN)
    first = Process(tmp_path / "first", *join)
    until(lambda: "ranks 1, 2 join" in root.err, "they join", root)
    assert not set(listening([root.pid, *root.descendants(), first.pid, *first.descendants()])) - LOOPBACK
    orphans = first.descendants()
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: "; rank 0 goes on" in root.err, "it goes on", root)
    wait_for_end(orphans)
    second = Process(tmp_path / "second", *join)
    until(lambda: "ranks 3, 4 join" in root.err, "they join", root)
    ranks = second.descendants()
    root.kill()
    assert second.end() == 1
    assert [line for line in second.err.splitlines() if "is gone" in line] == second.err.splitlines()[-1:]
    wait_for_end(ranks)
    ended_well(out, undisturbed, torusgd(tmp_path / "again", out, recipe, "--workers", "1", *pauses(0.15)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_campaign_of_losses_and_joins_ends_with_the_same_weights() -> None:
    words = [sys.executable, "-m", "benchmarks", "elastic", "changes", "--changes", "8", "--seed", "1"]
    done = ran(words, cwd=Path(__file__).parents[2], timeout=800)
    assert "8 changes" in done.stdout
    assert "0 restarts, weights those of the undisturbed run" in done.stdout

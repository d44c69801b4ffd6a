"""Ranks that torchrun or a script has started: the same weights as under our own launcher, and one of them speaks."""

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.comm.gloo_world import start_forkserver
from tests.messages import refused
from tests.polling import until
from tests.run import processes
from tests.run.processes import Process, children, ended_well, held_port, last_step, pauses, wait_for_step
from torch._C._distributed_c10d import HashStore

from torusgd.__main__ import main
from torusgd.comm import groups
from torusgd.errors import RunError
from torusgd.launch.torchrun import agree_on_prefix, run_joined
from torusgd.ranks.liveness import Limits


def torchrun(
    folder: Path, out: Path, recipe: Path, *options: str, flags: list[str], nodes: str = "", **environment: str
) -> Process:
    words = processes.torusgd_words(out, recipe, *flags)
    assert words[1] == "-m"
    where = nodes.split() or ("--nproc-per-node", "2", "--master-port", str(held_port()))
    launcher = (sys.executable, "-m", "torch.distributed.run", *where, *options)
    return Process(folder, *launcher, *words[1:], environment=environment)


class Forked:
    """A command in a process that is forked from one which has torch imported."""

    def __init__(self, folder: Path, words: list[str], environment: dict[str, str]) -> None:
        folder.mkdir(parents=True)
        self._folder, given = folder, (folder, words, environment)
        self._process = multiprocessing.get_context("forkserver").Process(target=_command, args=given)
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
    words = processes.torusgd_words(out, recipe, *flags)[2:]
    return [Forked(folder / str(rank), words, told | {"RANK": str(rank)}) for rank in range(size)]


@pytest.mark.slow
def test_torchrun_restarts_and_ranks_by_hand_finish(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    out, slow = tmp_path / "out", [*pauses(0.01), "--no-node-memory"]
    process = torchrun(tmp_path, out, recipe, "--max-restarts", "2", flags=slow)
    wait_for_step(out, 6, process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    wait_for_step(out, 9, process)
    ranks = children(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    process.end()
    done = last_step(out)
    assert (out / "checkpoints" / f"step-{done:08d}").is_dir()
    assert not any(map(processes.is_alive, ranks))
    assert process.out.count("4 virtual workers on 2 ranks") == 2  # rank 0 alone prints, in both attempts
    assert process.out.count("resumed from the checkpoint of step 4") == 1

    ranks_by_hand = by_hand(tmp_path, out, recipe, 3, slow)
    assert [process.end() for process in ranks_by_hand] == [0, 0, 0]
    told = ended_well(out, undisturbed)
    assert (told["resumed_from"], told["world_size"]) == (done, 3)
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
    processes.wait_for_end(ranks)


@pytest.mark.slow
def test_a_stop_of_one_rank_by_hand_stops_all_and_ranks_that_never_meet_end(tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    ranks = by_hand(tmp_path, out, recipe, 2, pauses(0.01))
    until(lambda: last_step(out) >= 5, "step 5")
    os.kill(ranks[1].pid, signal.SIGINT)
    assert [process.end() for process in ranks] == [130, 130]
    assert (out / "checkpoints" / f"step-{last_step(out):08d}").is_dir()
    assert not any("Traceback" in process.err for process in ranks)
    impatient = tmp_path / "impatient.yaml"
    impatient.write_text(recipe.read_text().replace("runtime: {", "runtime: {start_timeout: 2, "))
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port()), "RANK": "1"}
    process = Process(tmp_path, *processes.torusgd_words(tmp_path / "out", impatient), environment=told)
    where = f"127.0.0.1:{told['MASTER_PORT']}"
    assert process.end() == 1
    assert re.fullmatch(rf"torusgd: rank 1 on .*: the ranks did not meet at {where} within 2 s: .*\n", process.err)


def test_a_lost_rank_ends_the_others_with_one_line(tmp_path: Path, recipe: Path) -> None:
    out = tmp_path / "out"
    ranks = by_hand(tmp_path, out, recipe, 3, pauses(0.01))
    until(lambda: last_step(out) >= 5, "step 5")
    ranks[1].kill()
    assert [ranks[0].end(), ranks[2].end()] == [1, 1]
    says, goes_on = r"rank 1 was lost, says rank [02] on \S+", "the same command goes on from the checkpoint of step 4"
    assert re.fullmatch(f"torusgd: {says}; {goes_on}\n", ranks[0].err + ranks[2].err)


def _run_joined(rank: int, size: int, port: str, told: Path) -> None:
    """Of two ranks, 1 is killed when the store knows of it, before it is connected; one alone never closes a group."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.dup2(os.open(told, os.O_WRONLY | os.O_CREAT), 2)
    if rank == 1:
        patch.object(groups, "build", lambda *arguments, **keywords: os.kill(os.getpid(), signal.SIGKILL)).start()
    if size == 1:
        patch.object(groups.Group, "close", lambda self: threading.Event().wait()).start()
    run_joined(lambda *arguments: None, "cpu", Limits(beat=1 if size == 1 else 3, start=60))


@pytest.mark.parametrize(("codes", "line"), [
    ([0], r"torusgd: rank 0 on \S+ ends only now"),
    pytest.param([1, -signal.SIGKILL], r"torusgd: .*rank 1.*, says rank 0 on ", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_rank_that_does_not_end_or_is_lost_is_told_in_time(codes: list[int], line: str, tmp_path: Path) -> None:
    port, size, context = str(held_port()), len(codes), multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_run_joined, args=(n, size, port, tmp_path / str(n))) for n in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == codes
    assert re.match(line, (tmp_path / "0").read_text())


@pytest.mark.parametrize(("change", "code", "line"), [
    pytest.param("virtual_workers=1", 2, "workers = 2: the recipe has 1 virtual workers", marks=pytest.mark.slow),
    ("model={name: 'tests.run.slow:Broken'}", 1, "rank 1: KeyError: "),
])  # fmt: skip
def test_one_rank_tells_why_all_end(tmp_path: Path, recipe: Path, change: str, code: int, line: str) -> None:
    ranks = by_hand(tmp_path, tmp_path / "out", recipe, 2, ["--set", change])
    assert [process.end() for process in ranks] == [code, code]
    (told,) = (process.err for process in ranks if process.err)
    assert told.splitlines()[-1].startswith(f"torusgd: {line}")
    assert (told.count("Traceback"), told.count("torusgd:")) == (code % 2, 1)


class Agent:
    """An agent of torchrun whose workers' images take 0.1 s each, as long as the file `held` is there."""

    def __init__(self, folder: Path, out: Path, recipe: Path, *options: str, **more: str) -> None:
        held = out.with_name("held")
        held.touch()
        flags = ["--fresh", "--set", "data.source=tests.run.slow:Held", "--set", "data.options.pause=0.1"]
        self.process = torchrun(folder, out, recipe, *options, flags=flags, TORUSGD_HELD=str(held), **more)

    def copies(self) -> list[int]:
        """The steps whose state is in this node's memory."""
        found = Path("/dev/shm").glob(f"torusgd-{os.getuid()}-*-{self.process.pid}-*/step-*")
        return [int(path.name.removeprefix("step-")) for path in found]

    def workers(self) -> list[int]:
        return children(self.process.pid)


def resumed_from_memory(process: Process) -> list[int]:
    """The steps from which the ranks have gone on."""
    told = rf"resumed from the copy in the memory of {re.escape(socket.gethostname())} of step (\d+)"
    return [int(step) for step in re.findall(told, process.out)]


@pytest.mark.slow
def test_after_a_loss_all_go_on_from_good_memory(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    out = tmp_path / "out"
    agent = Agent(tmp_path, out, recipe, "--max-restarts", "2")
    process = agent.process
    until(lambda: max(agent.copies(), default=0) % 4, "a copy of a step that has no checkpoint", process)
    os.kill(agent.workers()[1], signal.SIGKILL)
    until(lambda: resumed_from_memory(process), "they have gone on", process)
    (step,) = resumed_from_memory(process)
    assert step > 0
    wait_for_step(out, step + 5, process)
    workers = agent.workers()
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    (file,) = Path("/dev/shm").glob(f"torusgd-{os.getuid()}-*-{process.pid}-*/step-*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    out.with_name("held").unlink()
    ended_well(out, undisturbed, process)
    assert "model.safetensors is damaged" in process.err
    assert process.out.count("resumed from the checkpoint of step") == 1
    assert agent.copies() == []


@pytest.mark.slow
def test_a_node_joins_is_lost_and_the_other_goes_on(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    out, rare = tmp_path / "out", tmp_path / "rare.yaml"
    rare.write_text(recipe.read_text().replace("checkpoint_every: 4st", f"checkpoint_every: {processes.STEPS}st"))
    # torch 2.13 never tells a node that joins later where the shared store is.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = "--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --max-restarts 3 --rdzv-conf last_call_timeout=2 "
    nodes += f"--rdzv-endpoint localhost:{held_port()}"
    first = Agent(tmp_path / "1", out, rare, nodes=nodes, **apart)
    until(first.copies, "a copy", first.process)
    second = Agent(tmp_path / "2", out, rare, nodes=nodes, **apart)
    until(lambda: "4 virtual workers on 2 ranks" in first.process.out + second.process.out, "both train")
    # torchrun has asked the first one's worker to stop, which has left a checkpoint.
    stopped = int(re.findall(r"resumed from the checkpoint of step (\d+)", first.process.out + second.process.out)[0])
    until(lambda: second.copies() > [stopped], "a later copy there", second.process)
    second.process.kill()
    until(lambda: resumed_from_memory(first.process), "the first goes on alone", first.process)
    assert resumed_from_memory(first.process)[0] > stopped
    out.with_name("held").unlink()
    assert ended_well(out, undisturbed, first.process)["resumed_from"] > stopped
    assert first.copies() == []


def agreed(store: HashStore, size: int) -> list[list[str]]:
    """What each rank of an attempt, as a thread, has written under the agreed prefix."""

    def be(rank: int) -> list[str]:
        part = agree_on_prefix(store, rank, size, 240)
        part.set(str(rank), "here")
        return sorted(str(each) for each in range(size) if part.get(str(each)) == b"here")

    with ThreadPoolExecutor(size) as ranks:
        return [*ranks.map(be, range(size))]


def test_each_attempt_meets_apart_from_what_earlier_ones_left_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "1", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    store = HashStore()
    for size in (3, 2, 4, 1, 2):
        assert agreed(store, size) == [[str(rank) for rank in range(size)]] * size
    store.set("word/1", "of a rank that is gone")
    store.set("answer", json.dumps({"prefix": "old", "words": ["a", "of a rank that is gone"]}))
    assert agreed(store, 2) == [["0", "1"]] * 2
    # A rank that waits for others that never come.
    with refused("ranks that do not meet", "rank 1", RunError, HOST=socket.gethostname()):
        agree_on_prefix(store, 1, 2, 0.1)

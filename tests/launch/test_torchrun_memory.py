"""Workers that torchrun starts again: they go on from their nodes' memory, on as many nodes as there are."""

import json
import os
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.messages import refused
from tests.polling import until
from tests.run.processes import (
    STEPS,
    Process,
    assert_told_once,
    children,
    held_port,
    results,
    summary,
    torusgd_words,
    wait_for_step,
)
from torch._C._distributed_c10d import HashStore

from torusgd.errors import RunError
from torusgd.launch.torchrun import agree_on_prefix


class Agent:
    """An agent of torchrun whose workers' images take 0.1 s each, as long as the file `held` is there."""

    def __init__(self, folder: Path, out: Path, recipe: Path, *options: str, **environment: str) -> None:
        words = torusgd_words(
            out, recipe, "--fresh", "--set", "data.source=tests.run.slow:Held", "--set", "data.options.pause=0.1"
        )
        held = out.with_name("held")
        held.touch()
        self.process = Process(
            folder,
            *(sys.executable, "-m", "torch.distributed.run", *options, *words[1:]),
            environment={"TORUSGD_HELD": str(held), **environment},
        )

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
def test_after_a_lost_worker_all_go_on_from_memory_and_from_the_checkpoint_where_that_is_damaged(
    tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    options = ("--nproc-per-node", "2", "--max-restarts", "2", "--master-port", str(held_port()))
    agent = Agent(tmp_path, out, recipe, *options)
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
    assert process.end() == 0, process.output
    assert "model.safetensors is damaged" in process.err
    assert len(re.findall("resumed from the checkpoint of step", process.out)) == 1
    assert results(summary(out)) == undisturbed
    assert_told_once(out, STEPS)
    assert agent.copies() == []


@pytest.mark.slow
def test_a_node_joins_and_is_lost_and_the_other_goes_on_from_memory(
    tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]
) -> None:
    out, rare = tmp_path / "out", tmp_path / "rare.yaml"
    rare.write_text(recipe.read_text().replace("checkpoint_every: 4st", f"checkpoint_every: {STEPS}st"))
    # torch 2.13 never tells a node that joins later where the shared store is.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--max-restarts", "3",
               "--rdzv-endpoint", f"localhost:{held_port()}", "--rdzv-conf", "last_call_timeout=2")  # fmt: skip
    first = Agent(tmp_path / "1", out, rare, *options, **apart)
    until(first.copies, "a copy", first.process)
    second = Agent(tmp_path / "2", out, rare, *options, **apart)
    until(lambda: "4 virtual workers on 2 ranks" in first.process.out + second.process.out, "both train")
    # torchrun has asked the first one's worker to stop, which has left a checkpoint.
    stopped = int(re.findall(r"resumed from the checkpoint of step (\d+)", first.process.out + second.process.out)[0])
    until(lambda: second.copies() > [stopped], "a later copy there", second.process)
    second.process.kill()
    until(lambda: resumed_from_memory(first.process), "the first goes on alone", first.process)
    assert resumed_from_memory(first.process)[0] > stopped
    out.with_name("held").unlink()
    assert first.process.end() == 0, first.process.output
    told = summary(out)
    assert results(told) == undisturbed
    assert told["resumed_from"] > stopped
    assert_told_once(out, STEPS)
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

"""The newest state, of ranks and in the memory of nodes: who goes on from which copy, and what becomes of bad ones."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from torusgd.comm import groups
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run import node_memory as module
from torusgd.run.fingerprint import Fingerprint
from torusgd.run.job import Job
from torusgd.run.newest_state import Choice, Offer, Retained, agree, choose
from torusgd.run.node_memory import NodeMemory, node_memory
from torusgd.run.saving import LastSaved, RunState
from torusgd.rundir.checkpoint import list_checkpoints

FINGERPRINT = Fingerprint("recipe", 96, "data", "", "drawn", {})


def test_all_go_on_from_the_newest_copy_unless_the_disk_has_a_newer_one_and_know_of_the_last_checkpoint() -> None:
    none, old, new = Offer(), Offer(copy=4, digest=1), Offer(copy=7, digest=1)
    assert choose([old._replace(disk=7), none, new, new]) == Choice(source=2, is_copy=True)
    assert choose([new._replace(disk=8), none]) == choose([none, none]) == Choice(source=0)
    # Of two that differ nobody can tell which is wrong.
    assert choose([new, new._replace(digest=2)]) is None
    # What ranks hold comes before all copies.
    assert choose([new, Offer(progress=2)]) == Choice(source=1, holders=frozenset({1}))
    for writer, known in ((0, 4), (3, None)):
        taken = agree(replace(retained(5, 0, 1.0), saved=LastSaved(4, writer, 0.0)), groups.alone())
        assert (taken.saved.step if taken.saved else None) == known


def retained(step: int, evaluated: int, value: float) -> Retained:
    """What a rank keeps after `step` steps; all its tensors hold `value`."""
    state = RunState(FINGERPRINT, step=step, evaluated=evaluated)
    tensors = {name: torch.full((3,), value) for name in ("model/w", "optimizer/momentum_buffer/w", "gradient_bounds")}
    nothing: Any = None
    own: dict[str, Any] = {"state": state, "tensors": tensors, "last_event": lambda: {"step": step}}
    return Retained(nothing, nothing, nothing, nothing, {}, (0, 1, 2), nothing, generation=0, **own)


def agreed(*each: Retained) -> list[tuple[int, int, Any, dict[str, float]]]:
    """What ranks, as threads, take from each other: step, evaluated, event, tensors."""
    store = HashStore()

    def be(rank: int) -> tuple[int, int, Any, dict[str, float]]:
        taken = agree(each[rank], groups.build(store, range(len(each)), rank, device=torch.device("cpu"), timeout=240))
        own = each[rank].tensors if rank in taken.holders else {}
        tensors = {name: float(tensor[0]) for name, tensor in (*own.items(), *taken.tensors)}
        return taken.state.step, taken.state.evaluated, taken.last_event, tensors

    with ThreadPoolExecutor(len(each)) as ranks:
        return [*ranks.map(be, range(len(each)))]


def test_ranks_take_the_newest_state_and_of_equal_ones_what_may_have_been_measured_again() -> None:
    whole = dict.fromkeys(("model/w", "optimizer/momentum_buffer/w", "gradient_bounds"), 2.0)
    assert agreed(retained(3, 0, 1.0), retained(4, 0, 2.0)) == [(4, 0, {"step": 4}, whole)] * 2
    mine = whole | {"model/w": 1.0, "optimizer/momentum_buffer/w": 1.0}
    assert agreed(retained(4, 0, 1.0), retained(4, 4, 2.0)) == [(4, 4, {"step": 4}, each) for each in (mine, whole)]
    # Two of them can be compared with each other, the third one's newer state with nothing; a joiner has none.
    joiner = replace(retained(0, 0, 0.0), state=None, tensors={}, last_event=None)
    found = agreed(retained(4, 0, 1.0), retained(5, 0, 3.0), retained(4, 4, 2.0), joiner)
    assert found == [(4, 4, {"step": 4}, whole)] * 4


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of the node's shared memory; this process' parent is the agent."""
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", "0")
    return tmp_path


def job(*overrides: str, **options: Any) -> Job:
    return Job(load_recipe("digits", overrides).recipe, RuntimeOptions(**options), "cpu", Path("nowhere"))


def keep(memory: NodeMemory, step: int) -> None:
    keep_tensors(memory, step, {"model/w": torch.full((3,), float(step)), "gradient_bounds": torch.zeros(2)})
    assert memory.writer is not None
    memory.writer.wait()


def keep_tensors(memory: NodeMemory, step: int, tensors: dict[str, torch.Tensor]) -> None:
    state: Any = SimpleNamespace(state_dict=lambda steps, keep: tensors)
    memory.keep(RunState(FINGERPRINT, step=step), state)


@pytest.fixture
def memory(shared: Path) -> NodeMemory:
    found = node_memory(job())
    assert found is not None
    return found


def test_a_copy_is_read_by_the_agents_next_worker_and_removed_at_the_end(shared: Path, memory: NodeMemory) -> None:
    assert memory.is_due()
    keep(memory, 3)
    assert not memory.is_due()  # a second at least from one to the next
    keep(memory, 5)
    (folder,) = shared.iterdir()
    assert (folder.stat().st_mode & 0o777, len(list_checkpoints(folder))) == (0o700, 1)

    again = node_memory(job())
    assert again is not None
    found = again.read()
    assert found is not None
    assert (found.step, found.tensors["model/w"].tolist()) == (5, [5.0, 5.0, 5.0])
    for each in (memory, again):
        each.forget()
    assert (memory.is_due(), [*shared.iterdir()]) == (False, [])


def test_a_damaged_copy_is_told_not_used(shared: Path, memory: NodeMemory, capsys: pytest.CaptureFixture[str]) -> None:
    keep(memory, 3)
    (file,) = shared.glob("*/step-00000003/state.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert memory.read() is None
    assert "state.safetensors is damaged (its SHA-256 is not the manifest's); it is not used" in capsys.readouterr().err


def test_without_room_the_run_goes_on_without_copies(shared: Path, memory: NodeMemory, monkeypatch, capsys) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    keep_tensors(memory, 3, {"model/w": torch.zeros(1 << 20)})
    assert "has no room for 8 MiB" in capsys.readouterr().err
    assert (memory.is_due(), [*shared.iterdir()]) == (False, [])


def test_what_an_ended_agent_left_is_swept_and_nothing_else(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, here = module.start_of(os.getpid()), module._namespace()
    assert own is not None
    dead, living, elsewhere = (
        shared / f"torusgd-{os.getuid()}-{namespace}-{os.getpid()}-{began}"
        for namespace, began in ((here, own - 1), (here, own), (f"{here}1", own - 1))
    )
    other = shared / "torusgd-notes"
    for folder in (dead, living, elsewhere, other):
        folder.mkdir()
    assert node_memory(job()) is not None
    # The processes of another container can't be seen from here.
    assert [folder.exists() for folder in (dead, living, elsewhere, other)] == [False, True, True, True]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert node_memory(job()) is None


def test_a_folder_that_others_can_write_is_not_used(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shared / f"torusgd-{os.getuid()}-{module.torchrun_agent()}"
    folder.mkdir()
    folder.chmod(0o777)
    memory = node_memory(job())
    assert memory is not None
    assert (memory.is_due(), memory.read()) == (False, None)
    assert "it is not this user's alone: the state is not saved" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "options"),
    [([], {"node_memory": False}), ([], {"update": "sharded"}), (["synchrony={form: cutoff, count: 3}"], {})],
)
def test_runs_that_no_node_holds_keep_no_copies(shared: Path, overrides: list[str], options: dict[str, Any]) -> None:
    assert node_memory(job(*overrides, **options)) is None

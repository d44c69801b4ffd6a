"""Checkpoints: whole or not there, checked when read, the newest few kept; the newest good one is found."""

import errno
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_mistakes import full_disk
from tests.messages import refused, refuses
from tests.run.runs import flip_a_byte

from torusgd.errors import RunError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schedule import Schedule
from torusgd.rundir import checkpoint as checkpoints
from torusgd.rundir.checkpoint import FILES, MANIFEST, Checkpoint, CheckpointWriter, read_checkpoint, write_checkpoint
from torusgd.step.journal import synchronous
from torusgd.step.stats import StepStats, StepTimes, StepTotals
from torusgd.text import json_text
from torusgd.untrusted import parse_json
from torusgd.weights import load_weights, save_weights

DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped byte": flip_a_byte, "a file that is gone": Path.unlink,
    "a file cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "an empty file": lambda path: path.write_bytes(b""),
    "another kind of file": lambda path: path.write_bytes(b"[1, 2]"),
}  # fmt: skip


def newest(folder: Path, warn: Callable[[str], None] = pytest.fail) -> Checkpoint:
    found = checkpoints.newest_checkpoint(folder, warn)
    assert found is not None
    return found


def checkpoint(step: int, value: float = 1.0) -> Checkpoint:
    weights = {"model/fc.weight": torch.full((4, 3), value), "model/bn.num_batches_tracked": torch.tensor(step)}
    state = {"optimizer/momentum_buffer/fc.weight": torch.full((4, 3), -value)}
    return Checkpoint(weights | state, {"step": step, "samples": 10 * step})


def write(folder: Path, *steps: int) -> None:
    for step in steps:
        write_checkpoint(folder, checkpoint(step), {})


def test_what_is_written_is_read_also_a_tensor_with_two_names(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(7, 0.1), {"classes": '["a"]'})
    assert path.name == "step-00000007"
    found = read_checkpoint(path)
    assert (found.step, found.progress) == (7, {"step": 7, "samples": 70})
    assert torch.equal(found.tensors["model/fc.weight"], torch.full((4, 3), 0.1))
    assert torch.equal(found.tensors["optimizer/momentum_buffer/fc.weight"], torch.full((4, 3), -0.1))
    model, metadata = load_weights(path / FILES[0])  # by the model's own names
    assert (sorted(model), metadata) == (["bn.num_batches_tracked", "fc.weight"], {"classes": '["a"]'})
    assert os.listdir(tmp_path) == ["step-00000007"]
    shared = torch.nn.Linear(2, 2)
    save_weights(tmp_path / "w.safetensors", torch.nn.Sequential(shared, torch.nn.ReLU(), shared).state_dict(), {})
    tensors, _ = load_weights(tmp_path / "w.safetensors")
    assert tensors.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(tensors[f"{place}.weight"], shared.weight) for place in (0, 2))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_the_one_before_stands_in_for_a_damaged_one(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path, 4, 8)
    DAMAGES[damage](tmp_path / "step-00000008" / name)
    told: list[str] = []
    assert newest(tmp_path, told.append).step == 4
    (line,) = told
    assert re.fullmatch(f".*{tmp_path}/step-00000008.*; it is set aside as step-00000008.damaged", line)
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000008.damaged"]


def test_a_checkpoint_of_no_step_is_not_whole_also_where_python_skips_assertions(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(8), {})
    state = path / FILES[2]
    sums = parse_json((path / MANIFEST).read_text())
    for text, name in (('{"step": -8}', "below 0"), ('{"samples": 80}', "none")):
        state.write_text(text)
        sums[FILES[2]] = hashlib.sha256(text.encode()).hexdigest()
        (path / MANIFEST).write_text(json.dumps(sums))
        refuses(f"a checkpoint whose step is {name}", read_checkpoint, path, TMP=tmp_path)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    write(tmp_path, 4, 8)
    for step in (4, 8):
        flip_a_byte(tmp_path / f"step-{step:08d}" / FILES[1])
    told: list[str] = []
    for _ in range(2):  # the second time they have been set aside before
        with refused("damaged checkpoints alone", str(tmp_path), RunError, TMP=tmp_path):
            checkpoints.newest_checkpoint(tmp_path, told.append)
    assert (len(told), sorted(os.listdir(tmp_path))) == (2, ["step-00000004.damaged", "step-00000008.damaged"])
    assert checkpoints.newest_checkpoint(tmp_path / "none", told.append) is None
    write(tmp_path, 8)  # a copy of it, put back, is damaged as well
    flip_a_byte(tmp_path / "step-00000008" / FILES[1])
    with pytest.raises(RunError):
        checkpoints.newest_checkpoint(tmp_path, told.append)
    assert (tmp_path / "step-00000008.damaged-2").is_dir()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_disk_that_cannot_be_read_now_is_read_again_and_then_ends_the_run(tmp_path, monkeypatch, number) -> None:
    write(tmp_path, 4, 8)
    monkeypatch.setattr(checkpoints, "READ_PAUSES", (0.0, 0.0))
    errors: list[OSError] = []

    def failing(call: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def ask(path: Path) -> Any:
            if errors:
                raise errors.pop()
            return call(path)

        return ask

    for owner, name, times in ((Path, "read_bytes", 2), (os, "scandir", 3), (Path, "read_bytes", 3)):
        errors[:] = [OSError(number, os.strerror(number))] * times
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(getattr(owner, name)))
            if times == 2:
                assert newest(tmp_path).step == 8
            else:
                with pytest.raises(RunError, match=re.escape(str(tmp_path))):
                    newest(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000008"]


def test_the_newest_are_kept_and_nothing_newer_is_deleted(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2, {})
    for step in (4, 8, 12):
        writer.save(checkpoint(step))
    writer.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-00000008", "step-00000012"]
    writer.save(checkpoint(10))
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000008", "step-00000010", "step-00000012"]


def test_a_slow_disk_puts_checkpoints_off_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def write_late(*arguments: Any) -> Path:
        assert release.wait(240)
        return write_checkpoint(*arguments)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_late)
    writer = CheckpointWriter(tmp_path, 2, {})
    times = checkpoints.CheckpointTimes({4, 8}, 1e9, writer)
    assert [step for step in range(1, 5) if times.is_due(step)] == [4]
    writer.save(checkpoint(4))
    times.taken()
    assert not times.is_due(7)
    assert times.is_due(8)  # a write of a moment is waited for
    monkeypatch.setattr(checkpoints, "WRITE_PATIENCE", 0.0)
    assert not times.is_due(9)
    writer.wait(lambda seconds: release.set())
    assert times.is_due(10)  # that of step 8, late
    times.taken()
    assert not times.is_due(11)
    assert checkpoints.CheckpointTimes((), 0.0, writer).is_due(11)  # by the time alone
    writer.close()


def test_a_snapshot_is_taken_at_once_and_written_aside(tmp_path: Path) -> None:
    writer, given = CheckpointWriter(tmp_path, 2, {}), checkpoint(4)
    writer.save(given)
    for tensor in given.tensors.values():
        tensor.zero_()  # the next step
    writer.close()
    found = newest(tmp_path)
    assert torch.equal(found.tensors["model/fc.weight"], torch.ones(4, 3))
    assert torch.equal(found.tensors["optimizer/momentum_buffer/fc.weight"], -torch.ones(4, 3))


def test_a_write_that_fails_leaves_nothing_and_is_told_at_the_next(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2, {})
    writer.save(checkpoint(4))
    writer.wait()
    large = Checkpoint({"model/fc.weight": torch.zeros(100_000)}, {"step": 8})
    with full_disk(most=50_000):
        writer.save(large)
        refuses("a checkpoint on a full disk", writer.wait, about=str(tmp_path), kind=RunError, TMP=tmp_path)
    assert os.listdir(tmp_path) == ["step-00000004"]
    writer.save(large)
    writer.close()
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_rights_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        folder = write_checkpoint(tmp_path, Checkpoint({"model/w": torch.zeros(2)}, {"step": 1}), {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}


def test_what_is_not_finite_is_null_in_every_json_file() -> None:
    told = json_text({"loss": math.inf, "times": [math.nan, 0.5], "steps": (3, -math.inf)})
    assert json.loads(told, parse_constant=pytest.fail) == {"loss": None, "times": [None, 0.5], "steps": [3, None]}
    # With NCCL nobody can tell how long messages were under way; a run that is resumed doesn't know it either.
    step = Schedule(load_recipe("digits").recipe, 1437)[0]
    times = StepTimes(1.0, 0.1, 0.2, on_way_seconds=math.nan, update_seconds=0.1)
    stats = StepStats(step, times, loss=1.0, entry=synchronous(0, 12))
    totals = StepTotals()
    totals.add(stats)
    resumed = StepTotals(**json.loads(json_text(asdict(totals))))
    resumed.add(stats)
    assert resumed.as_summary()["hidden_share"] is None

"""Checkpoints: whole or not there, checked when read, the newest few kept; a run goes on from the newest good one."""

import errno
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torusgd.errors import RunError, UserError
from torusgd.recipe.duration import Duration
from torusgd.recipe.load import read_run_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.train import checkpoint as checkpoints
from torusgd.train.checkpoint import (
    FILES,
    MANIFEST,
    Checkpoint,
    CheckpointTimes,
    CheckpointWriter,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from torusgd.train.job import Job
from torusgd.train.result import finished
from torusgd.train.step_stats import StepTimes, StepTotals
from torusgd.weights import json_text, load_weights, save_weights

from .processes import STEPS, assert_told_once, results, run_alone


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped byte": flip_a_byte,
    "a file cut short": cut_in_half,
    "a file that is gone": Path.unlink,
    "an empty file": lambda path: path.write_bytes(b""),
    "another kind of file": lambda path: path.write_bytes(b"[1, 2]"),
}


def checkpoint(step: int, value: float = 1.0) -> Checkpoint:
    weights = {"fc.weight": torch.full((4, 3), value), "bn.num_batches_tracked": torch.tensor(step)}
    state = {"optimizer/momentum_buffer/fc.weight": torch.full((4, 3), -value)}
    return Checkpoint(weights, state, {"step": step, "samples": 10 * step})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(7, 0.1), {"classes": '["a"]'})
    assert path.name == "step-00000007"
    found = read_checkpoint(path)
    assert (found.step, found.progress) == (7, {"step": 7, "samples": 70})
    assert torch.equal(found.model["fc.weight"], torch.full((4, 3), 0.1))
    assert torch.equal(found.state["optimizer/momentum_buffer/fc.weight"], torch.full((4, 3), -0.1))
    assert load_weights(path / FILES[0])[1] == {"classes": '["a"]'}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000007"]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_the_one_before_stands_in_for_a_damaged_one(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    for step in (4, 8):
        write_checkpoint(tmp_path, checkpoint(step), {})
    damage(tmp_path / "step-00000008" / name)
    told: list[str] = []
    found = newest_checkpoint(tmp_path, told.append)
    assert found is not None
    assert found.step == 4
    assert len(told) == 1
    assert str(tmp_path / "step-00000008") in told[0]
    assert told[0].endswith("; it is set aside as step-00000008.damaged")
    assert "\n" not in told[0]
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000008.damaged"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    for step in (4, 8):
        write_checkpoint(tmp_path, checkpoint(step), {})
        flip_a_byte(tmp_path / f"step-{step:08d}" / FILES[1])
    told: list[str] = []
    for _ in range(2):  # the second time they have been set aside before
        with pytest.raises(RunError, match=r"no good checkpoint is left, 2 damaged ones are set aside; .*--fresh"):
            newest_checkpoint(tmp_path, told.append)
    assert len(told) == 2
    assert sorted(os.listdir(tmp_path)) == ["step-00000004.damaged", "step-00000008.damaged"]
    assert newest_checkpoint(tmp_path / "none", told.append) is None
    write_checkpoint(tmp_path, checkpoint(8), {})  # a copy of it, put back, is damaged as well
    flip_a_byte(tmp_path / "step-00000008" / FILES[1])
    with pytest.raises(RunError):
        newest_checkpoint(tmp_path, told.append)
    assert (tmp_path / "step-00000008.damaged-2").is_dir()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_disk_that_cannot_be_read_now_is_asked_again_and_then_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for step in (4, 8):
        write_checkpoint(tmp_path, checkpoint(step), {})
    monkeypatch.setattr(checkpoints, "READ_PAUSES", (0.0, 0.0))
    read, errors = Path.read_bytes, [OSError(number, os.strerror(number))] * 2

    def failing(call: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def ask(path: Path) -> Any:
            if errors:
                raise errors.pop()
            return call(path)

        return ask

    monkeypatch.setattr(Path, "read_bytes", failing(read))
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 8
    monkeypatch.setattr(os, "scandir", failing(os.scandir))
    for _ in ("the list of checkpoints", "a file"):
        errors[:] = [OSError(number, os.strerror(number))] * 3
        with pytest.raises(RunError, match=r"can't be read: .*; 3 attempts in 0 s; nothing was changed"):
            newest_checkpoint(tmp_path, pytest.fail)
        monkeypatch.undo()
        monkeypatch.setattr(checkpoints, "READ_PAUSES", (0.0, 0.0))
        monkeypatch.setattr(Path, "read_bytes", failing(read))
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000008"]


def test_the_newest_are_kept_and_nothing_newer_is_deleted(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2, {})
    for step in (4, 8, 12):
        writer.save(checkpoint(step))
    writer.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000012", "step-00000008"]
    writer.save(checkpoint(10))
    writer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000012", "step-00000010", "step-00000008"]


class SlowDisk:
    """Takes as long to write as the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release, self.write = threading.Event(), checkpoints.write_checkpoint
        monkeypatch.setattr(checkpoints, "write_checkpoint", self._write_late)

    def _write_late(self, *arguments: Any) -> Path:
        assert self.release.wait(240)
        return self.write(*arguments)


def test_a_slow_disk_puts_checkpoints_off_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, writer = SlowDisk(monkeypatch), CheckpointWriter(tmp_path, 2, {})
    times = CheckpointTimes({4, 8}, 1e9, writer)
    assert [step for step in range(1, 5) if times.is_due(step)] == [4]
    writer.save(checkpoint(4))
    times.taken()
    assert not times.is_due(7)
    assert times.is_due(8)  # a write of a moment is waited for
    monkeypatch.setattr(checkpoints, "WRITE_PATIENCE", 0.0)
    assert not times.is_due(9)
    told: list[float] = []

    def progress(seconds: float) -> None:
        told.append(seconds)
        disk.release.set()

    writer.wait(progress)
    assert told
    assert times.is_due(10)  # that of step 8, late
    times.taken()
    assert not times.is_due(11)
    assert CheckpointTimes((), 0.0, writer).is_due(11)  # by the time alone
    writer.close()


def test_a_snapshot_is_taken_at_once_and_written_aside(tmp_path: Path) -> None:
    writer, given = CheckpointWriter(tmp_path, 2, {}), checkpoint(4)
    writer.save(given)
    for tensor in (*given.model.values(), *given.state.values()):
        tensor.zero_()  # the next step
    writer.close()
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert found is not None
    assert torch.equal(found.model["fc.weight"], torch.ones(4, 3))
    assert torch.equal(found.state["optimizer/momentum_buffer/fc.weight"], -torch.ones(4, 3))


def test_a_write_that_fails_leaves_nothing_and_is_told_at_the_next(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2, {})
    writer.save(checkpoint(4))
    writer.wait()
    large = Checkpoint({"fc.weight": torch.zeros(100_000)}, {}, {"step": 8})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        writer.save(large)
        with pytest.raises(RunError, match=r"File too large; the last good one is .*step-00000004; free space"):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    writer.save(large)
    writer.close()
    assert len(list_checkpoints(tmp_path)) == 2


@pytest.fixture(scope="module")
def half_way(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 15 of its 30 steps, with checkpoints of steps 12 and 15."""
    out = tmp_path_factory.mktemp("half") / "out"
    told = run_alone(out, recipe, max_steps=15)
    assert told["steps"] == 15
    return out


@pytest.mark.parametrize(("damaged", "resumed_from"), [((), 15), ((15,), 12)])
def test_more_steps_go_on_from_the_newest_good_checkpoint_to_the_same_weights(
    tmp_path: Path, recipe: Path, half_way: Path, undisturbed: dict[str, Any], damaged: tuple[int, ...],
    resumed_from: int, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    for step in damaged:
        flip_a_byte(out / "checkpoints" / f"step-{step:08d}" / FILES[0])
    told = run_alone(out, recipe)
    assert results(told) == undisturbed
    assert told["resumed_from"] == resumed_from
    assert_told_once(out, STEPS)
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-00000030", "step-00000028"]
    heard = capsys.readouterr().err
    assert heard.count("model.safetensors is damaged (its SHA-256 is not the manifest's)") == len(damaged)


def test_a_run_without_a_good_checkpoint_begins_anew_only_when_told_to(
    tmp_path: Path, recipe: Path, half_way: Path, undisturbed: dict[str, Any]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    for path in list_checkpoints(out / "checkpoints"):
        flip_a_byte(path / FILES[0])
    with pytest.raises(RunError, match=r"no good checkpoint is left"):
        run_alone(out, recipe)
    told = run_alone(out, recipe, fresh=True)
    assert (results(told), told["resumed_from"]) == (undisturbed, 0)
    assert not list((out / "checkpoints").glob("*.damaged"))


def test_checkpoints_come_by_the_clock_too(tmp_path: Path, recipe: Path) -> None:
    options = RuntimeOptions(checkpoint_every=Duration(20, "st"), checkpoint_minutes=1e-9, keep_checkpoints=9)
    run_alone(tmp_path, recipe, options=options, max_steps=5)
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")] == ["5", "4", "3", "2", "1"]


def test_fewer_steps_than_done_are_refused(tmp_path: Path, recipe: Path, half_way: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    with pytest.raises(UserError, match=r"--max-steps 10: the run in .* has done 15 steps already"):
        run_alone(out, recipe, max_steps=10)


def test_a_checkpoint_of_other_data_or_initial_weights_is_refused(tmp_path: Path, recipe: Path, half_way: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    with pytest.raises(UserError, match=r"other initial weights \(--init\)"):
        run_alone(out, recipe, init=str(half_way / "model.safetensors"))
    progress = out / "checkpoints" / "step-00000015" / FILES[2]
    tree = json.loads(progress.read_text())
    tree["fingerprint"]["train_images"] = 97
    progress.write_text(json.dumps(tree))
    manifest = progress.with_name(MANIFEST)
    sums = json.loads(manifest.read_text()) | {FILES[2]: hashlib.sha256(progress.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(sums))
    with pytest.raises(UserError, match=r"another data set \(train_images 97, now 96\)"):
        run_alone(out, recipe)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("optimizer/momentum_buffer/fc.weight", None),
        ("gradient_bounds", torch.zeros(3, dtype=torch.float64)),
        ("loss_scale", None),
    ],
)
def test_a_state_that_lacks_a_tensor_is_refused(
    tmp_path: Path, recipe: Path, half_way: Path, name: str, change: torch.Tensor | None
) -> None:
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    path = out / "checkpoints" / "step-00000015" / FILES[1]
    tensors = {key: tensor for key, tensor in load_weights(path)[0].items() if key != name}
    save_file(tensors if change is None else {**tensors, name: change}, path)
    manifest = path.with_name(MANIFEST)
    sums = json.loads(manifest.read_text()) | {FILES[1]: hashlib.sha256(path.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(sums))
    with pytest.raises(UserError, match=f"checkpoint of step 15: .*'{name}'"):
        run_alone(out, recipe)


def changed_progress(out: Path, changes: dict[str, Any]) -> None:
    """The newest checkpoint says something else of its run, and its manifest that all is well."""
    folder = out / "checkpoints" / "step-00000015"
    (folder / FILES[2]).write_text(json.dumps(json.loads((folder / FILES[2]).read_text()) | changes))
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    (folder / MANIFEST).write_text(json.dumps(sums))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"step": "15"}, "step: Input should be a valid integer"),
        ({"evaluated": -1}, "evaluated: Input should be greater than or equal to 0"),
        ({"seconds": [1]}, "seconds: Input should be a valid number"),
        ({"totals": {"samples": {}}}, "totals.samples: Input should be a valid integer"),
        ({"fingerprint": None}, "fingerprint: "),
        ({"other_conditions": [7]}, "other_conditions.0: "),
    ],
)
def test_a_strangers_checkpoint_is_refused_in_one_line(
    tmp_path: Path, recipe: Path, half_way: Path, changes: dict[str, Any], line: str
) -> None:
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    changed_progress(out, changes)
    with pytest.raises(UserError, match=rf"the checkpoint of step 15 is damaged \({line}") as caught:
        run_alone(out, recipe)
    assert "\n" not in str(caught.value)


def test_a_strangers_checkpoint_folder_leads_nowhere(
    tmp_path: Path, recipe: Path, half_way: Path, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(half_way, out)
    for number, name in enumerate((*FILES, MANIFEST)):  # newer ones: each has a file that never ends
        folder = out / "checkpoints" / f"step-{20 + number:08d}"
        shutil.copytree(out / "checkpoints" / "step-00000015", folder)
        (folder / name).unlink()
        if number % 2:
            os.mkfifo(folder / name)
        else:
            (folder / name).symlink_to("/dev/zero")
    (out / "checkpoints" / "step-00000099").symlink_to(out / "checkpoints")
    told = run_alone(out, recipe)
    assert (results(told), told["resumed_from"]) == (undisturbed, 15)
    assert capsys.readouterr().err.count(" is no file); it is set aside as step-000000") == 4


def test_init_from_either_kind_of_file(tmp_path: Path, recipe: Path, half_way: Path) -> None:
    weights, _ = load_weights(half_way / "model.safetensors")
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in weights.items()}}, tmp_path / "w.pth")
    first = run_alone(tmp_path / "a", recipe, init=str(half_way / "model.safetensors"), max_steps=3)
    second = run_alone(tmp_path / "b", recipe, init=str(tmp_path / "w.pth"), max_steps=3)
    plain = run_alone(tmp_path / "c", recipe, max_steps=3)
    assert first["weights_sha256"] == second["weights_sha256"] != plain["weights_sha256"]


def test_init_of_another_model_is_refused(tmp_path: Path, recipe: Path, half_way: Path) -> None:
    weights, _ = load_weights(half_way / "model.safetensors")
    wrong = {
        "lacks": {name: tensor for name, tensor in weights.items() if name != "fc.bias"},
        "holds": {**weights, "other": torch.zeros(1)},
        "is of shape": {**weights, "fc.bias": torch.zeros(9)},
    }
    for number, (word, tensors) in enumerate(wrong.items()):
        path = tmp_path / f"{number}.safetensors"
        save_file(tensors, path)
        with pytest.raises(UserError, match=word):
            run_alone(tmp_path / "out", recipe, init=str(path))


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(Malicious.mark),)

    mark = Path()


def test_a_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, recipe: Path) -> None:
    Malicious.mark = tmp_path / "executed"
    torch.save({"fc.weight": Malicious()}, tmp_path / "w.pth")
    with pytest.raises(UserError, match=r"w.pth: can't be read as weights .*give a .safetensors or a .pth of tensors"):
        run_alone(tmp_path / "out", recipe, init=str(tmp_path / "w.pth"))
    assert not Malicious.mark.exists()
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert Malicious.mark.exists()  # it would have been


@pytest.mark.parametrize("reduction", ["exact", "float32", "float16", "bfloat16"])
def test_a_resumed_run_ends_as_the_undisturbed_one_with_every_reduction(
    tmp_path: Path, recipe: Path, reduction: str
) -> None:
    flags = (f"reduction={reduction}", "polish=null")
    whole = run_alone(tmp_path / "whole", recipe, *flags, max_steps=8)
    run_alone(tmp_path / "cut", recipe, *flags, max_steps=4)
    resumed = run_alone(tmp_path / "cut", recipe, *flags, max_steps=8)
    assert resumed["resumed_from"] == 4
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_too_many_replaced_images_end_the_run_before_the_step_changes_anything(tmp_path: Path, recipe: Path) -> None:
    torn = ("data.source=tests.train.sources:Torn", "data.classes=4", "data.max_replaced=0.001", "polish=null")
    with pytest.raises(RunError, match="could not be decoded"):
        run_alone(tmp_path, recipe, *torn)
    newest = newest_checkpoint(tmp_path / "checkpoints", print)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    steps = [event["step"] for event in events if "event" not in event]
    assert (newest.step if newest is not None else 0) == (steps[-1] if steps else 0)


def test_a_finished_run_is_no_result_of_other_initial_weights(tmp_path: Path, recipe: Path, half_way: Path) -> None:
    out = tmp_path / "out"
    run_alone(out, recipe, max_steps=2)
    job = Job(read_run_recipe(out / "recipe.yaml"), RuntimeOptions(), "cpu", out, max_steps=2)
    assert finished(job)["steps"] == 2
    with pytest.raises(UserError, match=r"other initial weights"):
        finished(replace(job, init=str(half_way / "model.safetensors")))


def test_a_tensor_with_two_names_is_written_under_both(tmp_path: Path) -> None:
    shared = torch.nn.Linear(2, 2)
    network = torch.nn.Sequential(shared, torch.nn.ReLU(), shared)
    save_weights(tmp_path / "w.safetensors", network.state_dict(), {})
    tensors, _ = load_weights(tmp_path / "w.safetensors")
    assert tensors.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert all(torch.equal(tensors[f"{place}.weight"], shared.weight) for place in (0, 2))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_rights_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        folder = write_checkpoint(tmp_path, Checkpoint({"w": torch.zeros(2)}, {}, {"step": 1}), {})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}


def test_what_is_not_finite_is_null_in_every_json_file() -> None:
    told = json_text({"loss": math.inf, "times": [math.nan, 0.5], "steps": (3, -math.inf)})
    assert json.loads(told, parse_constant=pytest.fail) == {"loss": None, "times": [None, 0.5], "steps": [3, None]}
    # With NCCL nobody can tell how long messages were under way; a run that is resumed doesn't know it either.
    step = SimpleNamespace(start=0, batch=12)
    times = StepTimes(1.0, 0.1, 0.2, on_way_seconds=math.nan, update_seconds=0.1)
    stats = SimpleNamespace(
        step=step,
        times=times,
        loss=1.0,
        replaced=0,
        redone=0,
        skipped=[],
        audited=0,
        balance=None,
        taken_over=None,
        left_out=0,
        images_left_out=0,
        underflow=0.0,
    )
    totals = StepTotals()
    totals.add(stats)
    resumed = StepTotals(**json.loads(json_text(asdict(totals))))
    resumed.add(stats)
    assert resumed.as_summary()["hidden_share"] is None

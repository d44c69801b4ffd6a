"""Checkpoints: whole or not there, checked when read, the newest few kept; a run goes on from the newest good one."""

import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from torusgd.errors import RunError, UserError
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.train.build import Job
from torusgd.train.checkpoint import (
    FILES,
    MANIFEST,
    Checkpoint,
    CheckpointWriter,
    list_checkpoints,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from torusgd.train.run import finished
from torusgd.train.run_dir import read_run_recipe
from torusgd.weights import load_weights

from .processes import RECIPE, STEPS, assert_told_once, results, run_alone


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
    assert told[0].endswith("; falling back to step-00000004")
    assert "\n" not in told[0]


def test_when_all_are_damaged_it_says_so(tmp_path: Path) -> None:
    for step in (4, 8):
        write_checkpoint(tmp_path, checkpoint(step), {})
        flip_a_byte(tmp_path / f"step-{step:08d}" / FILES[1])
    told: list[str] = []
    assert newest_checkpoint(tmp_path, told.append) is None
    assert told[1].endswith("; none is left: starting from the beginning")
    assert newest_checkpoint(tmp_path / "none", told.append) is None
    assert len(told) == 2


def test_the_newest_are_kept_and_damaged_later_ones_make_room(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 2, {})
    for step in (4, 8, 12):
        writer.save(checkpoint(step))
    writer.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000012", "step-00000008"]
    flip_a_byte(tmp_path / "step-00000012" / FILES[0])
    # The run goes on from step 8, and is asked to stop at 10: both good ones must stay.
    writer.save(checkpoint(10))
    writer.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010", "step-00000008"]


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
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "faults.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def half_way(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 15 of its 30 steps, with checkpoints of steps 12 and 15."""
    out = tmp_path_factory.mktemp("half") / "out"
    told = run_alone(out, recipe, max_steps=15)
    assert told["steps"] == 15
    return out


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(run_alone(tmp_path_factory.mktemp("whole") / "out", recipe))


@pytest.mark.parametrize(("damaged", "resumed_from"), [((), 15), ((15,), 12), ((12, 15), 0)])
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
    assert ("starting from the beginning" in heard) == (len(damaged) == 2)


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

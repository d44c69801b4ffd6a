"""A run that was broken off goes on from its newest good checkpoint, or is refused with the reason."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.messages import refused, refuses
from tests.run.processes import ended_well, results, run_alone
from tests.run.runs import events, flip_a_byte, run_here
from torusgd.errors import RunError, UserError
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.section import Duration
from torusgd.rundir.checkpoint import FILES, MANIFEST, list_checkpoints, newest_checkpoint
from torusgd.step.records import parse_records, states_of
from torusgd.weights import load_weights


@pytest.fixture(scope="module")
def half_way(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 15 of its 30 steps, with checkpoints of steps 12 and 15."""
    out = tmp_path_factory.mktemp("half") / "out"
    assert run_alone(out, recipe, max_steps=15)["steps"] == 15
    return out


@pytest.fixture
def out(tmp_path: Path, half_way: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(half_way, tmp_path / "out"))


def renew_manifest(file: Path) -> None:
    """The manifest of a checkpoint says that all is well with a file that was changed."""
    manifest = file.with_name(MANIFEST)
    sums = json.loads(manifest.read_text()) | {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(sums))


@pytest.mark.parametrize("is_damaged", [False, True])
def test_more_steps_go_on_from_the_newest_good_checkpoint(recipe, out: Path, undisturbed, is_damaged, capsys) -> None:
    if is_damaged:
        flip_a_byte(out / "checkpoints" / "step-00000015" / FILES[0])
    run_alone(out, recipe)
    assert ended_well(out, undisturbed)["resumed_from"] == (12 if is_damaged else 15)
    assert [path.name for path in list_checkpoints(out / "checkpoints")] == ["step-00000030", "step-00000028"]
    damage = "model.safetensors is damaged (its SHA-256 is not the manifest's)"
    assert capsys.readouterr().err.count(damage) == is_damaged


def test_a_run_without_a_good_checkpoint_needs_fresh(recipe: Path, out: Path, undisturbed: dict[str, Any]) -> None:
    for path in list_checkpoints(out / "checkpoints"):
        flip_a_byte(path / FILES[0])
    refuses("damaged checkpoints alone", run_alone, out, recipe, kind=RunError, TMP=out / "checkpoints")
    told = run_alone(out, recipe, fresh=True)
    assert (results(told), told["resumed_from"]) == (undisturbed, 0)
    assert not list((out / "checkpoints").glob("*.damaged"))


def test_checkpoints_come_by_the_clock_too(tmp_path: Path, recipe: Path) -> None:
    options = RuntimeOptions(checkpoint_every=Duration(20, "st"), checkpoint_minutes=1e-9, keep_checkpoints=9)
    run_alone(tmp_path, recipe, options=options, max_steps=5)
    assert [path.name[-1] for path in list_checkpoints(tmp_path / "checkpoints")] == ["5", "4", "3", "2", "1"]


def test_a_checkpoint_of_other_data_weights_or_more_steps_is_refused(recipe: Path, out: Path, tmp_path: Path) -> None:
    refuses("fewer steps than done", run_alone, out, recipe, max_steps=10, about="--max-steps 10", TMP=tmp_path)
    with pytest.raises(UserError, match="init_sha256"):
        run_alone(out, recipe, init=str(out / "model.safetensors"))
    assert (out / "summary.json").exists(), "a refused command removes no result"
    fingerprint = json.loads((out / "checkpoints" / "step-00000015" / FILES[2]).read_text())["fingerprint"]
    change_progress(out, fingerprint=fingerprint | {"train_images": 97})
    refuses("a checkpoint of more images", run_alone, out, recipe, about="the checkpoint of step 15")


def change_progress(out: Path, **changes: Any) -> None:
    """As somebody would who renews the manifest, too."""
    path = out / "checkpoints" / "step-00000015" / FILES[2]
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    renew_manifest(path)


@pytest.mark.parametrize("name", ["optimizer/momentum_buffer/fc.weight", "gradient_bounds", "loss_scale"])
def test_a_state_without_a_tensor_is_refused(recipe: Path, out: Path, name: str) -> None:
    path = out / "checkpoints" / "step-00000015" / FILES[1]
    tensors = load_weights(path)[0]
    whole = tensors.pop(name)
    save_file(tensors | ({name: whole[:3].clone()} if name == "gradient_bounds" else {}), path)
    renew_manifest(path)
    with pytest.raises(UserError, match=f"'{name}'"):
        run_alone(out, recipe)


@pytest.mark.parametrize(
    "changes",
    [
        *({"step": "15"}, {"evaluated": -1}, {"seconds": [1]}, {"totals": {"samples": {}}}, {"fingerprint": None}),
        {"other_conditions": [7]},
    ],
)
def test_a_strangers_checkpoint_is_refused_in_one_line(recipe: Path, out: Path, changes: dict[str, Any]) -> None:
    change_progress(out, **changes)
    refuses(f"a checkpoint with {changes}", run_alone, out, recipe, about="the checkpoint of step 15")


def test_a_strangers_checkpoint_folder_leads_nowhere(
    recipe: Path, out: Path, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate((*FILES, MANIFEST)):  # newer ones: each has a file that never ends
        folder = out / "checkpoints" / f"step-{20 + number:08d}"
        shutil.copytree(out / "checkpoints" / "step-00000015", folder)
        (folder / name).unlink()
        os.mkfifo(folder / name) if number % 2 else (folder / name).symlink_to("/dev/zero")
    (out / "checkpoints" / "step-00000099").symlink_to(out / "checkpoints")
    told = run_alone(out, recipe)
    assert (results(told), told["resumed_from"]) == (undisturbed, 15)
    assert capsys.readouterr().err.count(" is no file); it is set aside as step-000000") == 4


@pytest.mark.parametrize("name", ["records.jsonl", "events.jsonl"])
def test_a_pipe_in_place_of_a_file_of_the_run_is_not_waited_for(name: str, recipe: Path, out: Path) -> None:
    (out / name).unlink(missing_ok=True)
    os.mkfifo(out / name)
    with pytest.raises(RunError, match=f"{name}: can't be (read: {name} is no file|written)"):
        run_alone(out, recipe, options=RuntimeOptions(verify_every=Duration(5, "st")))


def test_records_that_are_not_understood_are_set_aside_with_a_line(recipe: Path, out: Path, capsys) -> None:
    """As those of another version, or that a disk has damaged."""
    path = out / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1:1] = [json.dumps({"step": 0, "before": "", "record": "of another kind"}) + "\n"]
    path.write_text("".join(lines))
    run_alone(out, recipe)
    said = "records.jsonl: line 2 is no record; it is set aside as records.jsonl.damaged, and goes on behind"
    assert said in capsys.readouterr().err
    assert (out / "records.jsonl.damaged").read_text() == "".join(lines)
    found, _, problem = parse_records(path.read_text())
    assert (max(states_of(found)), problem) == (30, "")


@pytest.mark.parametrize(
    "changes",
    [
        *(f"reduction={reduction}" for reduction in ("exact", "float32", "float16", "bfloat16")),
        "model.batch_norm_workers=each; stages.0.extra_pass=true",
        "average={half_life: 2st, every: 2}",
    ],
)
def test_a_resumed_run_ends_as_the_undisturbed_one(tmp_path: Path, recipe: Path, changes: str) -> None:
    flags = (*changes.split("; "), "polish=null")
    whole = run_alone(tmp_path / "whole", recipe, *flags, max_steps=8)
    run_alone(tmp_path / "cut", recipe, *flags, max_steps=4)
    resumed = run_alone(tmp_path / "cut", recipe, *flags, max_steps=8)
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (4, whole["weights_sha256"])


def test_too_many_replaced_images_end_the_run_before_the_step_changes_anything(tmp_path: Path, recipe: Path) -> None:
    torn = ("data.source=tests.run.sources:Torn", "data.classes=4", "data.max_replaced=0.001", "polish=null")
    with pytest.raises(RunError, match=r"data\.max_replaced"):
        run_alone(tmp_path, recipe, *torn)
    steps = [event["step"] for event in events(tmp_path) if "event" not in event]
    newest = newest_checkpoint(tmp_path / "checkpoints", pytest.fail)
    assert (newest.step if newest else 0) == (steps[-1] if steps else 0)


def test_of_weights_that_are_not_finite_no_checkpoint_is_made(tmp_path: Path) -> None:
    """The last step's update has no step after it whose gradients would tell."""
    rate = "rate={lr: 1e308, warmup: {length: 3st, start: 0.0}}"
    options = RuntimeOptions(checkpoint_every=Duration(1, "st"))
    with refused("weights that are not finite", kind=RunError):
        run_here(tmp_path, rate, "optimizer={name: sgd}", options=options, max_steps=2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]

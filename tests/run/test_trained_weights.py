"""Runs that start from weights, of other classes, of another file, or refused; those of a stranger run no code."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.disks import blind
from tests.messages import refused, refuses
from tests.run.runs import DIGITS_NET, TINY, run_here
from tests.step.trainers import job_of, run_of
from torusgd.errors import UserError
from torusgd.models import build_model
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import Model
from torusgd.run.run import Run
from torusgd.run.trained_weights import check_initial, find_weights, open_trained, read_initial
from torusgd.rundir.checkpoint import Checkpoint, write_checkpoint
from torusgd.runtime import resolve_auto
from torusgd.weights import Tensors, save_weights

SHORT = (DIGITS_NET, "stages=[{until: 2st, images_per_worker: 3}]", "evaluate.every=null", "polish=null")


def tiny() -> Any:
    return resolve_auto(load_recipe("digits", [*TINY, DIGITS_NET]).recipe, "cpu")


def weights(classes: int = 4, **options: Any) -> Tensors:
    options = {**load_recipe("digits").recipe.model.options, **options}
    network = Model(name="digits-net", options=options)
    return build_model(network, classes=classes, channels=1, image_size=8, seed=5).state_dict()


def metadata(**names: str) -> dict[str, str]:
    """Of a weight file, with other names in its recipe; `model_name` stands for model.name."""
    tree = tiny().as_dict()
    for key, name in names.items():
        section, _, last = key.partition("_")
        tree[section][last] = name
    return {"recipe": json.dumps(tree), "classes": json.dumps(["0", "1", "2", "3"])}


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has a module `trap`; the file that is returned exists once it was imported."""
    sprung = tmp_path / "sprung"
    code = f"open({str(sprung)!r}, 'w').close()\ndef factory(classes, channels, **options):\n    return {{}}\n"
    (tmp_path / "trap.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return sprung


@pytest.mark.parametrize("command", ["eval", "polish"])
@pytest.mark.parametrize("named", ["model.name trap:factory", "model.name torch.hub:load", "data.source trap:factory"])
@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_metadata_that_names_code_is_refused(tmp_path: Path, run_cli, trap: Path, command, named: str, kind) -> None:
    key, name = named.split()
    described = metadata(**{key.replace(".", "_"): name})
    if kind == "file":
        given = tmp_path / "model.safetensors"
        save_weights(given, weights(), described)
    else:
        given = write_checkpoint(
            tmp_path, Checkpoint({f"model/{name}": each for name, each in weights().items()}, {"step": 1}), described
        )
    path = list(sys.path)
    code, _, err = run_cli(command, given)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"names {key} '{name}'" in err
    assert f"give --set {key}=package.module:factory" in err
    assert not trap.exists()
    assert sys.path == path


def test_the_user_may_name_the_code_that_the_metadata_may_not(tmp_path: Path, trap: Path) -> None:
    given = tmp_path / "model.safetensors"
    save_weights(given, weights(), metadata(model_name="trap:factory", data_source="tests.run.sources:tiny"))
    with pytest.raises(UserError, match=r"data\.source"):
        open_trained(given, None, None, None, ["model.name=digits-net"])
    opened = open_trained(given, None, None, None, ["model.name=digits-net", "data.source=synthetic"])
    assert opened.recipe.model.name == "digits-net"
    assert not trap.exists()
    with pytest.raises(UserError, match="trap:factory"):
        open_trained(given, None, None, None, ["model={name: 'trap:factory'}", "data.source=synthetic"])
    assert trap.exists()


class Bomb:
    """What a pickle of it does where it is read by `pickle.load`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


def test_weights_to_start_from_run_nothing(tmp_path: Path, trap: Path) -> None:
    torch.save({"state_dict": weights(), "bomb": Bomb()}, tmp_path / "bomb.pth")
    save_weights(tmp_path / "init.safetensors", weights(), metadata(model_name="trap:factory"))
    bomb = tmp_path / "bomb.pth"
    with refused("a pickle that holds code", str(bomb), UserError, **{"TMP/w.pth": bomb}):
        start(tmp_path / "one", bomb)
    assert start(tmp_path / "two", tmp_path / "init.safetensors").steps == 1  # its metadata is not read
    assert not trap.exists()
    torch.load(bomb, weights_only=False)
    assert Path("sprung").exists()  # it would have been


def start(out: Path, init: Path) -> Run:
    run = run_of(job_of(recipe=tiny(), out=out, init=str(init), max_steps=1))
    run.run()
    return run


@pytest.mark.parametrize(
    "described",
    [
        *({"recipe": text} for text in ("[1, 2]", "[" * 100_000, json.dumps({**tiny().as_dict(), "data": 3}))),
        *({**metadata(), "classes": text} for text in ("7", '["a", "b", "c", "d"]')),
    ],
    ids=["list", "nested", "no section", "classes", "other classes"],
)
def test_metadata_of_another_kind_is_one_line(tmp_path: Path, described: dict[str, str]) -> None:
    save_weights(tmp_path / "model.safetensors", weights(), described)
    with pytest.raises(UserError, match=r"^[^\n]*model\.safetensors[^\n]*$"):
        open_trained(tmp_path / "model.safetensors", None, None, None)


@pytest.fixture(scope="module")
def ten_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the network for 10 classes, where the recipe's data has 4."""
    path = tmp_path_factory.mktemp("init") / "ten.safetensors"
    save_file(weights(10), path)
    return path


def test_a_frozen_layer_keeps_its_weights_and_its_statistics(tmp_path: Path, ten_classes: Path) -> None:
    run_here(tmp_path, DIGITS_NET, "model.freeze=[body]", init=str(ten_classes))
    before, after = load_file(ten_classes), load_file(tmp_path / "model.safetensors")
    assert {name for name in after if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("freeze", ["[conf1]", "['*']"])
def test_freezing_what_is_not_there_is_refused(tmp_path: Path, freeze: str) -> None:
    refuses(f"model.freeze={freeze}", run_here, tmp_path, f"model.freeze={freeze}", about="model.freeze")


def test_a_new_head_is_drawn_and_listed(tmp_path: Path, ten_classes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    still = (*SHORT, "rate.lr=1e-30", "rate.warmup=null", "optimizer={name: sgd}")
    summary, _ = run_here(tmp_path / "ours", *still, init=str(ten_classes))
    assert summary["init"]["source"] == str(ten_classes)
    for key, classes in (("left", 10), ("new", 4)):
        shapes = summary["init"][key]
        assert {name: shape[0] for name, shape in shapes.items()} == {"fc.weight": classes, "fc.bias": classes}
    assert len(summary["init"]["taken"]) > 5
    first = json.loads((tmp_path / "ours" / "events.jsonl").read_text().splitlines()[0])
    assert first == {"event": "initial", "step": 0, **summary["init"]}
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("initial weights:")]
    assert "the head is new: fc.bias [4], fc.weight [4, " in said
    run_here(tmp_path / "drawn", *still)
    ours, drawn = (load_file(tmp_path / run / "model.safetensors") for run in ("ours", "drawn"))
    assert torch.equal(ours["fc.weight"], drawn["fc.weight"])
    assert not torch.equal(ours["conv1.weight"], drawn["conv1.weight"])


def test_either_kind_of_file_starts_the_same_run(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "w.safetensors")
    torch.save({"state_dict": {f"module.{name}": each for name, each in weights().items()}}, tmp_path / "w.pth")
    files = (tmp_path / "w.safetensors", tmp_path / "w.pth")
    first, second = (run_here(tmp_path / path.suffix, *SHORT, init=str(path))[0] for path in files)
    plain, _ = run_here(tmp_path / "plain", *SHORT)
    assert first["weights_sha256"] == second["weights_sha256"] != plain["weights_sha256"]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("lacks", lambda: {name: each for name, each in weights().items() if name != "fc.bias"}),
        ("holds", lambda: {**weights(), "other": torch.zeros(1)}),
        ("is of shape", lambda: {**weights(), "fc.bias": torch.zeros(9)}),
        ("is of another body", lambda: weights(10, width=5)),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, case: str, change: Any) -> None:
    path = tmp_path / "w.safetensors"
    save_file(change(), path)
    with refused(f"initial weights of another model: {case}", f"--init {path}", TMP=tmp_path):
        run_here(tmp_path / "out", DIGITS_NET, init=str(path))


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("digits").recipe
    refuses("initial weights that are not there", check_initial, "nowhere", recipe, about="--init nowhere")
    refuses("weights of timm for another network", check_initial, "timm", recipe, about="--init timm")
    for name in ("hf:", "hf:me/net/file", "hf:me/net@"):
        refuses(f"no name of the hub: {name}", check_initial, name, recipe, about=f"--init {name}")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refuses("the hub without its package", read_initial, "hf:me/net", recipe, about="--init hf:me/net")


def test_no_older_checkpoint_is_taken_because_a_disk_fails_a_moment(tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path / "checkpoints", Checkpoint({"model/w": torch.ones(3)}, {"step": step}), {})
    newest = tmp_path / "checkpoints" / "step-00000002" / "model.safetensors"
    assert find_weights(tmp_path) == newest
    with blind(newest):
        refuses("weights that can't be looked for", find_weights, tmp_path, TMP=tmp_path)

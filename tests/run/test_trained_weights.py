"""Weights of a stranger are opened without running what they name."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.messages import refused
from tests.run.runs import TINY
from tests.step.trainers import job_of, run_of
from torusgd.errors import UserError
from torusgd.models import build_model
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import Model
from torusgd.run.run import Run
from torusgd.run.trained_weights import open_trained
from torusgd.rundir.checkpoint import Checkpoint, write_checkpoint
from torusgd.runtime import resolve_auto
from torusgd.weights import Tensors, save_weights

RunCommand = Callable[..., tuple[int, str, str]]


def tiny() -> Any:
    return resolve_auto(load_recipe("digits", TINY).recipe, "cpu")


def tensors() -> Tensors:
    return build_model(Model(name="digits-net"), classes=4, channels=1, image_size=8, seed=0).state_dict()


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
    (tmp_path / "trap.py").write_text(
        f"open({str(sprung)!r}, 'w').close()\ndef factory(classes, channels, **options):\n    return {{}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    return sprung


@pytest.mark.parametrize("command", ["eval", "polish"])
@pytest.mark.parametrize(
    ("key", "name"), [("model_name", "trap:factory"), ("model_name", "torch.hub:load"), ("data_source", "trap:factory")]
)
@pytest.mark.parametrize("kind", ["file", "checkpoint"])
def test_metadata_that_names_code_is_refused(
    tmp_path: Path, run_cli: RunCommand, trap: Path, command: str, key: str, name: str, kind: str
) -> None:
    described = metadata(**{key: name})
    if kind == "file":
        weights = tmp_path / "model.safetensors"
        save_weights(weights, tensors(), described)
    else:
        weights = write_checkpoint(tmp_path, Checkpoint(tensors(), {}, {"step": 1}), described)
    path = list(sys.path)
    code, _, err = run_cli(command, weights)
    assert (code, err.count("\n")) == (2, 1), err
    assert f"names {key.replace('_', '.')} '{name}'" in err
    assert f"give --set {key.replace('_', '.')}=package.module:factory" in err
    assert not trap.exists()
    assert sys.path == path


def test_the_user_may_name_the_code_that_the_metadata_may_not(tmp_path: Path, trap: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_weights(weights, tensors(), metadata(model_name="trap:factory", data_source="tests.run.sources:tiny"))
    with pytest.raises(UserError, match=r"data\.source"):
        open_trained(weights, None, None, None, ["model.name=digits-net"])
    opened = open_trained(weights, None, None, None, ["model.name=digits-net", "data.source=synthetic"])
    assert opened.recipe.model.name == "digits-net"
    assert not trap.exists()
    with pytest.raises(UserError, match="trap:factory"):
        open_trained(weights, None, None, None, ["model={name: 'trap:factory'}", "data.source=synthetic"])
    assert trap.exists()


class Bomb:
    """What a pickle of it does where it is read by `pickle.load`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


def test_weights_to_start_from_run_nothing(tmp_path: Path, trap: Path) -> None:
    torch.save({"state_dict": tensors(), "bomb": Bomb()}, tmp_path / "bomb.pth")
    save_weights(tmp_path / "init.safetensors", tensors(), metadata(model_name="trap:factory"))
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
        {"recipe": "[1, 2]"},
        {"recipe": "[" * 100_000},
        {"recipe": json.dumps({**tiny().as_dict(), "data": 3})},
        {**metadata(), "classes": "7"},
        {**metadata(), "classes": '["a", "b", "c", "d"]'},
    ],
    ids=["list", "nested", "no section", "classes", "other classes"],
)
def test_metadata_of_another_kind_is_one_line(tmp_path: Path, described: dict[str, str]) -> None:
    save_weights(tmp_path / "model.safetensors", tensors(), described)
    with pytest.raises(UserError, match=r"model\.safetensors") as error:
        open_trained(tmp_path / "model.safetensors", None, None, None)
    assert "\n" not in str(error.value)

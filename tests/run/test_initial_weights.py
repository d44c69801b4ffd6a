"""Runs that start from weights: of another number of classes, of another kind of file, or refused; frozen layers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.messages import refused
from tests.run.runs import run_here
from torusgd.models import build_model
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import Model
from torusgd.run.trained_weights import check_initial, read_initial
from torusgd.weights import Tensors

SHORT = ("stages=[{until: 2st, images_per_worker: 3}]", "evaluate.every=null", "polish=null")


def weights(classes: int = 4, **options: Any) -> Tensors:
    options = {**load_recipe("digits").recipe.model.options, **options}
    network = Model(name="digits-net", options=options)
    return build_model(network, classes=classes, channels=1, image_size=8, seed=5).state_dict()


@pytest.fixture(scope="module")
def ten_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the network for 10 classes, where the recipe's data has 4."""
    path = tmp_path_factory.mktemp("init") / "ten.safetensors"
    save_file(weights(10), path)
    return path


def test_a_frozen_layer_keeps_its_weights_and_its_statistics(tmp_path: Path, ten_classes: Path) -> None:
    run_here(tmp_path, "model.freeze=[body]", init=str(ten_classes))
    before, after = load_file(ten_classes), load_file(tmp_path / "model.safetensors")
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert after.keys() - same == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("freeze", ["[conf1]", "['*']"])
def test_freezing_what_is_not_there_is_refused(tmp_path: Path, freeze: str) -> None:
    with refused(f"model.freeze={freeze}", "model.freeze"):
        run_here(tmp_path, f"model.freeze={freeze}")


def test_a_new_head_is_drawn_from_the_seed_and_listed(
    tmp_path: Path, ten_classes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        run_here(tmp_path / "out", init=str(path))


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("digits").recipe
    with refused("initial weights that are not there", "--init nowhere"):
        check_initial("nowhere", recipe)
    with refused("weights of timm for another network", "--init timm"):
        check_initial("timm", recipe)
    for name in ("hf:", "hf:me/net/file", "hf:me/net@"):
        with refused(f"no name of the hub: {name}", f"--init {name}"):
            check_initial(name, recipe)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with refused("the hub without its package", "--init hf:me/net"):
        read_initial("hf:me/net", recipe)

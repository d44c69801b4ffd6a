"""What users of timm bring along: other classes, frozen layers, optimisers, mixing; one hash on 1, 2 and 3 ranks."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comm.gloo_world import run_ranks
from tests.messages import refused
from tests.run.runs import TINY, train_on_ranks
from torusgd.errors import UserError
from torusgd.models import build_model
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Model
from torusgd.run.trained_weights import check_initial, read_initial

# case -> overrides of the tiny digits recipe, whether from the weights of other classes, and the runtime options
CASES: dict[str, tuple[tuple[str, ...], bool, dict[str, Any]]] = {
    "fine-tuned": (
        (
            "model.freeze=[conv1, bn1]",
            "optimizer={name: adamw, head_lr: 10.0, layer_decay: 0.5, weight_decay: 0.1}",
            "rate.lr=0.01",
            "clip_grad_norm=0.5",
        ),
        True,
        {},
    ),
    "head alone": (("model.freeze=[body]", "data.augment.mixup=0.2"), True, {}),
    "adamw": (("optimizer={name: adamw, beta2: 0.99, weight_decay: 0.1}", "rate.lr=0.01"), False, {}),
    "lamb": (("optimizer={name: lamb, weight_decay: 0.1}", "rate.lr=0.01", "clip_grad_norm=1.0"), False, {}),
    "clipped shards": (("clip_grad_norm=0.2",), False, {"update": "sharded"}),
    "mixed": (("data.augment={mixup: 0.5, cutmix: 1.0, erase: 0.5, policy: randaugment}",), False, {}),
    "repeated": (("data.augment={repeats: 3, cutmix: 1.0, policy: trivialaugment}",), False, {}),
}
SHORT = ("stages=[{until: 2st, images_per_worker: 3}]", "evaluate.every=null", "polish=null")
"""two steps, and one evaluation at the end: what is compared are the weights"""


def train(
    out: Path, *overrides: str, init: str | None = None, max_steps: int | None = None, **options: Any
) -> dict[str, Any]:
    """One run on the ranks of this process's group; rank 0's summary."""
    recipe = load_recipe("digits", [*TINY, *overrides]).recipe
    recipe = recipe.resolve(precision="float32", memory_format="channels_last")
    return train_on_ranks(out, recipe, RuntimeOptions(**options), init=init, max_steps=max_steps)


def train_cases(out: str, init: str, names: Iterable[str] = tuple(CASES)) -> dict[str, str]:
    """The weights' hash of each case."""
    return {
        name: train(Path(out, name), *SHORT, *overrides, init=init if other else None, **options)["weights_sha256"]
        for name in names
        for overrides, other, options in [CASES[name]]
    }


@pytest.fixture(scope="module")
def ten_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the network for 10 classes, where the recipe's data has 4."""
    options = load_recipe("digits").recipe.model.options
    model = build_model(Model(name="digits-net", options=options), classes=10, channels=1, image_size=8, seed=5)
    path = tmp_path_factory.mktemp("init") / "ten.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, ten_classes: Path) -> dict[str, str]:
    return train_cases(str(tmp_path_factory.mktemp("alone")), str(ten_classes))


def train_shards(out: str) -> dict[str, str]:
    """The hashes of AdamW and LAMB with each rank updating a shard, AdamW's second step after a resume."""
    options: dict[str, Any] = {"update": "sharded", "allreduce": "ring"}
    train(Path(out, "adamw"), *SHORT, *CASES["adamw"][0], max_steps=1, **options)
    return {
        name: train(Path(out, name), *SHORT, *CASES[name][0], **options)["weights_sha256"] for name in ("adamw", "lamb")
    }


def on_two_ranks(out: str, init: str) -> tuple[dict[str, str], dict[str, str]]:
    shards = train_shards(f"{out}/shards")
    return train_cases(f"{out}/whole", init, [name for name in CASES if name not in shards]), shards


def test_two_ranks_end_with_the_weights_of_one_also_in_shards_from_a_checkpoint(
    tmp_path: Path, alone: dict[str, str], ten_classes: Path
) -> None:
    whole, shards = run_ranks(2, on_two_ranks, str(tmp_path), str(ten_classes))[0]
    assert whole | shards == alone


def test_three_ranks_end_with_the_weights_of_one(tmp_path: Path, alone: dict[str, str], ten_classes: Path) -> None:
    assert run_ranks(3, train_cases, str(tmp_path), str(ten_classes))[0] == alone


def test_each_case_is_another_run(alone: dict[str, str]) -> None:
    assert len(set(alone.values())) == len(CASES)


def test_a_frozen_layer_keeps_its_weights_and_its_statistics(tmp_path: Path, ten_classes: Path) -> None:
    train(tmp_path, *CASES["head alone"][0], init=str(ten_classes))
    before, after = load_file(ten_classes), load_file(tmp_path / "model.safetensors")
    same = {name for name in after if torch.equal(before[name], after[name])}
    assert after.keys() - same == {"fc.weight", "fc.bias"}


@pytest.mark.parametrize("freeze", ["[conf1]", "['*']"])
def test_freezing_what_is_not_there_is_refused(tmp_path: Path, freeze: str) -> None:
    with refused(f"model.freeze={freeze}", "model.freeze"):
        train(tmp_path, f"model.freeze={freeze}")


class TestInitialWeights:
    def test_a_new_head_is_told_and_listed(
        self, tmp_path: Path, ten_classes: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        summary = train(tmp_path, "polish=null", init=str(ten_classes))
        assert summary["init"]["source"] == str(ten_classes)
        assert {name: shape[0] for name, shape in summary["init"]["left"].items()} == {"fc.weight": 10, "fc.bias": 10}
        assert {name: shape[0] for name, shape in summary["init"]["new"].items()} == {"fc.weight": 4, "fc.bias": 4}
        assert len(summary["init"]["taken"]) > 5
        first = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
        assert first == {"event": "initial", "step": 0, **summary["init"]}
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("initial weights:")]
        assert len(said) == 1
        assert "the head is new: fc.bias [4], fc.weight [4, " in said[0]

    def test_the_head_is_drawn_from_the_seed(self, tmp_path: Path, ten_classes: Path) -> None:
        frozen = ("rate.lr=1e-30", "rate.warmup=null", "polish=null", "optimizer={name: sgd}")
        summary = train(tmp_path / "a", *frozen, init=str(ten_classes))
        plain = train(tmp_path / "b", *frozen)
        assert summary["weights_sha256"] != plain["weights_sha256"]
        ours, drawn = (load_file(tmp_path / run / "model.safetensors") for run in "ab")
        assert torch.equal(ours["fc.weight"], drawn["fc.weight"])
        assert not torch.equal(ours["conv1.weight"], drawn["conv1.weight"])

    def test_a_body_of_another_network_is_refused(self, tmp_path: Path) -> None:
        narrow = Model(name="digits-net", options={"width": 5})
        model = build_model(narrow, classes=10, channels=1, image_size=8, seed=5)
        save_file(model.state_dict(), tmp_path / "w.safetensors")
        with pytest.raises(UserError, match=r"conv1\.weight"):
            train(tmp_path / "out", init=str(tmp_path / "w.safetensors"))

    def test_mistakes_are_told_in_one_line(self) -> None:
        recipe = load_recipe("digits").recipe
        with refused("initial weights that are not there", "--init nowhere"):
            check_initial("nowhere", recipe)
        with refused("weights of timm for another network", "--init timm"):
            check_initial("timm", recipe)
        for name in ("hf:", "hf:me/net/file", "hf:me/net@"):
            with refused(f"no name of the hub: {name}", f"--init {name}"):
                check_initial(name, recipe)

    def test_the_hub_needs_its_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with refused("the hub without its package", "--init hf:me/net"):
            read_initial("hf:me/net", load_recipe("digits").recipe)

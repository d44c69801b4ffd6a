"""Recipes: errors in one line, every field read, equal text equal hash."""

import hashlib
import json
import logging
from pathlib import Path

import pytest
from tests.messages import refused

from torusgd.recipe.load import load_recipe, recipe_source, validate
from torusgd.recipe.schema import Model, Optimizer, Recipe
from torusgd.recipe.section import Duration

MISTAKES = [
    *("sead=3", "stages.1.augmant=false", "stages.0.images_per_worker='8'", "stages.0.images_per_worker=0"),
    *("rate.decay.shap=cosine", "rate.lr=abc", "optimizer.no_decay=[x]", "evaluate.every=5", "evaluate.every=1.5st"),
    *("data.augment.flip=2", "data.augment.shift=0", "data.mean=[1, 2]", "data.resize=4", "data.image_size=0"),
    *("data.image_size=[11, 39, 1]", "data={image_size: [4, 9], resize: 8, source: digits}", "optimizer.name=sgd"),
    *("optimizer.nesterov=true", "stages.0.lr=2.0", "loss_scale.initial=8", "rate.decay.milestones=[1ep]", "stages=[]"),
    "seed=-1",
]


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(override: str) -> None:
    section = override.partition("=")[0].partition(".")[0]
    with refused(f"a recipe with {override}", f"recipe digits: {section}"):
        load_recipe("digits", [override])


def test_an_override_that_can_not_be_put_in_and_an_unknown_recipe_are_one_line() -> None:
    for override in ("stages.9.lr=1", "seed", "name.x=3", "virtual_workers=["):
        with refused(f"a recipe with {override}", f"--set {override}:"):
            load_recipe("digits", [override])
    with refused("a recipe's name with a slip", "recipe 'digit':"):
        load_recipe("digit")


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    path, call = tmp_path / "bad.yaml", "!!python/object/apply:os.system ['true']\n"
    for text in ("a: 1\na: 2\n", "- 1\n", "name: [\n", call, "name: x\n", "name: 2020-01-01\n"):
        path.write_text(text)
        with refused(f"a recipe file: {text!r}", f"recipe {path}:", TMP=tmp_path):
            load_recipe(str(path))


def test_hash_covers_every_key_and_no_runtime(tmp_path: Path) -> None:
    base = load_recipe("digits").recipe
    assert load_recipe("digits", ["seed=1"]).recipe.sha256() != base.sha256()
    path = tmp_path / "with_runtime.yaml"
    path.write_text(recipe_source("digits") + "\nruntime: {workers: 2, checkpoint_every: 50st}\n")
    recipe, runtime = load_recipe(str(path))
    assert recipe.sha256() == base.sha256()
    assert (runtime.workers, runtime.checkpoint_every) == (2, Duration(50, "st"))


def test_a_key_added_with_a_default_moves_no_hash() -> None:
    class NewerOptimizer(Optimizer):
        warm: float = 0.5

    class Newer(Recipe):
        optimizer: NewerOptimizer = NewerOptimizer()
        added: int = 3

    for name in ("digits", "sony-224s"):
        recipe = load_recipe(name).recipe
        newer = validate(Newer, recipe.as_dict(), "newer")
        assert newer.as_dict() != recipe.as_dict()
        assert newer.sha256() == recipe.sha256()
        assert newer.model_copy(update={"added": 4}).sha256() != recipe.sha256()


def test_a_hash_is_of_what_is_said_and_of_the_schema() -> None:
    base = load_recipe("digits").recipe
    assert load_recipe("digits", [f"threads={base.threads}", "column_blocks=1"]).recipe.sha256() == base.sha256()
    whole, none = (load_recipe("digits", [f"polish={value}"]).recipe for value in ("{}", "null"))
    assert whole.sha256() != none.sha256()
    assert load_recipe("digits", ["optimizer.momentum=0.8"]).recipe.sha256() != base.sha256()
    plain = base.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"schema": 1, **plain}, sort_keys=True, separators=(",", ":"))
    assert base.sha256() == hashlib.sha256(text.encode()).hexdigest()


def test_another_model_leaves_out_the_options_of_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        other = load_recipe("resnet50", ["model.name=torchvision:resnet18"]).recipe
    assert other.model == Model(name="torchvision:resnet18")
    assert caplog.messages == [
        "--set model.name=torchvision:resnet18: leaves out the model.options of resnet50: zero_gamma, fan_in"
    ]
    caplog.clear()
    digits = ["model.options.dropout=0.3", "model.name=fashion-net", "model.options.zero_gamma=false"]
    assert load_recipe("digits", digits).recipe.model == Model(name="fashion-net", options={"zero_gamma": False})
    assert len(caplog.messages) == 1
    caplog.clear()
    same = load_recipe("digits", ["model.name=digits-net"]).recipe
    assert same == load_recipe("digits").recipe
    assert not caplog.messages


def test_scientific_numbers_are_numbers_and_auto_is_resolved_into_the_recipe() -> None:
    assert load_recipe("digits", ["rate.lr=1e-3"]).recipe.rate.lr == 1e-3
    assert str(Duration.parse("1e6sa")) == "1000000sa"
    recipe: Recipe = load_recipe("digits", ["precision=auto"]).recipe
    resolved = recipe.resolve(precision="bfloat16", memory_format="channels_last")
    assert (resolved.precision, resolved.memory_format) == ("bfloat16", "channels_last")
    assert recipe.resolve(precision="float32", memory_format="contiguous").precision == "float32"
    assert load_recipe("digits").recipe.resolve(precision="bfloat16", memory_format="auto").precision == "float32"

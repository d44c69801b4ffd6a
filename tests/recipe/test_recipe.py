"""Recipes and schedules: errors in one line, nothing that stands for much, equal text equal hash, rates by formula."""

import hashlib
import json
import logging
import math
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refused, refuses

from torusgd.errors import UserError
from torusgd.recipe.load import load_recipe, parse_yaml, recipe_source, validate
from torusgd.recipe.schedule import Schedule
from torusgd.recipe.schema import Model, Optimizer, Recipe
from torusgd.recipe.section import Duration
from torusgd.untrusted import MOST_YAML, check_archive, check_swelling, parse_json, read_text
from torusgd.weights import load_weights

MISTAKES = [
    *("sead=3", "stages.1.augmant=false", "stages.0.images_per_worker='8'", "stages.0.images_per_worker=0"),
    *("rate.decay.shap=cosine", "rate.lr=abc", "optimizer.no_decay=[x]", "evaluate.every=5", "evaluate.every=1.5st"),
    *("data.augment.flip=2", "data.augment.shift=0", "data.mean=[1, 2]", "data.resize=4", "data.image_size=0"),
    *("data.image_size=[11, 39, 1]", "data={image_size: [4, 9], resize: 8, source: digits}", "optimizer.name=sgd"),
    *("optimizer.nesterov=true", "stages.0.lr=2.0", "loss_scale.initial=8", "rate.decay.milestones=[1ep]", "stages=[]"),
    *("seed=-1", "name=../x", "average={half_life: 0ep}", "rate.decay={shape: cosine, power: 3}"),
    "rate.decay={shape: constant, end: 1ep}",
    # Values of several forms, keys that no section could have, and a block that is no table.
    *(
        "stages.1.lr=cubic",
        "stages.1.lr=-1",
        "data.augment.flip=[1]",
        "model.options.int=[1]",
        "Seed=3",
        "polish.Steps=3",
    ),
    *("runtime.buckets=many", "runtime.buckets=-1", "runtime.buckets=[0]", "runtime.model_parallel=1.5", "runtime=[]"),
    *("runtime.workers_range=[2]", 'name="\\ud800"', "threads=1025"),
]


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(override: str) -> None:
    section = override.partition("=")[0].partition(".")[0]
    about = "recipe digits: " + ("holds" if "\\u" in override else section)
    refuses(f"a recipe with {override}", load_recipe, "digits", [override], about=about)


def test_a_key_with_a_blank_is_quoted() -> None:
    refuses("a key with a blank", load_recipe, "digits", ["seed =3"], about='recipe digits: "seed ": unknown key')


def test_bad_files_unknown_recipes_and_overrides_that_can_not_be_put_in_are_one_line(tmp_path: Path) -> None:
    for override in ("stages.9.lr=1", "seed", "name.x=3", "virtual_workers=["):
        refuses(f"a recipe with {override}", load_recipe, "digits", [override], about=f"--set {override}:")
    with pytest.raises(UserError, match="is no item of that list"):
        load_recipe("digits", ["stages.\u00b2.lr=1"])  # a digit to Python, and no number
    refuses("a batch that is a list", load_recipe, "resnet50", ["batch=[8192]"], about="batch = [8192]:")
    refuses("a recipe's name with a slip", load_recipe, "digit", about="recipe 'digit':")
    path, call = tmp_path / "bad.yaml", "!!python/object/apply:os.system ['true']\n"
    for text in ("a: 1\na: 2\n", "- 1\n", "name: [\n", call, "name: x\n", "name: 2020-01-01\n"):
        path.write_text(text)
        refuses(f"a recipe file: {text!r}", load_recipe, str(path), about=f"recipe {path}:", TMP=tmp_path)


def test_a_hash_is_of_every_key_that_is_said_and_of_the_schema_and_no_runtime(tmp_path: Path) -> None:
    base = load_recipe("digits").recipe
    assert load_recipe("digits", ["seed=1"]).recipe.sha256() != base.sha256()
    path = tmp_path / "with_runtime.yaml"
    path.write_text(recipe_source("digits") + "\nruntime: {workers: 2, checkpoint_every: 50st}\n")
    recipe, runtime = load_recipe(str(path))
    assert recipe.sha256() == base.sha256()
    assert (runtime.workers, runtime.checkpoint_every) == (2, Duration(50, "st"))
    assert load_recipe("digits", [f"threads={base.threads}", "column_blocks=1"]).recipe.sha256() == base.sha256()
    whole, none = (load_recipe("digits", [f"polish={value}"]).recipe for value in ("{}", "null"))
    assert whole.sha256() != none.sha256()
    assert load_recipe("digits", ["optimizer.momentum=0.8"]).recipe.sha256() != base.sha256()
    plain = base.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps({"schema": 1, **plain}, sort_keys=True, separators=(",", ":"))
    assert base.sha256() == hashlib.sha256(text.encode()).hexdigest()


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
    assert load_recipe("digits", ["model.name=digits-net"]).recipe == load_recipe("digits").recipe
    assert not caplog.messages


def test_scientific_numbers_are_numbers_and_auto_is_resolved_into_the_recipe() -> None:
    assert load_recipe("digits", ["rate.lr=1e-3"]).recipe.rate.lr == 1e-3
    assert parse_yaml("[017, 1:30, 81_920]", "a recipe") == ["017", "1:30", 81920]
    assert str(Duration.parse("1e6sa")) == "1000000sa"
    recipe: Recipe = load_recipe("digits", ["precision=auto"]).recipe
    resolved = recipe.resolve(precision="bfloat16", memory_format="channels_last")
    assert (resolved.precision, resolved.memory_format) == ("bfloat16", "channels_last")
    assert recipe.resolve(precision="float32", memory_format="contiguous").precision == "float32"
    assert load_recipe("digits").recipe.resolve(precision="bfloat16", memory_format="auto").precision == "float32"


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(("text", "reason"), [
    ("[" * 3000, "inside one another"),
    ("{a: " * 3000, "inside one another"),
    ("- " * 3000, "inside one another"),
    (ALIASES, "more than 100000 values"),
    ("&a [*a]", "an alias inside of what it stands for"),
    ("9" * 5000, "digits"),
    ("1" + "0" * 30, "beyond 64 bits"),
    ("a" * (MOST_YAML + 1), "longer than"),
    ("!!bool word", "word"),
    ("!!timestamp word", "not valid YAML"),
    ("? [1]\n: 2", "a key must be a word or a number"),
    ("a: &a {b: 1}\nc: {<<: *a}", "the merge key <<"),
    ("!!python/object/apply:os.system [ls]", "could not determine a constructor"),
], ids=lambda value: value[:12])  # fmt: skip
def test_yaml_that_stands_for_much_is_refused(text: str, reason: str) -> None:
    with refused(f"YAML: {reason}", "file:") as error:
        parse_yaml(text, "file")
    assert len(str(error.value)) < 300


def test_yaml_within_the_bounds_is_read_with_its_aliases_and_texts_have_an_end(tmp_path: Path) -> None:
    assert parse_yaml("[" * 19 + "]" * 19, "file") is not None
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]", "file") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
    assert parse_yaml(str(2**63 - 1), "file") == 2**63 - 1
    (tmp_path / "long").write_bytes(b"x" * 11)
    refuses("a text of 11 bytes", read_text, tmp_path / "long", 10, kind=ValueError)
    refuses("a device for a text", read_text, Path("/dev/zero"), kind=ValueError)
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    with refused("a device for a recipe", f"recipe {tmp_path}/zero.yaml:", TMP=tmp_path):
        load_recipe(str(tmp_path / "zero.yaml"))
    refuses("lists in lists", parse_json, "[" * 100_000, kind=ValueError)


def test_a_recipe_holds_no_number_that_nothing_can_be_made_of_and_no_tiny_interval() -> None:
    for item in (
        "stages.0.until=1e999ep", "stages.0.until=1e16ep", "data.mean=[.nan]", "data.mean=[.inf]", "data.std=[.nan]",
        "data.options={noise: .inf}", "data.augment.area=[.nan, 1.0]", "label_smoothing=.nan", "rate.lr=.inf",
        "data.image_size=[8, 65536]", "data.resize=65536", "data.augment.shift=65536", "data.augment.aspect=[1, 1e308]",
        "data.std=[5e-324]", "data.mean=[1e39]", "data.augment.contrast=1e300", "data.augment.operations=1001",
        "virtual_workers=1048577", "runtime.buckets=.inf", "runtime.buckets=1e308", "runtime.timeout=.nan",
    ):  # fmt: skip
        key = item.partition("=")[0]
        about = "runtime: " * key.startswith("runtime.") + key.removeprefix("runtime.")
        refuses(f"no number: {item}", load_recipe, "digits", [item], about=f"recipe digits: {about}")
    schedule, tiny = Schedule(load_recipe("digits").recipe, 1437), Duration.parse("0.0000001ep")
    refuses("an interval that is too short", schedule.boundaries, tiny, about="an interval of 0.0000001ep")
    assert Duration.parse(str(tiny)) == tiny


def test_archives_of_weights_and_compressed_data_may_not_swell(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"fc.weight": torch.ones(1000), "fc.bias": torch.ones(3)}, path)
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    (storage,) = (name for name, data in members.items() if len(data) == 4000)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, bytes(1 << 22) if name == storage else data)
    refuses("weights that swell", load_weights, path, about=f"{path}:", TMP=tmp_path, STORED=path.stat().st_size)
    # Compressed images neither.
    check_swelling(size=1 << 28, stored=1000)
    check_swelling(size=1 << 33, stored=1 << 30)
    refuses("data that swell", check_swelling, size=(1 << 28) + 1, stored=1000, kind=ValueError)


TRAIN = 1437


def schedule(*overrides: str, train_images: int = TRAIN) -> Schedule:
    return Schedule(load_recipe("digits", overrides).recipe, train_images)


@given(
    st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(50, 5000),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
)  # fmt: skip
@settings(max_examples=50)
def test_steps_follow_one_another_and_stages_end_at_the_first_boundary(
    workers: int, images: list[int], train: int, spans: list[int]
) -> None:
    ends = [sum(spans[: i + 1]) * math.ceil(workers * max(images) * 2 / train) for i in range(len(images))]
    stages = ", ".join(f"{{until: {end}ep, images_per_worker: {n}}}" for end, n in zip(ends, images, strict=True))
    plan = schedule(
        f"virtual_workers={workers}", f"stages=[{stages}]", "rate.warmup=null", "evaluate.every=null",
        train_images=train,
    )  # fmt: skip
    position = 0
    for step in plan:
        assert (step.start, step.batch) == (position, workers * step.images_per_worker)
        position += step.batch
    assert position == plan.stop
    for span, end in zip(plan.spans, ends, strict=True):
        assert span.stop >= end * train > span.stop - span.batch
    shares = {plan[0].share(worker) for worker in range(workers)}
    assert shares == {worker * plan[0].images_per_worker for worker in range(workers)}


# Warm-ups and polynomials: tests/recipe/test_records.py.
def test_rates_decay_weight_decay_is_ramped_and_evaluations_come_as_asked() -> None:
    step = schedule("rate.decay={shape: step, milestones: [10ep, 30ep], factor: 0.1}", "rate.warmup=null")
    root = 4.0 * math.sqrt(2)
    assert [step[i].lr for i in (0, 149, 150, 400)] == pytest.approx([4.0, 4.0, 0.4, root * 0.01])
    cosine = schedule("rate.decay={shape: cosine, floor: 0.1, end: 20ep}", "rate.warmup=null")
    assert cosine[0].lr == 4.0
    assert cosine[449].lr == pytest.approx(root * 0.1)
    assert schedule("rate.decay={shape: constant}", "rate.warmup=null")[449].lr == pytest.approx(root)
    ramped = schedule("optimizer.ramp_weight_decay=true")
    assert (schedule()[0].weight_decay_factor, ramped[0].weight_decay_factor) == (1.0, 0.0)
    assert 0 < ramped[10].weight_decay_factor < 1
    plan, evaluate = schedule(), load_recipe("digits", ["evaluate={every: 100st, first: 20st}"]).recipe.evaluate
    assert plan.boundaries(evaluate.every, evaluate.first) == [20, 120, 220, 320, 420, 450]
    assert plan.boundaries(None) == [450]
    assert plan.boundaries(plan.recipe.evaluate.every)[:2] == [math.ceil(n * TRAIN / 96) for n in (5, 10)]
    # As floats 8.3 * 60,000 is above 498,000.
    stages = "stages=[{until: 8.3ep, images_per_worker: 1}]"
    plan = schedule("virtual_workers=500", stages, "rate.warmup=null", train_images=60_000)
    assert len(plan) == plan.boundaries(Duration.parse("8.3ep"))[0] == 996


@settings(max_examples=50)
@given(exact=st.booleans(), batch=st.integers(1, 90), momentum=st.floats(0.0, 0.99), lr=st.floats(0.01, 4.0))
def test_noise_scale_momentum_keeps_the_noise_of_a_reference_run(exact, batch, momentum, lr: float) -> None:
    """Smith and Le, arXiv 1710.06451: lr (N / B - 1) / (1 - m), or lr N / B / (1 - m)."""
    kept = {"exact": exact, "batch": batch, "lr": lr, "momentum": momentum}

    def noise(lr: float, batch: int, momentum: float) -> float:
        return lr * (TRAIN / batch - exact) / (1 - momentum)

    try:
        plan = schedule(f"noise_scale={json.dumps(kept)}", "stages.0.momentum=noise-scale")
    except UserError as error:
        assert "must be in [0, 1)" in str(error)  # noqa: PT017 - a rate so high that no momentum keeps the noise
        return
    for span in plan.spans:
        assert noise(span.lr, span.batch, span.momentum) == pytest.approx(noise(lr, batch, momentum), rel=1e-6)


def test_a_reference_of_a_whole_epoch_has_no_noise_to_keep() -> None:
    with refused("a reference of an epoch", "noise_scale.exact = true:"):
        schedule("noise_scale={exact: true, batch: 5000}", "stages.0.momentum=noise-scale")
    with refused("noise-scale without a reference", "recipe digits: stages.0.momentum:"):
        schedule("stages.0.momentum=noise-scale")
    with refused("a reference that no stage holds", "recipe digits: noise_scale:"):
        schedule("noise_scale.batch=50", one := "stages=[{until: 5ep, images_per_worker: 8}]")
    schedule("noise_scale.batch=50", one, "noise_scale={}")


@pytest.mark.parametrize(("override", "words"), [
    ("stages.1.until=20ep", "stages.1.until = 20ep:"),
    ("stages.1.until=1e15ep", "stages.1.until = 1000000000000000ep:"),
    ("rate.warmup.length=50ep", "rate.warmup.length = 50ep:"),
    ("rate.decay.end=1ep", "rate.decay:"),
    ("rate.decay={shape: step, milestones: [1ep, 2ep], factor: 1e200}", "rate.decay.factor = 1e+200:"),
    ("stages.1.lr=1000.0", "stages.1.momentum = noise-scale:"),
    ("evaluate={every: 5ep, first: 20st}", "evaluate.first = 20st:"),
])  # fmt: skip
def test_impossible_schedules_are_one_line(override: str, words: str) -> None:
    with refused(f"a schedule: {override}", words):
        plan = schedule(override)
        plan.boundaries(plan.recipe.evaluate.every, plan.recipe.evaluate.first)

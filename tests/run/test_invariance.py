"""The thesis: weights, loss, top-1 and counts are equal, bit for bit, on any number of ranks."""

import re
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from safetensors.torch import save_file

from tests.comm.gloo_world import run_ranks
from tests.data.pictures import write_folder
from tests.data.tables import write_lists, write_parquet
from tests.data.tars import write_shards
from tests.run.processes import summary
from tests.run.runs import SMALL, TINY, events
from tests.step.trainers import train_on_ranks
from torusgd.comm import exact_sum
from torusgd.comm.groups import group_of
from torusgd.data.tar_index import FILE, make_index, write_index
from torusgd.gradients.integer_sum import HEADROOM, IntegerGradientSum
from torusgd.models import build_model
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Model


class Case(NamedTuple):
    overrides: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    recipe: str = "digits"
    data: str = ""  # folder of the images, below that of `given`
    init: str = ""  # file of initial weights there


# Real digits over a change of stage, with dropout, shifts, batch norm, LARS, and a polish of uneven batches.
DIGITS = (
    SMALL, "virtual_workers=7", "data.eval_images=70",
    "stages=[{until: 3st, images_per_worker: 3}, {until: 5st, images_per_worker: 5, lr: sqrt, momentum: noise-scale}]",
    "rate={lr: 4.0, warmup: {length: 2st}}", "evaluate={every: 3st, images_per_chunk: 50}",
    "polish={images: 90, images_per_batch: 40}",
)  # fmt: skip
SENT: dict[str, dict[str, Any]] = {
    "small buckets": {"buckets": 0.001}, "halving-doubling": {"allreduce": "halving-doubling"},
    "torus": {"allreduce": "torus", "buckets": 0.01},
}  # fmt: skip
"""cases that differ in what is sent alone, and so have the weights of `float32`"""
OF_DIGITS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("precision=bfloat16",),
    "float16": (  # which a CPU computes slowly
        "precision=float16", "loss_scale.initial=1.0e+12",
        "stages=[{until: 1st, images_per_worker: 3}, {until: 3st, images_per_worker: 2}]",
    ),
    "torn images": (
        "data={source: tests.run.sources:Torn, image_size: 8, channels: 1, mean: [0.5], std: [0.25]}",
        "data.max_replaced=1.0",
    ),
    "keys of the records": (
        "data.resize=10", "data.augment={crop: random, flip: 0.5}", "model.batch_norm_momentum=1.0",
        "noise_scale={exact: true, batch: 50}", "optimizer.bias_rate=2.0", "optimizer.variant=nnabla",
        "optimizer.eps=1.0e-6", "evaluate={every: 3st, images_per_chunk: 50, image_size: 10, resize: 12}",
    ),
    "fewer epochs": (
        "stages=[{until: 3st, images_per_worker: 3, image_size: 6, resize: 7}, {until: 5st, images_per_worker: 5}]",
        "data.augment={crop: shift, shift: 1, flip: alternating, rotation: 0.3, distortion: 0.2, brightness: 0.1, "
        "contrast: 1.2, noise: 0.05}",
        "average={half_life: 2st, every: 2}", "loss=binary-cross-entropy", "polish={steps: 3, images_per_batch: 7}",
        "evaluate={every: 3st, images_per_chunk: 50, flip: true}",
    ),
    "batch norm as Fujitsu's": (
        "model.batch_norm_workers=each", "data.augment={crop: shift, shift: 1}", "polish={steps: 2}",
        "stages=[{until: 2st, images_per_worker: 3, extra_pass: true}, {until: 3st, images_per_worker: 3}, "
        "{until: 5st, images_per_worker: 3, augment: false, extra_pass: true}]",
    ),
}  # fmt: skip
# What users of timm bring along: other classes, frozen layers, optimisers, mixing; two steps, evaluated at the end.
SHORT = (*TINY, "stages=[{until: 2st, images_per_worker: 3}]", "evaluate.every=null", "polish=null")
TINIES: dict[str, Case] = {
    "fine-tuned": Case(
        (*SHORT, "model.freeze=[conv1, bn1]", "rate.lr=0.01", "clip_grad_norm=0.5",
         "optimizer={name: adamw, head_lr: 10.0, layer_decay: 0.5, weight_decay: 0.1}"),
        init="ten.safetensors",
    ),
    "head alone": Case((*SHORT, "model.freeze=[body]", "data.augment.mixup=0.2"), init="ten.safetensors"),
    "adamw": Case((*SHORT, "optimizer={name: adamw, beta2: 0.99, weight_decay: 0.1}", "rate.lr=0.01")),
    "lamb": Case((*SHORT, "optimizer={name: lamb, weight_decay: 0.1}", "rate.lr=0.01", "clip_grad_norm=1.0")),
    "clipped shards": Case((*SHORT, "clip_grad_norm=0.2"), {"update": "sharded"}),
    "mixed": Case((*SHORT, "data.augment={mixup: 0.5, cutmix: 1.0, erase: 0.5, policy: randaugment}")),
    "repeated": Case((*SHORT, "data.augment={repeats: 3, cutmix: 1.0, policy: trivialaugment}")),
}  # fmt: skip
# Every kind of source of encoded images; one rank makes its batches in processes, several make theirs in threads.
IMAGES = "image_size: 8, resize: 10, channels: 1, mean: [0.5], std: [0.25], augment: {crop: resized, flip: 0.5}"
FOLDERS = {"tar": "shards", "csv": "folder", **({"parquet": "tables"} if find_spec("pyarrow") else {})}
SOURCES: dict[str, Case] = {
    source: Case(
        ("virtual_workers=3", "stages=[{until: 3st, images_per_worker: 3}]", "polish={images_per_batch: 5}",
         "rate={lr: 1.0, warmup: {length: 1st, start: 0.5}}", "evaluate={every: 2st, images_per_chunk: 4}",
         f"data={{source: {source}, {IMAGES}}}"),
        {"loader_processes": 2},
        data=folder,
    )
    for source, folder in FOLDERS.items()
}  # fmt: skip
# Synchronous SGD as Das et al. (arXiv 1602.06709) leave it, and its three networks: narrow, with few pixels.
FEW = ("column_blocks=1", "stages=[{until: 4st, images_per_worker: 2}]", "evaluate={every: 2st, images_per_chunk: 10}")
PICTURES = (
    "data={source: synthetic, train_images: 96, eval_images: 20, classes: 10, image_size: 32, resize: 36, "
    "augment: {crop: random, flip: 0.5}}",
    "virtual_workers=8",
)
NETWORKS: dict[str, tuple[str, ...]] = {
    "intel-vgga-64": (*FEW, *PICTURES, "model.options.width=8"),
    "intel-overfeat-64": (*FEW, *PICTURES, "data.image_size=96", "data.resize=100", "model.options.width=6"),
    "intel-cddnn-16": (
        *FEW, "data.classes=1000", "data.train_images=2000", "data.eval_images=100", "model.options.width=128",
    ),
}  # fmt: skip
# The sharded update, which has the weights of the replicated one over any all-reduce. Norms have several blocks here,
# and a shard ends within a tensor.
WIDE = (
    *("virtual_workers=7", "model.options={width: 24, dropout: 0.1}"),
    "stages=[{until: 3st, images_per_worker: 3}, {until: 4st, images_per_worker: 5, lr: sqrt, momentum: noise-scale}]",
    *("rate={lr: 4.0, warmup: {length: 2st}}", "data.eval_images=90"),
    *("evaluate={every: 4st, images_per_chunk: 40}", "polish={images: 100, images_per_batch: 50}"),
)
SGD = ("optimizer={name: sgd, momentum: 0.9, nesterov: true}", "rate={lr: 0.1}")
ADAMW = ("optimizer={name: adamw, beta2: 0.99, weight_decay: 0.1}", "rate.lr=0.01")
LAMB = ("optimizer={name: lamb, weight_decay: 0.1}", "rate.lr=0.01", "clip_grad_norm=1.0")
SKIPPED = ("precision=float16", "loss_scale.initial=1.0e+6", "model.options={width: 8, dropout: 0.1}")  # slow on a CPU
AVERAGED = (*SGD, "average={half_life: 2st}", "model.batch_norm_workers=each", "stages.0.extra_pass=true")
SHARDED: dict[str, Case] = {
    name: Case((*WIDE, *overrides), {"update": "sharded", **options})
    for name, overrides, options in (
        ("LARS, ring", (), {"allreduce": "ring", "buckets": 0.05}),
        ("LARS, bfloat16, torus", ("precision=bfloat16",), {"allreduce": "torus", "buckets": 0.02}),
        ("LARS of tensorflow, halving", ("optimizer.variant=tensorflow",), {"allreduce": "halving-doubling"}),
        ("SGD, bfloat16, doubling", (*SGD, "precision=bfloat16"), {"allreduce": "doubling", "buckets": 0.1}),
        ("SGD with averages, native", AVERAGED, {}), ("skipped steps", SKIPPED, {"allreduce": "hierarchical"}),
        ("redone steps", ("virtual_workers=12",), {"allreduce": "direct", "buckets": 0.05}),
        ("64-bit sums", (), {"allreduce": "torus", "buckets": 0.05}), ("auto", (), {"allreduce": "auto"}),
        ("AdamW", ADAMW, {"allreduce": "ring"}), ("LAMB", LAMB, {"allreduce": "ring"}),
    )
}  # fmt: skip
FLOATS: dict[str, Case] = {
    f"{wire} sums": Case((*WIDE, f"reduction={wire}", f"float32_norms={norms}"), {"allreduce": allreduce})
    for wire, norms, allreduce in (("float32", "false", "native"), ("float16", "true", "ring"))
}
CASES: dict[str, Case] = {
    **{name: Case((*DIGITS, *overrides)) for name, overrides in OF_DIGITS.items()},
    **{name: Case(DIGITS, options) for name, options in SENT.items()},
    **(TINIES | SOURCES | SHARDED | FLOATS),
    **{name: Case(overrides, recipe=name) for name, overrides in NETWORKS.items()},
}
COMPARED = (
    "weights_sha256", "top1", "top5", "loss", "train_loss", "replaced_images", "excluded_images", "redone_steps",
    "skipped_steps", "top1_before_polish",
)  # fmt: skip


def train_cases(given: Path, out: Path, names: list[str], max_steps: int | None = None, **more: Any) -> None:
    """`more`: options in place of the cases' own.

    A step of "redone steps" leaves its range; "64-bit sums" has the messages of 8,192 virtual workers and more.
    """
    for name in names:
        case = CASES[name]
        recipe = load_recipe(case.recipe, case.overrides).recipe
        recipe = recipe.resolve(precision="float32", memory_format="channels_last")
        options = {"drift_every": 1, **case.options, **more}
        if group_of().size > 1:
            options |= {"loader_processes": 0}
        data, init = given / case.data if case.data else None, str(given / case.init) if case.init else None
        defaults = (None, None, None, 1.1 if name == "redone steps" else HEADROOM)
        with (
            patch.object(IntegerGradientSum.__init__, "__defaults__", defaults),
            patch.object(exact_sum, "_MOST_NARROW", 0 if name == "64-bit sums" else exact_sum._MOST_NARROW),
        ):
            train_on_ranks(out / name, recipe, RuntimeOptions(**options), data=data, init=init, max_steps=max_steps)


def results(out: Path, names: list[str]) -> dict[str, Any]:
    def found(name: str) -> dict[str, Any]:
        told, of_time = summary(out / name), re.compile("seconds|^slowest$|^hidden_share$")
        lines = [{key: each[key] for key in each if not of_time.search(key)} for each in events(out / name)]
        return {key: told[key] for key in COMPARED} | {"events": lines}

    return {name: found(name) for name in names}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of each source, and weights for 10 classes, where the recipe's data has 4."""
    root = tmp_path_factory.mktemp("given")
    write_shards(root / "shards")
    write_index(root / "shards" / FILE, make_index(root / "shards"))
    write_lists(write_folder(root / "folder"))
    if "parquet" in FOLDERS:
        write_parquet(root / "tables")
    network = Model(name="tests.run.sources:small_net", options={"zero_gamma": True})
    save_file(build_model(network, classes=10, channels=1, image_size=8, seed=5).state_dict(), root / "ten.safetensors")
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, given: Path) -> Callable[[str], dict[str, Any]]:
    """The results of the replicated update on one rank, each found when it is first asked for."""
    out = tmp_path_factory.mktemp("alone")

    @cache
    def found(name: str) -> dict[str, Any]:
        same = "float32" if name in SENT else "LARS, ring" if name == "auto" else name  # on one rank nothing is sent
        if same != name:
            return found(same)
        train_cases(given, out, [name], update="replicated")
        return results(out, [name])[name]

    return found


LONG = [
    (2, ["float32", "bfloat16", *TINIES, *SOURCES, "AdamW"]), (4, ["float32", "bfloat16"]), (5, ["bfloat16"]),
    (7, ["float32", "bfloat16"]), (5, ["SGD with averages, native"]), (3, [*SHARDED]), (3, [*NETWORKS]),
]  # fmt: skip


@pytest.mark.parametrize(("size", "names"), [
    (3, [*OF_DIGITS, *SENT]), (3, [*TINIES, *SOURCES]), (5, ["float32"]), (1, ["LARS, ring"]),
    (2, ["LARS, bfloat16, torus", "LAMB"]), (3, ["redone steps", "64-bit sums"]),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG),
])  # fmt: skip
def test_same_bits_on_any_ranks(size: int, names: list[str], alone: Any, given: Path, tmp_path: Path) -> None:
    run_ranks(size, train_cases, given, tmp_path, names, timeout=200)
    assert results(tmp_path, names) == {name: alone(name) for name in names}


@pytest.mark.parametrize(
    "names", [[*OF_DIGITS, *TINIES], *(pytest.param([*each], marks=pytest.mark.slow) for each in (SHARDED, NETWORKS))]
)
def test_cases_are_what_they_claim(names: list[str], alone: Any) -> None:
    own = {*names} - {"auto"}
    assert len({alone(name)["weights_sha256"] for name in own}) == len(own)
    for name in own:
        losses = [event["loss"] for event in alone(name)["events"] if "lr" in event]
        assert 1 < len(losses) == len(set(losses)), "each step has other images and other weights"
    if "torn images" in names:
        torn = alone("torn images")
        assert min(torn["replaced_images"], torn["excluded_images"], alone("float16")["skipped_steps"]) > 0
    if "redone steps" in names:
        assert alone("redone steps")["redone_steps"] > 0
        assert 0 < alone("skipped steps")["skipped_steps"] < 4


@pytest.mark.slow
def test_float_sums_whose_bits_depend_on_who_adds_up_what_are_close(given: Path, tmp_path: Path) -> None:
    for update in ("replicated", "sharded"):
        run_ranks(3, partial(train_cases, update=update), given, tmp_path / update, [*FLOATS])
    for name in FLOATS:
        losses = [summary(tmp_path / update / name)["train_loss"] for update in ("replicated", "sharded")]
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("name", ["AdamW", pytest.param("LARS, ring", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_any_ranks_in_either_form(name: str, alone: Any, given: Path, tmp_path: Path) -> None:
    """Begun sharded on 3 ranks, gone on replicated on 2, and ended sharded on 5."""
    for size, update, until, begun in ((3, "sharded", 1, 0), (2, "replicated", 3, 1), (5, "sharded", None, 3)):
        run_ranks(size, partial(train_cases, max_steps=until, update=update), given, tmp_path, [name])
        told = summary(tmp_path / name)
        assert told["resumed_from"] == begun
        (tmp_path / name / "summary.json").unlink()
    assert {key: told[key] for key in ("weights_sha256", "loss")}.items() <= alone(name).items()

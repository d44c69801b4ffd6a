"""The thesis: weights, loss, top-1 and counts are equal, bit for bit, on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.comm.gloo_world import run_ranks
from tests.run.runs import events, train_on_ranks
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

# Real digits over a change of stage, with dropout, shifts, batch norm, LARS, and a polish of uneven batches.
BASE = (
    "data.eval_images=70",
    "stages=[{until: 3st, images_per_worker: 3}, {until: 5st, images_per_worker: 5, lr: sqrt, momentum: noise-scale}]",
    "rate={lr: 4.0, warmup: {length: 2st}}",
    "evaluate={every: 3st, images_per_chunk: 50}",
    "polish={images: 250, images_per_batch: 100}",
)
CASES: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("precision=bfloat16",),
    "float16": (  # which a CPU computes slowly
        "precision=float16",
        "loss_scale.initial=1.0e+12",
        "virtual_workers=7",
        "stages=[{until: 1st, images_per_worker: 3}, {until: 3st, images_per_worker: 2}]",
    ),
    "torn images": (
        "data={source: tests.run.sources:Torn, image_size: 8, channels: 1, mean: [0.5], std: [0.25]}",
        "data.max_replaced=1.0",
    ),
    "small buckets": (),
    "halving-doubling": (),
    "torus": (),
    "keys of the records": (
        "data.resize=10",
        "data.augment={crop: random, flip: 0.5}",
        "model.batch_norm_momentum=1.0",
        "noise_scale={exact: true, batch: 50}",
        "optimizer.bias_rate=2.0",
        "optimizer.variant=nnabla",
        "optimizer.eps=1.0e-6",
        "evaluate={every: 3st, images_per_chunk: 50, image_size: 10, resize: 12}",
    ),
    "fewer epochs": (
        "stages=[{until: 3st, images_per_worker: 3, image_size: 6, resize: 7}, {until: 5st, images_per_worker: 5}]",
        "data.augment={crop: shift, shift: 1, flip: alternating, rotation: 0.3, distortion: 0.2, brightness: 0.1, "
        "contrast: 1.2, noise: 0.05}",
        "average={half_life: 2st, every: 2}",
        "loss=binary-cross-entropy",
        "polish={steps: 3, images_per_batch: 7}",
        "evaluate={every: 3st, images_per_chunk: 50, flip: true}",
    ),
    "batch norm as Fujitsu's": (
        "model.batch_norm_workers=each",
        "data.augment={crop: shift, shift: 1}",
        "stages=[{until: 2st, images_per_worker: 3, extra_pass: true}, {until: 3st, images_per_worker: 3}, "
        "{until: 5st, images_per_worker: 3, augment: false, extra_pass: true}]",
        "polish={steps: 2}",
    ),
}
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
RUNTIME = {
    "small buckets": RuntimeOptions(buckets=0.001),
    "halving-doubling": RuntimeOptions(allreduce="halving-doubling"),
    "torus": RuntimeOptions(allreduce="torus", buckets=0.01),
}
COMPARED = (
    "weights_sha256", "top1", "top5", "loss", "train_loss", "replaced_images", "excluded_images", "redone_steps",
    "skipped_steps", "top1_before_polish",
)  # fmt: skip


def train_cases(out: str, cases: list[str]) -> None:
    for name in cases:
        given = load_recipe(name, NETWORKS[name]) if name in NETWORKS else load_recipe("digits", [*BASE, *CASES[name]])
        recipe = given.recipe.resolve(precision="float32", memory_format="channels_last")
        train_on_ranks(Path(out) / name, recipe, RUNTIME.get(name, RuntimeOptions(drift_every=1)))


def run_world(size: int, out: Path, cases: list[str]) -> dict[str, Any]:
    run_ranks(size, train_cases, str(out), cases, timeout=200)
    results = {}
    for name in cases:
        summary = json.loads((out / name / "summary.json").read_text())
        told = [
            {k: v for k, v in e.items() if "seconds" not in k and k not in ("slowest", "hidden_share")}
            for e in events(out / name)
        ]
        results[name] = {key: summary[key] for key in COMPARED} | {"events": told}
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = run_world(1, tmp_path_factory.mktemp("alone"), [name for name in CASES if name not in RUNTIME])
    return found | dict.fromkeys(RUNTIME, found["float32"])  # on one rank nothing is sent


@pytest.mark.parametrize("size", [3, 7, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 5))])
def test_same_bits_on_any_number_of_ranks(size: int, alone: dict[str, Any], tmp_path: Path) -> None:
    cases = [*CASES] if size == 3 else ["float32", "bfloat16"]
    assert run_world(size, tmp_path, cases) == {name: alone[name] for name in cases}


def test_cases_are_what_they_claim(alone: dict[str, Any]) -> None:
    hashes = {name: result["weights_sha256"] for name, result in alone.items()}
    assert len(set(hashes.values())) == len(hashes) - len(RUNTIME)
    assert alone["torn images"]["replaced_images"] > 0
    assert alone["torn images"]["excluded_images"] > 0
    assert alone["float16"]["skipped_steps"] > 0


@pytest.mark.slow
def test_the_networks_of_das_et_al_have_the_same_bits_on_three_ranks(tmp_path: Path) -> None:
    worlds = [tmp_path / str(size) for size in (1, 3)]
    for out in worlds:
        out.mkdir()
    alone, shared = (run_world(int(out.name), out, [*NETWORKS]) for out in worlds)
    assert alone == shared
    for found in alone.values():
        losses = [event["loss"] for event in found["events"] if "lr" in event]
        assert len(losses) == len(set(losses)) == 4

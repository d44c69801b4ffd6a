"""Hybrid parallelism keeps the thesis: one hash for every number of ranks and of model-parallel ranks among them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks
from tests.run.runs import run_here
from tests.step.trainers import job_of, run_of
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from torusgd.comm import groups
from torusgd.comm.groups import Group
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.tensor_parallel.tail import choose_parallel, column_tail
from torusgd.weights import load_weights

STEPS = 4
BASE = (
    f"stages=[{{until: {STEPS}st, images_per_worker: 3}}]", "virtual_workers=8", "column_blocks=4",
    # Images made on the fly: a library to read others would take 8 processes seconds to import.
    "data={source: synthetic, train_images: 96, eval_images: 20, image_size: 8, channels: 1, classes: 10, mean: [0.5], "
    "std: [0.25]}",
    "evaluate={every: 2st, images_per_chunk: 20}", "polish={images: 40, images_per_batch: 20}",
    "rate={lr: 0.5, warmup: {length: 2st}}",
    "model={name: 'tests.tensor_parallel.test_tensor_parallel:network', options: {dropout: 0.2}}",
)  # fmt: skip
SGD = "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-3}"
LARS = "optimizer={name: lars, momentum: 0.9, weight_decay: 1.0e-3, trust: 0.01, no_trust: []}"
CASES: dict[str, tuple[str, ...]] = {
    "sgd": (SGD,), "bfloat16": (SGD, "precision=bfloat16"), "lars": (LARS,),
    "float16": (SGD, "precision=float16", "loss_scale.initial=1.0e+30"),
    # No layer before the tail, and a jump of the gradients: steps are measured anew and redone.
    "all tail": (SGD, "model={name: cd-dnn, options: {inputs: 64, hidden: 2, width: 12}}",
                 "rate={lr: 300.0, decay: {shape: constant}}"),
    "torn images": (SGD, "data.source=tests.run.sources:Torn", "data.classes=4", "data.max_replaced=1.0"),
}  # fmt: skip
# ranks -> (case, model-parallel ranks, other options)
FEW: dict[int, list[tuple[str, int | str, dict[str, Any]]]] = {
    1: [(case, 1, {}) for case in CASES if case != "bfloat16"],
    2: [("sgd", 2, {}), ("all tail", 2, {}), ("lars", 2, {"update": "sharded"})],
    4: [("float16", 4, {}), ("torn images", 4, {}), ("lars", "auto", {"update": "sharded", "allreduce": "ring"})],
}  # fmt: skip
# Slow: beside them
MORE: dict[int, list[tuple[str, int | str, dict[str, Any]]]] = {
    1: [("bfloat16", 1, {})], 2: [("bfloat16", 2, {}), ("lars", 2, {}), ("lars", 1, {"update": "sharded"})],
    4: [*[(case, 4, {}) for case in ("sgd", "bfloat16", "lars", "all tail")], ("sgd", 1, {}), ("bfloat16", 2, {}),
        ("sgd", 2, {"buckets": 0.0005}), ("lars", 2, {"allreduce": "ring"}), ("sgd", 2, {"update": "sharded"}),
        ("float16", 2, {"update": "sharded", "buckets": 0.0005}),
        ("lars", 4, {"update": "sharded", "allreduce": "ring"}),
        ("all tail", 2, {"update": "sharded", "allreduce": "halving-doubling"})],
    8: [("lars", "auto", {"update": "sharded"}), ("sgd", 2, {"update": "sharded", "buckets": 0.0005}),
        ("sgd", 2, {}), ("sgd", 4, {"allreduce": "halving-doubling"}), ("bfloat16", "auto", {})],
}  # fmt: skip
"""A run that each world carries on from the one before: (ranks, model-parallel ranks, up to step)."""
RELAY = [(8, 4, 1), (4, 2, 2), (2, 1, 3), (1, 1, STEPS)]
COMPARED = ("weights_sha256", "top1", "loss", "train_loss", "redone_steps", "skipped_steps", "replaced_images")


def network(classes: int, channels: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(48, 24), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(24, 14, bias=False), nn.Tanh(), nn.Dropout(dropout), nn.Linear(14, classes),
    )  # fmt: skip


def train(out: Path, case: str, world: Group, steps: int | None = None, **options: Any) -> dict[str, Any]:
    loaded = load_recipe("digits", [*BASE, *CASES[case]]).recipe
    recipe = loaded.resolve(precision="float32", memory_format="contiguous")
    job = job_of(recipe=recipe, options=RuntimeOptions(drift_every=1, **options), out=out, max_steps=steps)
    return run_of(job, world).run().summary


def train_all(out: Path, runs: dict[int, list[tuple[str, int | str, dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    rank, store, found = dist.get_rank(), dist.distributed_c10d._get_default_store(), {}
    for size, parallel, until in (each for each in RELAY if each[0] in runs):
        if rank >= size:
            break
        of_size, cpu = PrefixStore(f"{size} ranks", store), torch.device("cpu")
        world = groups.build(of_size, range(size), rank, device=cpu, timeout=240)
        for number, (case, shared, options) in enumerate(runs[size]):
            summary = train(out / f"{size}-{number}", case, world, model_parallel=shared, **options)
            found[f"{case}: {size} ranks, {shared} model-parallel, {options}"] = {k: summary[k] for k in COMPARED}
        update = "sharded" if size in (8, 2) else "replicated"
        train(out / "relay", "lars", world, steps=until, model_parallel=parallel, update=update)
        world.barrier()
        world.close()
    return found


ALL = {size: FEW.get(size, []) + more for size, more in MORE.items()}


@pytest.fixture(scope="module", params=[FEW, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("hybrid")
    found = run_ranks(max(request.param), train_all, out, request.param, timeout=400)[0]
    relay = json.loads((out / "relay" / "summary.json").read_text())
    return found | {"lars: in a relay": {key: relay[key] for key in COMPARED}}


def test_same_bits_for_any_number_of_model_parallel_ranks(results: dict[str, dict[str, Any]]) -> None:
    one = "{}: 1 ranks, 1 model-parallel, {{}}"
    alone = {case: results[one.format(case)] for case in CASES if one.format(case) in results}
    for case, expected in alone.items():
        others = {name: result for name, result in results.items() if name.startswith(f"{case}: ")}
        assert len(others) > 1
        assert {name for name, result in others.items() if result != expected} == set()
    # The cases are what they claim.
    assert len({result["weights_sha256"] for result in alone.values()}) == len(alone) >= 5
    assert alone["all tail"]["redone_steps"] > 0
    assert alone["float16"]["skipped_steps"] > 0
    assert alone["torn images"]["replaced_images"] > 0


def test_column_blocks_train_what_the_whole_layers_train(tmp_path: Path) -> None:
    """To rounding, without dropout: the gradients' sums, means and the update are those of whole layers."""
    plain = ("model.options.dropout=0.0", LARS.replace("no_trust: []", "no_trust: [bias]"))
    for blocks in (1, 4):
        run_here(tmp_path / f"{blocks}", *BASE, *plain, f"column_blocks={blocks}", tiny=False)
    whole, cut = (load_weights(tmp_path / blocks / "model.safetensors")[0] for blocks in "14")
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)


def test_auto_takes_the_formula_s_parts_of_each_layer() -> None:
    tail = column_tail(nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 8)), 8)
    # G* = sqrt(N batch / outputs): 0.7 groups for the first layer, and 16 for the second, of 8 ranks and 256 images.
    assert choose_parallel("auto", tail.layers, 8, 16, 256, ranks=8) == [8, 1]
    assert choose_parallel("auto", tail.layers, 8, 16, 256, ranks=5) == [1, 1]
    assert choose_parallel(2, tail.layers, 8, 16, 256, ranks=8) == [2, 2]

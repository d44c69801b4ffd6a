"""The sharded update ends with the weights of the replicated one: any ranks, all-reduce, optimiser, precision, wire."""

from pathlib import Path
from typing import Any

import pytest

from tests.comm.gloo_world import run_ranks
from tests.step.trainers import train_on_ranks
from torusgd.comm import exact_sum
from torusgd.gradients import integer_sum as gradients
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions

# Wide enough that norms have several blocks and a shard ends within a tensor; dropout, batch norm, two stages, polish.
BASE = (
    "model.options={width: 24, dropout: 0.1}",
    "stages=[{until: 3st, images_per_worker: 3}, {until: 4st, images_per_worker: 5, lr: sqrt, momentum: noise-scale}]",
    "rate={lr: 4.0, warmup: {length: 2st}}",
    "data.eval_images=90",
    "evaluate={every: 4st, images_per_chunk: 40}",
    "polish={images: 100, images_per_batch: 50}",
)
SGD = ("optimizer={name: sgd, momentum: 0.9, nesterov: true}", "rate={lr: 0.1}")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "LARS, ring": ((), {"allreduce": "ring", "buckets": 0.05}),
    "LARS, bfloat16, torus": (("precision=bfloat16",), {"allreduce": "torus", "buckets": 0.02}),
    "LARS of tensorflow, halving": (("optimizer.variant=tensorflow",), {"allreduce": "halving-doubling"}),
    "SGD with averages, native": (
        (*SGD, "average={half_life: 2st}", "model.batch_norm_workers=each", "stages.0.extra_pass=true"),
        {},
    ),
    "SGD, bfloat16, doubling": ((*SGD, "precision=bfloat16"), {"allreduce": "doubling", "buckets": 0.1}),
    "skipped steps": (
        ("precision=float16", "loss_scale.initial=1.0e+6", "model.options={width: 8, dropout: 0.1}"),  # slow on a CPU
        {"allreduce": "hierarchical"},
    ),
    "redone steps": ((), {"allreduce": "direct", "buckets": 0.05}),
    "64-bit sums": ((), {"allreduce": "torus", "buckets": 0.05}),
    "auto": ((), {"allreduce": "auto"}),
    "AdamW": (("optimizer={name: adamw, beta2: 0.99, weight_decay: 0.1}", "rate.lr=0.01"), {"allreduce": "ring"}),
    "LAMB": (
        ("optimizer={name: lamb, weight_decay: 0.1}", "rate.lr=0.01", "clip_grad_norm=1.0"),
        {"allreduce": "ring"},
    ),
}
FLOATS = {"float32": "native", "float16": "ring"}
COMPARED = ("weights_sha256", "loss", "train_loss", "top1_before_polish", "redone_steps", "skipped_steps")


def train(
    out: Path, overrides: tuple[str, ...], options: dict[str, Any], max_steps: int | None = None
) -> dict[str, Any]:
    """One run on these ranks; every rank has the summary."""
    plain = {"precision": "float32", "memory_format": "channels_last"}
    recipe = load_recipe("digits", [*BASE, *overrides]).recipe.resolve(**plain)
    return train_on_ranks(out, recipe, RuntimeOptions(**{"drift_every": 1, **options}), max_steps=max_steps)


def train_case(out: Path, name: str, **more: Any) -> dict[str, Any]:
    """A case's results; almost every step of "redone steps" leaves the range of the one before.

    "64-bit sums" has the messages of 8,192 virtual workers and more.
    """
    overrides, options = CASES[name]
    usual, most_narrow = gradients.HEADROOM, exact_sum._MOST_NARROW
    gradients.HEADROOM = 1.1 if name == "redone steps" else usual
    exact_sum._MOST_NARROW = 0 if name == "64-bit sums" else most_narrow
    try:
        summary = train(out / name, overrides, {**options, **more})
    finally:
        gradients.HEADROOM, exact_sum._MOST_NARROW = usual, most_narrow
    return {key: summary[key] for key in COMPARED}


def train_cases(out: str, names: list[str], floats: bool) -> dict[str, Any]:
    """Sharded runs on each of several ranks; float sums, whose bits depend on who adds up what, only for a look."""
    found: dict[str, Any] = {name: train_case(Path(out), name, update="sharded") for name in names}
    for wire, allreduce in FLOATS.items() if floats else ():
        told = [
            train(
                Path(out, f"{wire} {update}"),
                (f"reduction={wire}", f"float32_norms={str(wire == 'float16').lower()}"),
                {"allreduce": allreduce, "update": update},
            )
            for update in ("replicated", "sharded")
        ]
        found[wire] = [summary["train_loss"] for summary in told]
    return found


class Alone(dict[str, dict[str, Any]]):
    """The results of the replicated update on one rank, each found when it is first asked for."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def __missing__(self, name: str) -> dict[str, Any]:
        if name == "auto":
            return self["LARS, ring"]
        self[name] = train_case(self.out, name)
        return self[name]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
def test_cases_are_what_they_claim(alone: Alone) -> None:
    hashes = {alone[name]["weights_sha256"] for name in CASES if name != "auto"}
    assert len(hashes) == len(CASES) - 1
    assert alone["redone steps"]["redone_steps"] > 0
    assert 0 < alone["skipped steps"]["skipped_steps"] < 4


SOME = [
    (1, ["LARS, ring"]),
    (2, ["LARS, bfloat16, torus", "AdamW", "LAMB"]),
    (3, ["LARS, ring", "skipped steps", "redone steps", "64-bit sums"]),
    pytest.param(5, ["SGD with averages, native"], marks=pytest.mark.slow),
    pytest.param(3, list(CASES), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "names"), SOME)
def test_sharded_has_the_bits_of_replicated(size: int, names: list[str], alone: Alone, tmp_path: Path) -> None:
    for found in run_ranks(size, train_cases, str(tmp_path), names, len(names) == len(CASES)):
        for replicated, sharded in (found.pop(wire) for wire in FLOATS if wire in found):
            assert sharded == pytest.approx(replicated, rel=1e-2)
        assert found == {name: alone[name] for name in names}


RESUMED = ("LARS, ring", "AdamW")


def train_resumed(out: Path, update: str, until: int | None) -> list[dict[str, Any]]:
    return [train(out / name, CASES[name][0], {**CASES[name][1], "update": update}, until) for name in RESUMED]


def test_a_checkpoint_goes_on_with_any_ranks_in_either_form(alone: Alone, tmp_path: Path) -> None:
    """Begun sharded on 3 ranks, gone on replicated on 2, and ended sharded on 5."""
    for size, update, until, begun in ((3, "sharded", 1, 0), (2, "replicated", 3, 1), (5, "sharded", None, 3)):
        found = run_ranks(size, train_resumed, tmp_path, update, until)[0]
        for name, summary in zip(RESUMED, found, strict=True):
            assert summary["resumed_from"] == begun
            (tmp_path / name / "summary.json").unlink(missing_ok=True)
    for name, summary in zip(RESUMED, found, strict=True):
        assert {key: summary[key] for key in ("weights_sha256", "loss")}.items() <= alone[name].items()

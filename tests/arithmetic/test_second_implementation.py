"""The specification says it all: NumPy, from the document alone, trains `digits` to the same weights, bit for bit."""

import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.arithmetic.second_implementation import DOCUMENT, Arithmetic, coefficients
from tests.arithmetic.second_training import Numbers, Training, read_recipe
from tests.run.runs import run_here
from tests.run.test_portable import GOLDEN, STEPS
from torch import Tensor

import torusgd
from torusgd.arithmetic import convolution, draws, functions, normalization, reductions, scales
from torusgd.data import arrays, augment, order
from torusgd.gradients import integer_sum
from torusgd.models import registry
from torusgd.optim import norms
from torusgd.step import forward_backward

ROOT = Path(__file__).parents[2]
RECIPE = Path(torusgd.__file__).parent / "recipe/digits-portable.yaml"
# Of `digits-portable` after some steps, by both, as the specification has them.
ROWS = re.findall(r"^\| (\d+) \| (\w{64}) \|$", DOCUMENT.read_text(), re.MULTILINE)
HASHES = {int(steps): sha256 for steps, sha256 in ROWS} | {STEPS: GOLDEN}
# Two stages, warm-up and decay, two epochs, and sums that leave their range, in 23 steps.
SHORT = (
    "virtual_workers=2", "data.train_images=150", "data.eval_images=4", "polish={images_per_batch: 9, images: 20}",
    "stages=[{until: 24sa, images_per_worker: 4},"
    " {until: 220sa, images_per_worker: 5, lr: sqrt, momentum: noise-scale}]",
    "rate={lr: 4.0, warmup: {length: 20sa, shape: linear, start: 0.1}, decay: {shape: polynomial, power: 2.0}}",
)  # fmt: skip


@pytest.mark.parametrize("steps", [STEPS, pytest.param(20, marks=pytest.mark.slow)])
def test_numpy_has_the_hashes_of_digits_portable(steps: int) -> None:
    run, found = Training(read_recipe(RECIPE)), {}
    for step in range(1, steps + 1):
        run.step()
        if step in HASHES:
            found[step] = run.sha256()
    assert found == {step: known for step, known in HASHES.items() if step <= steps}
    assert HASHES[20] in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_numpy_trains_digits_portable_to_its_end() -> None:
    run = Training(read_recipe(RECIPE))
    while run.steps < len(run.schedule):
        run.step()
    assert run.sha256() == HASHES[run.steps]


def by_the_package(out: Path, steps: int, *changes: str) -> str:
    summary, _ = run_here(out, *changes, recipe="digits-portable", tiny=False, max_steps=steps)
    return str(summary["weights_sha256"])


@cache
def by_numpy(steps: int, *changes: str, numbers: Numbers | None = None) -> str:
    run = Training(read_recipe(RECIPE, *changes), numbers)
    for _ in range(steps):
        run.step()
    return run.sha256()


MIXUP = [f"data.augment={{crop: shift, shift: 1, mixup: {alpha}}}" for alpha in (0.05, 0.2, 0.8, 1, 2.5, 10)]


@pytest.mark.parametrize(("steps", "change"), [
    (2, ""), (20, ""), (3, "polish=null"), (2, MIXUP[1]), (2, MIXUP[-2]),
    *(pytest.param(2, MIXUP[n], marks=pytest.mark.slow) for n in (0, 2, 3, 5)),
])  # fmt: skip
def test_a_short_run_has_the_same_weights_by_both(tmp_path: Path, steps: int, change: str) -> None:
    changes = (*SHORT, change) if change else SHORT
    found = by_numpy(steps, *changes)
    assert by_the_package(tmp_path, steps, *changes) == found
    assert not change or found != by_numpy(steps, *SHORT)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.8, 1.0, 1.7, 10.0])
def test_a_beta_draw_is_the_same_by_both(alpha: float) -> None:
    found = [draws.beta(alpha, 17, 0, epoch, 5) for epoch in range(100)]
    assert found == [Arithmetic().beta(alpha, 17, 0, epoch, 5) for epoch in range(100)]


# Constants: the document's, which NumPy takes, are the package's, and any other one changes the weights.

TABLES = {
    "EXP2": functions.EXP2, "ATANH": functions.ATANH, "CENTRE": draws._CENTRE, "TAIL": draws._TAIL,
    "ERF": functions.ERF, "SINE": functions.SINE, "COSINE": functions.COSINE,
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_a_polynomial_has_the_documents_coefficients(name: str) -> None:
    assert coefficients(name) == TABLES[name]


def half_up(x: Any) -> Any:
    """What `rne` is not."""
    return np.floor(x + x.dtype.type(0.5))


def half_up_of_tensors(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scale, inverse = scales.scales(scales.amax_over(x, dims))
    return torch.floor(x * scale + 0.5), inverse


def bent(numbers: tuple[float, ...], place: int) -> tuple[float, ...]:
    """One coefficient off: a low one by 1e-6 of itself, higher ones by as much as float32 can see."""
    off = 1e-6 if place < 2 else 0.5 if place < 6 else 5.0
    return tuple(number * (1 + off) if n == place else number for n, number in enumerate(numbers))


ALL, PLAIN = (0, 1, 2, 3), Numbers()
MUTANTS: dict[str, tuple[str, Any]] = {
    **{name: (name, value) for name, value in {
        "largest": 16128, "rne": half_up, "grid_bits": 21, "tail_from": 4.9, "of_row": (0, 1), "of_column": (0, 1),
        "root_half_bits": PLAIN.root_half_bits + 2**50, "held_out": 300, "headroom": 4.0, "most": 2**30,
        "block": 1 << 20, "narrow": (14, 2), "full": (85, 3),
    }.items()},
    **{name: (name, getattr(PLAIN, name) * (1 + 1e-7)) for name in ("log2_e", "ln_2", "root_2")},
    **{f"gamma {n}": ("gamma", tuple(x * 1.1 if n == m else x for m, x in enumerate(PLAIN.gamma))) for n in range(3)},
    **{word: (word, getattr(PLAIN, word) + 1) for word in ("draw_word", "golden", "mix1", "mix2")},
    **{word: (word, getattr(PLAIN, word) + 100)
       for word in ("order", "augment", "dropout", "split", "initial", "mix")},
    **{f"of_{what}": (f"of_{what}", ALL)
       for what in ("image", "output_channel", "input_channel", "gradient_channel", "pixel_channel")},
    **{f"{name} {n}": (name, bent(getattr(PLAIN, name), n))
       for name in ("exp2", "atanh", "centre", "tail") for n in range(len(getattr(PLAIN, name)))},
}  # fmt: skip


def test_every_number_of_numpys_has_a_mutant() -> None:
    assert {name for name, _ in MUTANTS.values()} == {each.name for each in fields(Numbers)}


# What makes a run take a number.
CHANGES = {
    "narrow": ("polish=null",),
    **dict.fromkeys(("gamma 0", "gamma 1", "gamma 2", "mix"), ("data.augment={crop: shift, shift: 1, mixup: 0.8}",)),
}
# At first no layer with more than one block has a gradient; of two steps no draw of a Beta is refused.
LONGER = {"block": 8, "gamma 2": 8}


# Of a polynomial's coefficients the first and the last one; those between in the slow group.
BETWEEN = {f"{key} {n}" for key in ("exp2", "atanh", "centre", "tail") for n in range(1, len(getattr(PLAIN, key)) - 1)}


@pytest.mark.parametrize("mutant", [pytest.param(x, marks=[pytest.mark.slow] * (x in BETWEEN)) for x in MUTANTS])
def test_one_changed_constant_of_numpys_is_found(mutant: str) -> None:
    name, value = MUTANTS[mutant]
    numbers, changes, steps = replace(PLAIN, **{name: value}), CHANGES.get(mutant, ()), LONGER.get(mutant, 2)
    assert by_numpy(steps, *SHORT, *changes, numbers=numbers) != by_numpy(steps, *SHORT, *changes)


def of_all_channels(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return scales.amax_over(x, ALL if dims == (0, 2, 3) else dims)


PLACES: dict[str, list[tuple[Any, str, Any]]] = {
    "largest": [(scales, "_CARRY", scales._CARRY + (1 << 17))], "split": [(arrays, "SPLIT", 106)],
    "channels": [(convolution, "amax_over", of_all_channels)], "block": [(norms, "BLOCK", 1 << 20)],
    "rounding": [(convolution, "quantised", half_up_of_tensors)],
    "grid": [(reductions, "grid_offset", lambda amax: scales.grid_offset(amax) * 2)],
    "quotient": [(normalization, "quotient", lambda total, count: torch.div(total.float(), float(count)))],
    **{name.lower(): [(functions, name, getattr(functions, name) * (1 + 1e-7))] for name in ("LOG2_E", "LN_2")},
    "draws": [(draws, "_DRAW", 24)], "weights": [(registry, "INIT", 107)], "order": [(order, "ORDER", 101)],
    "moves": [(augment, "AUGMENT", 102)], "dropout": [(forward_backward, "DROPOUT", 103)],
    "headroom": [(integer_sum.IntegerGradientSum.__init__, "__defaults__", (None, None, None, 4.0))],
}  # fmt: skip


@pytest.mark.parametrize("mutant", PLACES)
def test_one_change_in_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    for place, name, value in PLACES[mutant]:
        assert getattr(place, name) != value
        monkeypatch.setattr(place, name, value)
    steps = LONGER.get(mutant, 2)
    assert by_the_package(tmp_path, steps, *SHORT) != by_numpy(steps, *SHORT)

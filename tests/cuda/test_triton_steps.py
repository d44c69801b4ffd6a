"""The kernels of a whole step: its bits and their number by Triton's interpreter, their assembly by its compiler."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.commands import ran

pytest.importorskip("triton", reason="needs the extra triton")
if torch.cuda.is_available():
    pytest.skip("there the interpreter is off", allow_module_level=True)

from tests.cuda.trainers import SGD, left, make_trainer, take
from triton.runtime.interpreter import GridExecutor

from torusgd.cuda import triton_kernels
from torusgd.cuda.flat_weights import Update
from torusgd.cuda.sums import Verdict

pytestmark = pytest.mark.slow

SUMS: dict[str, Callable[..., Any]] = {
    **{name: getattr(triton_kernels, name) for name in ("add_gradients", "add_bounds", "add_statistics", "mean")},
    "verdict": lambda *given: triton_kernels.verdict(Verdict(*given)),
}
UPDATE = {"update": lambda *given: triton_kernels.update(Update(*given))}
ELEMENTS_OF_A_THREAD = 32
"""4,096 of a block over 128 threads"""


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Takes other forms of the operators on the CPU, for one test."""
    library = torch.library.Library("torusgd", "IMPL")
    yield library
    library._destroy()


def weights_after(steps: int, *changes: str) -> tuple[str, torch.Tensor]:
    trainer = make_trainer(True, "virtual_workers=1", *changes)
    for index in range(steps):
        take(trainer, index)
    return left(trainer), torch.cat([p.detach().flatten() for p in trainer.step.state.model.parameters()])


def test_sums_verdict_and_mean_by_kernels_have_the_bits_of_a_cpu(library: torch.library.Library) -> None:
    plain, _ = weights_after(2, SGD)
    for name, kernel in SUMS.items():
        library.impl(name, kernel, "CPU")
    assert weights_after(2, SGD)[0] == plain


@pytest.mark.parametrize(("change", "update"), [
    (SGD, {"_momentum": 1}), ("optimizer.name=lars", {"_block_norms": 1, "_rates": 1, "_momentum": 1}),
])  # fmt: skip
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_launches_two_kernels_a_bucket_and_at_most_seven(
    precision: str, change: str, update: dict[str, int], library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = (change, f"precision={precision}", "virtual_workers=1")
    _, plain = weights_after(2, *changes)
    for name, kernel in {**SUMS, **UPDATE}.items():
        library.impl(name, kernel, "CPU")
    _, ours = weights_after(2, *changes)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)

    trainer = make_trainer(True, *changes)
    take(trainer, 0)
    launched, run = Counter[str](), GridExecutor.__call__

    def count(kernel: GridExecutor, *arguments: object, **keywords: object) -> None:
        launched[kernel.fn.__name__] += 1
        run(kernel, *arguments, **keywords)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    assert trainer.ahead is not None
    trainer.ahead._launch(1, trainer.membership)
    buckets = len(trainer.step.reducer.layout.buckets)
    of_a_step = {"_add_statistics": 1, "_examine": 1, "_follow": 1, "_mean": 1, **update}
    assert launched == {"_add_gradients": buckets, "_add_bounds": buckets, **of_a_step}
    assert sum(of_a_step.values()) <= 7


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_and_join_no_more_roundings_than_foreach(capability: int, tmp_path: Path) -> None:
    words = [sys.executable, Path(__file__).with_name("compile_kernels.py"), capability]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    lines = [line.split() for line in ran(words, timeout=590, env=environment).stdout.splitlines()]
    assert {kind for _, _, kind in lines} == {"exact"}
    fused = [int(count) // ELEMENTS_OF_A_THREAD for name, count, _ in lines if name == "_momentum"]
    # SGD: decay and step; Nesterov: the look ahead too; every variant of LARS: decay alone; then SGD without momentum.
    assert fused == [2, 3, *[1] * (len(fused) - 3), 2]
    assert {count for name, count, _ in lines if name in ("_follow", "_mean", "_add_statistics", "_rates")} == {"0"}

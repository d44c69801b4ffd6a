"""The kernels of a step on a GPU, by Triton's interpreter in a real run: its bits, and how many are launched."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="needs the extra triton")
if torch.cuda.is_available():
    pytest.skip("there the interpreter is off", allow_module_level=True)

from tests.cuda.test_run_ahead import SGD, left, make_trainer, take
from triton.runtime.interpreter import GridExecutor

from torusgd.cuda import triton_kernels, triton_shadow, triton_update, triton_verdict

pytestmark = pytest.mark.slow

SUMS = {
    "add_gradients": triton_kernels,
    "add_bounds": triton_kernels,
    "add_statistics": triton_verdict,
    "verdict": triton_verdict,
    "mean": triton_verdict,
}
UPDATE = {"update": triton_update, "block_norms": triton_update, "copy_weights": triton_shadow}


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
    return left(trainer), torch.cat([p.detach().flatten() for p in trainer.step.model.parameters()])


def test_sums_verdict_and_mean_by_kernels_have_the_bits_of_a_cpu(library: torch.library.Library) -> None:
    plain, _ = weights_after(2, SGD)
    for name, module in SUMS.items():
        library.impl(name, getattr(module, name), "CPU")
    assert weights_after(2, SGD)[0] == plain


@pytest.mark.parametrize(
    ("change", "update"),
    [(SGD, {"_momentum": 1}), ("optimizer.name=lars", {"_block_norms": 1, "_rates": 1, "_momentum": 1})],
)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_launches_two_kernels_a_bucket_and_at_most_seven(
    precision: str,
    change: str,
    update: dict[str, int],
    library: torch.library.Library,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 16-bit copies of the weights one more, in the place of autocast's casts in each pass."""
    changes = (change, f"precision={precision}", "virtual_workers=1")
    _, plain = weights_after(2, *changes)
    for name, module in {**SUMS, **UPDATE}.items():
        library.impl(name, getattr(module, name), "CPU")
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
    copies = {} if precision == "float32" else {"_copy_weights": 1}
    assert launched == {"_add_gradients": buckets, "_add_bounds": buckets, **of_a_step, **copies}
    assert sum(of_a_step.values()) <= 7

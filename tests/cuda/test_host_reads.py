"""What a step asks its device for: each question makes the host wait for all that the device has been given.

Counted on the CPU, where the same code runs: every call by which Python gets at a tensor's values, and every operator
whose result has a length that depends on values. What only the CPU's own kernels ask for is switched to the GPU's way.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.runs import TINY
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.base import NoLiveness
from torusgd.comm.groups import alone
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import Trainer, build, open_data
from torusgd.run.job import Job
from torusgd.step.journal import synchronous

READS = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__",
    "__contains__", "__format__", "__repr__",
}  # fmt: skip
"""of Python"""
SIZED_BY_VALUES = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim",
    "bincount", "repeat_interleave",
}  # fmt: skip
"""of aten"""


class ByPython(TorchFunctionMode):
    def __init__(self, reads: Counter[str]) -> None:
        self._reads = reads

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if getattr(function, "__name__", "") in READS:
            self._reads[function.__name__] += 1
            with torch._C.DisableTorchFunction(), Silent():
                return function(*arguments, **(keywords or {}))
        return function(*arguments, **(keywords or {}))


class Silent(TorchDispatchMode):
    """Hides the operators by which such a call does its work, so that it counts once."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return function(*arguments, **(keywords or {}))


class ByOperators(TorchDispatchMode):
    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = arguments[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in SIZED_BY_VALUES or by_mask:
            self._reads[name] += 1
        return function(*arguments, **(keywords or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    reads: Counter[str] = Counter()
    with ByPython(reads), ByOperators(reads):
        yield reads


def make_trainer(*overrides: str) -> Trainer:
    recipe = load_recipe("digits", [*TINY, *overrides]).recipe.resolve(precision="float32", memory_format="contiguous")
    job, world, liveness = Job(recipe, RuntimeOptions(), "cpu", Path("nowhere")), alone(), NoLiveness()
    trainer = build(job, open_data(job, world.device, liveness), world, liveness, lambda: False)
    for group in trainer.step.update.optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True  # LARS: the CPU's fused kernel takes each layer's rate from the host
    return trainer


@pytest.mark.parametrize(
    "change",
    [
        "optimizer.name=lars",
        "optimizer={name: sgd, momentum: 0.9}",
        "precision=float16",
        "reduction=float32",
        "reduction=bfloat16",
        "reduction=float16",
    ],
)
def test_a_step_asks_its_device_twice(change: str) -> None:
    """For the control vector, and for the status of the sums."""
    trainer = make_trainer(change)
    for index in range(3):
        with counted() as reads:
            stats = trainer.step.run(trainer.membership, synchronous(index, trainer.step.recipe.virtual_workers))
        # Step 0 measures its scales first, by passes with a control vector of their own. So does a redo, and then it
        # takes the step again.
        measured = index == 0 and not change.endswith("reduction=float32")
        assert reads == {"tolist": 2 + measured + 3 * stats.redone}


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda x: x.sum().item(), "item"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: bool(x[0] > 0), "__bool__"),
        (lambda x: x[x > 0], "index"),
        (torch.nonzero, "nonzero"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
    ],
)
def test_every_way_of_asking_counts_once(ask: Any, name: str) -> None:
    with counted() as reads:
        ask(torch.ones(3))
    assert reads == {name: 1}


def one_step_on_the_gpu() -> int:
    """Calls that wait, as torch itself counts them: it warns at each."""
    recipe = load_recipe("digits", list(TINY)).recipe.resolve(precision="float16", memory_format="channels_last")
    world, liveness = alone(torch.device("cuda", 0)), NoLiveness()
    job = Job(recipe, RuntimeOptions(), "cuda", Path("nowhere"))
    trainer = build(job, open_data(job, world.device, liveness), world, liveness, lambda: False)
    for index in range(2):
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        trainer.step.run(trainer.membership, synchronous(index, recipe.virtual_workers))
    torch.cuda.set_sync_debug_mode("default")
    return 0


@pytest.mark.gpu
def test_the_host_waits_for_events_only() -> None:
    """The two answers come by asynchronous copies; nothing else in a step synchronises."""
    try:
        assert one_step_on_the_gpu() == 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)

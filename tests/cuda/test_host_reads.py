"""What a step asks its device for: each question makes the host wait for all that the device has been given.

Counted on the CPU: every copy to the host (`Monitor.to_host`), every other call by which Python gets at a tensor's
values, and every operator the length of whose result depends on values.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.cuda.trainers import make_trainer, on_gpu, take
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.comm.monitor import Monitor

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


class OnHost(Tensor):
    """What was copied to the host, and what is made of it there; to read it is free."""


class ByPython(TorchFunctionMode):
    def __init__(self, reads: Counter[str]) -> None:
        self._reads = reads

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        is_free = any(issubclass(kind, OnHost) for kind in types) or (arguments and _is_nothing(arguments[0]))
        if getattr(function, "__name__", "") in READS and not is_free:
            self._reads[function.__name__] += 1
            # Without the operators by which the call does its work, so that it counts once.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                return function(*arguments, **(keywords or {}))
        return function(*arguments, **(keywords or {}))


def _is_nothing(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.numel()


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

    def start_to_host(monitor: Monitor, tensor: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            reads["to_host"] += 1
            return tensor.as_subclass(OnHost)

        return wait

    with pytest.MonkeyPatch.context() as patch, ByPython(reads), ByOperators(reads):
        patch.setattr(Monitor, "start_to_host", start_to_host)
        yield reads


@pytest.mark.parametrize(
    "change",
    ["optimizer.name=lars", "optimizer={name: sgd, momentum: 0.9}", "precision=float16", "reduction=float32",
     "reduction=bfloat16", "reduction=float16"],
)  # fmt: skip
def test_a_step_asks_its_device_twice(change: str) -> None:
    """For the control vector, and for the status of the sums; three times more where the noise scale is due."""
    trainer = make_trainer(False, change)
    for group in trainer.step.update.optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True  # LARS: the CPU's fused kernel takes each layer's rate from the host
    for index in range(6):
        with counted() as reads:
            stats = take(trainer, index)
        assert stats is not None
        # Step 0 measures its scales first, by passes with a control vector of their own. So does a redo, and then it
        # takes the step again.
        measured = index == 0 and not change.endswith("reduction=float32")
        assert reads == {"to_host": 2 + measured + 3 * stats.redone + 3 * (index == 5)}


@pytest.mark.parametrize(
    ("ask", "name"),
    [(lambda x: x.sum().item(), "item"), (lambda x: x.cpu(), "cpu"), (lambda x: bool(x[0] > 0), "__bool__"),
     (lambda x: x[x > 0], "index"), (torch.nonzero, "nonzero"), (lambda x: torch.equal(x, x), "equal"),
     (lambda x: x.masked_select(x > 0), "masked_select")],
)  # fmt: skip
def test_every_way_of_asking_counts_once(ask: Any, name: str) -> None:
    with counted() as reads:
        ask(torch.ones(3))
    assert reads == {name: 1}


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_for_events_only() -> None:
    """The two answers come by asynchronous copies; torch itself raises an error at whatever else synchronises."""
    with on_gpu() as gpu:
        trainer = make_trainer(False, "precision=float16", world=gpu)
        for index in range(2):
            torch.cuda.set_sync_debug_mode("error" if index else "default")
            take(trainer, index)

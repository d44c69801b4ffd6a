"""Weight gradients before input gradients: the order in which they come, and that no bit depends on it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run.runs import run_here
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.step.weights_first import Context, WeightsFirst

FORMATS = (torch.contiguous_format, torch.channels_last)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.ReLU(inplace=True),
        nn.Conv2d(12, 12, 3, padding="same"), nn.Conv2d(12, 12, 3, groups=4, dilation=2), nn.Flatten(),
        nn.Linear(108, 20), nn.ReLU(inplace=True), nn.Linear(20, 4, bias=False),
    )  # fmt: skip


@pytest.mark.parametrize("layout", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("images", [1, 6])
def test_gradients_are_the_same_either_way(layout: torch.memory_format, dtype: torch.dtype | None, images: int) -> None:
    x = torch.randn(images, 3, 16, 16).to(memory_format=layout)

    def gradients(order: Context) -> list[Tensor]:
        net = network()
        net.to(memory_format=layout)  # type: ignore[call-overload]  # torch does not declare memory_format here
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None), order():
            logits = net(x)
        loss = F.cross_entropy(logits.float(), torch.arange(images) % 4)
        loss.backward()
        return [loss, *(p.grad for p in net.parameters() if p.grad is not None)]

    for usual, first in zip(gradients(nullcontext), gradients(WeightsFirst), strict=True):
        assert torch.equal(usual, first)
        assert usual.stride() == first.stride()


class Kernels(TorchDispatchMode):
    """Notes the kernels of a backward pass that make gradients of layers."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self._seen.append("mm")
        if func is torch.ops.aten.convolution_backward.default:
            of_input, of_weight, _ = args[-1]
            self._seen.append(" and ".join(["input"] * of_input + ["weight"] * of_weight))
        return func(*args, **(kwargs or {}))


def test_a_layers_weight_gradient_leaves_before_its_input_gradient_is_begun() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    seen: list[str] = []
    for name in ("0", "2", "4"):
        weight = net.get_parameter(f"{name}.weight")
        weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name} leaves"))

    def order_of(context: Context) -> list[str]:
        with context():
            loss = net(torch.randn(2, 3, 6, 6)).sum()
        seen.clear()
        with Kernels(seen):
            loss.backward()
        return list(seen)

    assert order_of(nullcontext) == ["mm", "mm", "4 leaves", "input and weight", "2 leaves", "weight", "0 leaves"]
    assert order_of(WeightsFirst) == ["mm", "4 leaves", "mm", "weight", "2 leaves", "input", "weight", "0 leaves"]


@pytest.mark.parametrize("overrides", [(), ("column_blocks=2",)], ids=["whole", "column blocks"])
def test_a_run_ends_with_the_same_weights(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    orders = {first: RuntimeOptions(weights_first=first) for first in (False, True)}
    runs = [run_here(tmp_path / str(first), *overrides, options=each)[0] for first, each in orders.items()]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]

"""A layer that torch refuses under deterministic algorithms is named before a run begins."""

from typing import Any

import pytest
import torch
from tests.messages import refused
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torusgd.models.registry import check_repeatable
from torusgd.recipe.load import load_recipe

RECIPE = load_recipe("digits", []).recipe  # of 8 x 8 images with one channel


def ready(*pooling: nn.Module) -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), *pooling]
    made = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)).train()
    made(torch.zeros(2, 1, 8, 8))
    return made


class RefusesAsCuda(TorchDispatchMode):
    """Torch's refusal of an operation on a GPU, on the CPU."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name == "_adaptive_avg_pool2d_backward":
            raise RuntimeError(f"{name}_cuda does not have a deterministic implementation, but you set ...")
        return function(*arguments, **(keywords or {}))


def test_the_layer_is_named_in_one_line_be_it_refused_on_a_gpu_or_on_the_cpu() -> None:
    made = ready(nn.AdaptiveAvgPool2d(2), nn.Tanh())
    with refused("a layer that CUDA refuses", "model.name: digits-net, layer 3 "), RefusesAsCuda():
        check_repeatable(made, RECIPE)

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.clone().put_(torch.tensor([0]), torch.tensor([0.0]))

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Scatter.apply(x)

    with refused("a layer that torch refuses"):
        check_repeatable(ready(Layer()), RECIPE)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_network_that_repeats_is_left_as_it_is_and_other_errors_stay_what_they_are() -> None:
    made = ready(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5))
    before, state = {k: v.clone() for k, v in made.state_dict().items()}, torch.random.get_rng_state()
    with RefusesAsCuda():
        check_repeatable(made, RECIPE)
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in made.parameters())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        check_repeatable(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), RECIPE)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    with refused("a pooling layer that CUDA refuses"):
        check_repeatable(ready(nn.AdaptiveAvgPool2d(2)).cuda(), RECIPE)
    check_repeatable(ready(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)).cuda(), RECIPE)

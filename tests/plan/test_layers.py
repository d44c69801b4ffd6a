"""What the planner reads off a network, against the published counts and against hand-computed ones."""

import pytest
import torch
from torch import nn

from tests.messages import refused
from torusgd.models import MODELS
from torusgd.plan.model_cost import ModelCost, read_model


def cost_of(name: str, pixels: int) -> ModelCost:
    return read_model(lambda: MODELS[name](classes=1000, channels=3), (3, pixels, pixels))


@pytest.mark.parametrize(
    ("name", "pixels", "convolution", "linear", "gmac"),
    [
        ("resnet50", 224, 23_454_912, 2_048_000, 4.089),
        ("vgg-a", 224, 9_217_728, 123_633_664, 7.609),
        ("overfeat-fast", 231, 15_984_672, 129_925_120, 2.801),
    ],
)
def test_counts_are_the_published_ones(name: str, pixels: int, convolution: int, linear: int, gmac: float) -> None:
    cost = cost_of(name, pixels)
    assert sum(layer.weights for layer in cost.layers if not layer.linear) == convolution
    assert sum(layer.weights for layer in cost.layers if layer.linear) == linear
    macs, flops = sum(layer.macs for layer in cost.layers), cost.forward.flops.sum() + cost.backward.flops.sum()
    assert macs / 1e9 == pytest.approx(gmac, abs=5e-4)
    # Forward, input gradient and weight gradient cost the same, but the first layer's input needs no gradient.
    assert flops == pytest.approx(6 * macs - 2 * cost.layers[0].macs, rel=0.01)


def test_the_speech_network_has_seven_hidden_layers() -> None:
    cost = read_model(lambda: MODELS["cd-dnn"](classes=9304, channels=1), (1, 11, 39))
    assert [layer.ofm for layer in cost.layers] == [2048] * 7 + [9304]
    assert cost.parameters == 429 * 2048 + 6 * 2048**2 + 2048 * 9304 + 7 * 2048 + 9304
    assert cost.norms == 0


def test_gradients_come_in_the_order_of_backward() -> None:
    cost = cost_of("resnet50", 224)
    names = [gradient.name for gradient in cost.gradients]
    assert len(names) == 161
    assert set(names[:2]) == {"fc.weight", "fc.bias"}
    assert names[-1] == "conv1.weight"
    ready = [gradient.ready for gradient in cost.gradients]
    assert ready == sorted(ready)
    assert ready[-1] <= len(cost.backward.flops)
    assert cost.norms == 53
    assert sum(g.values for g in cost.gradients if g.norm_or_bias) == 53_120 + 1000


def test_work_of_one_convolution_is_counted_by_hand() -> None:
    cost = read_model(lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False)), (4, 16, 16))
    macs = 4 * 8 * 9 * 16 * 16
    assert cost.layers[0].macs == macs
    assert cost.forward.flops.sum() == 2 * macs
    assert cost.forward.values.sum() == 4 * 256 + 8 * 256
    assert cost.forward.fixed.sum() == 4 * 8 * 9
    # The input needs no gradient: backward is the weight gradient alone.
    assert cost.backward.flops[cost.backward.flops > 0].sum() == 2 * macs


def test_grouped_convolutions_cost_their_share() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 3, groups=2, bias=False))

    layer = read_model(build, (8, 10, 10)).layers[1]
    assert layer.macs == 8 * 16 * 9 // 2 * 8 * 8


def test_the_model_is_left_as_it_was_and_never_computed() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Linear(10**5, 10**5))
        return made[-1]

    assert read_model(build, (10**5,)).parameters == 10**10 + 10**5  # 40 GB if it were real
    assert all(p.is_meta and p.grad is None for p in made[0].parameters())


def test_a_model_that_looks_at_values_is_a_users_mistake() -> None:
    class Looks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum().item() > 0 else input

    with refused("a model that looks at values", "model:"):
        read_model(lambda: Looks(4, 4), (4,))

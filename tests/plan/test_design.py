"""What is read off a network, and design points, against published figures and those worked out by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.messages import refuses
from torusgd.plan.cluster import load_cluster, load_software
from torusgd.plan.design import Design, LayerPoint, design, flops_a_byte, flops_a_weight, least_images
from torusgd.plan.model_cost import Layer, known_cost, read_model


@pytest.mark.parametrize(("name", "convolution", "linear", "gmac"), [
    ("resnet50", 23_454_912, 2_048_000, 4.089),
    ("vgg-a", 9_217_728, 123_633_664, 7.609),
    ("overfeat-fast", 15_984_672, 129_925_120, 2.801),
])  # fmt: skip
def test_counts_are_the_published_ones(name: str, convolution: int, linear: int, gmac: float) -> None:
    cost = known_cost(name)
    assert sum(layer.weights for layer in cost.layers if not layer.linear) == convolution
    assert sum(layer.weights for layer in cost.layers if layer.linear) == linear
    macs, flops = sum(layer.macs for layer in cost.layers), cost.forward.flops.sum() + cost.backward.flops.sum()
    assert macs / 1e9 == pytest.approx(gmac, abs=5e-4)
    # Forward, input gradient and weight gradient cost the same, but the first layer's input needs no gradient.
    assert flops == pytest.approx(6 * macs - 2 * cost.layers[0].macs, rel=0.01)


def test_the_speech_network_has_seven_hidden_layers_and_gradients_come_in_the_order_of_backward() -> None:
    cost = known_cost("cd-dnn")
    assert [layer.ofm for layer in cost.layers] == [2048] * 7 + [9304]
    parameters = 429 * 2048 + 6 * 2048**2 + 2048 * 9304 + 7 * 2048 + 9304
    assert (cost.parameters, cost.norms) == (parameters, 0)
    cost = known_cost("resnet50")
    names, ready = ([getattr(gradient, field) for gradient in cost.gradients] for field in ("name", "ready"))
    assert (len(names), set(names[:2]), names[-1]) == (161, {"fc.weight", "fc.bias"}, "conv1.weight")
    assert ready == sorted(ready)
    assert ready[-1] <= len(cost.backward.flops)
    assert (cost.norms, sum(g.values for g in cost.gradients if g.norm_or_bias)) == (53, 53_120 + 1000)


def test_work_of_one_convolution_is_counted_by_hand_and_grouped_ones_cost_their_share() -> None:
    cost = read_model(lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, bias=False)), (4, 16, 16))
    macs = 4 * 8 * 9 * 16 * 16
    assert (cost.layers[0].macs, cost.forward.flops.sum()) == (macs, 2 * macs)
    assert (cost.forward.values.sum(), cost.forward.fixed.sum()) == (4 * 256 + 8 * 256, 4 * 8 * 9)
    # The input needs no gradient: backward is the weight gradient alone.
    assert cost.backward.flops[cost.backward.flops > 0].sum() == 2 * macs
    cost = read_model(lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 3, groups=2)), (8, 10, 10))
    assert cost.layers[1].macs == 8 * 16 * 9 // 2 * 8 * 8


def test_a_model_is_never_computed_and_one_that_looks_at_values_is_a_users_mistake() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Linear(10**5, 10**5))
        return made[-1]

    assert read_model(build, (10**5,)).parameters == 10**10 + 10**5  # 40 GB if it were real
    assert all(p.is_meta and p.grad is None for p in made[0].parameters())

    class Looks(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum().item() > 0 else input

    refuses("a model that looks at values", read_model, lambda: Looks(4, 4), (4,), about="model:")


@pytest.mark.parametrize(("name", "ratio", "fdr", "ethernet"), [("overfeat-fast", 250.7, 2, 6), ("vgg-a", 1218, 1, 2)])
def test_ratios_and_least_images_of_das_et_al(name: str, ratio: float, fdr: int, ethernet: int) -> None:
    layers = known_cost(name).layers
    assert flops_a_byte([layer for layer in layers if not layer.linear]) == pytest.approx(ratio, rel=1e-3)
    assert (least_images(336, layers), least_images(1336, layers)) == (fdr, ethernet)


def test_scaling_ratios_of_you_et_al() -> None:
    for area in (1, 9, 25):  # the ratio of a convolution depends on its output alone
        assert flops_a_byte([Layer("conv", False, 64, 128, area, 196, 196)], images=4) == pytest.approx(1.5 * 196 * 4)
    residual, alexnet = (flops_a_weight(known_cost(name)) for name in ("resnet50", "alexnet-bn"))
    assert residual == pytest.approx(308, rel=0.05)
    assert alexnet == pytest.approx(24.6, rel=0.05)
    assert residual / alexnet == pytest.approx(12.5, rel=0.08)  # both networks' deviations


def found(model: str = "overfeat-fast", cluster: str = "cori", devices: int = 64, batch: int = 256) -> Design:
    return design(known_cost(model), load_cluster(cluster), load_software("pcl-dnn"), devices, batch)


def test_the_design_points_of_overfeat_on_64_nodes_of_one_device_and_of_quicker_links() -> None:
    point = found()
    groups = {layer.name: layer.groups for layer in point.layers}
    assert groups["features.0"] == 64  # the first convolution is data-parallel
    assert groups["fc6"] == groups["fc7"] == 2  # of 4,096 outputs or nearly: the paper's sqrt(64 * 256 / 4096)
    assert [layer.flops for layer in point.layers] == [6.0 * layer.macs for layer in known_cost("overfeat-fast").layers]
    overfeat, vgg = (found(model, "endeavor") for model in ("overfeat-fast", "vgg-a"))
    assert overfeat.balance == pytest.approx(336, rel=2e-3)
    limits = [(each.least_images, each.most_nodes) for each in (overfeat, vgg)]
    assert limits == [(2, 128), (1, 256)]  # the paper's
    alone = found(devices=1)
    assert (alone.bubble, alone.exchange, alone.efficiency) == (0, 0, 1)
    assert all(layer.sent == 0 for layer in alone.layers)
    slow, fast = found("vgg-a", "aws-c4.8xlarge", 16), found("vgg-a", "cori", 16)
    assert slow.efficiency < fast.efficiency < 1
    assert found(batch=256).efficiency < found(batch=1024).efficiency


def test_any_network_has_a_design_point() -> None:
    timm = pytest.importorskip("timm")
    cost = read_model(lambda: timm.create_model("mobilenetv3_small_050"), (3, 224, 224))
    point = design(cost, load_cluster("hgx-h100"), load_software("torusgd"), 64, 4096)
    assert 0 < point.efficiency < 1
    assert point.critical in point.layers


@settings(max_examples=50)
@given(st.lists(st.tuples(*[st.floats(1e-3, 1)] * 3), min_size=2, max_size=8), st.sampled_from(["transfer", "latency"]))
def test_the_layers_of_a_queue(rows: list[tuple[float, float, float]], part: str) -> None:
    """Messages of (latency, transfer) seconds, and the seconds of backward between two gradients, input first."""
    layers, latency, transfer, hiding = [], 0.0, 0.0, 0.0
    for index, (first, rest, gap) in enumerate(rows):
        latency, transfer, hiding = latency + first, transfer + rest, hiding + (gap if index else 0.0)
        layers.append(LayerPoint(str(index), 1.0, 1.0, 1.0, 1, latency, transfer, hiding))
    point = Design(4, 64, tuple(layers), 10.0, 0.0, 1.0, 1, 1.0)
    # The same queue message by message: a gradient is complete `hiding` before the end of backward, at 0.
    free = -math.inf
    for layer, (first, rest, _) in zip(reversed(layers), reversed(rows), strict=True):
        free = max(free, -layer.hiding) + first + rest
    assert point.bubble == pytest.approx(max(0.0, free))
    # Just below the factor the same layer is critical, just above it another is.
    limit = point.next_limit(part)
    if limit is None:
        factors = {1e6: point.critical.name}
    else:
        factors = {max(1.0, limit[0] * (1 - 1e-6)): point.critical.name, limit[0] * (1 + 1e-6): limit[1]}
    for factor, name in factors.items():
        scaled = [dataclasses.replace(layer, **{part: getattr(layer, part) * factor}) for layer in layers]
        lates = {layer.name: layer.late() for layer in scaled}
        assert lates[name] == pytest.approx(max(lates.values()), abs=1e-4)

"""Das et al.'s design points against the figures that the papers give, and against a queue walked by hand."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.plan.cluster import load_cluster, load_software
from torusgd.plan.design import Design, LayerPoint, design, flops_a_byte, flops_a_weight, least_images
from torusgd.plan.model_cost import Layer, known_cost, read_model


def convolution(ifm: int, ofm: int, kernel: int, pixels: int) -> Layer:
    return Layer("conv", False, ifm, ofm, kernel * kernel, pixels * pixels, pixels * pixels)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_the_ratio_of_a_convolution_depends_on_its_output_alone(kernel: int) -> None:
    assert flops_a_byte([convolution(64, 128, kernel, 14)], images=4) == pytest.approx(1.5 * 14 * 14 * 4)


@pytest.mark.parametrize(("name", "ratio", "fdr", "ethernet"), [("overfeat-fast", 250.7, 2, 6), ("vgg-a", 1218, 1, 2)])
def test_ratios_and_least_images_of_das_et_al(name: str, ratio: float, fdr: int, ethernet: int) -> None:
    layers = known_cost(name).layers
    assert flops_a_byte([layer for layer in layers if not layer.linear]) == pytest.approx(ratio, rel=1e-3)
    assert (least_images(336, layers), least_images(1336, layers)) == (fdr, ethernet)


def test_scaling_ratios_of_you_et_al() -> None:
    residual, alexnet = (flops_a_weight(known_cost(name)) for name in ("resnet50", "alexnet-bn"))
    assert residual == pytest.approx(308, rel=0.05)
    assert alexnet == pytest.approx(24.6, rel=0.05)
    assert residual / alexnet == pytest.approx(12.5, rel=0.08)  # both networks' deviations


def found(model: str = "overfeat-fast", cluster: str = "cori", devices: int = 64, batch: int = 256) -> Design:
    return design(known_cost(model), load_cluster(cluster), load_software("pcl-dnn"), devices, batch)


def test_the_design_point_of_overfeat_on_64_nodes() -> None:
    point = found()
    groups = {layer.name: layer.groups for layer in point.layers}
    assert groups["features.0"] == 64  # the first convolution is data-parallel
    assert groups["fc6"] == groups["fc7"] == 2  # of 4,096 outputs or nearly: the paper's sqrt(64 * 256 / 4096)
    assert [layer.flops for layer in point.layers] == [6.0 * layer.macs for layer in known_cost("overfeat-fast").layers]
    endeavor = found(cluster="endeavor")
    assert endeavor.balance == pytest.approx(336, rel=2e-3)
    assert (endeavor.least_images, endeavor.most_nodes) == (2, 128)  # the paper's
    vgg = found("vgg-a", "endeavor")
    assert (vgg.least_images, vgg.most_nodes) == (1, 256)  # the paper's


def test_one_device_waits_for_nothing() -> None:
    alone = found(devices=1)
    assert (alone.bubble, alone.exchange, alone.efficiency) == (0, 0, 1)
    assert all(layer.sent == 0 for layer in alone.layers)


def test_quicker_links_and_more_images_raise_the_efficiency() -> None:
    slow, fast = found("vgg-a", "aws-c4.8xlarge", 16), found("vgg-a", "cori", 16)
    assert slow.efficiency < fast.efficiency < 1
    assert found(batch=256).efficiency < found(batch=1024).efficiency


def test_any_network_has_a_design_point() -> None:
    timm = pytest.importorskip("timm")
    cost = read_model(lambda: timm.create_model("mobilenetv3_small_050"), (3, 224, 224))
    point = design(cost, load_cluster("hgx-h100"), load_software("torusgd"), 64, 4096)
    assert 0 < point.efficiency < 1
    assert point.critical in point.layers


@settings(deadline=None, max_examples=50)
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

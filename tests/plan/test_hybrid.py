"""Das et al.'s formulas against the figures that the paper gives, and against brute force."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.plan.hybrid import (
    best_groups,
    bubbles,
    data_parallel_ratio,
    hybrid_volume,
    minimum_images,
    model_parallel_is_better,
    network_ratio,
    optimal_groups,
    overlap_efficiency,
)
from torusgd.plan.known import known_cost
from torusgd.plan.model_cost import Layer


def linear(ifm: int, ofm: int) -> Layer:
    return Layer("fc", True, ifm, ofm, 1, 1, 1)


def convolution(ifm: int, ofm: int, kernel: int, pixels: int) -> Layer:
    return Layer("conv", False, ifm, ofm, kernel * kernel, pixels * pixels, pixels * pixels)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_data_parallel_ratio_depends_on_the_output_alone(kernel: int) -> None:
    assert data_parallel_ratio(convolution(64, 128, kernel, 14), images_per_node=4) == pytest.approx(1.5 * 14 * 14 * 4)


@pytest.mark.parametrize(("name", "ratio", "fdr", "ethernet"), [("overfeat-fast", 250.7, 2, 6), ("vgg-a", 1218, 1, 2)])
def test_network_ratios_and_least_images_of_the_paper(name: str, ratio: float, fdr: int, ethernet: int) -> None:
    layers = [layer for layer in known_cost(name).layers if not layer.linear]
    assert network_ratio(layers) == pytest.approx(ratio, rel=1e-3)
    assert (minimum_images(336, layers), minimum_images(1336, layers)) == (fdr, ethernet)


@pytest.mark.parametrize(
    ("nodes", "batch", "ofm", "none", "full"),
    [(64, 256, 4096, 2.0, 2.83), (128, 512, 4096, 4.0, 5.66), (16, 1024, 2048, 2.83, 4.0)],
)
def test_optimal_groups_of_the_paper(nodes: int, batch: int, ofm: int, none: float, full: float) -> None:
    layer = linear(4096, ofm)
    assert optimal_groups(layer, nodes, batch, overlap=0) == pytest.approx(none, abs=0.005)
    assert optimal_groups(layer, nodes, batch, overlap=1) == pytest.approx(full, abs=0.005)


@settings(deadline=None, max_examples=60)
@given(
    ifm=st.integers(16, 30_000),
    ofm=st.integers(16, 10_000),
    nodes=st.integers(2, 256),
    batch=st.integers(16, 4096),
    overlap=st.floats(0, 1),
)
def test_the_formula_is_the_minimum_of_the_volume(ifm: int, ofm: int, nodes: int, batch: int, overlap: float) -> None:
    def volume(groups: float) -> float:
        return sum(hybrid_volume(linear(ifm, ofm), nodes, batch, groups, overlap, exact=False))

    best = optimal_groups(linear(ifm, ofm), nodes, batch, overlap)
    scale = 1 + 1e-9
    assert 1 <= best <= nodes
    assert volume(best) <= volume(max(1.0, best * 0.9)) * scale
    assert volume(best) <= volume(min(nodes, best * 1.1)) * scale
    found = best_groups(linear(ifm, ofm), nodes, batch, overlap)
    assert nodes % found == 0
    exact = [sum(hybrid_volume(linear(ifm, ofm), nodes, batch, g, overlap)) for g in (1, nodes, found)]
    assert exact[2] <= min(exact[:2])


def test_the_ends_of_hybrid_parallelism() -> None:
    layer = linear(4096, 4096)
    # G = 1 sends activations alone, G = N weights alone.
    assert hybrid_volume(layer, 8, 256, 1) == (2 * 4 * 4096 * 256 * 7 / 8, 0)
    assert hybrid_volume(layer, 8, 256, 8) == (0, 4 * 4096 * 4096 * 2 * 7 / 8)


def test_when_model_parallelism_wins() -> None:
    assert model_parallel_is_better(linear(4096, 4096), batch=256, overlap=0)
    assert not model_parallel_is_better(linear(4096, 200), batch=256, overlap=0)
    assert not model_parallel_is_better(convolution(256, 256, 3, 56), batch=256)


def test_bubbles_by_hand() -> None:
    layers = [convolution(1, 1, 1, 10), linear(10, 10)]  # 100 and 100 MAC: 200 FLOP a pass
    volumes = [30.0, 50.0]
    # The first layer's gradients wait for 80 bytes with nothing left to hide behind; the second hides behind 3 * 200.
    assert bubbles(layers, volumes, images=1, flops=100.0, bandwidth=4.0) == [20.0, 50 / 4 - 6]
    assert overlap_efficiency(layers, volumes, 1, 100.0, 4.0) == pytest.approx(12 / (12 + 20))


def test_endless_bandwidth_has_no_bubbles() -> None:
    layers = [layer for layer in known_cost("vgg-a").layers if not layer.linear]
    volumes = [4.0 * layer.weights for layer in layers]
    assert overlap_efficiency(layers, volumes, 4, 1e12, math.inf) == 1
    slow, fast = (overlap_efficiency(layers, volumes, 4, 1e12, rate) for rate in (1e9, 1e10))
    assert 0 < slow < fast < 1

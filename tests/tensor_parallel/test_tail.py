"""The tail of a network: who has one, its blocks as the network's own parameters, their layouts over ranks and sums.

Das et al.'s volumes and groups against the figures that the paper gives, and against brute force.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refuses
from torch import nn
from torch.nn.functional import linear

from torusgd.models import MODELS
from torusgd.recipe.compatibility import allowed_parallel
from torusgd.tensor_parallel.exchange import Layout, sum_in_tree
from torusgd.tensor_parallel.tail import best_groups, column_tail, hybrid_volume


@pytest.mark.parametrize(("name", "options", "pixels", "layers"), [
    ("vgg-a", {"width": 4}, 64, ["fc6", "fc7", "fc8"]), ("overfeat-fast", {"width": 6}, 96, ["fc6", "fc7", "fc8"]),
    ("cd-dnn", {"inputs": 441, "width": 16}, 21, ["1", "3", "5", "7", "9", "11", "13", "15"]),
    ("digits-net", {}, 8, ["fc"]),
])  # fmt: skip
def test_front_and_tail_are_the_network(name: str, options: dict, pixels: int, layers: list[str]) -> None:
    torch.manual_seed(0)
    network = MODELS[name](classes=7, channels=1, **options).eval()
    images = torch.randn(3, 1, pixels, pixels)
    want = network(images)
    tail = column_tail(network, 4)
    assert [layer.name for layer in tail.layers] == layers
    x = tail.front(images)
    names = {name for name, _ in network.named_parameters()}
    for layer in tail.layers:
        assert {f"{layer.name}.weight", f"{layer.name}.bias"} <= names
        assert x.shape == (3, layer.inputs)
        x = layer.after.eval()(torch.cat([linear(x, block.weight, block.bias) for block in layer.blocks], dim=1))
    torch.testing.assert_close(x, want)


def test_alexnet_has_a_tail() -> None:
    with torch.device("meta"):
        tail = column_tail(MODELS["alexnet-bn"](classes=7, channels=1), 4)
        assert tail.front(torch.empty(3, 1, 67, 67)).shape == (3, tail.layers[0].inputs)
    assert [layer.name for layer in tail.layers] == ["fc6", "fc7", "fc8"]


def test_blocks_share_the_memory_of_the_parameters() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3, bias=False))
    tail = column_tail(network, 3)
    block = tail.layers[0].blocks[1]
    assert block.bias is not None
    block.weight.fill_(7.0)
    block.bias.fill_(5.0)
    assert network.get_parameter("0.weight")[2:4].eq(7).all()
    assert network.get_parameter("0.bias")[2:4].eq(5).all()
    assert tail.layers[1].blocks[0].bias is None
    assert not tail.layers[0].after[0].inplace
    assert network[1].inplace


@pytest.mark.parametrize(("name", "network", "blocks"), [
    ("a residual network in column blocks", MODELS["resnet18"](classes=8, channels=1), 2),
    ("a tail that does not end in linear layers", nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), 2),
    ("more blocks than outputs", nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 4),
])  # fmt: skip
def test_a_network_without_a_tail_is_refused(name: str, network: nn.Module, blocks: int) -> None:
    refuses(name, column_tail, network, blocks, about=f"column_blocks = {blocks}")


@settings(deadline=None, max_examples=100)
@given(blocks=st.integers(1, 48), seed=st.integers(0, 99), data=st.data())
def test_the_sum_has_the_same_bits_for_any_allowed_number_of_parts(blocks: int, seed: int, data: st.DataObject) -> None:
    addends = torch.randn(blocks, 5, generator=torch.Generator().manual_seed(seed))
    ranks = blocks * data.draw(st.integers(1, 3))
    want = sum_in_tree(addends)
    for parts in allowed_parallel(ranks, blocks):
        layout = Layout(parts, blocks)
        of_ranks = [sum_in_tree(addends[block] for block in layout.held(rank)) for rank in range(parts)]
        assert torch.equal(sum_in_tree(of_ranks), want)
    torch.testing.assert_close(want, addends.sum(dim=0))


@pytest.mark.parametrize(("parts", "blocks"), [(1, 8), (2, 8), (8, 8), (3, 6), (1, 1)])
def test_every_piece_is_held_once(parts: int, blocks: int) -> None:
    layout = Layout(parts, blocks)
    ranks = 2 * parts
    held = [piece for rank in range(ranks) for piece in layout.activations(rank)]
    assert len(held) == len(set(held)) == ranks * blocks
    for rank in range(ranks):
        assert {piece.owner for piece in layout.activations(rank)} == set(layout.owners(rank))
        assert rank in layout.owners(rank)


@pytest.mark.parametrize(("nodes", "batch", "ofm", "none", "full"), [
    (64, 256, 4096, 2.0, 2.83), (128, 512, 4096, 4.0, 5.66), (16, 1024, 2048, 2.83, 4.0),
])  # fmt: skip
def test_optimal_groups_of_the_paper(nodes: int, batch: int, ofm: int, none: float, full: float) -> None:
    layer = (4096, 4096 * ofm, nodes, batch)
    for overlap, least in ((0.0, none), (1.0, full)):
        groups = (1 + 0.005 * step for step in range(2000))
        assert min(groups, key=lambda g: sum(hybrid_volume(*layer, g, overlap))) == pytest.approx(least, abs=0.006)


@settings(deadline=None, max_examples=60)
@given(
    ifm=st.integers(16, 30_000), ofm=st.integers(16, 10_000), nodes=st.integers(2, 256), batch=st.integers(16, 4096),
    overlap=st.floats(0, 1),
)  # fmt: skip
def test_the_best_groups_divide_the_nodes_and_send_least(
    ifm: int, ofm: int, nodes: int, batch: int, overlap: float
) -> None:
    layer = (ifm, ifm * ofm)
    found = best_groups(*layer, nodes, batch, overlap)
    assert nodes % found == 0
    exact = [sum(hybrid_volume(*layer, nodes, batch, g, overlap)) for g in (1, nodes, found)]
    assert exact[2] <= min(exact[:2])


def test_one_group_sends_activations_alone_and_as_many_as_nodes_weights_alone() -> None:
    layer = (4096, 4096 * 4096)
    assert hybrid_volume(*layer, 8, 256, 1) == (2 * 4 * 4096 * 256 * 7 / 8, 0)
    assert hybrid_volume(*layer, 8, 256, 8) == (0, 4 * 4096 * 4096 * 2 * 7 / 8)

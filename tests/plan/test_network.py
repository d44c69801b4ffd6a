"""Costs of all-reduces: by hand, by what must hold for any cluster, and against the price of the routes that run."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.cost import Network, Terms, seconds
from torusgd.plan.cluster import Cluster, Communication, Device, Link
from torusgd.plan.network import Axis, doubling, exchange, grid_of, hop, phases, reduce_scatter, tree

DEVICE = Device(name="any", peak={"float32": 1e12}, memory_bandwidth=1e11)


def cluster(**changes: object) -> Cluster:
    values: dict[str, object] = {
        "name": "test",
        "source": "by hand",
        "device": DEVICE,
        "devices_per_node": 4,
        "inside": Link(alpha=1e-6, bandwidth=100e9),
        "between": Link(alpha=5e-6, bandwidth=20e9),
    }
    return Cluster(**{**values, **changes})  # type: ignore[arg-type]


def total(machine: Cluster, ranks: int, size: float, **how: object) -> float:
    parts = phases(machine, Communication.model_validate(how), ranks, size)
    return sum(phase.seconds for phase in parts)


def test_a_ring_within_a_node_by_hand() -> None:
    # 2 * 3 rounds of 1 us, 2 * 3/4 of 1 MB at 100 GB/s.
    assert total(cluster(), 4, 1e6, algorithm="ring") == pytest.approx(6e-6 + 1.5e6 / 100e9)


def test_a_ring_over_nodes_crosses_once_a_node() -> None:
    # Of 4 hops 3 are inside; the one flow that leaves a node has its 20 GB/s for itself.
    found = hop(cluster(), Axis(16, 1))
    assert found.alpha == pytest.approx((3 * 1e-6 + 5e-6) / 4)
    assert found.bandwidth == 20e9


def test_vertical_rings_share_the_cards_of_a_node() -> None:
    found = hop(cluster(), Axis(8, 4))
    assert found == (5e-6, 20e9 / 4)
    # Rows of two: two columns, each crossing once a node.
    assert hop(cluster(), Axis(8, 2)).bandwidth == 20e9 / 2


def test_sonys_formula_on_abcis_numbers() -> None:
    """T = 2(X-1) a + 2(Y-1) a + 2 (X-1)/X n / B_h + 2 (Y-1)/Y (n/X) / B_v, rows of one node (Sony, section 2)."""
    n, x, y = 51.1e6, 4, 256
    expected = 2 * (x - 1) * 1e-6 + 2 * (y - 1) * 5e-6 + 2 * (x - 1) / x * n / 100e9 + 2 * (y - 1) / y * n / x / 5e9
    assert total(cluster(), x * y, n, algorithm="torus", grid="node") == pytest.approx(expected)


def test_a_single_connection_may_not_fill_the_link() -> None:
    """One TCP stream of a flat ring is slow, the six columns of a torus fill the card (Horovod's torus)."""
    tcp = cluster(devices_per_node=6, between=Link(alpha=50e-6, bandwidth=1.25e9, stream=0.4e9))
    ring, torus = (total(tcp, 192, 6e8, algorithm=a, grid="node") for a in ("ring", "torus"))
    assert ring / torus == pytest.approx(1.25 / 0.4, rel=0.05)


def test_taper_holds_back_what_leaves_a_rack() -> None:
    tapered = cluster(rack_nodes=8, taper=0.25)
    assert exchange(tapered, 4).bandwidth == exchange(cluster(), 4).bandwidth  # neighbours: an eighth leaves
    assert exchange(tapered, 4 * 64).bandwidth == pytest.approx(exchange(cluster(), 4 * 64).bandwidth / 4)
    assert hop(tapered, Axis(512, 1)) == hop(cluster(), Axis(512, 1))  # one flow in eight nodes leaves


def test_halving_doubling_by_hand() -> None:
    alone = cluster(devices_per_node=1)
    # 8 ranks: 3 rounds each way, 7/8 of the bytes each way.
    assert total(alone, 8, 8e6, algorithm="halving-doubling") == pytest.approx(6 * 5e-6 + 2 * 7e6 / 20e9)
    assert doubling(alone, Axis(8, 1), 8e6) == pytest.approx(3 * (5e-6 + 8e6 / 20e9))
    assert doubling(alone, Axis(6, 1), 8e6) == pytest.approx(4 * (5e-6 + 8e6 / 20e9))


def test_tree_and_in_network_by_hand() -> None:
    assert tree(cluster(), 32, 1e6) == pytest.approx(2 * (3 * 1e-6 + 3 * 5e-6 + 1e6 / 20e9))
    # Every card sends and receives each byte of its part once.
    expected = 2 * (3 * 1e-6 + 0.75e6 / 100e9) + 2 * 5e-6 + 1e6 / 20e9
    assert total(cluster(), 32, 1e6, algorithm="in-network") == pytest.approx(expected)


def test_hierarchical_leaders_have_the_cards_for_themselves() -> None:
    inside = 4 * (3 * 1e-6 + 0.75e6 / 100e9)
    between = 2 * (7 * 5e-6 + 7 / 8 * 1e6 / 20e9)
    assert total(cluster(), 32, 1e6, algorithm="hierarchical", grid="node") == pytest.approx(inside + between)


def test_the_programs_own_time_a_message_counts_in_every_round() -> None:
    slow = total(cluster(), 16, 1e6, algorithm="ring", message=1e-3)
    assert slow - total(cluster(), 16, 1e6, algorithm="ring") == pytest.approx(30e-3)


@pytest.mark.parametrize(("ranks", "grid"), [(2048, (512, 4)), (12, (3, 4)), (4, (1, 4)), (6, (3, 2))])
def test_rows_of_a_node(ranks: int, grid: tuple[int, int]) -> None:
    assert grid_of(Communication(algorithm="torus", grid="node"), cluster(), ranks) == grid


def test_a_given_grid_goes_before_the_rule() -> None:
    how = Communication(algorithm="torus", grids=((48, 72),))
    assert grid_of(how, cluster(), 3456) == (48, 72)
    assert grid_of(how, cluster(), 1024) == (32, 32)


ALGORITHMS = (
    "auto",
    "ring",
    "halving-doubling",
    "doubling",
    "direct",
    "torus",
    "hierarchical",
    "tree",
    "nccl",
    "in-network",
)


@settings(deadline=None, max_examples=60)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    ranks=st.integers(2, 3000),
    size=st.floats(1, 1e9),
    per_node=st.sampled_from([1, 2, 4, 8]),
)
def test_better_hardware_and_fewer_bytes_never_cost_more(
    algorithm: str, ranks: int, size: float, per_node: int
) -> None:
    def cost(size: float, alpha: float = 5e-6, bandwidth: float = 20e9, taper: float = 1.0) -> float:
        link = Link(alpha=alpha, bandwidth=bandwidth)
        machine = cluster(devices_per_node=per_node, between=link, rack_nodes=16, taper=taper)
        return total(machine, ranks, size, algorithm=algorithm)

    base = cost(size)
    assert math.isfinite(base)
    assert base > 0
    assert cost(size, alpha=1e-5) >= base
    assert cost(size, bandwidth=10e9) >= base
    assert cost(size, taper=0.3) >= base
    assert cost(size * 2) > base


@settings(deadline=None, max_examples=40)
@given(size=st.floats(1e3, 1e9), ranks=st.integers(2, 512))
def test_no_algorithm_beats_the_bound_on_bytes(size: float, ranks: int) -> None:
    alone = cluster(devices_per_node=1)
    for algorithm in ("ring", "halving-doubling", "doubling", "torus"):
        assert total(alone, ranks, size, algorithm=algorithm) >= 2 * (ranks - 1) / ranks * size / 20e9


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(["ring", "halving-doubling", "torus"]),
    ranks=st.sampled_from([2, 4, 8, 16, 32]),
    size=st.integers(1 << 20, 1 << 26),
)
def test_formulas_agree_with_the_price_of_the_routes(name: str, ranks: int, size: int) -> None:
    """The synchronisation's own price counts messages of the routes that run, and one latency more to begin with."""
    alone = cluster(devices_per_node=1)
    network = Network(tuple(range(ranks)), None, Terms(5e-6, 1 / 20e9), 0.0)
    routed = seconds(parse_algorithm(name, ranks), size, network)
    assert total(alone, ranks, size, algorithm=name) == pytest.approx(routed - 5e-6, rel=1e-3)


def test_an_axis_of_one_is_free() -> None:
    assert reduce_scatter(cluster(), Axis(1, 1), 1e9, "ring") == 0
    assert phases(cluster(), Communication(), 1, 1e9) == ()

"""Messages on a cluster: by hand, by what must hold for any cluster, and as a run's own all-reduces are priced."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from torusgd.comm.algorithms import OTHER_PROGRAMS
from torusgd.comm.tuning.cost import rank_candidates
from torusgd.plan.cluster import Cluster, Communication, Device, Link
from torusgd.plan.timeline import algorithm_of, grid_of, group_phases, phases, topology_of

DEVICE = Device(name="any", peak={"float32": 1e12}, memory_bandwidth=1e11)


def cluster(**changes: object) -> Cluster:
    near, far = Link(alpha=1e-6, bandwidth=100e9), Link(alpha=5e-6, bandwidth=20e9)
    values = {"name": "test", "source": "by hand", "backend": "gloo", "device": DEVICE, "inside": near, "between": far}
    return Cluster.model_validate({**values, "devices_per_node": 4, **changes})


def total(machine: Cluster, ranks: int, size: float, **communication: Any) -> float:
    return sum(p.seconds for p in phases(machine, Communication.model_validate(communication), ranks, size))


@pytest.mark.parametrize("size", [4096.0, 1e9])
def test_native_is_that_of_the_backend(size: float) -> None:
    gpus = cluster(backend="nccl")
    assert total(gpus, 512, size, algorithm="native") == total(gpus, 512, size, algorithm="nccl")
    assert total(cluster(), 512, size, algorithm="native") == total(gpus, 512, size, algorithm="ring")


def test_a_ring_within_a_node_by_hand() -> None:
    # 2 * 3 rounds of 1 us, 2 * 3/4 of 1 MB at 100 GB/s.
    assert total(cluster(), 4, 1e6, algorithm="ring") == pytest.approx(6e-6 + 1.5e6 / 100e9)


def test_a_ring_over_nodes_crosses_once_a_node() -> None:
    # Of 4 hops 3 are inside; the one flow that leaves a node has its 20 GB/s for itself.
    rounds = 2 * 15
    expected = rounds * (3 * 1e-6 + 5e-6) / 4 + rounds / 16 * 1e6 / 20e9
    assert total(cluster(), 16, 1e6, algorithm="ring") == pytest.approx(expected)


@pytest.mark.parametrize(("apart", "columns"), [(4, 4), (2, 2)])
def test_rings_beside_each_other_share_the_cards_of_a_node(apart: int, columns: int) -> None:
    """Groups of 8 ranks: each of a node's 4 ranks in a group of its own, or two in each of two groups."""
    (phase,) = group_phases(cluster(), Communication(algorithm="ring"), 8 * apart, 8, apart, 1e6, "sum")
    alpha = 5e-6 if apart == 4 else (1e-6 + 5e-6) / 2
    assert phase.seconds == pytest.approx(2 * 7 * (alpha + 1e6 / 8 / (20e9 / columns)))


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
    large: dict[str, Any] = {"size": 1e9, "algorithm": "halving-doubling"}
    # Of a machine of one rack half the flows leave it in the longest round, of a large one all do.
    few, many = (total(tapered, ranks, **large) / total(cluster(), ranks, **large) for ranks in (32, 4096))
    assert 1 < few < many < 4
    ring: dict[str, Any] = {"size": 1e9, "algorithm": "ring"}  # one flow in eight nodes leaves
    assert total(tapered, 512, **ring) == total(cluster(), 512, **ring)


def test_halving_doubling_by_hand() -> None:
    alone = cluster(devices_per_node=1)
    # 8 ranks: 3 rounds each way, 7/8 of the bytes each way.
    assert total(alone, 8, 8e6, algorithm="halving-doubling") == pytest.approx(6 * 5e-6 + 2 * 7e6 / 20e9)
    assert total(alone, 8, 8e6, algorithm="doubling") == pytest.approx(3 * (5e-6 + 8e6 / 20e9))
    assert total(alone, 6, 8e6, algorithm="doubling") == pytest.approx(4 * (5e-6 + 8e6 / 20e9))


def test_tree_and_in_network_by_hand() -> None:
    assert total(cluster(), 32, 1e6, algorithm="tree") == pytest.approx(2 * (3 * 1e-6 + 3 * 5e-6 + 1e6 / 20e9))
    # Every card sends and receives each byte of its part once.
    expected = 2 * (3 * 1e-6 + 0.75e6 / 100e9) + 2 * 5e-6 + 1e6 / 20e9
    assert total(cluster(), 32, 1e6, algorithm="in-network") == pytest.approx(expected)


def test_hierarchical_leaders_have_the_cards_for_themselves() -> None:
    # To the leader and back again is one round each, of all that the others have.
    inside = 2 * (4 * 1e-6 + 2 * 0.75e6 / 100e9)
    between = 2 * (7 * 5e-6 + 7 / 8 * 1e6 / 20e9)
    assert total(cluster(), 32, 1e6, algorithm="hierarchical", grid="node") == pytest.approx(inside + between)


def test_the_programs_own_time_a_message_counts_in_every_round() -> None:
    slow = total(cluster(), 16, 1e6, algorithm="ring", message=1e-3)
    assert slow - total(cluster(), 16, 1e6, algorithm="ring") == pytest.approx(30e-3)


@pytest.mark.parametrize(("ranks", "grid"), [(2048, (512, 4)), (12, (3, 4)), (4, (1, 4)), (6, (3, 2))])
def test_rows_of_a_node(ranks: int, grid: tuple[int, int]) -> None:
    assert grid_of(Communication(algorithm="torus", grid="node"), cluster(), ranks) == grid


def test_a_given_grid_goes_before_the_rule() -> None:
    communication = Communication(algorithm="torus", grids=((48, 72),))
    assert grid_of(communication, cluster(), 3456) == (48, 72)
    assert grid_of(communication, cluster(), 1024) == (32, 32)


ALGORITHMS = (
    "auto", "native", "ring", "halving-doubling", "doubling", "direct", "torus", "torus:halving/ring",
    "torus:doubling/direct", "torus:doubling", "hierarchical", "hierarchical:halving/direct", *OTHER_PROGRAMS,
)  # fmt: skip


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


@settings(deadline=None, max_examples=60)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    ranks=st.integers(2, 500),
    size=st.floats(1, 1e9),
    per_node=st.sampled_from([1, 3, 4, 8]),
)
def test_shards_are_summed_and_gathered_in_halves(algorithm: str, ranks: int, size: float, per_node: int) -> None:
    """Where an algorithm leaves no shards, another one stands for it, as in a run."""
    machine, communication = cluster(devices_per_node=per_node), Communication(algorithm=algorithm)
    whole, scatter, gather = (
        phases(machine, communication, ranks, size, kind) for kind in ("sum", "scatter", "gather")
    )
    assert [phase.axis for phase in gather] == [phase.axis for phase in reversed(scatter)]
    moved = sum(phase.seconds for phase in (*scatter, *gather))
    if "doubling" in algorithm or algorithm.startswith("hierarchical") or algorithm == "auto":
        assert moved > 0
    else:
        assert moved == pytest.approx(sum(phase.seconds for phase in whole))


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(2, 3000), size=st.integers(1, 1 << 28), per_node=st.sampled_from([1, 2, 4, 8]),
    message=st.sampled_from([0.0, 1e-6, 1e-4]),
)  # fmt: skip
def test_auto_plans_what_a_run_would_take(ranks: int, size: int, per_node: int, message: float) -> None:
    """A run ranks the same candidates by the same price; in one chunk no other one of them is quicker."""
    machine, communication = cluster(devices_per_node=per_node), Communication(algorithm="auto", message=message)
    topology = topology_of(machine, ranks, communication)
    assert sum(phase.seconds for phase in phases(machine, communication, ranks, size)) == pytest.approx(
        min(
            sum(p.seconds for p in phases(machine, named, ranks, size))
            for each, _ in rank_candidates(size, ranks, topology)
            for named in [Communication(algorithm=each.name, grids=(each.grid,), message=message)]
        )
    )


def test_every_method_is_considered_where_it_is_best() -> None:
    def chosen(size: float, ranks: int, message: float = 1e-6, **changes: object) -> str:
        return algorithm_of(Communication(algorithm="auto", message=message), cluster(**changes), ranks, size).name

    far = Link(alpha=5e-3, bandwidth=1e8)
    assert chosen(1e3, 8, devices_per_node=1, between=far) == "direct"
    assert chosen(1e6, 64, 1e-3, devices_per_node=1, between=far).startswith("torus:")
    assert chosen(1e3, 100_000, devices_per_node=1) == "doubling"
    assert chosen(1e9, 7, devices_per_node=8) == "halving-doubling"


@pytest.mark.parametrize("name", ["magic", "ring:halving", "torus:best", "hierarchical:ring/doubling"])
def test_an_all_reduce_that_there_is_not_is_named(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Communication(algorithm=name)
    assert f"allreduce {name}: " in str(caught.value)


def test_an_axis_of_one_is_free() -> None:
    assert group_phases(cluster(), Communication(), 4, 1, 4, 1e9, "sum") == ()
    assert phases(cluster(), Communication(), 1, 1e9) == ()

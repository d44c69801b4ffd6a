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
from torusgd.plan.timeline import grid_of, phases, topology_of

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


@pytest.mark.parametrize(
    ("how", "ranks", "expected"),
    [
        # Of 4 hops of a ring 3 are inside; the one flow that leaves a node has its 20 GB/s for itself.
        ({"algorithm": "ring"}, 16, 30 * (3 * 1e-6 + 5e-6) / 4 + 30 / 16 * 1e6 / 20e9),
        ({"algorithm": "ring", "message": 1e-3}, 16, 30 * (1e-3 + (3 * 1e-6 + 5e-6) / 4) + 30 / 16 * 1e6 / 20e9),
        # Rows of one node, as on ABCI.
        ({"algorithm": "torus", "grid": "node"}, 32,
         6 * 1e-6 + 14 * 5e-6 + 2 * 3 / 4 * 1e6 / 100e9 + 2 * 7 / 8 * 1e6 / 4 / 5e9),
        ({"algorithm": "tree"}, 32, 2 * (3 * 1e-6 + 3 * 5e-6 + 1e6 / 20e9)),
        # Every card sends and receives each byte of its part once.
        ({"algorithm": "in-network"}, 32, 2 * (3 * 1e-6 + 0.75e6 / 100e9) + 2 * 5e-6 + 1e6 / 20e9),
    ],
)  # fmt: skip
def test_a_megabyte_by_hand(how: dict[str, Any], ranks: int, expected: float) -> None:
    """Formulas of a run's own all-reduces: tests/comm/tuning/test_cost.py."""
    assert total(cluster(), ranks, 1e6, **how) == pytest.approx(expected)


def test_a_clusters_limits_are_those_of_the_topology() -> None:
    slow = Link(alpha=5e-6, bandwidth=20e9, efficiency=0.5, stream=1e9)
    limited = cluster(between=slow, rack_nodes=8, taper=0.25)
    found = topology_of(limited, 64, Communication(message=1e-3, streams=2))
    assert (found.per_host, found.message, found.rack_hosts, found.taper) == (4, 1e-3, 8, 0.25)
    assert (found.between.beta, found.stream) == pytest.approx((1 / 10e9, 1 / 2e9))
    assert topology_of(limited, 2, Communication()).per_host == 2


@pytest.mark.parametrize(("apart", "columns"), [(4, 4), (2, 2)])
def test_rings_beside_each_other_share_the_cards_of_a_node(apart: int, columns: int) -> None:
    """Groups of 8 ranks: each of a node's 4 ranks in a group of its own, or two in each of two groups."""
    (phase,) = phases(cluster(), Communication(algorithm="ring"), 8 * apart, 1e6, "sum", 8, apart)
    alpha = 5e-6 if apart == 4 else (1e-6 + 5e-6) / 2
    assert phase.seconds == pytest.approx(2 * 7 * (alpha + 1e6 / 8 / (20e9 / columns)))


@pytest.mark.parametrize(("ranks", "grid"), [(2048, (512, 4)), (12, (3, 4)), (4, (1, 4)), (6, (3, 2))])
def test_rows_of_a_node(ranks: int, grid: tuple[int, int]) -> None:
    assert grid_of(Communication(algorithm="torus", grid="node"), cluster(), ranks) == grid


def test_a_given_grid_goes_before_the_rule_and_an_axis_of_one_is_free() -> None:
    communication = Communication(algorithm="torus", grids=((48, 72),))
    assert [grid_of(communication, cluster(), ranks) for ranks in (3456, 1024)] == [(48, 72), (32, 32)]
    assert phases(cluster(), Communication(), 4, 1e9, "sum", 1, 4) == ()
    assert phases(cluster(), Communication(), 1, 1e9) == ()


ALGORITHMS = (
    "auto", "native", "ring", "halving-doubling", "doubling", "direct", "torus", "torus:halving/ring",
    "torus:doubling/direct", "torus:doubling", "hierarchical", "hierarchical:halving/direct", *OTHER_PROGRAMS,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ALGORITHMS), st.integers(2, 3000), st.floats(1, 1e9), st.sampled_from([1, 2, 4, 8]))
def test_better_hardware_and_fewer_bytes_never_cost_more(algorithm: str, ranks: int, size: float, per_node) -> None:
    def cost(size: float, alpha: float = 5e-6, bandwidth: float = 20e9, taper: float = 1.0) -> float:
        link = Link(alpha=alpha, bandwidth=bandwidth)
        machine = cluster(devices_per_node=per_node, between=link, rack_nodes=16, taper=taper)
        return total(machine, ranks, size, algorithm=algorithm)

    base = cost(size)
    assert 0 < base < math.inf
    assert min(cost(size, alpha=1e-5), cost(size, bandwidth=10e9), cost(size, taper=0.3)) >= base
    assert cost(size * 2) > base


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ALGORITHMS), st.integers(2, 500), st.floats(1, 1e9), st.sampled_from([1, 3, 4, 8]))
def test_shards_are_summed_and_gathered_in_halves(algorithm: str, ranks: int, size: float, per_node: int) -> None:
    """Where an algorithm leaves no shards, another one stands for it, as in a run."""
    how = cluster(devices_per_node=per_node), Communication(algorithm=algorithm), ranks, size
    whole, scatter, gather = phases(*how, "sum"), phases(*how, "scatter"), phases(*how, "gather")
    assert [phase.axis for phase in gather] == [phase.axis for phase in reversed(scatter)]
    moved = sum(phase.seconds for phase in (*scatter, *gather))
    if "doubling" in algorithm or algorithm.startswith("hierarchical") or algorithm == "auto":
        assert moved > 0
    else:
        assert moved == pytest.approx(sum(phase.seconds for phase in whole))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 3000), st.integers(1, 1 << 28), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1e-6, 1e-4]))
def test_auto_plans_what_a_run_would_take(ranks: int, size: int, per_node: int, message: float) -> None:
    """A run ranks the same candidates by the same price; in one chunk no other one of them is quicker."""
    machine = cluster(devices_per_node=per_node)
    topology = topology_of(machine, ranks, Communication(algorithm="auto", message=message))
    quickest = min(
        total(machine, ranks, size, algorithm=each.name, grids=(each.grid,), message=message)
        for each, _ in rank_candidates(size, ranks, topology)
    )
    assert total(machine, ranks, size, algorithm="auto", message=message) == pytest.approx(quickest)


@pytest.mark.parametrize("name", ["magic", "ring:halving", "torus:best", "hierarchical:ring/doubling"])
def test_an_all_reduce_that_there_is_not_is_named(name: str) -> None:
    with pytest.raises(ValidationError, match=f"allreduce {name}: "):
        Communication(algorithm=name)

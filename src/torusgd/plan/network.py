"""The cost of a step's messages on a described cluster, phase by phase.

The price of an all-reduce is that of `comm.tuning.cost`, by which a run chooses too. The algorithms of other programs
have formulas here: NCCL's trees, and switches that add.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from ..comm.algorithms import FLAT, GRIDS, Algorithm, parse_algorithm, squarest
from ..comm.tuning import cost as prices
from ..comm.tuning.cost import AlphaBeta, Axis, Cost, Topology
from ..comm.tuning.profile import Profile, expect, waited
from .cluster import Cluster, Communication

Kind = Literal["sum", "scatter", "gather"]
"""kind of a message: an all-reduce, or its first or second half (reduce-scatter, all-gather)"""


class Phase(NamedTuple):
    """A part of an all-reduce that occupies one axis."""

    axis: str
    seconds: float
    lead: float = 0.0
    """seconds at its beginning that do not occupy the axis: another message's phase may go on meanwhile"""


def topology_of(cluster: Cluster, ranks: int, communication: Communication) -> Topology:
    """The topology of a cluster's first `ranks` devices for a program's way of sending messages."""
    inside, between = cluster.inside, cluster.between
    return Topology(
        per_host=min(ranks, cluster.devices_per_node),
        inside=AlphaBeta(inside.alpha, 1 / (inside.bandwidth * inside.efficiency)),
        between=AlphaBeta(between.alpha, 1 / (between.bandwidth * between.efficiency)),
        message=communication.message,
        start=0.0 if cluster.profile is None else cluster.profile.topology.start,
        stream=0.0 if between.stream is None else 1 / (communication.streams * between.stream),
        rack_hosts=cluster.rack_nodes,
        taper=cluster.taper,
    )


def grid_of(communication: Communication, cluster: Cluster, ranks: int) -> tuple[int, int]:
    """The (Y, X) of the program's torus or hierarchical all-reduce on so many devices."""
    for rows, columns in communication.grids:
        if rows * columns == ranks:
            return rows, columns
    if communication.grid == "node":
        columns = math.gcd(ranks, cluster.devices_per_node) if ranks > cluster.devices_per_node else ranks
        return ranks // columns, columns
    return squarest(ranks)


def phases(
    cluster: Cluster, communication: Communication, ranks: int, size: float, kind: Kind = "sum"
) -> tuple[Phase, ...]:
    """The phases of one message of `size` bytes over the first `ranks` devices, in order."""
    if ranks == 1:
        return ()
    # A measurement on as many ranks goes before every formula.
    profile, name = cluster.profile, communication.algorithm
    topology = topology_of(cluster, ranks, communication)
    if profile is not None and profile.timings and len(profile.hosts) == ranks and name in ("auto", "native"):
        whole: tuple[Phase, ...] = (_measured(profile, name == "auto", size),)
    elif name == "in-network":
        whole = _in_network(topology, ranks, size)
    elif name in ("tree", "nccl") or (name == "native" and cluster.backend == "nccl"):
        rivals = [_tree(topology, ranks)]
        rivals += [] if name == "tree" else [prices.all_reduce(topology, Axis(ranks), "ring")]
        whole = (Phase("flat", min(cost.seconds(size) for cost in rivals)),)
    else:
        algorithm = algorithm_of(communication, cluster, ranks, size)
        # In one chunk: buckets gain among each other what chunks gain in a message.
        costs = prices.price(algorithm if kind == "sum" else _leaving_shards(algorithm), topology)
        starts = (topology.start, *(0.0 for _ in costs[1:]))
        whole = tuple(
            Phase(axis, start + cost.seconds(size)) for (axis, cost), start in zip(costs, starts, strict=True)
        )
    return whole if kind == "sum" else halves(whole)[0 if kind == "scatter" else 1]


def algorithm_of(communication: Communication, cluster: Cluster, ranks: int, size: float) -> Algorithm:
    """The algorithm of a run by the program's name of it, for `size` bytes; Gloo's `native` counts as a ring."""
    name = communication.algorithm
    if name == "auto":
        topology = topology_of(cluster, ranks, communication)
        return min(prices.candidates(ranks, topology.per_host), key=lambda each: prices.seconds(each, size, topology))
    grid = grid_of(communication, cluster, ranks) if name.partition(":")[0] in GRIDS else None
    return parse_algorithm("ring" if name == "native" else name, ranks, grid)


def _leaving_shards(algorithm: Algorithm) -> Algorithm:
    # Doubling and a leader leave no shards (`comm.algorithms`).
    vertical, horizontal = (m if m != "doubling" else "halving" for m in (algorithm.vertical, algorithm.horizontal))
    name = "torus" if algorithm.algorithm == "hierarchical" else algorithm.algorithm
    return replace(algorithm, algorithm=name, vertical=vertical, horizontal=horizontal)


def group_phases(
    cluster: Cluster, communication: Communication, ranks: int, members: int, apart: int, size: float, kind: Kind
) -> tuple[Phase, ...]:
    """The phases in each group of `members` ranks, `apart` ranks from each other, all groups at the same time."""
    # Groups have no grid: they sum by a ring if the program has no flat algorithm.
    topology = topology_of(cluster, ranks, communication)
    axis, method = Axis(members, apart, apart), FLAT.get(communication.algorithm, "ring")
    if kind == "sum":
        cost = prices.all_reduce(topology, axis, method)
    else:
        cost = prices.reduce_scatter(topology, axis, "halving" if method == "doubling" else method)
    return (Phase("flat", cost.seconds(size)),) if members > 1 else ()


def halves(whole: Sequence[Phase]) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """An all-reduce as its reduce-scatter and its all-gather, which is the same backwards."""
    # Phases are symmetrical; a single phase in the middle, such as a torus' vertical one, is cut in two.
    middle = len(whole) // 2
    half = [Phase(axis, length / 2, lead / 2) for axis, length, lead in whole[middle : middle + len(whole) % 2]]
    return (*whole[:middle], *half), (*half, *whole[len(whole) - middle :])


def _measured(profile: Profile, is_chosen: bool, size: float) -> Phase:
    """The phase that `torusgd tune` measured on its own ranks: of its choice, or of the backend's own all-reduce."""
    if not is_chosen:
        return Phase("flat", expect(profile, round(size))[2])
    # Each message has threads and connections of its own: its rounds begin while another's are under way.
    return Phase("flat", waited(profile, size), lead=waited(profile, 1))


def _tree(topology: Topology, ranks: int) -> Cost:
    """NCCL's double binary tree: a chain inside each host, two trees of half the bytes each between hosts."""
    # 2 ((g - 1) a_in + log2(hosts) a_out + n b): up the tree and down again, by the slower of the two links.
    # Chunks follow each other: bytes count once up and once down, not for each level; latencies add up along the tree.
    hosts = math.ceil(ranks / topology.per_host)
    slower = topology.inside.beta
    if hosts > 1:
        slower = max(slower, topology.stream, prices.card_beta(topology, 1, max(1, hosts // 2)))
    inside, between = topology.per_host - 1, math.log2(hosts)
    latency = inside * topology.inside.alpha + between * topology.between.alpha
    return Cost(latency, (inside + between) * topology.message, slower).repeated(2)


def _in_network(topology: Topology, ranks: int, size: float) -> tuple[Phase, ...]:
    """Reduce-scatter in the host, addition in the switches (each card sends and receives a byte once), all-gather."""
    half = Phase("horizontal", prices.reduce_scatter(topology, Axis(topology.per_host), "ring").seconds(size))
    if ranks <= topology.per_host:
        return half, half
    up_and_down = 2 * (topology.between.alpha + topology.message) + size * topology.between.beta
    return half, Phase("vertical", up_and_down), half

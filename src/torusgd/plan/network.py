"""What an all-reduce costs on a cluster: alpha-beta terms an axis, shared network cards, tapered racks.

Devices are numbered node by node. An axis is a set of devices `stride` apart: stride 1 is horizontal (neighbours), a
stride of X is the vertical axis of a Y x X grid. By symmetry one representative device is priced, so that 100,000 cost
no more than 8. A ring of P takes 2 (P-1) alpha + 2 (P-1)/P n / B; the others' formulas are in docs/methods/planner.md.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ..comm.profile import Profile, expect, waited
from .cluster import Cluster, Communication


class Hop(NamedTuple):
    """From a device to its neighbour on an axis: mean seconds a message, and bytes/s while all send."""

    alpha: float
    bandwidth: float


class Axis(NamedTuple):
    """`size` devices, `stride` apart."""

    size: int
    stride: int


class Phase(NamedTuple):
    """A part of an all-reduce that keeps one axis busy."""

    axis: str
    seconds: float
    latency: float = 0.0
    """seconds of it during which it may pass others, at its beginning"""


def hop(cluster: Cluster, axis: Axis) -> Hop:
    """Of a ring along an axis; a ring that spans nodes crosses from node to node once for each node."""
    per_node, inside = cluster.devices_per_node, cluster.inside
    inner = inside.bandwidth * inside.efficiency
    if axis.size * axis.stride <= per_node or axis.size == 1:
        return Hop(inside.alpha, inner)
    if axis.stride >= per_node:
        return Hop(cluster.between.alpha, _between(cluster, per_node, axis.stride // per_node))
    members = per_node // axis.stride
    alpha = ((members - 1) * inside.alpha + cluster.between.alpha) / members
    outer = _between(cluster, axis.stride, 1)
    return Hop(alpha, min(inner, outer) if members > 1 else outer)


def exchange(cluster: Cluster, distance: int) -> Hop:
    """Between all pairs of devices `distance` apart at once."""
    if distance < cluster.devices_per_node:
        return Hop(cluster.inside.alpha, cluster.inside.bandwidth * cluster.inside.efficiency)
    nodes = distance // cluster.devices_per_node
    return Hop(cluster.between.alpha, _between(cluster, cluster.devices_per_node, nodes))


def _between(cluster: Cluster, flows: int, distance: int) -> float:
    """bytes/s of one of `flows` equal flows that leave a node for one `distance` nodes away."""
    link = cluster.between
    node = link.bandwidth * link.efficiency
    if cluster.rack_nodes is not None:
        leaving = min(1.0, distance / cluster.rack_nodes)
        node *= min(1.0, cluster.taper / leaving)
    return min(node / flows, link.stream or math.inf)


def reduce_scatter(cluster: Cluster, axis: Axis, size: float, method: str, message: float = 0.0) -> float:
    """Seconds to sum `size` bytes over an axis so that each device holds its part; an all-gather takes as long.

    `method` is ring (P-1 rounds), halving (log2 P rounds) or direct (one round of P-1 messages); `message` is the
    program's own time a message.
    """
    ranks = axis.size
    if ranks == 1:
        return 0.0
    moved = size * (ranks - 1) / ranks
    if method == "ring":
        alpha, bandwidth = hop(cluster, axis)
        return (ranks - 1) * (alpha + message) + moved / bandwidth
    if method == "direct":
        alpha, bandwidth = exchange(cluster, axis.stride * (ranks // 2))
        return alpha + (ranks - 1) * message + moved / bandwidth
    assert method == "halving", method
    seconds, left = 0.0, ranks
    while left > 1:
        keep = (left + 1) // 2
        alpha, bandwidth = exchange(cluster, keep * axis.stride)
        seconds += alpha + message + size * (left - keep) / ranks / bandwidth
        left = keep
    return seconds


def doubling(cluster: Cluster, axis: Axis, size: float, message: float = 0.0) -> float:
    """Seconds of log2 P exchanges of the whole; two more where P is no power of two."""
    rounds = axis.size.bit_length() - 1
    distances = [1 << bit for bit in range(rounds)] + ([1 << rounds] * 2 if axis.size != 1 << rounds else [])
    hops = [exchange(cluster, distance * axis.stride) for distance in distances]
    return sum(alpha + message + size / bandwidth for alpha, bandwidth in hops)


def tree(cluster: Cluster, ranks: int, size: float, message: float = 0.0) -> float:
    """Seconds of NCCL's double binary tree: a chain inside each node, two trees of half the bytes between nodes."""
    members = min(ranks, cluster.devices_per_node)
    nodes = math.ceil(ranks / cluster.devices_per_node)
    bandwidth = cluster.inside.bandwidth * cluster.inside.efficiency
    if nodes > 1:
        bandwidth = min(bandwidth, _between(cluster, 1, max(1, nodes // 2)))
    inside = (members - 1) * (cluster.inside.alpha + message)
    between = math.log2(nodes) * (cluster.between.alpha + message)
    return 2 * (inside + between + size / bandwidth)


def grid_of(communication: Communication, cluster: Cluster, ranks: int) -> tuple[int, int]:
    """The (Y, X) that the profile's torus or hierarchical all-reduce has on so many devices."""
    for rows, columns in communication.grids:
        if rows * columns == ranks:
            return rows, columns
    if communication.grid == "node":
        columns = math.gcd(ranks, cluster.devices_per_node) if ranks > cluster.devices_per_node else ranks
        return ranks // columns, columns
    rows = next(y for y in range(math.isqrt(ranks), 0, -1) if ranks % y == 0)
    return rows, ranks // rows


def phases(cluster: Cluster, communication: Communication, ranks: int, size: float) -> tuple[Phase, ...]:
    """The parts of one all-reduce of `size` bytes over the first `ranks` devices, in order."""
    if ranks == 1:
        return ()
    profile, name = cluster.profile, communication.algorithm
    if profile is not None and profile.timings and len(profile.hosts) == ranks and name in ("auto", "native"):
        return (_measured(profile, name == "auto", size),)
    if communication.algorithm == "auto":
        return _chosen(cluster, communication, ranks, size)
    if communication.algorithm in ("torus", "hierarchical"):
        return _on_grid(cluster, communication, ranks, size)
    if communication.algorithm == "in-network":
        return _in_network(cluster, ranks, size, communication.message)
    message, flat = communication.message, Axis(ranks, 1)
    ring = partial(_summed, cluster, flat, size, "ring", message)
    double_tree = partial(tree, cluster, ranks, size, message)
    seconds: dict[str, Callable[[], float]] = {
        "native": ring,
        "ring": ring,
        "halving-doubling": partial(_summed, cluster, flat, size, "halving", message),
        "doubling": partial(_summed, cluster, flat, size, "doubling", message),
        "direct": partial(_summed, cluster, flat, size, "direct", message),
        "tree": double_tree,
        "nccl": lambda: min(ring(), double_tree()),
    }
    return (Phase("flat", seconds[communication.algorithm]()),)


def _measured(profile: Profile, is_chosen: bool, size: float) -> Phase:
    """By `torusgd tune`, on its own ranks: of what it chose, or of the backend's own all-reduce."""
    if not is_chosen:
        return Phase("flat", expect(profile, round(size))[2])
    # Messages have lanes of their own: one's rounds begin while another's are under way.
    return Phase("flat", waited(profile, size), latency=waited(profile, 1))


def halves(parts: Sequence[Phase]) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """An all-reduce as its reduce-scatter and its all-gather, which is the same backwards."""
    middle = len(parts) // 2
    half = [Phase(axis, seconds / 2, latency / 2) for axis, seconds, latency in parts[middle : middle + len(parts) % 2]]
    return (*parts[:middle], *half), (*half, *parts[len(parts) - middle :])


def axis_sum(cluster: Cluster, communication: Communication, axis: Axis, size: float) -> tuple[Phase, ...]:
    """An all-reduce of `size` bytes among the ranks of one axis; rings where the algorithm has no method for one."""
    methods = {"halving-doubling": "halving", "doubling": "doubling", "direct": "direct"}
    method = methods.get(communication.algorithm, "ring")
    seconds = _summed(cluster, axis, size, method, communication.message)
    return (Phase("flat", seconds),) if axis.size > 1 else ()


def _chosen(cluster: Cluster, communication: Communication, ranks: int, size: float) -> tuple[Phase, ...]:
    """The fastest by the formulas."""
    tried = [communication.model_copy(update={"algorithm": name}) for name in ("ring", "halving-doubling", "doubling")]
    for grid in ("square", "node"):
        for methods in (("ring", "ring"), ("halving", "halving"), ("direct", "direct")):
            change = {"algorithm": "torus", "grid": grid, "grids": (), "methods": methods}
            tried.append(communication.model_copy(update=change))
    return min((phases(cluster, how, ranks, size) for how in tried), key=lambda parts: sum(p.seconds for p in parts))


def _summed(cluster: Cluster, axis: Axis, size: float, method: str, message: float) -> float:
    """Seconds of an all-reduce along one axis."""
    if method == "doubling":
        return doubling(cluster, axis, size, message)
    return 2 * reduce_scatter(cluster, axis, size, method, message)


def _on_grid(cluster: Cluster, communication: Communication, ranks: int, size: float) -> tuple[Phase, ...]:
    rows, columns = grid_of(communication, cluster, ranks)
    across, down = Axis(columns, 1), Axis(rows, columns)
    vertical, horizontal = communication.methods
    message = communication.message
    half = reduce_scatter(cluster, across, size, horizontal, message)
    if communication.algorithm == "torus":
        middle = _summed(cluster, down, size / columns, vertical, message)
        return (Phase("horizontal", half), Phase("vertical", middle), Phase("horizontal", half))
    # The row's sum is gathered on its leader, which takes as long again; only leaders use the cards of a node.
    leaders = cluster.model_copy(update={"devices_per_node": max(1, cluster.devices_per_node // columns)})
    middle = _summed(leaders, Axis(rows, 1), size, vertical, message)
    return (Phase("horizontal", 2 * half), Phase("vertical", middle), Phase("horizontal", 2 * half))


def _in_network(cluster: Cluster, ranks: int, size: float, message: float) -> tuple[Phase, ...]:
    """Scatter inside the node, add in the switches (every card sends and receives its part once), gather."""
    members = min(ranks, cluster.devices_per_node)
    half = reduce_scatter(cluster, Axis(members, 1), size, "ring", message)
    if ranks <= members:
        return (Phase("horizontal", 2 * half),)
    link = cluster.between
    middle = 2 * (link.alpha + message) + size / (link.bandwidth * link.efficiency)
    return (Phase("horizontal", half), Phase("vertical", middle), Phase("horizontal", half))

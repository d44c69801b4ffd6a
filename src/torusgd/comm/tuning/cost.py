"""The price of an all-reduce: which algorithms there are to choose from, and how many seconds each takes.

The usual alpha-beta model (Hockney 1994): a message of n bytes takes alpha + n * beta seconds. Ranks are numbered host
by host, hosts are alike, and all ranks do the same at once. So a method along an axis has a closed formula, and 100,000
ranks are priced as quickly as eight; only the double tree, which is there for comparison, is counted. The file
tests/comm/tuning/test_cost.py counts the real schedule, message by message, and holds every formula to it. `auto`,
`tune`, the planner and its search all take their candidates and their prices from here.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ..algorithms import FLAT, TREES, Algorithm, parse_algorithm, squarest

# Methods of a torus, VERTICAL/HORIZONTAL or one for both axes, that are worth a price.
TORUS_METHODS = ("ring", "halving", "halving/ring", "direct", "doubling/direct", "ring/direct")


class AlphaBeta(NamedTuple):
    """A link: a message of n bytes takes alpha + n * beta seconds."""

    alpha: float
    beta: float


class Topology(NamedTuple):
    """The network between ranks: equal hosts of `per_host` neighbouring ranks each."""

    per_host: int
    inside: AlphaBeta
    between: AlphaBeta  # link between hosts; beta is of all network cards of a host together, which its ranks share
    message: float = 0.0  # seconds of a rank's own work for each message that it sends
    start: float = 0.0  # seconds before the first round: a Gloo send waits until its receiver has announced the buffer
    stream: float = 0.0  # least seconds a byte of one connection between hosts, if it can't fill the link (TCP)
    rack_hosts: int | None = None  # number of hosts with full bandwidth among them; None: all
    taper: float = 1.0  # fraction of a rack's bandwidth that leaves it


class Axis(NamedTuple):
    """A line of `size` ranks that are `stride` apart, and how many such lines, side by side, work at the same time."""

    size: int
    stride: int = 1
    lines: int = 1


class Cost(NamedTuple):
    """The seconds of some rounds for a tensor of n bytes: latency + work + n * per_byte."""

    latency: float = 0.0
    work: float = 0.0  # seconds of the ranks' own work for their messages
    per_byte: float = 0.0
    inside: float = 0.0  # seconds a byte during which the links inside hosts are busy
    between: float = 0.0  # seconds a byte during which the links between hosts are busy

    def seconds(self, size: float) -> float:
        """Seconds for a tensor of `size` bytes."""
        return self.latency + self.work + size * self.per_byte

    def repeated(self, times: int) -> "Cost":
        return Cost(*(times * value for value in self))

    def of_fraction(self, part: float) -> "Cost":
        return Cost(self.latency, self.work, part * self.per_byte, part * self.inside, part * self.between)


def total(costs: Iterable[Cost]) -> Cost:
    return Cost(*(sum(values) for values in zip(Cost(), *costs, strict=True)))


@lru_cache(maxsize=256)
def candidates(ranks: int, per_host: int, grids: tuple[tuple[int, int], ...] | None = None) -> tuple[Algorithm, ...]:
    """The algorithms worth a price on `ranks` ranks, `per_host` on each host; none of them twice.

    `grids` are the candidates for a torus; None: the squarest, and one with a row for each host.

    >>> [str(algorithm) for algorithm in candidates(2, 1)]
    ['ring', 'doubling']
    """
    host_rows = [(ranks // per_host, per_host)] if ranks % per_host == 0 else []
    tried = {squarest(ranks), *host_rows} if grids is None else set(grids)
    found = [parse_algorithm(name, ranks) for name in FLAT if name not in TREES]
    for grid in sorted(tried - {(1, ranks), (ranks, 1)}):
        found += [parse_algorithm(f"torus:{methods}", ranks, grid) for methods in TORUS_METHODS]
    if 1 < per_host < ranks:
        found += [parse_algorithm("hierarchical", ranks, grid) for grid in host_rows]

    first: dict[tuple[object, ...], Algorithm] = {}  # by schedule
    for algorithm in found:
        # On an axis of two ranks ring, halving and direct are the same exchange.
        axes = zip((algorithm.vertical, algorithm.horizontal), algorithm.grid, strict=True)
        used = [(method, size) for method, size in axes if size > 1]
        methods = [method if size != 2 or method == "doubling" else "exchange" for method, size in used]
        family = "flat" if algorithm.algorithm in FLAT else algorithm.algorithm
        first.setdefault((family, algorithm.grid, *methods), algorithm)
    return tuple(first.values())


def seconds(algorithm: Algorithm, size: float, topology: Topology) -> float:
    """Seconds of an all-reduce of `size` bytes."""
    cost, chunks = total(cost for _, cost in price(algorithm, topology)), algorithm.chunks
    # Chunks follow each other a round apart: the first one passes every link in turn, and each further one adds the
    # time that it occupies the busier kind of link. The work for messages is done once more for each chunk.
    transfer = cost.per_byte + (chunks - 1) * max(cost.inside, cost.between)
    return topology.start + cost.latency + chunks * cost.work + size / chunks * transfer


def rank_candidates(size: int, ranks: int, topology: Topology) -> list[tuple[Algorithm, float]]:
    """Every candidate, each in the number of chunks (1, 2 or 4) that suits it best, by predicted seconds."""
    ranked = []
    for algorithm in candidates(ranks, topology.per_host):
        in_chunks = [replace(algorithm, chunks=chunks) for chunks in (1, 2, 4)]
        ranked.append(min(((each, seconds(each, size, topology)) for each in in_chunks), key=lambda pair: pair[1]))
    return sorted(ranked, key=lambda pair: pair[1])


@lru_cache(maxsize=4096)
def price(algorithm: Algorithm, topology: Topology) -> tuple[tuple[str, Cost], ...]:
    """The phases of the algorithm in one chunk, each with its axis (flat, horizontal, vertical) and its cost there."""
    # A torus leaves each rank of a row one part of the row's sum (reduce-scatter), sums that part along its column
    # (all-reduce of n / X bytes), and gathers the row. A hierarchical all-reduce also gathers the row's sum on its
    # leader, the first rank; leaders sum all n bytes, with the cards of their hosts for themselves, and spread them.
    rows, columns = algorithm.grid
    # Fewer ranks than a host holds are one host, or `_ends` would find rows that leave it.
    topology = topology._replace(per_host=min(topology.per_host, rows * columns))
    row = Axis(columns)
    if algorithm.algorithm in FLAT:
        return (("flat", all_reduce(topology, row, algorithm.horizontal)),)
    if algorithm.algorithm == "hierarchical":
        # Until the leader has all other ranks' parts of the row's sum, or has handed them back.
        to_leader = _fan(topology, row, messages=columns - 1, lines=topology.per_host // columns)
        half = total([reduce_scatter(topology, row, algorithm.horizontal), to_leader])
        middle = all_reduce(topology, Axis(rows, columns, 1), algorithm.vertical)
    elif algorithm.horizontal == "doubling":  # leaves the whole sum on every rank of the row, and nothing to gather
        whole = all_reduce(topology, Axis(rows, columns, columns), algorithm.vertical)
        return ("horizontal", all_reduce(topology, row, "doubling")), ("vertical", whole)
    else:
        half = reduce_scatter(topology, row, algorithm.horizontal)
        middle = all_reduce(topology, Axis(rows, columns, columns), algorithm.vertical).of_fraction(1 / columns)
    return ("horizontal", half), ("vertical", middle), ("horizontal", half)


def all_reduce(topology: Topology, axis: Axis, method: str) -> Cost:
    """The cost along one axis: a reduce-scatter and the all-gather that mirrors it, or rounds that move the whole."""
    if method == "double-tree":
        return _double_tree(topology, axis.size)
    if method in TREES.values():
        return _to_root(topology, axis.size, method).repeated(2)
    if method != "doubling":
        return reduce_scatter(topology, axis, method).repeated(2)
    power = 1 << (axis.size.bit_length() - 1)
    is_inside, rounds = _ends(topology, axis) == 0, []
    for bit in range(power.bit_length() - 1):
        # Partners differ in one bit of their position, so that a host of a multiple of 2 * distance ranks holds both.
        distance = axis.stride << bit
        stays = is_inside or topology.per_host % (2 * distance) == 0
        rounds.append(_round(topology, axis, 0 if stays else distance, 1.0))
    if power < axis.size:  # the ranks beyond the power of two hand theirs over first, and get the sum at the end
        rounds += [_round(topology, axis, 0 if is_inside else axis.stride * power, 1.0)] * 2
    return total(rounds)


def reduce_scatter(topology: Topology, axis: Axis, method: str) -> Cost:
    """The cost until each rank of the axis holds its part of the sum; an all-gather costs the same.

    ring: P - 1 rounds of n / P bytes to the neighbour. direct: one round of P - 1 messages. halving: ceil(log2 P)
    rounds, of the half of what is left to the rank so far away; it also stands for methods that leave no shards.
    """
    size = axis.size
    if size == 1:
        return Cost()
    if method == "ring" or size == 2:  # between two all methods are the same exchange
        return _round(topology, axis, _crossing(topology, axis, 1), 1 / size).repeated(size - 1)
    if method == "direct":
        return _fan(topology, axis, messages=size - 1, lines=axis.lines * topology.per_host / axis.stride)
    rounds, left = [], size
    while left > 1:  # the same halves as in algorithms._halving
        keep = (left + 1) // 2
        rounds.append(_round(topology, axis, _crossing(topology, axis, keep), (left - keep) / size))
        left = keep
    return total(rounds)


def _to_root(topology: Topology, ranks: int, method: str) -> Cost:
    # The whole tensor on its way from all ranks to the first; the way back costs the same.
    # binomial: ceil(log2 P) rounds, to the rank 1, 2, 4, ... positions before. chain: P - 1 rounds to the neighbour,
    # each of which has a link to itself: a rank sends each chunk twice, up and down, and the links work side by side.
    host, far = topology.per_host, topology.between
    near = Cost(topology.inside.alpha, topology.message, topology.inside.beta, topology.inside.beta)
    if method == "chain":
        beta = max(card_beta(topology, 1.0, 1), topology.stream)
        across, crossing = Cost(far.alpha, topology.message, beta, 0.0, beta), (ranks - 1) // host
        way = total([across.repeated(crossing), near.repeated(ranks - 1 - crossing)])
        # Each link carries the tensor once each way: further chunks cost that, not the sum over all links.
        return way._replace(inside=min(way.inside, near.inside), between=min(way.between, beta))
    rounds = []
    for hop in (1 << bit for bit in range((ranks - 1).bit_length())):
        # A round in which any pair crosses hosts is as late as that pair.
        beta = max(card_beta(topology, 1.0, max(1, hop // host)), topology.stream)
        rounds.append(near if host % (2 * hop) == 0 else Cost(far.alpha, topology.message, beta, 0.0, beta))
    return total(rounds)


def _double_tree(topology: Topology, ranks: int) -> Cost:
    # Up and down two binary trees of half the tensor each, counted from the rounds: no formula says which edges cross.
    # In one chunk a round is as late as its busiest link; once chunks follow each other, the rank and the host with
    # most bytes over all rounds are the limit.
    host, rounds = topology.per_host, []
    beta = max(card_beta(topology, 1.0, 1), topology.stream)
    # Seconds a byte of each rank and of each host over all rounds, sending (0) and receiving (1): links have two ways.
    inside, between = defaultdict[tuple[int, int], float](float), defaultdict[tuple[int, int], float](float)
    routes = (parse_algorithm("double-tree", ranks).rounds(rank, 2)[0] for rank in range(ranks))
    for turns in zip(*routes, strict=True):
        near, far = defaultdict[tuple[int, int], float](float), defaultdict[tuple[int, int], float](float)
        peers = 0
        for rank, turn in enumerate(turns):
            for way, messages in enumerate((turn.sends, turn.adds + turn.copies)):
                peers = max(peers, len({message.peer for message in messages}))
                for message in messages:  # each of one element of two
                    if message.peer // host == rank // host:
                        near[way, rank] += topology.inside.beta / 2
                    else:
                        far[way, rank // host] += beta / 2
        for whole, part in ((inside, near), (between, far)):
            for end, seconds_a_byte in part.items():
                whole[end] += seconds_a_byte
        alpha = topology.between.alpha if far else topology.inside.alpha
        rounds.append(Cost(alpha, peers * topology.message, max([*near.values(), *far.values()], default=0.0)))
    most = {"inside": max(inside.values(), default=0.0), "between": max(between.values(), default=0.0)}
    return total(rounds)._replace(**most)


def card_beta(topology: Topology, flows: float, distance: int) -> float:
    """Seconds a byte of each of `flows` equal flows that leave a host together, to a host `distance` hosts away."""
    # They divide the host's cards and a rack's tapered uplinks among them: the fraction min(1, distance / rack_hosts)
    # of a rack's flows leaves it, for which `taper` of its bandwidth is left.
    leaving = min(1.0, distance / topology.rack_hosts) if topology.rack_hosts else 0.0
    return flows * topology.between.beta * max(1.0, leaving / topology.taper)


def _ends(topology: Topology, axis: Axis) -> int:
    # Most ends of rows that lie inside a host: 0 if the axis does not leave it, 2 if rows don't fill hosts.
    span = axis.size * axis.stride
    if topology.per_host % span == 0:
        return 0
    return 1 if span % topology.per_host == 0 else 2


def _crossing(topology: Topology, axis: Axis, hops: int) -> int:
    # Ranks by which a message to the rank `hops` further on the ring of the axis goes beyond hosts; 0: it does not.
    # The shorter way around the ring. A host with two ends of rows has twice as many ranks that send to another host.
    return _ends(topology, axis) * min(hops, axis.size - hops) * axis.stride


def _round(topology: Topology, axis: Axis, distance: int, part: float) -> Cost:
    # Every rank sends a fraction of the tensor to one rank, `distance` ranks away (0: in its own host).
    # Of the g ranks of a host min(g, distance) send to another one: those of the last `distance` positions.
    leaving = min(topology.per_host, distance)
    crossing = leaving / topology.per_host
    # Rounds are no barriers: a rank goes on when its own message is there. So a chain of messages meets the slow
    # latency in that fraction of its rounds, while the bytes of a round are as late as the slower of the two links.
    latency = (1 - crossing) * topology.inside.alpha + crossing * topology.between.alpha
    inside = part * topology.inside.beta if crossing < 1 else 0.0
    between = 0.0
    if leaving:
        # An axis of stride s has a rank at every s-th position only; the lines beside it fill the others.
        flows = max(1.0, leaving * axis.lines / axis.stride)
        beta = card_beta(topology, flows, max(1, distance // topology.per_host))
        between = part * max(beta, topology.stream)  # no flow is faster than one connection
    return Cost(latency, topology.message, max(inside, between), inside, between)


def _fan(topology: Topology, axis: Axis, messages: int, lines: float) -> Cost:
    # One round in which a rank exchanges 1 / P of the tensor with each other rank; `lines` ranks of a host do so.
    size, ends = axis.size, _ends(topology, axis)
    if size == 1:
        return Cost()
    # Ranks of the line inside one host, this rank among them: what goes to them does not use the cards.
    members = min(size - 1, max(1, topology.per_host // (axis.stride * ends))) if ends else size
    inside, between, latency = (members - 1) / size * topology.inside.beta, 0.0, topology.inside.alpha
    if ends:
        # No message goes farther around the axis than half of it.
        far = max(1, axis.stride * (size // 2) // topology.per_host)
        beta = card_beta(topology, max(1.0, lines), far)
        # Each connection carries 1 / P: together they fill a link that one of them can't.
        between, latency = max((size - members) / size * beta, topology.stream / size), topology.between.alpha
    return Cost(latency, messages * topology.message, max(inside, between), inside, between)

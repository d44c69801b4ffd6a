"""One training step on a cluster: what its messages cost, phase by phase, and its timeline.

The price of an all-reduce is that of `comm.tuning.cost`, by which a run chooses too. The algorithms of other programs
have formulas here: NCCL's trees, and switches that add.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from heapq import heappop, heappush
from itertools import count
from statistics import NormalDist
from typing import NamedTuple

from ..comm.algorithms import FLAT, GRIDS, Algorithm, parse_algorithm, squarest
from ..comm.tuning import cost as prices
from ..comm.tuning.cost import AlphaBeta, Axis, Cost, Topology
from ..comm.tuning.profile import expect, waited
from ..comm.tuning.profile import hidden as hidden_seconds
from .cluster import Cluster, Communication, Software
from .model_cost import ONE_PASS, ModelCost, Pass, Routine, update_seconds, worker_seconds
from .step_script import CONTENTS, Action, Compute, Kind, Send, Wait, compose, split_layers

PARTS = {  # names of the parts of a `StepTime` for people
    "forward": "forward", "backward": "backward", "exposed": "exposed communication", "contention": "contention",
    "exchange": "exchange within layers", "coordination": "coordination", "update": "update", "input": "input",
    "jitter": "slow devices",
}  # fmt: skip


class Phase(NamedTuple):
    """A part of an all-reduce that occupies the links inside hosts, or those between them."""

    link: str
    seconds: float
    lead: float = 0.0  # seconds at its beginning in which another message's phase may have the link


def topology_of(cluster: Cluster, ranks: int, communication: Communication) -> Topology:
    """The topology of a cluster's first `ranks` devices for a program's way of sending messages."""
    inside, between = cluster.inside, cluster.between
    return Topology(
        per_host=min(ranks, cluster.devices_per_node),
        inside=AlphaBeta(inside.alpha, 1 / (inside.bandwidth * inside.efficiency)),
        between=AlphaBeta(between.alpha, 1 / (between.bandwidth * between.efficiency)),
        message=communication.message, rack_hosts=cluster.rack_nodes, taper=cluster.taper,
        start=0.0 if cluster.profile is None else cluster.profile.topology.start,
        stream=0.0 if between.stream is None else 1 / (communication.streams * between.stream),
    )  # fmt: skip


def grid_of(communication: Communication, cluster: Cluster, ranks: int) -> tuple[int, int]:
    """The (Y, X) of the program's torus or hierarchical all-reduce on so many devices."""
    for grid in communication.grids:
        if math.prod(grid) == ranks:
            return grid
    if communication.grid == "square":
        return squarest(ranks)
    columns = math.gcd(ranks, cluster.devices_per_node) if ranks > cluster.devices_per_node else ranks
    return ranks // columns, columns


def phases(
    cluster: Cluster,
    communication: Communication,
    ranks: int,
    size: float,
    kind: Kind = "sum",
    members: int | None = None,
    apart: int = 1,
) -> tuple[Phase, ...]:
    """The phases of one message of `size` bytes over the first `ranks` devices, in order; with `members`, of one in
    each group of so many ranks, `apart` ranks from each other, all groups at the same time.
    """
    if 1 in (ranks, members):
        return ()
    topology = topology_of(cluster, ranks, communication)
    if members is not None:
        # Groups have no grid: they sum by a ring if the program has no flat algorithm.
        axis, method = Axis(members, apart, apart), FLAT.get(communication.algorithm, "ring")
        if kind == "sum":
            return (_phase(prices.all_reduce(topology, axis, method), size),)
        return (_phase(prices.reduce_scatter(topology, axis, "halving" if method == "doubling" else method), size),)
    # A measurement on as many ranks goes before every formula.
    profile, name = cluster.profile, communication.algorithm
    link = "between" if ranks > topology.per_host else "inside"
    if profile is not None and profile.timings and len(profile.hosts) == ranks and name in ("auto", "native"):
        # `torusgd tune` measured the backend's own all-reduce, and its choice, whose messages have threads and
        # connections of their own: the rounds of one begin while another's are under way.
        is_own = name == "native"
        seconds = expect(profile, round(size))[2] if is_own else waited(profile, size)
        whole: tuple[Phase, ...] = (Phase(link, seconds, lead=0.0 if is_own else waited(profile, 1)),)
    elif name == "in-network":
        # Reduce-scatter in the host, addition in the switches (each card sends and receives a byte once), all-gather.
        half = Phase("inside", prices.reduce_scatter(topology, Axis(topology.per_host), "ring").seconds(size))
        up_and_down = 2 * (topology.between.alpha + topology.message) + size * topology.between.beta
        whole = (half, half) if ranks <= topology.per_host else (half, Phase("between", up_and_down), half)
    elif name in ("tree", "nccl") or (name == "native" and cluster.backend == "nccl"):
        rivals = [_tree(topology, ranks)]
        rivals += [] if name == "tree" else [prices.all_reduce(topology, Axis(ranks), "ring")]
        whole = (Phase(link, min(cost.seconds(size) for cost in rivals)),)
    else:
        # In one chunk: buckets gain among each other what chunks gain in a message.
        costs = prices.price(algorithm_of(communication, cluster, ranks, size, kind), topology)
        starts = (topology.start, *(0.0 for _ in costs[1:]))
        whole = tuple(_phase(cost, size, start) for (_, cost), start in zip(costs, starts, strict=True))
    return whole if kind == "sum" else halves(whole)[0 if kind == "scatter" else 1]


def _phase(cost: Cost, size: float, start: float = 0.0) -> Phase:
    # Axes that both leave their hosts have one link in common; what leaves them at times has it for all of its time.
    return Phase("between" if cost.between > 0 else "inside", start + cost.seconds(size))


def algorithm_of(communication: Communication, cluster: Cluster, ranks: int, size: float, kind: Kind) -> Algorithm:
    """The algorithm of a run by the program's name of it, for `size` bytes; Gloo's `native` counts as a ring."""
    name = communication.algorithm
    if name == "auto":
        topology = topology_of(cluster, ranks, communication)
        found = min(prices.candidates(ranks, topology.per_host), key=lambda each: prices.seconds(each, size, topology))
    else:
        grid = grid_of(communication, cluster, ranks) if name.partition(":")[0] in GRIDS else None
        found = parse_algorithm("ring" if name == "native" else name, ranks, grid)
    if kind == "sum":
        return found
    # Doubling and a leader leave no shards (`comm.algorithms`).
    vertical, horizontal = (m if m != "doubling" else "halving" for m in (found.vertical, found.horizontal))
    name = "torus" if found.algorithm == "hierarchical" else found.algorithm
    return replace(found, algorithm=name, vertical=vertical, horizontal=horizontal)


def halves(whole: Sequence[Phase]) -> tuple[tuple[Phase, ...], tuple[Phase, ...]]:
    """An all-reduce as its reduce-scatter and its all-gather, which is the same backwards."""
    # Phases are symmetrical; a single phase in the middle, such as a torus' vertical one, is cut in two.
    middle = len(whole) // 2
    half = [Phase(link, length / 2, lead / 2) for link, length, lead in whole[middle : middle + len(whole) % 2]]
    return (*whole[:middle], *half), (*half, *whole[len(whole) - middle :])


def _tree(topology: Topology, ranks: int) -> Cost:
    """NCCL's double binary tree: a chain inside each host, two trees of half the bytes each between hosts."""
    # 2 ((g - 1) a_in + log2(hosts) a_out + n b): up the tree and down again, by the slower of the two links.
    # Chunks follow each other: bytes count once up and once down, not for each level; latencies add up along the tree.
    hosts, slower = math.ceil(ranks / topology.per_host), topology.inside.beta
    if hosts > 1:
        slower = max(slower, topology.stream, prices.card_beta(topology, 1, max(1, hosts // 2)))
    inside, between = topology.per_host - 1, math.log2(hosts)
    latency = inside * topology.inside.alpha + between * topology.between.alpha
    return Cost(latency, (inside + between) * topology.message, slower).repeated(2)


Price = Callable[[Send], Sequence[Phase]]


@dataclass(frozen=True)
class StepTime:
    """The parts of a step's seconds; `hidden` is communication that adds none."""

    forward: float
    backward: float
    exposed: float  # communication that compute waits for
    contention: float  # seconds by which hidden communication makes compute longer
    exchange: float  # activations between the ranks of a split layer, and batch statistics within a group
    coordination: float
    update: float
    input: float  # wait for images
    jitter: float  # wait for the slowest device
    hidden: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.update + self.input + self.jitter

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def communication(self) -> float:
        """Seconds that a single device would not spend."""
        return self.exposed + self.contention + self.exchange + self.coordination


@lru_cache(maxsize=4096)
def slowest(devices: int, quantile: float = 0.5) -> float:
    """Standard deviations by which the slowest of so many devices is above the mean, at a quantile."""
    # The largest of N normal draws stays below x with probability F(x)^N.
    return NormalDist().inv_cdf(quantile ** (1 / devices))


def step_time(
    cost: ModelCost,
    cluster: Cluster,
    software: Software,
    devices: int,
    images: int,
    passes: int = 1,
    quantile: float = 0.5,
    routine: Routine = ONE_PASS,
) -> StepTime:
    """Seconds of one step, in which a device computes `passes` virtual workers of `images` images one after another.

    `quantile` is of the slowest device's speed: 0.5 for the expected step. An extra pass of the routine is over as many
    images more, which are to be prepared too.
    """
    # Plan 6: walk the list; each message has the price by which a run's `auto` chooses too.
    work = step_work(cost, cluster, software, devices, images, routine)
    forward, backward = work.forward * passes, work.backward * passes
    script = compose(cost, cluster, software, devices, images, passes, work)
    exposed, exchange, hidden, contention = _messages(script, cluster, software, devices)
    if software.norm_group > 1 and devices > 1:
        # Statistics in forward and their gradients in backward: small messages, so alpha alone.
        exchange += 2 * cost.norms * passes * (cluster.inside.alpha + software.communication.message)
    update = update_seconds(cost, cluster, software, devices)
    coordination = software.communication.coordination * devices if devices > 1 else 0.0
    jitter = (forward + backward) * (math.exp(software.jitter * slowest(devices, quantile)) - 1)
    # Images are prepared beside all of this: only the rest of their time is waited for.
    prepared = passes * (1 + routine.extra_pass)
    busy = forward + backward + exposed + contention + exchange + coordination + update + jitter
    waiting = max(0.0, images * prepared / software.input_rate - busy) if software.input_rate else 0.0
    return StepTime(forward, backward, exposed, contention, exchange, coordination, update, waiting, jitter, hidden)


def price_of(cluster: Cluster, communication: Communication, devices: int, message: Send) -> tuple[Phase, ...]:
    return phases(cluster, communication, devices, message.bytes, message.kind, message.members, message.apart)


def compute_seconds(actions: Sequence[Action]) -> float:
    """Seconds of the step without its waits."""
    return sum(action.seconds for action in actions if isinstance(action, Compute))


def waited_seconds(actions: Sequence[Action], price: Price, pipelined: bool) -> float:
    """The exposed communication: seconds by which messages make a step longer; `pipelined`: on all links at a time."""
    network, begin, now = _Network(price, pipelined), 0.0, 0.0
    # A message that a step leaves in flight may hide behind the next step, so that the first step is too short. The
    # third of three is taken, by when all steps are alike.
    for _ in range(3):
        begin = now
        for action in actions:
            match action:
                case Compute(seconds):
                    now += seconds
                case Send():
                    network.send(action, now)
                case Wait(name):
                    now = max(now, network.end_of(name))
    return max(0.0, now - begin - compute_seconds(actions))


class _Network:
    """Messages in flight: past its lead a phase has its links for itself, which serve phases in order of arrival."""

    def __init__(self, price: Price, pipelined: bool) -> None:
        self._price, self._pipelined = price, pipelined
        # (time at which the phase may begin, number of the message, index of the phase, name, phases): of two phases
        # that may begin at one time, the message that was sent first goes first.
        self._events: list[tuple[float, int, int, str, Sequence[Phase]]] = []
        self._free: dict[str, float] = {}  # the time at which each link has served all phases taken so far
        self._ends: dict[str, float] = {}
        self._in_flight: set[str] = set()
        self._numbers = count()

    def send(self, message: Send, now: float) -> None:
        ahead = self._price(message)
        if not self._pipelined:
            ahead = [Phase("all", sum(phase.seconds for phase in ahead), sum(phase.lead for phase in ahead))]
        self._ends[message.name] = now
        if ahead:
            self._in_flight.add(message.name)
            heappush(self._events, (now, next(self._numbers), 0, message.name, ahead))

    def end_of(self, name: str) -> float:
        """The time at which that message has arrived; 0 if none of the name was sent."""
        # Events in order of time until the message's last phase is done. A message that is yet to be sent can't come
        # before them: it is sent after this one has arrived.
        while name in self._in_flight:
            now, number, index, owner, ahead = heappop(self._events)
            link, seconds, lead = ahead[index]
            end = max(now + lead, self._free.get(link, 0.0)) + seconds - lead
            self._free[link] = end
            if index + 1 < len(ahead):
                heappush(self._events, (end, number, index + 1, owner, ahead))
            else:
                self._ends[owner] = end
                self._in_flight.discard(owner)
        return self._ends.get(name, 0.0)


def _messages(
    script: Sequence[Action], cluster: Cluster, software: Software, devices: int
) -> tuple[float, float, float, float]:
    """Seconds of a step's messages: exposed, of activations, hidden, and by which the hidden ones slow computation."""
    # Activations are always waited for, and counted apart.
    communication = software.communication
    price = cache(partial(price_of, cluster, communication, devices))
    sent = [action for action in script if isinstance(action, Send)]
    seconds = {content: sum(p.seconds for s in sent if s.content == content for p in price(s)) for content in CONTENTS}
    waited = max(0.0, waited_seconds(script, price, communication.pipelined) - seconds["activations"])
    summed = sum(seconds.values()) - seconds["activations"]
    hidden = max(0.0, summed - waited)
    contention = communication.contention * hidden
    if cluster.profile is not None and cluster.profile.in_steps and summed:
        # Measured: what each message costs the computation beside it, in proportion to the part that is hidden, and to
        # how these ranks slow each other against how those of the measurement do.
        own = [s for s in sent if s.content != "activations"]
        each = [hidden_seconds(cluster.profile, s.bytes) / (1 if s.kind == "sum" else 2) for s in own]
        share = cluster.slowdown(devices) / cluster.slowdown(len(cluster.profile.hosts))
        contention = sum(each) * share * hidden / summed
    return waited, seconds["activations"], hidden, contention


def step_work(
    cost: ModelCost, cluster: Cluster, software: Software, devices: int, images: int, routine: Routine = ONE_PASS
) -> Pass:
    """Times of a pass over one virtual worker's images, with split layers and a crowded node."""
    split = split_layers(cost, software, devices)
    own = (software.communication.linear_groups or 1) / devices if split else 1.0
    work = worker_seconds(cost, cluster.device, software, images, routine, own)
    factor = cluster.slowdown(devices)
    return Pass(work.forward * factor, work.backward * factor, work.ready * factor, work.needed * factor)

"""One training step on a cluster as a timeline: compute, buckets that leave during backward and queue on each axis."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from heapq import heappop, heappush
from itertools import count
from statistics import NormalDist

from ..comm.tuning.profile import hidden as hidden_seconds
from ..tensor_parallel.volume import hybrid_volume
from .cluster import Cluster, Communication, Software
from .model_cost import Layer, ModelCost
from .network import Phase, group_phases, phases
from .roofline import Pass, pass_seconds, update_seconds
from .step_script import CONTENTS, Action, Compute, Send, Wait, activation_bytes, compose, split_layers

Price = Callable[[Send], Sequence[Phase]]


@dataclass(frozen=True)
class StepTime:
    """Where a step's seconds go; `seconds` is their sum, `hidden` is communication that costs none of its own."""

    forward: float
    backward: float
    exposed: float
    """communication that compute waits for"""
    contention: float
    """how much longer compute takes because of the communication that it hides"""
    exchange: float
    """activations between the ranks of a split layer, and batch statistics within a group"""
    coordination: float
    update: float
    input: float
    """waiting for images"""
    jitter: float
    """waiting for the slowest device"""
    hidden: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.communication + self.update + self.input + self.jitter

    @property
    def compute(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def communication(self) -> float:
        """All that a single device would not spend."""
        return self.exposed + self.contention + self.exchange + self.coordination


@lru_cache(maxsize=4096)
def slowest(devices: int, quantile: float = 0.5) -> float:
    """Standard deviations by which the slowest of so many devices is above the mean, at a quantile.

    The largest of N normal draws stays below x with probability F(x)^N.

    >>> round(slowest(1), 6), round(slowest(1024), 2)
    (0.0, 3.2)
    """
    return NormalDist().inv_cdf(quantile ** (1 / devices))


def step_time(
    cost: ModelCost,
    cluster: Cluster,
    software: Software,
    devices: int,
    images: int,
    passes: int = 1,
    quantile: float = 0.5,
) -> StepTime:
    """Seconds of one step.

    Args:
        cost: The network.
        cluster: The machine.
        software: The program.
        devices: How many take part.
        images: Of one virtual worker.
        passes: Virtual workers of a device, one after another; only the last one's backward hides communication.
        quantile: Of the slowest device's speed: 0.5 for the expected step, 0.05 and 0.95 for a band.
    """
    # Plan 6: walk the list; each message has the price by which a run's `auto` chooses too.
    split = split_layers(cost, software, devices)
    work = step_work(cost, cluster, software, devices, images)
    forward, backward = work.forward * passes, work.backward * passes
    sent = _sum_gradients(cost, cluster, software, devices, images, passes, work)
    exchange = sum(_activations(layer, cluster, software, devices, images * passes) for layer in split)
    if software.norm_group > 1 and devices > 1:
        # Statistics in forward and their gradients in backward: small messages, so alpha alone.
        exchange += 2 * cost.norms * passes * (cluster.inside.alpha + software.communication.message)
    update = update_seconds(cost, cluster, software, devices)
    coordination = software.communication.coordination * devices if devices > 1 else 0.0
    jitter = (forward + backward) * (_stretch(software.jitter, devices, quantile) - 1)
    busy = forward + backward + sent.exposed + sent.contention + exchange + coordination + update + jitter
    waiting = max(0.0, images * passes / software.input_rate - busy) if software.input_rate else 0.0
    return StepTime(
        forward, backward, sent.exposed, sent.contention, exchange, coordination, update, waiting, jitter, sent.hidden
    )


def price_of(cluster: Cluster, communication: Communication, devices: int, message: Send) -> tuple[Phase, ...]:
    """The phases of a message on the network."""
    if message.members is None:
        return phases(cluster, communication, devices, message.bytes, message.kind)
    members, apart = message.members, message.apart
    return group_phases(cluster, communication, devices, members, apart, message.bytes, message.kind)


def compute_seconds(actions: Sequence[Action]) -> float:
    """Seconds of the step without any waiting."""
    return sum(action.seconds for action in actions if isinstance(action, Compute))


def waited_seconds(actions: Sequence[Action], price: Price, pipelined: bool) -> float:
    """Seconds by which messages make a step longer, by their prices: the exposed communication.

    Steps follow each other, so that what a step leaves in flight may hide behind the next one: the third of three is
    taken, by when they are all alike.

    Args:
        actions: Of a step.
        price: The phases of a message.
        pipelined: Messages on different axes travel at the same time; else each has the whole network to itself.
    """
    network = _Network(price, pipelined)
    ends = [0.0]
    for _ in range(3):
        now = ends[-1]
        for action in actions:
            match action:
                case Compute(seconds):
                    now += seconds
                case Send():
                    network.send(action, now)
                case Wait(name):
                    now = max(now, network.end_of(name))
        ends.append(now)
    return max(0.0, ends[-1] - ends[-2] - compute_seconds(actions))


class _Network:
    """Messages in flight: past its lead a phase has its axis for itself; axes serve phases in order of arrival.

    An event queue: each entry is the next phase of one message, and the time at which it may begin.
    """

    def __init__(self, price: Price, pipelined: bool) -> None:
        self._price, self._pipelined = price, pipelined
        self._events: list[tuple[float, int, int, str, Sequence[Phase]]] = []
        self._free: dict[str, float] = {}
        """when each axis has served all phases taken so far"""
        self._ends: dict[str, float] = {}
        self._in_flight: set[str] = set()
        self._numbers = count()

    def send(self, message: Send, now: float) -> None:
        """It leaves at `now`."""
        ahead = self._price(message)
        if not self._pipelined:
            ahead = [Phase("all", sum(phase.seconds for phase in ahead), sum(phase.lead for phase in ahead))]
        self._ends[message.name] = now
        if ahead:
            self._in_flight.add(message.name)
            heappush(self._events, (now, next(self._numbers), 0, message.name, ahead))

    def end_of(self, name: str) -> float:
        """When that message has arrived; 0 where none of the name was sent.

        Takes events in order of time until the message's last phase is done, and puts each message's next phase back
        into the queue. Messages that are yet to be sent can't come before: they are sent after this one has arrived.
        """
        while name in self._in_flight:
            now, number, place, owner, ahead = heappop(self._events)
            axis, seconds, lead = ahead[place]
            end = max(now + lead, self._free.get(axis, 0.0)) + seconds - lead
            self._free[axis] = end
            if place + 1 < len(ahead):
                heappush(self._events, (end, number, place + 1, owner, ahead))
            else:
                self._ends[owner] = end
                self._in_flight.discard(owner)
        return self._ends.get(name, 0.0)


def _crowded(work: Pass, cluster: Cluster, devices: int) -> Pass:
    factor = cluster.slowdown(devices)
    return Pass(work.forward * factor, work.backward * factor, work.ready * factor, work.needed * factor)


def _stretch(jitter: float, devices: int, quantile: float) -> float:
    return math.exp(jitter * slowest(devices, quantile))


@dataclass(frozen=True)
class _Sent:
    exposed: float
    hidden: float
    contention: float
    """seconds that messages add to the computation that hides them"""


def _sum_gradients(
    cost: ModelCost, cluster: Cluster, software: Software, devices: int, images: int, passes: int, work: Pass
) -> _Sent:
    """What the step's script waits for; activations are waited for where they are, and counted apart."""
    communication = software.communication
    price = cache(partial(price_of, cluster, communication, devices))
    script = compose(cost, cluster, software, devices, images, passes, work)
    sent = [action for action in script if isinstance(action, Send)]
    seconds = {content: sum(p.seconds for s in sent if s.content == content for p in price(s)) for content in CONTENTS}
    waited = max(0.0, waited_seconds(script, price, communication.pipelined) - seconds["activations"])
    summed = sum(seconds.values()) - seconds["activations"]
    hidden = max(0.0, summed - waited)
    contention = communication.contention * hidden
    if cluster.profile is not None and cluster.profile.in_steps and summed:
        own = [s for s in sent if s.content != "activations"]
        each = [hidden_seconds(cluster.profile, s.bytes) / (1 if s.kind == "sum" else 2) for s in own]
        contention = sum(each) * hidden / summed
    return _Sent(waited, hidden, contention)


def step_work(cost: ModelCost, cluster: Cluster, software: Software, devices: int, images: int) -> Pass:
    """Times of a pass over one virtual worker's images when so many devices share split layers and a crowded node."""
    split = split_layers(cost, software, devices)
    own = (software.communication.linear_groups or 1) / devices if split else 1.0
    return _crowded(pass_seconds(cost, cluster.device, software, images, own), cluster, devices)


def _activations(layer: Layer, cluster: Cluster, software: Software, devices: int, images: int) -> float:
    """Inputs of a split layer all-gathered in forward, their gradients reduce-scattered in backward: waited for."""
    groups = software.communication.linear_groups or devices
    bytes_, _ = hybrid_volume(layer, devices, images * devices, groups, size=activation_bytes(software))
    members = devices // groups
    whole = bytes_ / 2 * members / (members - 1)
    gather = group_phases(cluster, software.communication, devices, members, 1, whole, "gather")
    return 2 * sum(phase.seconds for phase in gather)

"""One training step on a cluster as a timeline: compute, buckets that leave during backward and queue on each axis."""

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist

from ..comm.profile import hidden as hidden_seconds
from .cluster import Cluster, Software
from .compose import compose, split_layers
from .hybrid import hybrid_volume
from .model_cost import Layer, ModelCost
from .network import Axis, reduce_scatter
from .roofline import Pass, pass_seconds, update_seconds
from .step_script import CONTENTS, Send, price_of, waited_seconds


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
    """activations between parts of a split layer, and batch statistics within a group"""
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
    how = software.communication
    price = partial(price_of, cluster, how, devices)
    script = compose(cost, cluster, software, devices, images, passes, work)
    sent = [action for action in script if isinstance(action, Send)]
    seconds = {content: sum(p.seconds for s in sent if s.content == content for p in price(s)) for content in CONTENTS}
    waited = max(0.0, waited_seconds(script, price, how.pipelined) - seconds["activations"])
    summed = sum(seconds.values()) - seconds["activations"]
    hidden = max(0.0, summed - waited)
    contention = how.contention * hidden
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
    size = software.communication.wire_bits // 8
    bytes_, _ = hybrid_volume(layer, devices, images * devices, groups, size=size)
    members = devices // groups
    whole = bytes_ / 2 * members / (members - 1)
    return 2 * reduce_scatter(cluster, Axis(members, 1), whole, "ring", software.communication.message)

"""One training step on a cluster as a timeline: compute, buckets that leave during backward and queue on each axis."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from statistics import NormalDist

from .buckets import Bucket, cut_buckets
from .compute import Pass, pass_seconds, update_seconds
from .describe import Cluster, Software
from .hybrid import hybrid_volume
from .layers import Layer, ModelCost
from .network import Axis, Phase, phases, reduce_scatter


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
    split = _split_layers(cost, software, devices)
    own = (software.communication.linear_groups or 1) / devices if split else 1.0
    work = pass_seconds(cost, cluster.device, software, images, own)
    work = _crowded(work, cluster, devices)
    forward, backward = work.forward * passes, work.backward * passes
    sent = _sum_gradients(cost, cluster, software, devices, work, {layer.name for layer in split})
    exchange = sum(_activations(layer, cluster, software, devices, images * passes) for layer in split)
    if software.norm_group > 1 and devices > 1:
        # Statistics in forward and their gradients in backward: small messages, so alpha alone.
        exchange += 2 * cost.norms * passes * (cluster.inside.alpha + software.communication.message)
    update = update_seconds(cost, cluster.device, software, devices)
    contention = software.communication.contention * sent.hidden
    coordination = software.communication.coordination * devices if devices > 1 else 0.0
    jitter = (forward + backward) * (_stretch(software.jitter, devices, quantile) - 1)
    busy = forward + backward + sent.exposed + contention + exchange + coordination + update + jitter
    waiting = max(0.0, images * passes / software.input_rate - busy) if software.input_rate else 0.0
    return StepTime(
        forward, backward, sent.exposed, contention, exchange, coordination, update, waiting, jitter, sent.hidden
    )


def _crowded(work: Pass, cluster: Cluster, devices: int) -> Pass:
    neighbours = min(devices, cluster.devices_per_node) - 1
    if not cluster.crowding or not neighbours:
        return work
    factor = 1 + cluster.crowding * neighbours / (cluster.devices_per_node - 1)
    return Pass(work.forward * factor, work.backward * factor, work.ready * factor)


def _stretch(jitter: float, devices: int, quantile: float) -> float:
    return math.exp(jitter * slowest(devices, quantile))


@dataclass(frozen=True)
class _Sent:
    exposed: float
    hidden: float


def _sum_gradients(
    cost: ModelCost, cluster: Cluster, software: Software, devices: int, work: Pass, split: set[str]
) -> _Sent:
    how = software.communication
    if devices == 1:
        return _Sent(0.0, 0.0)
    whole = [i for i, gradient in enumerate(cost.gradients) if gradient.name.rpartition(".")[0] not in split]
    gradients, ready = tuple(cost.gradients[i] for i in whole), work.ready[whole]
    buckets = cut_buckets(gradients, ready, how.buckets, how.wire_bits // 8)
    buckets += _weights_across_groups(cost, software, devices, work, split)
    buckets.sort(key=lambda bucket: bucket.ready)
    priced = [(bucket.ready, phases(cluster, how, devices, bucket.bytes)) for bucket in buckets]
    total = sum(phase.seconds for _, parts in priced for phase in parts)
    if not how.overlap:
        return _Sent(total, 0.0)
    # Hiding behind the next forward pass would gain nothing: the first layer's weights come last and are needed first.
    exposed = max(0.0, _end(priced, how.pipelined) - work.backward)
    return _Sent(exposed, max(0.0, total - exposed))


def _end(priced: Sequence[tuple[float, Sequence[Phase]]], pipelined: bool) -> float:
    """When the last bucket's sum is complete; an axis serves one bucket at a time, in the order of arrival.

    Unpipelined, a bucket has the whole network to itself.
    """
    if not pipelined:
        priced = [(ready, [Phase("all", sum(phase.seconds for phase in parts))]) for ready, parts in priced]
    waiting = [(ready, number, 0) for number, (ready, _) in enumerate(priced)]
    heapify(waiting)
    free: dict[str, float] = {}
    end = 0.0
    while waiting:
        now, number, part = heappop(waiting)
        axis, seconds = priced[number][1][part]
        end_of_part = max(now, free.get(axis, 0.0)) + seconds
        free[axis] = end_of_part
        end = max(end, end_of_part)
        if part + 1 < len(priced[number][1]):
            heappush(waiting, (end_of_part, number, part + 1))
    return end


def _split_layers(cost: ModelCost, software: Software, devices: int) -> list[Layer]:
    groups = software.communication.linear_groups
    return [layer for layer in cost.layers if layer.linear] if groups is not None and groups < devices else []


def _activations(layer: Layer, cluster: Cluster, software: Software, devices: int, images: int) -> float:
    """Inputs of a split layer all-gathered in forward, their gradients reduce-scattered in backward: waited for."""
    groups = software.communication.linear_groups or devices
    size = software.communication.wire_bits // 8
    bytes_, _ = hybrid_volume(layer, devices, images * devices, groups, size=size)
    members = devices // groups
    whole = bytes_ / 2 * members / (members - 1)
    return 2 * reduce_scatter(cluster, Axis(members, 1), whole, "ring", software.communication.message)


def _weights_across_groups(
    cost: ModelCost, software: Software, devices: int, work: Pass, split: set[str]
) -> list[Bucket]:
    """The strips of split layers, summed over the groups; priced as sums over all devices of an equal volume."""
    groups = software.communication.linear_groups or devices
    if groups == 1 or not split:
        return []
    share = groups / devices * (groups - 1) / groups * devices / (devices - 1)
    size = software.communication.wire_bits // 8
    ready = {gradient.name.rpartition(".")[0]: work.ready[i] for i, gradient in enumerate(cost.gradients)}
    return [Bucket(float(ready[x.name]), x.weights * size * share) for x in cost.layers if x.name in split]

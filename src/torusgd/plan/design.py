"""Design points of a network on a machine: the scaling analysis of Das et al. (arXiv 1602.06709).

Layer by layer the balance of computation and messages, whether its weights or its activations should travel, and what
can't be hidden. Gradients leave layer by layer from the output to the input, first in first out, each after its layer's
weight gradient, which comes before the input gradient. The next forward pass begins with the first layer, whose weights
come last, and so hides nothing more. The end of the queue is exact here, where the paper estimates it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from ..recipe.section import MOST_RANKS
from ..tensor_parallel.tail import best_groups, hybrid_volume
from .cluster import Cluster, Link, Software
from .forecast import Forecast, Workload, forecast
from .model_cost import Layer, ModelCost, pass_seconds
from .search import fixed_batch
from .step_script import activation_bytes, cut_buckets
from .timeline import phases


def flops_a_byte(layers: Sequence[Layer], images: float = 1.0, size: float = 4.0) -> float:
    """FLOP of all three passes a byte of weights, data-parallel; `images` of a node, `size` bytes of a gradient."""
    return 6 * images * sum(layer.macs for layer in layers) / (size * sum(layer.weights for layer in layers))


def flops_a_weight(cost: ModelCost) -> float:
    """You et al.'s scaling ratio (arXiv 1709.05011): FLOP of an image's forward pass a trained value."""
    return 2 * sum(layer.macs for layer in cost.layers) / cost.parameters


def least_images(balance: float, layers: Sequence[Layer], size: float = 4.0) -> int:
    """Least images a node that hide the messages at `balance` FLOP/s for a byte/s; of convolutions if there are any."""
    return math.ceil(balance / flops_a_byte([layer for layer in layers if not layer.linear] or layers, size=size))


@dataclass(frozen=True)
class LayerPoint:
    """A layer in the balance; sums run over the messages from this layer's on, to the end of the queue."""

    name: str
    flops: float  # of an image, in all three passes
    sent: float  # bytes that a device sends a step, activations included
    ratio: float  # FLOP a byte of its weights at a device's images
    groups: int  # G of least volume; the number of devices: data parallelism
    latency: float  # seconds of the messages before their first byte, summed
    transfer: float  # seconds of their bytes, summed
    hiding: float  # seconds of backward that are left when its weight gradient is complete

    def late(self) -> float:
        """Seconds by which the queue from here on ends after backward."""
        return self.latency + self.transfer - self.hiding


@dataclass(frozen=True)
class Design:
    """The balance of a network, a batch and a machine."""

    devices: int
    batch: int
    layers: tuple[LayerPoint, ...]  # from the input to the output
    compute: float  # seconds of a step, without messages
    exchange: float  # seconds of activations between the devices of a group, which nothing hides
    balance: float  # FLOP/s of a node for a byte/s of its link
    least_images: int  # of a node
    flops_a_weight: float

    @property
    def critical(self) -> LayerPoint:
        """The layer from which on the queue never empties: faster messages above it would gain nothing."""
        return max(self.layers, key=LayerPoint.late)

    @property
    def bubble(self) -> float:
        """Seconds of a step in which the first layer's weights are waited for."""
        return max(0.0, self.critical.late())

    @property
    def efficiency(self) -> float:
        """Fraction of a step that computes."""
        return self.compute / (self.compute + self.bubble + self.exchange)

    @property
    def most_nodes(self) -> int:
        """Nodes at which each has its least images."""
        return max(1, self.batch // self.least_images)

    def next_limit(self, part: str) -> tuple[float, str] | None:
        """The factor of `transfer` or `latency` beyond which another layer is critical, and its name; None: none is."""
        # Lateness is linear in the factor x: of the lines that rise faster than the critical one's, the one that is
        # crossed first.
        now = self.critical
        steeper = [each for each in self.layers if getattr(each, part) > getattr(now, part) * (1 + 1e-9)]
        factors = [1 + (now.late() - each.late()) / (getattr(each, part) - getattr(now, part)) for each in steeper]
        return min(zip(factors, (each.name for each in steeper), strict=True), default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        layers = [{**vars(each), "late": each.late()} for each in self.layers]
        names = ("devices", "batch", "compute", "exchange", "bubble", "efficiency", "balance", "least_images")
        limits = {part: self.next_limit(part) for part in ("transfer", "latency")}
        own = {name: getattr(self, name) for name in (*names, "most_nodes", "flops_a_weight")}
        return {**own, "critical": self.critical.name, "next_limits": limits, "layers": layers}


def design(cost: ModelCost, cluster: Cluster, software: Software, devices: int, batch: int) -> Design:
    """The design point of a network at a batch over so many devices, by the program's speed, algorithm and buckets."""
    communication, layers, images = software.communication, cost.layers, batch / devices
    size = communication.wire_bits // 8
    chosen = [best_groups(layer.ifm * layer.in_area, layer.weights, devices, batch) for layer in layers]
    # Sending and receiving go on at the same time.
    # The layers share the roofline's seconds of a pass, memory and launches included, by their FLOP.
    share = max((g for g, layer in zip(chosen, layers, strict=True) if layer.linear), default=devices) / devices
    work = pass_seconds(cost, cluster.device, software, images, share)
    compute = work.forward + work.backward
    third = compute / (3 * sum(layer.macs for layer in layers) - layers[0].macs)  # the first layer's input needs none
    passes = [third * layer.macs for layer in layers]
    below = [0.0, *accumulate(passes)]
    buckets = cut_buckets(cost.gradients, np.zeros(len(cost.gradients)), communication.buckets, size)
    points, latency, transfer, exchange = [], 0.0, 0.0, 0.0
    for index, (layer, groups) in enumerate(zip(layers, chosen, strict=True)):
        inputs = layer.ifm * layer.in_area
        volumes = hybrid_volume(inputs, layer.weights, devices, batch, groups, size=size)
        # A program that sends layers together pays a latency once a bucket: each layer bears an equal part of all.
        members, apart = None if groups == devices else groups, devices // groups
        # Of the sum of its weight gradients, of which a device has G / N: of one byte, and of all.
        first, whole = (
            sum(p.seconds for p in phases(cluster, communication, devices, b * groups / devices, "sum", members, apart))
            for b in (1.0, size * layer.weights)
        )
        latency += first * len(buckets) / len(layers)
        transfer += max(0.0, whole - first)
        # Its input gradient, and both gradients of the layers below.
        hiding = passes[index] + 2 * below[index] - passes[0] if index else 0.0
        ratio = flops_a_byte([layer], images, size)
        points.append(LayerPoint(layer.name, 6.0 * layer.macs, sum(volumes), ratio, groups, latency, transfer, hiding))
        if groups < devices:  # inputs are gathered in forward, their gradients scattered in backward
            gathered = activation_bytes(software) * inputs * batch / groups
            gather = phases(cluster, communication, devices, gathered, "gather", devices // groups)
            exchange += 2 * sum(phase.seconds for phase in gather)
    balance = cluster.device.peak_of(software.precision) * cluster.devices_per_node / cluster.between.bandwidth
    least = least_images(balance, layers, size)
    return Design(devices, batch, tuple(points), compute, exchange, balance, least, flops_a_weight(cost))


def next_steps(
    workload: Workload, cluster: Cluster, program: Callable[[int], Software], devices: int
) -> list[tuple[str, Forecast]]:
    """Plans of the machine and batch as they are, and with one thing doubled or halved, by their names."""

    def plan(work: Workload, machine: Cluster, count: int) -> Forecast:
        return forecast(fixed_batch(work, count), machine, program(count), count)

    def links(bandwidth: float = 1.0, alpha: float = 1.0) -> Cluster:
        changed = dict[str, Link]()
        for key, link in (("inside", cluster.inside), ("between", cluster.between)):
            rates = {"bandwidth": link.bandwidth * bandwidth, "stream": link.stream and link.stream * bandwidth}
            changed[key] = link.model_copy(update={"alpha": link.alpha * alpha, **rates})
        return cluster.model_copy(update=changed)

    stages = workload.stages
    twice = tuple(replace(s, images=2 * s.images, spare=2 * s.spare, steps=math.ceil(s.steps / 2)) for s in stages)
    more = [("twice the devices", plan(workload, cluster, 2 * devices))] if 2 * devices <= MOST_RANKS else []
    return [
        ("as it is", plan(workload, cluster, devices)),
        ("links twice as fast", plan(workload, links(bandwidth=2.0), devices)),
        ("half the latency", plan(workload, links(alpha=0.5), devices)),
        *more,
        ("twice the batch", plan(replace(workload, stages=twice), cluster, devices)),
    ]

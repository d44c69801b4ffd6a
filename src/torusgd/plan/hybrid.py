"""Das et al. (arXiv 1602.06709): the balance of compute and communication, hybrid parallelism, and what overlap hides.

G groups of N / G nodes: model-parallel inside a group, data-parallel across groups. G = N is pure data parallelism,
G = 1 pure model parallelism. All volumes are bytes a node and step; `overlap` in 0..1 is how far sending and receiving
go on at the same time.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from ..tensor_parallel.volume import best_groups, hybrid_volume, optimal_groups
from .model_cost import Layer

__all__ = [
    "best_groups",
    "bubbles",
    "data_parallel_ratio",
    "hybrid_volume",
    "minimum_images",
    "model_parallel_is_better",
    "network_ratio",
    "optimal_groups",
    "overlap_efficiency",
]


def data_parallel_ratio(layer: Layer, images_per_node: float, overlap: float = 1.0, size: int = 4) -> float:
    """FLOP a byte of a layer whose weights travel: 1.5 * ow*oh * images with 32 bits and full overlap."""
    flops = 3 * 2 * layer.macs * images_per_node
    return flops / (size * layer.weights * (2 - overlap))


def network_ratio(layers: Sequence[Layer], overlap: float = 1.0, size: int = 4) -> float:
    """FLOP a byte of one image through all the given layers, data-parallel."""
    flops = sum(3 * 2 * layer.macs for layer in layers)
    return flops / (size * sum(layer.weights for layer in layers) * (2 - overlap))


def minimum_images(system_ratio: float, layers: Sequence[Layer]) -> int:
    """Least images a node that keep it busy, on a system of so many FLOP a byte."""
    return math.ceil(system_ratio / network_ratio(layers))


def model_parallel_is_better(layer: Layer, batch: int, overlap: float = 0.0) -> bool:
    """Whether a layer's activations are less to send than its weights: ofm * k * (2 - overlap) > 2 * iw*ih * batch."""
    return layer.ofm * layer.kernel * (2 - overlap) > 2 * layer.in_area * batch


def bubbles(
    layers: Sequence[Layer], volumes: Sequence[float], images: float, flops: float, bandwidth: float
) -> list[float]:
    """Seconds that each layer's new weights are late.

    A layer's gradients leave after its weight-gradient pass, first in first out, and hide behind the backward passes of
    the layers before it and those layers' next forward passes.

    Args:
        layers: From the input to the output.
        volumes: Bytes that each sends a step.
        images: A node's share of the batch.
        flops: FLOP/s of a node.
        bandwidth: bytes/s of a node.
    """
    passes = [2 * layer.macs * images / flops for layer in layers]
    before = [0.0, *accumulate(passes)][:-1]
    queued = list(accumulate(reversed(volumes)))[::-1]
    return [max(0.0, sent / bandwidth - 3 * hidden) for sent, hidden in zip(queued, before, strict=True)]


def overlap_efficiency(
    layers: Sequence[Layer], volumes: Sequence[float], images: float, flops: float, bandwidth: float
) -> float:
    """T_comp / (T_comp + the largest bubble)."""
    compute = sum(3 * 2 * layer.macs * images / flops for layer in layers)
    return compute / (compute + max(bubbles(layers, volumes, images, flops, bandwidth)))

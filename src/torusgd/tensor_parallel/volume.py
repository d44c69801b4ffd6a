"""Das et al. (arXiv 1602.06709): the bytes that a layer sends under hybrid parallelism, and the groups that send least.

G groups of N / G nodes: model-parallel inside a group, data-parallel across groups. G = N is pure data parallelism,
G = 1 pure model parallelism. A layer has `inputs` values an image (ifm * iw * ih) and `weights` (ifm * ofm * k). All
volumes are bytes a node and step; `overlap` in 0..1 is how far sending and receiving go on at the same time: with 0 a
volume is what goes one way through a node's link.
"""

import math
from collections.abc import Sequence
from typing import Literal

from ..recipe.compatibility import allowed_parallel
from .tail import ColumnLayer

ModelParallel = int | Literal["auto"]


def hybrid_volume(
    inputs: int, weights: int, nodes: int, batch: int, groups: float, overlap: float = 0.0, size: int = 4
) -> tuple[float, float]:
    """(bytes of activations and their gradients, bytes of weight gradients and weights) that a node sends.

    What is the node's own is left out: G/N of the first, 1/G of the second. `size` are the bytes of a value.
    """
    # Twice: inputs in forward, their gradients in backward. Weights: gradients are reduced, new weights are gathered,
    # which `overlap` may let go on at the same time.
    activations = 2 * size * inputs * batch / groups
    gathered = size * weights * groups / nodes * (2 - overlap)
    return activations * (1 - groups / nodes), gathered * (groups - 1) / groups


def optimal_groups(inputs: int, weights: int, nodes: int, batch: int, overlap: float = 0.0) -> float:
    """The real-valued G of least volume, sqrt(2 N batch iw*ih / ((2 - overlap) ofm k)), within 1..N."""
    # The zero of the derivative by G of both volumes' sum, a node's own part included; the size of a value cancels out.
    best = math.sqrt(2 * nodes * batch * inputs / ((2 - overlap) * weights))
    return min(max(best, 1.0), float(nodes))


def best_groups(
    inputs: int, weights: int, nodes: int, batch: int, overlap: float = 0.0, among: Sequence[int] | None = None
) -> int:
    """The G with the least exact volume; the larger of two equals, which sends fewer messages.

    `batch` are the images of a step over all nodes; `among` are the numbers of groups to choose from (None: all
    divisors of N).

    >>> best_groups(4096, 4096 * 4096, nodes=64, batch=256)
    2
    """
    choices = [groups for groups in range(1, nodes + 1) if nodes % groups == 0] if among is None else among
    return min(
        sorted(choices, reverse=True), key=lambda g: sum(hybrid_volume(inputs, weights, nodes, batch, g, overlap))
    )


def choose_parallel(
    requested: ModelParallel, layers: Sequence[ColumnLayer], blocks: int, virtual_workers: int, batch: int, ranks: int
) -> list[int]:
    """The model-parallel ranks M of each layer: `requested`, or the M that sends least by Das et al.'s formula (auto).

    `batch` are the images of a step. `auto` takes 1 if the ranks can't share the virtual workers evenly.
    """
    if requested != "auto":
        return [requested] * len(layers)
    # A group works in step: every rank brings one virtual worker to each pass.
    if virtual_workers % ranks:
        return [1] * len(layers)
    # One way of each link counts (overlap 0), and only the M that give the same bits.
    groups = [ranks // parallel for parallel in allowed_parallel(ranks, blocks)]
    return [
        ranks // best_groups(layer.inputs, layer.inputs * layer.outputs, ranks, batch, among=groups) for layer in layers
    ]

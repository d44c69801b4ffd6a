"""Das et al. (arXiv 1602.06709): the bytes that a layer sends under hybrid parallelism, and the groups that send least.

G groups of N / G nodes: model-parallel inside a group, data-parallel across groups. G = N is pure data parallelism,
G = 1 pure model parallelism. All volumes are bytes a node and step; `overlap` in 0..1 is how far sending and receiving
go on at the same time: with 0 a volume is what goes one way through a node's link.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Shape(Protocol):
    """The numbers of a layer that the formulas need."""

    @property
    def ifm(self) -> int:
        """Feature maps in, or inputs of a linear layer."""

    @property
    def ofm(self) -> int:
        """Feature maps out, or outputs of a linear layer."""

    @property
    def kernel(self) -> int:
        """kh * kw, 1 for a linear layer."""

    @property
    def in_area(self) -> int:
        """ih * iw, 1 for a linear layer."""

    @property
    def weights(self) -> int:
        """Values of the weight tensor."""


class Linear(NamedTuple):
    """The shape of a linear layer."""

    ifm: int
    ofm: int
    kernel: int = 1
    in_area: int = 1

    @property
    def weights(self) -> int:
        return self.ifm * self.ofm


def hybrid_volume(
    layer: Shape, nodes: int, batch: int, groups: float, overlap: float = 0.0, size: int = 4, exact: bool = True
) -> tuple[float, float]:
    """(bytes of activations and their gradients, bytes of weight gradients and weights) of a node.

    With `exact` the part that is a node's own is left out: (1 - G/N) of the first, (G-1)/G of the second.
    """
    # Twice: inputs in forward, their gradients in backward. Weights: gradients are reduced, new weights are gathered,
    # which `overlap` may let go on at the same time.
    activations = 2 * size * layer.ifm * layer.in_area * batch / groups
    weights = size * layer.weights * groups / nodes * (2 - overlap)
    if not exact:
        return activations, weights
    return activations * (1 - groups / nodes), weights * (groups - 1) / groups


def optimal_groups(layer: Shape, nodes: int, batch: int, overlap: float = 0.0) -> float:
    """The real-valued G of least volume, sqrt(2 N batch iw*ih / ((2 - overlap) ofm k)), within 1..N."""
    # The zero of the derivative by G of both volumes' sum, not `exact`; ifm and the size of a value cancel out.
    best = math.sqrt(2 * nodes * batch * layer.in_area / ((2 - overlap) * layer.ofm * layer.kernel))
    return min(max(best, 1.0), float(nodes))


def best_groups(
    layer: Shape, nodes: int, batch: int, overlap: float = 0.0, size: int = 4, among: Sequence[int] | None = None
) -> int:
    """The G with the least exact volume; the larger of two equals, which sends fewer messages.

    `batch` are the images of a step over all nodes, `size` the bytes of a value; `among` are the numbers of groups to
    choose from (None: all divisors of N).

    >>> best_groups(Linear(4096, 4096), nodes=64, batch=256)
    2
    """
    choices = [groups for groups in range(1, nodes + 1) if nodes % groups == 0] if among is None else among
    return min(sorted(choices, reverse=True), key=lambda g: sum(hybrid_volume(layer, nodes, batch, g, overlap, size)))

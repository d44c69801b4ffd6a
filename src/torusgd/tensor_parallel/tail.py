"""The tail of a network: its trailing linear layers, cut by outputs into the column blocks that a recipe names.

The unit of a matrix product is then (virtual worker x column block), so that a group of ranks can divide the blocks in
any way and get the same bits (ours; the layout is the model parallelism of Das et al., arXiv 1602.06709). The network
is an nn.Sequential, or it has two methods:

    front(images) -> Tensor    all that comes before the first linear layer of the tail
    tail() -> list of modules  linear layers and elementwise modules; calling them in turn on `front` is the network
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from ..errors import UserError

ELEMENTWISE = (
    nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
"""modules of a tail beside nn.Linear: without parameters or state, and computed an element at a time"""


@runtime_checkable
class HasTail(Protocol):
    """A network that is `front`, then the modules of `tail` in turn."""

    def front(self, x: Tensor) -> Tensor:
        """From images to the inputs of the tail, flat: (N, features)."""

    def tail(self) -> list[nn.Module]:
        """A linear layer, then linear layers and elementwise modules; the same ones on every call."""


@dataclass(frozen=True)
class Block:
    """A run of a linear layer's outputs, with its rows of the layer's own parameters (views)."""

    low: int
    high: int
    weight: Tensor
    """(high - low, inputs)"""
    bias: Tensor | None
    """(high - low)"""


@dataclass(frozen=True)
class ColumnLayer:
    """A linear layer in column blocks, and the elementwise modules that follow it."""

    name: str
    """name of the linear layer in the model"""
    inputs: int
    outputs: int
    blocks: tuple[Block, ...]
    after: nn.Sequential


@dataclass(frozen=True)
class ColumnTail:
    """A network cut in two; the layers share their memory with the network's parameters."""

    front: Callable[[Tensor], Tensor]
    layers: tuple[ColumnLayer, ...]


def cut_columns(outputs: int, blocks: int) -> list[tuple[int, int]]:
    """The outputs of each column block; sizes differ by one at most.

    >>> cut_columns(10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return list(pairwise(outputs * block // blocks for block in range(blocks + 1)))


def column_tail(model: nn.Module, blocks: int) -> ColumnTail:
    """Cuts each linear layer of a network's tail into column blocks (the recipe's `column_blocks`).

    UserError if the network has no tail, or a layer has fewer outputs than there are blocks.

    >>> tail = column_tail(nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), blocks=2)
    >>> [(layer.name, [tuple(block.weight.shape) for block in layer.blocks]) for layer in tail.layers]
    [('1', [(3, 4), (3, 4)]), ('3', [(1, 6), (2, 6)])]
    """
    front, modules = _split(model, blocks)
    names = {module: name for name, module in model.named_modules()}
    starts = [i for i, module in enumerate(modules) if isinstance(module, nn.Linear)]
    layers = []
    for start, end in pairwise([*starts, len(modules)]):
        linear = modules[start]
        assert isinstance(linear, nn.Linear)
        name = names[linear]
        if linear.out_features < blocks:
            raise UserError(
                f"column_blocks = {blocks}: layer {name} has only {linear.out_features} outputs to cut; use at most "
                f"{linear.out_features}"
            )
        layers.append(_layer(name, linear, modules[start + 1 : end], blocks))
    return ColumnTail(front, tuple(layers))


def _split(model: nn.Module, blocks: int) -> tuple[Callable[[Tensor], Tensor], list[nn.Module]]:
    if isinstance(model, HasTail):
        front, modules = model.front, model.tail()
    elif isinstance(model, nn.Sequential):
        children = list(model)
        start = _trailing(children)
        front, modules = nn.Sequential(*children[:start]), children[start:]
    else:
        modules = []
    if not modules or not isinstance(modules[0], nn.Linear) or _trailing(modules) != 0:
        raise UserError(
            f"column_blocks = {blocks}: {type(model).__name__} has no tail of linear layers to cut: it needs the "
            "methods front(x) and tail(), or to be an nn.Sequential that ends in linear layers with "
            "elementwise modules (activations, dropout) between them; or use column_blocks = 1"
        )
    return front, modules


def _trailing(modules: Sequence[nn.Module]) -> int:
    """Index of the first linear layer of the run of linear and elementwise modules at the end."""
    # `type(...) is`, no isinstance: a subclass may compute something else than its base.
    start = len(modules)
    for index in range(len(modules) - 1, -1, -1):
        if type(modules[index]) is nn.Linear:
            start = index
        elif type(modules[index]) not in ELEMENTWISE:
            break
    return start


def _layer(name: str, linear: nn.Linear, after: Sequence[nn.Module], count: int) -> ColumnLayer:
    # Views of the network's own memory: an update of the blocks is one of the parameters.
    weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
    blocks = tuple(
        Block(low, high, weight[low:high], None if bias is None else bias[low:high])
        for low, high in cut_columns(linear.out_features, count)
    )
    # Not in place: backward begins at the linear layer's output, which must not be overwritten.
    copies = [copy.copy(module) for module in after]
    for module in copies:
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
    return ColumnLayer(name, linear.in_features, linear.out_features, blocks, nn.Sequential(*copies).train())

"""The tail of a network: its trailing linear layers, cut by outputs into the column blocks that a recipe names.

The unit of a matrix product is then (virtual worker x column block), so that a group of ranks can divide the blocks in
any way and get the same bits (ours; the layout is the model parallelism of Das et al., arXiv 1602.06709). The network
is an nn.Sequential, or has the methods of `HasTail`. Everything before the tail is data-parallel.

Each layer of the tail has its own number M of model-parallel ranks; a rank computes, sums and updates only the rows of
its own column blocks of the weights (`ParallelTail`), and the other rows are stale until `gather` brings them. The
parameters stay whole tensors on each rank; momentum and sums are of the rank's own rows alone.

How many ranks share a layer follows from the bytes that it sends by Das et al. (`hybrid_volume`): G groups of N / G
nodes, model-parallel inside a group, data-parallel across groups. A layer has `inputs` values an image (ifm * iw * ih)
and `weights` (ifm * ofm * k). All volumes are bytes a node and step; `overlap` in 0..1 is how far sending and receiving
go on at the same time: with 0 a volume is what goes one way through a node's link.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from ..comm.base import Work
from ..comm.groups import Group
from ..errors import UserError
from ..gradients.layout import Slot
from ..recipe.compatibility import allowed_parallel
from .exchange import Layout, ParallelGroups

# Modules of a tail beside nn.Linear: without parameters or state, and computed an element at a time.
ELEMENTWISE = (
    nn.Dropout, nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
    nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
ModelParallel = int | Literal["auto"]


@runtime_checkable
class HasTail(Protocol):
    """A network that is `front`, then the modules of `tail` in turn."""

    def front(self, x: Tensor) -> Tensor:
        """From images to the inputs of the tail, flat: (N, features)."""

    def tail(self) -> list[nn.Module]:
        """A linear layer, then linear layers and elementwise modules; the same ones on every call."""


class Block(NamedTuple):
    """A run of a linear layer's outputs, with its rows of the layer's own parameters (views)."""

    low: int
    high: int
    weight: Tensor
    bias: Tensor | None


class ColumnLayer(NamedTuple):
    """A linear layer of the model in column blocks, and the elementwise modules that follow it."""

    name: str
    inputs: int
    outputs: int
    blocks: tuple[Block, ...]
    after: nn.Sequential


class ColumnTail(NamedTuple):
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
    """
    front, modules = _split(model, blocks)
    names = {module: name for name, module in model.named_modules()}
    starts = [i for i, module in enumerate(modules) if isinstance(module, nn.Linear)]
    layers = []
    for start, end in pairwise([*starts, len(modules)]):
        linear = modules[start]
        assert isinstance(linear, nn.Linear)
        name, outputs = names[linear], linear.out_features
        if outputs < blocks:
            raise UserError(
                f"column_blocks = {blocks}: layer {name} has only {outputs} outputs to cut; use at most {outputs}"
            )
        # Views of the network's own memory: an update of the blocks is one of the parameters.
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        cut = tuple(
            Block(low, high, weight[low:high], None if bias is None else bias[low:high])
            for low, high in cut_columns(outputs, blocks)
        )
        # Not in place: backward begins at the linear layer's output, which must not be overwritten.
        after = nn.Sequential(*(copy.copy(module) for module in modules[start + 1 : end])).train()
        for module in after:
            if hasattr(module, "inplace"):
                module.inplace = False  # type: ignore[assignment]
        layers.append(ColumnLayer(name, linear.in_features, outputs, cut, after))
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
    # Index of the first linear layer of the run of linear and elementwise modules at the end.
    # `type(...) is`, no isinstance: a subclass may compute something else than its base.
    tail = takewhile(lambda module: type(module) in (nn.Linear, *ELEMENTWISE), reversed(modules))
    return len(modules) - max((count for count, module in enumerate(tail, 1) if type(module) is nn.Linear), default=0)


class ParallelTail:
    """A network's tail, divided over groups of `parallel` ranks; its parameters take no gradients of their own."""

    def __init__(
        self,
        model: nn.Module,
        tail: ColumnTail,
        parallel: Sequence[int],
        world: Group,
        watch: Callable[[Work], Work] = lambda work: work,
    ) -> None:
        self.tail, self.parallel = tail, list(parallel)
        self.layouts = [Layout(m, len(layer.blocks)) for m, layer in zip(parallel, tail.layers, strict=True)]
        self.groups = ParallelGroups(parallel, world, watch)
        self.slots = list[Slot]()  # column blocks as their gradients are ready: the last layer first, block by block
        self._order: list[tuple[int, int]] = []  # the layer and the block of each slot
        self.held: dict[str, list[Tensor]] = {}  # the column blocks that this rank updates, by parameter
        self.held_slots: dict[tuple[int, int, bool], int] = {}  # indices there by (layer, block, is the bias)
        for number, layer in reversed([*enumerate(tail.layers)]):
            for index, block in enumerate(layer.blocks):
                for is_bias, tensor in ((True, block.bias), (False, block.weight)):
                    if tensor is None:
                        continue
                    parameter = f"{layer.name}.{'bias' if is_bias else 'weight'}"
                    slot = Slot(
                        f"{parameter} (column block {index})", parameter, tensor, parallel=parallel[number],
                        layer=number, held=index in self.layouts[number].held(world.rank),
                        # Several ranks of the largest group may hold the same block of a layer with a smaller M: the
                        # first reports.
                        is_owner=world.rank % max(parallel) < parallel[number],
                    )  # fmt: skip
                    self.slots.append(slot)
                    self._order.append((number, index))
                    if slot.held:
                        self.held.setdefault(parameter, []).append(tensor)
                        self.held_slots[number, index, is_bias] = len(self.held_slots)
                    # Autograd then computes no gradient for them, which `ColumnPass` does block by block.
                    model.get_parameter(parameter).requires_grad_(False)

    @property
    def explanation(self) -> str:
        layers = (f"{layer.name} {m}" for layer, m in zip(self.tail.layers, self.parallel, strict=True))
        return f"column blocks {self.layouts[0].blocks}; model-parallel ranks of each layer: {', '.join(layers)}"

    def gather(self, rows: Mapping[int, Tensor]) -> None:
        """Fills the rows of every column block, by slot index, from the ranks that hold it; every rank calls it."""
        # All broadcasts are started before the first is waited for, in one order on all ranks.
        works = []
        for number, (layer, block) in enumerate(self._order):
            parallel, blocks = self.layouts[layer]
            group = self.groups.model_parallel[parallel]
            works.append(self.groups.watch(group.start_broadcast(rows[number], block * parallel // blocks)))
        for work in works:
            work.wait()

    def complete_norms(self, table: Tensor) -> None:
        """Sums a table over the largest model-parallel group, whose ranks together hold every column block."""
        self.groups.watch(self.groups.model_parallel[max(self.parallel)].start_all_reduce(table)).wait()

    def close(self) -> None:
        self.groups.close()


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


def best_groups(
    inputs: int, weights: int, nodes: int, batch: int, overlap: float = 0.0, among: Sequence[int] | None = None
) -> int:
    """The G with the least exact volume; the larger of two equals, which sends fewer messages.

    `batch` are the images of a step over all nodes, `among` the numbers of groups to choose from (None: N's divisors).
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

"""Which rank computes which column blocks for which virtual workers, and which numbers must divide each other.

In a layout of `parallel` M, groups of M consecutive ranks work together: each rank takes 1/M of the column blocks, for
the virtual workers of all ranks of its group. M = 1 is data parallelism. Layers may have different M; the groups of the
smaller M lie within those of the larger. (The model parallelism of Das et al., arXiv 1602.06709; that the sums have the
same bits for every M is ours.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..recipe.compatibility import allowed_parallel
from .tail import ColumnLayer
from .volume import Linear, best_groups

ModelParallel = int | Literal["auto"]


class ActivationBlock(NamedTuple):
    """The columns of one block for the virtual worker of one rank."""

    owner: int
    """rank whose virtual worker it is"""
    block: int
    """index of the column block"""


ActivationBlocks = dict[ActivationBlock, Tensor]
"""activations by block: tensors (images, width of the block)"""


@dataclass(frozen=True)
class Layout:
    """The activations that each rank holds: `parallel` consecutive ranks divide `blocks` column blocks."""

    parallel: int
    blocks: int

    def owners(self, rank: int) -> range:
        """The group of `rank`, for whose virtual workers it computes."""
        first = rank // self.parallel * self.parallel
        return range(first, first + self.parallel)

    def held(self, rank: int) -> range:
        """The column blocks of `rank`."""
        each = self.blocks // self.parallel
        return range(rank % self.parallel * each, (rank % self.parallel + 1) * each)

    def activations(self, rank: int) -> list[ActivationBlock]:
        """The activation blocks that `rank` holds."""
        return [ActivationBlock(owner, block) for owner in self.owners(rank) for block in self.held(rank)]


OWN = Layout(parallel=1, blocks=1)
"""layout before the tail: each rank holds all activations of its own virtual worker"""


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
    # One way of each link counts (`volume`, overlap 0), and only the M that give the same bits.
    groups = [ranks // parallel for parallel in allowed_parallel(ranks, blocks)]
    shapes = [Linear(layer.inputs, layer.outputs) for layer in layers]
    return [ranks // best_groups(shape, ranks, batch, among=groups) for shape in shapes]


def sum_in_tree(addends: Iterable[Tensor]) -> Tensor:
    """The sum by pairs of neighbours, pairs of pairs and so on; the addends are not changed.

    A run of 2**k addends that begins at a multiple of 2**k is a branch: the sum of such runs' sums has the same bits.

    >>> import torch
    >>> sum_in_tree(torch.tensor([1e8, 1.0, 1.0])).item()  # (1e8 + 1) + 1
    100000000.0
    """
    branches: list[tuple[int, Tensor]] = []
    for addend in addends:
        # As a binary counter: two branches of one height become one of the next, so that few tensors are held at once.
        branch, height = addend, 0
        while branches and branches[-1][0] == height:
            branch = branches.pop()[1] + branch
            height += 1
        branches.append((height, branch))
    total = branches.pop()[1]
    while branches:
        total = branches.pop()[1] + total
    return total

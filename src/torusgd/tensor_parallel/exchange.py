"""Which rank computes which column blocks for which virtual workers, and the messages between layers so divided.

In a layout of `parallel` M, groups of M consecutive ranks work together: each rank takes 1/M of the column blocks, for
the virtual workers of all ranks of its group. M = 1 is data parallelism. Layers may have different M; the groups of the
smaller M lie within those of the larger. One all-to-all inside the larger of their groups leads from one layout to the
next: part-broadcast in forward, and part-reduce in backward, as Das et al. call it (the model parallelism of arXiv
1602.06709; that the sums have the same bits for every M is ours).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.base import Done, Work
from ..comm.groups import Group, alone


class ActivationBlock(NamedTuple):
    """The columns of one block for the virtual worker of one rank."""

    owner: int  # rank whose virtual worker it is
    block: int  # index of the column block


ActivationBlocks = dict[ActivationBlock, Tensor]  # activations by block: tensors (images, width of the block)
_Blocks = Sequence[tuple[int, ActivationBlock]]  # blocks, each with the rank that sends or receives it


class Layout(NamedTuple):
    """The activations that each rank holds: `parallel` consecutive ranks divide `blocks` column blocks."""

    parallel: int
    blocks: int

    def owners(self, rank: int) -> range:
        """The group of `rank`, for whose virtual workers it computes."""
        first = rank // self.parallel * self.parallel
        return range(first, first + self.parallel)

    def held(self, rank: int) -> range:
        each = self.blocks // self.parallel
        return range(rank % self.parallel * each, (rank % self.parallel + 1) * each)

    def activations(self, rank: int) -> list[ActivationBlock]:
        return [ActivationBlock(owner, block) for owner in self.owners(rank) for block in self.held(rank)]


OWN = Layout(parallel=1, blocks=1)  # layout before the tail: each rank holds all activations of its own virtual worker


def sum_in_tree(addends: Iterable[Tensor]) -> Tensor:
    """The sum by pairs of neighbours, pairs of pairs and so on; the addends are not changed.

    A run of 2**k addends that begins at a multiple of 2**k is a branch: the sum of such runs' sums has the same bits.
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


class ParallelGroups:
    """Groups of consecutive ranks, for activations, and of ranks that hold the same columns, for gradients.

    In Megatron's words: for each number M of model-parallel ranks (`sizes`, of the layers) the tensor-model-parallel
    group of this rank, and its data-parallel group. Every rank makes them at the same time.
    """

    def __init__(self, sizes: Sequence[int], world: Group, watch: Callable[[Work], Work] = lambda work: work) -> None:
        self.world, self.watch = world, watch
        self.model_parallel = {1: alone(world.device, world.ranks[world.rank])}  # so many consecutive ranks around this
        self._data: dict[int, Group] = {}
        for parallel in sorted({*sizes} - {1}):
            grid = torch.arange(world.size).view(-1, parallel)
            self.model_parallel[parallel] = world.partition(grid.tolist())
            self._data[parallel] = world.partition(grid.T.tolist())

    def data_parallel(self, parallel: int) -> Group:
        """The ranks that hold the same columns as this one if `parallel` ranks divide them."""
        return self._data.get(parallel, self.world)

    def close(self) -> None:
        for group in (*self.model_parallel.values(), *self._data.values()):
            group.close()


class Transfer(NamedTuple):
    """Activations or their gradients under way between ranks."""

    work: Work
    received: Tensor
    expected: Sequence[ActivationBlock]
    shapes: Sequence[torch.Size]

    def wait(self) -> list[tuple[ActivationBlock, Tensor]]:
        """Blocks and their values, in the order of the ranks that sent them; each tensor in memory of its own."""
        self.work.wait()
        runs = self.received.split([shape.numel() for shape in self.shapes])
        # Copies, since the bits of a matrix product may depend on where in memory its operands begin.
        tensors = [run.view(shape).clone() for run, shape in zip(runs, self.shapes, strict=True)]
        return list(zip(self.expected, tensors, strict=True))


class Exchange:
    """The messages between two layouts: columns forward to `target`, sums of gradients back to `source`."""

    def __init__(self, source: Layout, target: Layout, groups: ParallelGroups) -> None:
        # Groups of the smaller M lie within those of the larger, so that no other rank takes part.
        span, rank = max(source.parallel, target.parallel), groups.world.rank
        self._groups, self._group = groups, groups.model_parallel[span]
        first = rank // span * span
        self._peers = range(first, first + span)
        # The blocks that the one rank holds in `source` and the other needs in `target`.
        held, owners = source.activations, target.owners
        self._sent = [(peer, each) for peer in self._peers for each in held(rank) if each.owner in owners(peer)]
        self._received = [(peer, each) for peer in self._peers for each in held(peer) if each.owner in owners(rank)]

    def forward(self, activations: Mapping[ActivationBlock, Tensor], widths: Sequence[int]) -> Transfer:
        """Sends the activations that this rank holds in `source`: (images, widths[block]), of one dtype."""
        return self._start(activations, self._sent, self._received, widths)

    def backward(self, partials: Mapping[ActivationBlock, Tensor], widths: Sequence[int]) -> Transfer:
        """Sends this rank's addend of the gradient of each block that it has received: (images, widths[block])."""
        return self._start(partials, self._received, self._sent, widths)

    def _start(
        self, values: Mapping[ActivationBlock, Tensor], sent: _Blocks, expected: _Blocks, widths: Sequence[int]
    ) -> Transfer:
        # One message to each peer, with all blocks for it: the lists are in the order of ranks on both sides.
        outgoing = [values[block] for _, block in sent]
        images = len(outgoing[0])
        shapes = [torch.Size((images, widths[block.block])) for _, block in expected]
        data, blocks = torch.cat([block.reshape(-1) for block in outgoing]), [block for _, block in expected]
        if self._group.size == 1:
            return Transfer(Done(), data, blocks, shapes)
        received = data.new_empty(sum(shape.numel() for shape in shapes))

        def bytes_by_peer(blocks: _Blocks) -> list[int]:
            counts = dict.fromkeys(self._peers, 0)
            for peer, each in blocks:
                counts[peer] += data.element_size() * images * widths[each.block]
            return [*counts.values()]

        # As bytes: the backend need not know the dtype of what it carries.
        in_bytes = received.view(torch.uint8), data.view(torch.uint8)
        work = self._group.start_all_to_all(*in_bytes, bytes_by_peer(expected), bytes_by_peer(sent))
        return Transfer(self._groups.watch(work), received, blocks, shapes)


def join_columns(arrived: Sequence[tuple[ActivationBlock, Tensor]]) -> dict[int, Tensor]:
    """After `forward`: the columns of each virtual worker, all blocks in order: (images, columns), contiguous."""
    found = defaultdict[int, list[Tensor]](list)
    for block, values in sorted(arrived, key=lambda each: each[0]):  # by virtual worker, then by block
        found[block.owner].append(values)
    return {owner: runs[0] if len(runs) == 1 else torch.cat(runs, dim=1) for owner, runs in found.items()}


def sum_addends(arrived: Sequence[tuple[ActivationBlock, Tensor]]) -> ActivationBlocks:
    """After `backward`: the gradient of each block, the ranks' addends summed."""
    # As a tree in rank order: each addend is a branch over the rank's own blocks, so the whole is one tree over blocks.
    found = defaultdict[ActivationBlock, list[Tensor]](list)
    for block, values in arrived:
        found[block].append(values)
    return {block: sum_in_tree(partials) for block, partials in found.items()}

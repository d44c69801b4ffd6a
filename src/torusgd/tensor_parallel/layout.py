"""Which rank computes which column blocks for which virtual workers, and the messages from one layer to the next.

In a layout of `parts` M, groups of M consecutive ranks work together: each rank takes 1/M of the column blocks, for the
virtual workers of all ranks of its group. M = 1 is data parallelism. Layers may have different M; the groups of the
smaller M lie within those of the larger, and one all-to-all inside the larger group leads from layer to layer. (The
model parallelism of Das et al., arXiv 1602.06709, whose part-broadcast and part-reduce these messages are; that the
sums have the same bits for every M is ours.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.base import Work
from ..comm.groups import group_of
from ..errors import UserError


class Piece(NamedTuple):
    """The columns of one block, of the virtual worker that a rank brought."""

    owner: int
    block: int


Pieces = dict[Piece, Tensor]
"""tensors (images, width of the block)"""


@dataclass(frozen=True)
class Layout:
    """Who holds which piece: `parts` consecutive ranks share `blocks` column blocks."""

    parts: int
    blocks: int

    def owners(self, rank: int) -> range:
        """The ranks whose virtual workers `rank` works for: its group."""
        first = rank // self.parts * self.parts
        return range(first, first + self.parts)

    def held(self, rank: int) -> range:
        """The column blocks of `rank`."""
        each = self.blocks // self.parts
        return range(rank % self.parts * each, (rank % self.parts + 1) * each)

    def pieces(self, rank: int) -> list[Piece]:
        """All that `rank` holds."""
        return [Piece(owner, block) for owner in self.owners(rank) for block in self.held(rank)]


OWN = Layout(parts=1, blocks=1)
"""before the tail: each rank holds the whole of what its own virtual worker has"""


def allowed_parts(ranks: int, blocks: int) -> list[int]:
    """The numbers of model-parallel ranks that give the same bits: divisors of both, a power of two of blocks each.

    (Or all blocks on one rank.) `sum_in_tree` adds pairs of neighbours, so that blocks on a rank must be a branch.

    >>> allowed_parts(8, 8), allowed_parts(6, 12), allowed_parts(4, 1)
    ([1, 2, 4, 8], [1, 3, 6], [1])
    """
    fitting = [m for m in range(1, blocks + 1) if ranks % m == 0 and blocks % m == 0]
    return [m for m in fitting if m == 1 or (blocks // m).bit_count() == 1]


def check_parts(parts: int, ranks: int, blocks: int, virtual_workers: int) -> None:
    """UserError where so many model-parallel ranks can't work together."""
    if parts == 1:
        return
    if blocks == 1:
        raise UserError(
            f"model_parallel = {parts}: the recipe computes its linear layers whole; set its column_blocks to {parts} "
            "or a multiple by a power of two (this changes the weights that it trains)"
        )
    allowed = allowed_parts(ranks, blocks)
    if parts not in allowed:
        raise UserError(
            f"model_parallel = {parts}: must divide {ranks} ranks and {blocks} column blocks, with a power of two of "
            f"blocks on each rank; use one of {', '.join(map(str, allowed))}, or auto"
        )
    if virtual_workers % ranks:
        raise UserError(
            f"model_parallel = {parts}: {ranks} ranks can't share {virtual_workers} virtual workers evenly, and the "
            f"ranks of a group work in step; use a number of workers that divides {virtual_workers}"
        )


def sum_in_tree(addends: Iterable[Tensor]) -> Tensor:
    """The sum by pairs of neighbours, pairs of pairs and so on; the addends are not changed.

    A run of 2**k addends that begins at a multiple of 2**k is a branch: the sum of such runs' sums has the same bits.

    >>> sum_in_tree(torch.tensor([1e8, 1.0, 1.0])).item()  # (1e8 + 1) + 1
    100000000.0
    """
    branches: list[tuple[int, Tensor]] = []
    for addend in addends:
        branch, height = addend, 0
        while branches and branches[-1][0] == height:
            branch = branches.pop()[1] + branch
            height += 1
        branches.append((height, branch))
    total = branches.pop()[1]
    while branches:
        total = branches.pop()[1] + total
    return total


class Transfer:
    """Pieces on their way between ranks."""

    def __init__(
        self,
        work: Work | None,
        received: Tensor,
        expected: Sequence[tuple[int, Piece]],
        shapes: Sequence[torch.Size],
    ) -> None:
        self._work, self._received, self._expected, self._shapes = work, received, expected, shapes

    def wait(self) -> list[tuple[int, Piece, Tensor]]:
        """(sending rank, piece, values) in the order of ranks and pieces; each tensor in memory of its own."""
        if self._work is not None:
            self._work.wait()
        parts = self._received.split([shape.numel() for shape in self._shapes])
        # Copies, since the bits of a matrix product may depend on where in memory its operands begin.
        return [
            (peer, piece, part.view(shape).clone())
            for (peer, piece), part, shape in zip(self._expected, parts, self._shapes, strict=True)
        ]


class Passage:
    """The messages between two layouts, for one rank: `spread` forward, `collect` backward.

    Forward, each rank of `target` gets all columns of its group's virtual workers. Backward, each rank of `source` gets
    the gradients of the pieces that it holds, summed over the ranks of the target's group.
    """

    def __init__(self, source: Layout, target: Layout, rank: int, groups: "Groups") -> None:
        self.source, self.target, self._rank = source, target, rank
        span = max(source.parts, target.parts)
        self._groups, self._group = groups, groups.of(span)
        first = rank // span * span
        self._sent = [(peer, p) for peer in range(first, first + span) for p in _sent(source, target, rank, peer)]
        self._received = [(peer, p) for peer in range(first, first + span) for p in _sent(source, target, peer, rank)]
        self._span = range(first, first + span)

    def spread(self, pieces: Mapping[Piece, Tensor], widths: Sequence[int]) -> Transfer:
        """Starts the way forward.

        Args:
            pieces: All that this rank holds in `source`, (images, widths[block]), of one dtype.
            widths: Columns of each block.
        """
        images = next(iter(pieces.values())).shape[0]
        outgoing = [pieces[piece] for _, piece in self._sent]
        shapes = [torch.Size((images, widths[piece.block])) for _, piece in self._received]
        return self._start(outgoing, self._sent, self._received, shapes)

    def collect(self, partials: Mapping[Piece, Tensor], widths: Sequence[int]) -> Transfer:
        """Starts the way back of this rank's part of the gradient of each piece that it was sent; see `total`."""
        outgoing = [partials[piece] for _, piece in self._received]
        images = outgoing[0].shape[0]
        shapes = [torch.Size((images, widths[piece.block])) for _, piece in self._sent]
        return self._start(outgoing, self._received, self._sent, shapes)

    def _start(
        self,
        outgoing: Sequence[Tensor],
        sent: Sequence[tuple[int, Piece]],
        expected: Sequence[tuple[int, Piece]],
        shapes: Sequence[torch.Size],
    ) -> Transfer:
        data = torch.cat([piece.reshape(-1) for piece in outgoing])
        if len(self._span) == 1:
            return Transfer(None, data, expected, shapes)
        received = data.new_empty(sum(shape.numel() for shape in shapes))
        splits = [sum(t.numel() for (peer, _), t in zip(sent, outgoing, strict=True) if peer == p) for p in self._span]
        takes = [sum(s.numel() for (peer, _), s in zip(expected, shapes, strict=True) if peer == p) for p in self._span]
        # As bytes: what is carried has no say in how.
        work = group_of(self._group).start_all_to_all(
            received.view(torch.uint8),
            data.view(torch.uint8),
            [take * data.element_size() for take in takes],
            [split * data.element_size() for split in splits],
        )
        return Transfer(self._groups.watch(work), received, expected, shapes)


def _sent(source: Layout, target: Layout, rank: int, peer: int) -> list[Piece]:
    """What `rank` holds in `source` and `peer` needs in `target`."""
    needed = target.owners(peer)
    return [piece for piece in source.pieces(rank) if piece.owner in needed]


def joined(arrived: Sequence[tuple[int, Piece, Tensor]]) -> dict[int, Tensor]:
    """After `spread`: for each virtual worker its columns, all blocks in order: (images, columns), contiguous."""
    found: dict[int, list[tuple[int, Tensor]]] = {}
    for _, piece, values in arrived:
        found.setdefault(piece.owner, []).append((piece.block, values))
    return {
        owner: parts[0][1] if len(parts) == 1 else torch.cat([t for _, t in sorted(parts, key=lambda p: p[0])], dim=1)
        for owner, parts in sorted(found.items())
    }


def total(arrived: Sequence[tuple[int, Piece, Tensor]]) -> Pieces:
    """After `collect`: each piece's gradient, the parts of the ranks added as a tree in rank order."""
    found: dict[Piece, list[Tensor]] = {}
    for _, piece, values in arrived:
        found.setdefault(piece, []).append(values)
    return {piece: sum_in_tree(parts) for piece, parts in found.items()}


class Groups:
    """Process groups of consecutive ranks (for activations), and of ranks that hold the same columns (for gradients).

    Args:
        sizes: The numbers of model-parallel ranks that the layers have; every rank makes the same groups.
        ranks: In all.
        timeout: Seconds that a message may take; None: the backend's default.
    """

    def __init__(self, sizes: Sequence[int], ranks: int, timeout: float | None) -> None:
        self.watch: Callable[[Work], Work] = lambda work: work
        """is shown every message that leaves (`monitor.Monitor.watch`)"""
        self._size = max(sizes, default=1)
        limit = None if timeout is None else timedelta(seconds=timeout)
        self._together: dict[int, dist.ProcessGroup] = {}
        self._alike: dict[int, dist.ProcessGroup] = {}
        for parts in sorted({size for size in sizes if size > 1}):
            mesh = torch.arange(ranks).view(-1, parts)  # a DeviceMesh would make the same groups, but without timeouts
            for found, lines in ((self._together, mesh), (self._alike, mesh.T)):
                found[parts], _ = dist.new_subgroups_by_enumeration(lines.tolist(), timeout=limit)

    def of(self, parts: int) -> dist.ProcessGroup | None:
        """The `parts` consecutive ranks around this one; None for this rank alone."""
        return self._together.get(parts)

    def alike(self, parts: int) -> dist.ProcessGroup | None:
        """The ranks that hold the same columns as this one where `parts` share them; None: all ranks."""
        return self._alike.get(parts)

    def complete(self, tensor: Tensor) -> None:
        """Adds a tensor up over the largest group, in place."""
        if self._size > 1:
            self.watch(group_of(self.of(self._size)).start_all_reduce(tensor)).wait()

    def close(self) -> None:
        """Destroys the groups; every rank calls it, with nothing on its way."""
        for group in (*self._together.values(), *self._alike.values()):
            dist.destroy_process_group(group)

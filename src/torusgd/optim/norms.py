"""Layer norms over fixed blocks, so that a tensor cut into shards has bit for bit the norm of the whole.

A norm that is summed shard by shard differs in its last bits from one that is summed in one pass, and the difference
would depend on the number of workers. So blocks belong to the definition of the norm here (ours):

1. float32 norms of blocks of `BLOCK` elements, in logical order: torch's on a CPU; on a GPU `norms_by_lanes`;
2. their squares, in float64, added in pairs of neighbours, then the sums in pairs, until one is left: a binary tree;
3. the square root of that one.

Shards that are cut at block edges exchange block norms only. The tree is made of elementwise additions, in which no
library chooses an order, and zeros to its right change nothing: from block norms on, the bits depend on neither the
device nor the number of threads nor the tensors whose norms are taken beside it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ..arithmetic import is_portable

# Elements of a block.
BLOCK = 4096
# Parts of a block on a GPU that are summed side by side.
LANES = 256
# Blocks whose squares, 128 MiB, are added at a time.
_BLOCKS_AT_A_TIME = 4096


def block_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean norms of the blocks of each tensor in logical (row-major) order: float32 [ceil(numel / BLOCK)].

    Any shape and floating dtype, all on one device; another memory format is copied first. The last block may be
    shorter. A NaN makes its block's norm NaN; on a CPU an element above 1.8e19 makes it infinite.

    >>> block_norms([torch.ones(2 * BLOCK + 9)])
    [tensor([64., 64.,  3.])]
    """
    flats = [tensor.detach().reshape(-1).float() for tensor in tensors]
    if not flats or not flats[0].is_cuda or is_portable():  # whose norms are grid sums on any device
        return [_norms_of_blocks(flat) for flat in flats]
    return list(norms_by_lanes(flats).split([-(-flat.numel() // BLOCK) for flat in flats]))


def norms_by_lanes(flats: Sequence[Tensor]) -> Tensor:
    """The block norms of 1-D float32 tensors on a GPU, one tensor after another: float32 [all blocks].

    A library's reduction may choose its order by the number of blocks, so that a shard would have other bits than the
    whole. Elementwise additions, of which this is made, have no order to choose.
    """
    padded = torch.cat([pad(flat, (0, -flat.numel() % BLOCK)) for flat in flats])
    # Element i of a block belongs to lane i modulo LANES.
    blocks = padded.view(padded.numel() // BLOCK, BLOCK // LANES, LANES)
    norms = []
    for part in blocks.split(_BLOCKS_AT_A_TIME):
        # Each lane adds its squares one after another, in float64, in which the square of a float32 is exact.
        lanes, *others = part.double().square_().unbind(1)
        for row in others:
            lanes += row
        # Then the upper half of the lanes is added to the lower half, until one is left.
        while lanes.shape[1] > 1:
            lower, upper = lanes.chunk(2, dim=1)
            lanes = lower + upper
        norms.append(lanes[:, 0].sqrt().float())
    return torch.cat(norms)


def _norms_of_blocks(flat: Tensor) -> Tensor:
    whole = flat.numel() // BLOCK * BLOCK
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1)
    if whole == flat.numel():
        return rows
    rest = torch.linalg.vector_norm(flat[whole:].view(1, -1), dim=1)
    return torch.cat([rows, rest]) if whole else rest


def norms_from_blocks(blocks: Sequence[Tensor]) -> Tensor:
    """Norms of several tensors, float64 [len(blocks)], from all block norms of each in order, float32, on one device.

    A tensor without blocks has the norm 0, and the bits of a norm don't depend on the tensors beside it.
    """
    if not blocks:
        return torch.zeros(0, dtype=torch.float64)
    # Zeros on the right fill all rows to one width: they join the tree as addends that change nothing.
    squares = pad_sequence(list(blocks), batch_first=True).double().square()
    while squares.shape[1] != 1:
        # An odd width gets a zero on the right, so that each column has a neighbour, and a width of none gets two.
        squares = pad(squares, (0, squares.shape[1] % 2 or 2 * (squares.shape[1] == 0)))
        squares = squares[:, 0::2] + squares[:, 1::2]
    return squares[:, 0].sqrt()


def layer_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of each tensor by blocks, without a host sync: float64 [len(tensors)], tensors on one device."""
    return norms_from_blocks(block_norms(tensors))

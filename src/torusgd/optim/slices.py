"""An optimizer over slices of the parameters, for updates that ranks share out; with LARS norms of the whole."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .lars import Lars, Norms
from .norms import BLOCK, block_norms, norms_from_blocks

Complete = Callable[[Tensor], object]
"""Adds a float32 tensor up over the ranks, in place."""


def over_slices(optimizer: Optimizer, slices: Mapping[Tensor, Tensor], norms: Norms) -> Optimizer:
    """An optimizer of the same class, with the same groups and values, and with no state, over slices.

    Args:
        optimizer: Over whole parameters; left alone.
        slices: For each parameter its slice, maybe an empty one, so that all ranks' groups are of one length.
        norms: For `Lars`, such as `SliceNorms`.
    """
    sliced = copy.copy(optimizer)
    sliced.param_groups = [{**g, "params": [slices[p] for p in g["params"]]} for g in optimizer.param_groups]
    sliced.state = defaultdict(dict)
    if isinstance(sliced, Lars):
        sliced.norms = norms
    return sliced


class SliceNorms:
    """Norms of whole tensors where a rank has slices of them, cut at blocks; for `Lars(norms=...)`.

    Only block norms travel, two values (of weights and of gradient) for 4,096 elements; the result has the bits of
    `layer_norms`, since all ranks but one add zero to each.

    Args:
        slices: (slice of a parameter, its first element, elements of the parameter), maybe empty.
        complete: Adds up what the ranks have.
    """

    def __init__(self, slices: Sequence[tuple[Tensor, int, int]], complete: Complete) -> None:
        self._places = {id(own): (low // BLOCK, -(-numel // BLOCK)) for own, low, numel in slices}
        self._complete = complete

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms of parameters, then of their gradients: float64 [len(tensors)]. Every rank calls it alike."""
        # Gradients come in the order of their parameters, and lie in the same blocks.
        places = [self._places[id(param)] for param in tensors[: len(tensors) // 2]] * 2
        table = torch.zeros(sum(blocks for _, blocks in places), device=tensors[0].device)
        rows = table.split([blocks for _, blocks in places])
        for tensor, row, (first, _) in zip(tensors, rows, places, strict=True):
            own = block_norms(tensor)
            row[first : first + len(own)].copy_(own)
        self._complete(table)
        return norms_from_blocks(rows)

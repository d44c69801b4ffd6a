"""LARS norms of whole parameters where a rank updates only some of their elements: shards, column blocks, or both.

A layer norm is defined over blocks of 4,096 elements (`optim.norms`) of each slot of a parameter, in order. Shards are
cut at the edges of those blocks, so each block lies on one rank as a whole, and only block norms travel: two values
(of weights and of gradient) for 4,096 elements. Every rank writes what it owns into a table of zeros, the table is
summed, and each rank joins the same blocks in the same order: the bits of `optim.norms.layer_norms`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..optim.norms import BLOCK, all_block_norms, norms_from_blocks
from .reducer import Reducer


class _Place(NamedTuple):
    """Where a tensor's block norms stand in those of its parameter, and whether this rank reports them."""

    parameter: str
    first: int
    is_owner: bool


class BlockNorms:
    """Norms of whole parameters, for an optimizer (`Lars(norms=...)`) over `Reducer.owned`.

    Args:
        reducer: Its layout says what this rank updates.
        complete: Sums a float32 tensor, in place, over ranks that together own every block once.
    """

    def __init__(self, reducer: Reducer, complete: Callable[[Tensor], object]) -> None:
        layout = reducer.layout
        blocks = layout.norm_blocks()
        self._counts = {parameter: sum(counts) for parameter, counts in blocks.items()}
        self._complete = complete
        self._places: dict[int, _Place] = {}
        # Where the slot of a parameter in several column blocks begins among the parameter's norm blocks.
        starts = dict.fromkeys(blocks, 0)
        begins = []
        for slot in layout.slots:
            begins.append(starts[slot.parameter])
            starts[slot.parameter] += -(-slot.tensor.numel() // BLOCK)
        spans = reducer.spans
        for number, (tensor, slot, place) in enumerate(zip(reducer.owned, layout.held, layout.places, strict=True)):
            if spans is not None:  # shards: every element lies on one rank
                self._places[id(tensor)] = _Place(slot.parameter, begins[place] + spans[number][0] // BLOCK, True)
            elif slot.layer is not None:  # a column block that several ranks may update alike
                self._places[id(tensor)] = _Place(slot.parameter, begins[place], slot.is_owner)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms of parameters, then of their gradients: float64 [len(tensors)]. Every rank calls it alike."""
        params = tensors[: len(tensors) // 2]
        places = [self._places.get(id(param)) for param in params]
        norms = all_block_norms(tensors)
        shared = list(dict.fromkeys(place.parameter for place in places if place is not None))
        if shared:
            counts = [self._counts[parameter] for parameter in shared]
            table = torch.zeros(2, sum(counts), device=norms[0].device)
            rows = [dict(zip(shared, row.split(counts), strict=True)) for row in table]
            for number, own in enumerate(norms):
                half, place = number // len(params), places[number % len(params)]
                if place is not None and place.is_owner:
                    rows[half][place.parameter][place.first : place.first + len(own)].copy_(own)
            self._complete(table.view(-1))
            for number in range(len(norms)):
                place = places[number % len(params)]
                if place is not None:
                    norms[number] = rows[number // len(params)][place.parameter]
        return norms_from_blocks(norms)

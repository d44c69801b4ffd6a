"""Layer norms where a parameter is cut into column blocks and a rank holds only some of them."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..optim.norms import BLOCK, block_norms, norms_from_blocks

Complete = Callable[[Tensor], object]
"""adds a float32 tensor up over the ranks that hold the column blocks together, in place"""


class ColumnNorms:
    """Norms of whole parameters for an optimizer (`Lars(norms=...)`) that updates column blocks, each for itself.

    The norm of a cut parameter is defined over blocks of 4,096 elements (`optim.norms`) of each column block, in the
    order of column blocks: the plain definition where a column block is a multiple of 4,096 elements, and the same
    for every number of ranks in any case. Only block norms travel: a value for 4,096.

    Args:
        blocks: For each cut parameter, by name, its column blocks in order: tensors, all of which this rank has though
            it may not update them all.
        told: The column blocks that this rank tells the others of, by identity: each by one rank.
        complete: Joins what the ranks tell.
    """

    def __init__(self, blocks: Mapping[str, Sequence[Tensor]], told: Sequence[Tensor], complete: Complete) -> None:
        self._names = {id(tensor): name for name, tensors in blocks.items() for tensor in tensors}
        self._counts = {name: [-(-t.numel() // BLOCK) for t in tensors] for name, tensors in blocks.items()}
        self._places = {id(tensor): number for tensors in blocks.values() for number, tensor in enumerate(tensors)}
        self._told = {id(tensor) for tensor in told}
        self._complete = complete

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms of parameters, then of their gradients: float64 [len(tensors)], as `layer_norms` of whole ones.

        Every rank calls it for blocks of the same parameters.
        """
        params = tensors[: len(tensors) // 2]
        names = [self._names.get(id(param)) for param in params] * 2
        norms = [block_norms(tensor) for tensor in tensors]
        cut = list(dict.fromkeys(name for name in names[: len(params)] if name is not None))
        if cut:
            width = sum(sum(self._counts[name]) for name in cut)
            table = torch.zeros(2, width, device=norms[0].device)
            views = [self._views(cut, row) for row in table]
            for number, own in enumerate(norms):
                param = params[number % len(params)]
                if id(param) in self._told:
                    views[number // len(params)][self._names[id(param)]][self._places[id(param)]].copy_(own)
            self._complete(table.view(-1))
            for number, name in enumerate(names):
                if name is not None:
                    norms[number] = torch.cat(views[number // len(params)][name])
        return norms_from_blocks(norms)

    def _views(self, names: Sequence[str], row: Tensor) -> dict[str, list[Tensor]]:
        """Each parameter's column blocks in a row of the table."""
        parts = iter(row.split([count for name in names for count in self._counts[name]]))
        return {name: [next(parts) for _ in self._counts[name]] for name in names}

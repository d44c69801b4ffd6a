"""The tail of a network on this rank: its column blocks as slots, and the gather of other ranks' blocks.

Everything before the tail is data-parallel. Each layer of the tail has its own number M of model-parallel ranks (Das et
al., arXiv 1602.06709); a rank computes, sums and updates only the rows of its own column blocks of the weights, and the
other rows are stale until `gather` brings them. The parameters stay whole tensors on each rank; momentum and sums are
of the rank's own rows alone.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from ..comm.base import Work
from ..comm.groups import Group
from ..gradients.layout import Slot
from .column_layout import Layout
from .exchange import ParallelGroups
from .tail import ColumnTail


class ParallelTail:
    """A network's tail (from `column_tail`), divided over groups of ranks. Every rank makes one at the same time.

    From then on the tail's parameters take no gradients of their own (`requires_grad` is off): their column blocks do.
    `parallel` are the model-parallel ranks of each layer, as from `choose_parallel`.
    """

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
        self.slots = self._make_slots(world.rank)
        """column blocks in the order in which their gradients are ready: the last layer first, block by block"""
        # Autograd then computes no gradient for them, which `ColumnPass` does block by block.
        parameters = dict(model.named_parameters())
        for slot in self.slots:
            parameters[slot.parameter].requires_grad_(False)

    @property
    def explanation(self) -> str:
        """One line: how many ranks divide each layer."""
        layers = (f"{layer.name} {m}" for layer, m in zip(self.tail.layers, self.parallel, strict=True))
        return f"column blocks {self.layouts[0].blocks}; model-parallel ranks of each layer: {', '.join(layers)}"

    @property
    def held(self) -> dict[str, list[Tensor]]:
        """The column blocks that this rank updates, by parameter."""
        found: dict[str, list[Tensor]] = {}
        for slot in self.slots:
            if slot.held:
                found.setdefault(slot.parameter, []).append(slot.tensor)
        return found

    def held_slots(self) -> dict[tuple[int, int, bool], int]:
        """The index among this rank's slots by (layer, block, whether it is the bias)."""
        keys = [(layer, block, is_bias) for layer, block, is_bias in self._order() if self._holds(layer, block)]
        return {key: number for number, key in enumerate(keys)}

    def gather(self, rows: Mapping[int, Tensor]) -> None:
        """Fills the rows of every column block, by slot index, from the ranks that hold it; every rank calls it."""
        # All broadcasts are started before the first is waited for, in one order on all ranks.
        works = []
        for number, (layer, block, _) in enumerate(self._order()):
            layout = self.layouts[layer]
            group = self.groups.model_parallel(layout.parallel)
            if group is not None:
                holder = block * layout.parallel // layout.blocks
                works.append(self.groups.watch(group.start_broadcast(rows[number], holder)))
        for work in works:
            work.wait()

    def complete_norms(self, table: Tensor) -> None:
        """Sums a table over the largest model-parallel group, whose ranks together hold every column block."""
        self.groups.complete(table)

    def close(self) -> None:
        """Drops the groups; every rank calls it."""
        self.groups.close()

    def _order(self) -> list[tuple[int, int, bool]]:
        """(layer, block, whether it is the bias) of each slot, in the order of backward."""
        order = []
        for number in reversed(range(len(self.tail.layers))):
            for index, block in enumerate(self.tail.layers[number].blocks):
                order += [(number, index, True)] if block.bias is not None else []
                order.append((number, index, False))
        return order

    def _holds(self, layer: int, block: int) -> bool:
        return block in self.layouts[layer].held(self.groups.world.rank)

    def _make_slots(self, rank: int) -> list[Slot]:
        # Several ranks of the largest group may hold the same block of a layer with a smaller M: the first reports it.
        most = max(self.parallel)
        slots = []
        for number, index, is_bias in self._order():
            layer = self.tail.layers[number]
            block = layer.blocks[index]
            parameter = f"{layer.name}.{'bias' if is_bias else 'weight'}"
            tensor = block.bias if is_bias else block.weight
            assert tensor is not None
            slots.append(
                Slot(
                    name=f"{parameter} (column block {index})",
                    parameter=parameter,
                    tensor=tensor,
                    parallel=self.parallel[number],
                    layer=number,
                    held=self._holds(number, index),
                    is_owner=rank % most < self.parallel[number],
                )
            )
        return slots

"""Hybrid parallelism of a run (Das et al., arXiv 1602.06709): the network's tail shared out over groups of ranks.

Everything before the tail is data-parallel. Each layer of the tail has its own number M of model-parallel ranks; a rank
computes, sums and updates only the rows of its own column blocks of the weights, and the rest of them grows old until
`gather` brings it. The parameters stay whole tensors on each rank; momentum and sums are of the rank's own rows alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.allreduce import AlgorithmAllReduce, NativeAllReduce, create
from ..comm.buckets import USUAL_MIB, Buckets
from ..comm.monitor import Monitor
from ..errors import UserError
from ..recipe.schema import Recipe
from ..runtime import Ranks, RuntimeOptions
from .column_norms import ColumnNorms
from .column_reducer import ColumnReducer, Slot, held_slots, is_teller, slots_of
from .layout import Groups, Layout, allowed_parts, check_parts
from .tail import ColumnLayer, column_tail
from .volume import Linear, best_groups

ModelParallel = int | Literal["auto"]


def choose_parts(asked: ModelParallel, layers: Sequence[ColumnLayer], recipe: Recipe, ranks: int) -> list[int]:
    """The model-parallel ranks M of each layer: what was asked for, or what sends least by the planner's formula.

    `auto` counts the images of the first stage's batch, and one way of each link (`tensor_parallel.volume`, overlap 0);
    of the M that give the same bits it takes 1 where the ranks can't share the virtual workers evenly.

    Raises:
        UserError: So many ranks can't work together.
    """
    if asked != "auto":
        check_parts(asked, ranks, recipe.column_blocks, recipe.virtual_workers)
        return [asked] * len(layers)
    if recipe.virtual_workers % ranks:
        return [1] * len(layers)
    batch = recipe.virtual_workers * recipe.stages[0].images_per_worker
    groups = [ranks // parts for parts in allowed_parts(ranks, recipe.column_blocks)]
    shapes = [Linear(layer.inputs, layer.outputs) for layer in layers]
    return [ranks // best_groups(shape, ranks, batch, among=groups) for shape in shapes]


def hybrid_tail(
    model: nn.Module,
    recipe: Recipe,
    options: RuntimeOptions,
    ranks: Ranks,
    allreduce: AlgorithmAllReduce | NativeAllReduce,
) -> "HybridTail | None":
    """The tail of a run's network, where its recipe computes it in column blocks. Every rank calls it.

    Raises:
        UserError: The network has no tail, the ranks can't share it so, or the update is sharded.
    """
    if options.model_parallel != "auto":
        check_parts(options.model_parallel, ranks.size, recipe.column_blocks, recipe.virtual_workers)
    if recipe.column_blocks == 1:
        return None
    if options.update == "sharded":
        raise UserError(
            f"update = sharded: the recipe computes its linear layers in {recipe.column_blocks} column blocks, whose "
            "update ranks share by --model-parallel; use --update replicated, or set column_blocks to 1 (this changes "
            "the weights that it trains)"
        )

    def over(group: dist.ProcessGroup | None) -> AlgorithmAllReduce | NativeAllReduce:
        if group is None:
            return allreduce
        profile = Path(options.profile) if options.profile else None
        return create(
            options.allreduce, profile=profile, group=group, device=ranks.device, timeout=options.start_timeout
        )

    return HybridTail(model, recipe, options.model_parallel, ranks, over, options.start_timeout)


class HybridTail:
    """The tail of a network on this rank. It makes groups: every rank makes one, at the same time.

    From then on the tail's parameters take no gradients of their own (`requires_grad` is off): their column blocks do.

    Args:
        model: On its device.
        recipe: With `column_blocks` above 1.
        asked: See `choose_parts`.
        ranks: This process among the others.
        over: Makes the all-reduce over a group (None: over all ranks).
        timeout: Seconds that a message may take.

    Raises:
        UserError: The network has no tail, or the ranks can't share it so.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        asked: ModelParallel,
        ranks: Ranks,
        over: Callable[[dist.ProcessGroup | None], AlgorithmAllReduce | NativeAllReduce],
        timeout: float | None,
    ) -> None:
        self.tail = column_tail(model, recipe.column_blocks)
        self.parts = choose_parts(asked, self.tail.layers, recipe, ranks.size)
        """model-parallel ranks of each layer"""
        self.groups = Groups(self.parts, ranks.size, timeout)
        self.layouts = [Layout(parts, recipe.column_blocks) for parts in self.parts]
        self._channels = {parts: over(self.groups.alike(parts)) for parts in sorted(set(self.parts))}
        self._rank = ranks.rank
        self._parameters = dict(model.named_parameters())
        self.slots = slots_of(self.tail.layers)
        self._held = held_slots(self.slots, self.layouts, ranks.rank)
        for slot in self.slots:
            self._parameters[slot.parameter].requires_grad_(False)

    @property
    def held(self) -> dict[str, list[Tensor]]:
        """By parameter, the column blocks that this rank updates."""
        return _by_parameter(self._held)

    @property
    def explanation(self) -> str:
        """One line: how many ranks share each layer."""
        layers = (f"{layer.name} {m}" for layer, m in zip(self.tail.layers, self.parts, strict=True))
        return f"column blocks {self.layouts[0].blocks}; model-parallel ranks of each layer: {', '.join(layers)}"

    def norms(self) -> ColumnNorms:
        """Of whole layers, for LARS over `held`."""
        told = [slot.tensor for slot in self._held if is_teller(self.layouts, slot.layer, self._rank)]
        return ColumnNorms(_by_parameter(self.slots), told, self.groups.complete)

    def reducer(self, virtual_workers: int, buckets: Buckets, monitor: Monitor) -> ColumnReducer:
        """Sums the gradients of `held`; the messages of the tail are watched by `monitor` from now on.

        Its buckets are of the size that `buckets` tells, or of USUAL_MIB where that is no size.
        """
        self.groups.watch = monitor.watch
        mib = float(buckets) if isinstance(buckets, int | float) else USUAL_MIB
        channels = {parts: monitor.over(channel) for parts, channel in self._channels.items()}
        in_layers = [channels[parts] for parts in self.parts]
        return ColumnReducer(
            self.slots, self.layouts, self._rank, virtual_workers, mib, in_layers, self.groups.complete
        )

    def gather(self) -> None:
        """Makes the tail's parameters whole on every rank; every rank calls it."""
        self._gather({slot: slot.tensor for slot in self.slots})

    def whole(self, own: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
        """By parameter, what `own` gives for the column blocks, whole on every rank, each of which calls it.

        Args:
            own: From a held column block to a tensor of its shape, such as its momentum; None: zeros.
        """
        found = {name: torch.zeros_like(self._parameters[name]) for name in _by_parameter(self.slots)}
        rows = {slot: self._rows(slot, found[slot.parameter]) for slot in self.slots}
        for slot in self._held:
            values = own(slot.tensor)
            if values is not None:
                rows[slot].copy_(values)
        self._gather(rows)
        return found

    def own_rows(self, name: str, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(held column block, its rows of `whole`) of a parameter."""
        return [(slot.tensor, self._rows(slot, whole)) for slot in self._held if slot.parameter == name]

    def _rows(self, slot: Slot, whole: Tensor) -> Tensor:
        block = self.tail.layers[slot.layer].blocks[slot.block]
        return whole[block.low : block.high]

    def _gather(self, rows: dict[Slot, Tensor]) -> None:
        works = []
        for slot, values in rows.items():
            layout = self.layouts[slot.layer]
            if layout.parts > 1:
                holder = slot.block * layout.parts // layout.blocks
                group = self.groups.of(layout.parts)
                works.append(dist.broadcast(values, group_src=holder, group=group, async_op=True))
        for work in works:
            work.wait()

    def close(self) -> None:
        """Ends the groups; every rank calls it."""
        for parts, channel in self._channels.items():
            if parts > 1:  # the other is the run's own
                channel.close()
        self.groups.close()


def _by_parameter(slots: Sequence[Slot]) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for slot in slots:
        found.setdefault(slot.parameter, []).append(slot.tensor)
    return found

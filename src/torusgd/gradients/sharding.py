"""What ranks exchange if each updates a shard of the weights: LARS norms before the update, new weights after it.

Norms: a layer norm is defined over blocks of 4,096 elements (`optim.norms`) of each slot of a parameter, in order.
Shards are cut at the edges of those blocks, so each block lies on one rank as a whole, and only block norms travel: two
values (of weights and of gradient) for 4,096 elements. Every rank writes what it owns into a table of zeros, the table
is summed, and each rank joins the same blocks in the same order: the bits of `optim.norms.layer_norms`.

Weights: they are all-gathered bucket by bucket, and waited for by the layer that needs them. Das et al. (arXiv
1602.06709) hide this part-broadcast behind the next forward pass. The weights travel in the memory of the gradient
sums, which is free from the update until the next backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.base import Work
from ..optim.norms import BLOCK, all_block_norms, norms_from_blocks
from .reducer import Reducer


class WeightGather:
    """Brings each rank's updated shards (`Reducer.owned`) to all ranks that hold the same slots.

    A hook before each module's forward pass waits for the buckets of the module's own parameters. Column blocks belong
    to no module that is called: before every forward pass, their reader calls `wait`. So does any other code that reads
    parameters without calling a module.
    """

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        self._reducer, self._layout = reducer, reducer.layout
        self._works: dict[int, Work] = {}
        bucket_of = {
            slot.tensor: bucket
            for slot, bucket in zip(self._layout.held, self._layout.bucket_of, strict=True)
            if slot.layer is None
        }
        self._needs = {
            module: {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            for module in model.modules()
        }
        # A parameter may also be read by another module than its own, as multi-head attention does: until a module has
        # been called itself, every hook waits for its parameters.
        self._never_called = {module for module, needed in self._needs.items() if needed}
        self._hooks = [module.register_forward_pre_hook(self._before) for module in self._never_called]

    def start(self) -> None:
        """Sends this rank's shards."""
        # In the reverse of backward's order: the forward pass needs the last bucket first.
        for bucket in reversed(range(len(self._layout.buckets))):
            if self._reducer.shards(bucket).size > 1:
                self._works[bucket] = self._gather(bucket, self._reducer.owned)

    def wait(self) -> None:
        """Returns when every held slot has its new values; to be called before the next backward pass at the latest."""
        for bucket in sorted(self._works, reverse=True):
            self._receive(bucket)

    def gather_state(self, shards: Sequence[Tensor], is_receiver: bool) -> list[Tensor]:
        """Whole tensors (float32, shaped like the held slots) from every rank's shards of them; [] if not a receiver.

        Every rank calls it, between two steps. It moves as many bytes as the weights' gather.
        """
        self.wait()
        whole = []
        for index in range(len(self._layout.buckets)):
            self._gather(index, shards).wait()
            whole += [run.view_as(slot).clone() for slot, run in self._runs(index) if is_receiver]
        return whole

    def close(self) -> None:
        """Takes the hooks off the model."""
        self.wait()
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _before(self, module: nn.Module, _: object) -> None:
        if self._works:
            for needed in [self._needs[module], *(self._needs[other] for other in self._never_called)]:
                for bucket in needed & self._works.keys():
                    self._receive(bucket)
        self._never_called.discard(module)

    def _gather(self, index: int, shards: Sequence[Tensor]) -> Work:
        bucket, spans = self._layout.buckets[index], self._reducer.spans
        assert spans is not None
        own = range(bucket.first, bucket.stop)
        for slot, (_, run) in zip(own, self._runs(index), strict=True):
            low, high = spans[slot]
            run[low:high].copy_(shards[slot])
        cuts = bucket.cuts(self._layout.block)
        return self._reducer.shards(index).start_all_gather(self._reducer.sum.scratch(index), cuts)

    def _receive(self, index: int) -> None:
        self._works.pop(index).wait()
        slots, runs = zip(*self._runs(index), strict=True)
        torch._foreach_copy_([slot.detach().view(-1) for slot in slots], list(runs))

    def _runs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Each slot of a bucket: its tensor, and its run of the memory in which it travels."""
        bucket = self._layout.buckets[index]
        slots = self._layout.held[bucket.first : bucket.stop]
        return zip((s.tensor for s in slots), bucket.views(self._reducer.sum.scratch(index)), strict=True)


class _Run(NamedTuple):
    """The index of a tensor's first block among those of its parameter, and whether this rank reports its norms."""

    parameter: str
    first: int
    is_owner: bool


class BlockNorms:
    """Norms of whole parameters, for an optimizer (`Lars(norms=...)`) over `Reducer.owned`.

    Args:
        reducer: Its layout has the slots that this rank updates.
        complete: Function that sums a float32 tensor, in place, over ranks that together own every block once.
    """

    def __init__(self, reducer: Reducer, complete: Callable[[Tensor], object]) -> None:
        layout = reducer.layout
        blocks = layout.norm_blocks()
        self._counts = {parameter: sum(counts) for parameter, counts in blocks.items()}
        self._complete = complete
        self._owned: dict[int, _Run] = {}
        # The first of a slot's norm blocks among its parameter's, which may have several slots (column blocks).
        starts = dict.fromkeys(blocks, 0)
        begins = []
        for slot in layout.slots:
            begins.append(starts[slot.parameter])
            starts[slot.parameter] += -(-slot.tensor.numel() // BLOCK)
        spans = reducer.spans
        for number, (tensor, slot, index) in enumerate(zip(reducer.owned, layout.held, layout.places, strict=True)):
            if spans is not None:  # shards: every element lies on one rank
                self._owned[id(tensor)] = _Run(slot.parameter, begins[index] + spans[number][0] // BLOCK, True)
            elif slot.layer is not None:  # a column block that several ranks may update alike
                self._owned[id(tensor)] = _Run(slot.parameter, begins[index], slot.is_owner)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms of parameters, then of their gradients: float64 [len(tensors)]. Every rank calls it alike."""
        params = tensors[: len(tensors) // 2]
        runs = [self._owned.get(id(param)) for param in params]
        norms = all_block_norms(tensors)
        shared = list(dict.fromkeys(run.parameter for run in runs if run is not None))
        if shared:
            counts = [self._counts[parameter] for parameter in shared]
            # Zeros for the blocks of other ranks: adding zero is exact, so that the sum of the tables is a copy of each
            # owner's norms, whatever algorithm adds them.
            table = torch.zeros(2, sum(counts), device=norms[0].device)
            rows = [dict(zip(shared, row.split(counts), strict=True)) for row in table]
            for number, own in enumerate(norms):
                half, run = number // len(params), runs[number % len(params)]
                if run is not None and run.is_owner:
                    rows[half][run.parameter][run.first : run.first + len(own)].copy_(own)
            self._complete(table.view(-1))
            for number in range(len(norms)):
                run = runs[number % len(params)]
                if run is not None:
                    norms[number] = rows[number // len(params)][run.parameter]
        return norms_from_blocks(norms)

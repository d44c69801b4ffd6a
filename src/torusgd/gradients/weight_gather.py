"""New weights on their way: all-gathered bucket by bucket, and waited for by the layer that needs them.

Das et al. (arXiv 1602.06709) hide this part-broadcast behind the next forward pass. The weights travel in the memory of
the gradient sums, which is free from the update until the next backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..comm.base import Work
from ..comm.reduce_scatter import ShardCollectives
from ..comm.shards import block_stops
from .reducer import Reducer


class WeightGather:
    """Brings each rank's updated `pieces` of a model's parameters to all ranks.

    A hook before each module's forward pass waits for the buckets of the module's own parameters. A parameter may also
    be read by another module than its own, as multi-head attention does; so where a module has never been called, any
    hook waits for its parameters. What reads parameters without calling a module calls `wait` first.

    Args:
        model: Of the reducer.
        reducer: One that has `pieces`.
        shards: Those of the reducer.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, shards: ShardCollectives) -> None:
        self._reducer, self._shards = reducer, shards
        self._works: dict[int, Work] = {}
        bucket_of = {reducer.parameters[s]: i for i, b in enumerate(reducer.buckets) for s in range(b.first, b.stop)}
        self._needs = {
            module: {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            for module in model.modules()
        }
        self._never_called = {module for module, needed in self._needs.items() if needed}
        self._hooks = [module.register_forward_pre_hook(self._before) for module in self._never_called]

    def start(self) -> None:
        """Sends this rank's pieces off, those first that the forward pass needs first."""
        if self._shards.size > 1:
            for bucket in reversed(range(len(self._reducer.buckets))):
                self._works[bucket] = self._gather(bucket, self._reducer.pieces)

    def wait(self) -> None:
        """Returns when every parameter is the new one; to be called before the next backward pass at the latest."""
        for bucket in sorted(self._works, reverse=True):
            self._receive(bucket)

    def collect(self, pieces: Sequence[Tensor], keep: bool) -> list[Tensor]:
        """Whole tensors (float32, shaped like the parameters) from every rank's pieces of them, where `keep` is true.

        Every rank calls it, between two steps. It moves as many bytes as the weights' gather.
        """
        self.wait()
        whole = []
        for bucket, layout in enumerate(self._reducer.buckets):
            self._gather(bucket, pieces).wait()
            slots = range(layout.first, layout.stop) if keep else ()
            whole += [self._part(bucket, slot).view_as(self._reducer.parameters[slot]).clone() for slot in slots]
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

    def _gather(self, bucket: int, pieces: Sequence[Tensor]) -> Work:
        layout, spans = self._reducer.buckets[bucket], self._reducer.spans
        assert spans is not None
        for slot in range(layout.first, layout.stop):
            low, high = spans[slot]
            self._part(bucket, slot)[low:high].copy_(pieces[slot])
        return self._shards.start_all_gather(self._reducer.sum.room(bucket), block_stops(layout))

    def _receive(self, bucket: int) -> None:
        self._works.pop(bucket).wait()
        layout = self._reducer.buckets[bucket]
        slots = range(layout.first, layout.stop)
        parameters = [self._reducer.parameters[slot].detach().view(-1) for slot in slots]
        torch._foreach_copy_(parameters, [self._part(bucket, slot) for slot in slots])

    def _part(self, bucket: int, slot: int) -> Tensor:
        layout = self._reducer.buckets[bucket]
        offset, numel = layout.offsets[slot - layout.first], layout.numels[slot - layout.first]
        return self._reducer.sum.room(bucket)[offset : offset + numel]

"""New weights under way: all-gathered bucket by bucket, and waited for by the layer that needs them.

Das et al. (arXiv 1602.06709) hide this part-broadcast behind the next forward pass. The weights travel in the memory of
the gradient sums, which is free from the update until the next backward pass.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..comm.base import Work
from .reducer import Reducer


class WeightGather:
    """Brings each rank's updated shards (`Reducer.owned`) to all ranks that hold the same slots.

    A hook before each module's forward pass waits for the buckets of the module's own parameters. A parameter may also
    be read by another module than its own, as multi-head attention does; so where a module has never been called, any
    hook waits for its parameters. Column blocks belong to no module that is called: before every forward pass, their
    reader calls `wait`. So does whatever else reads parameters without calling a module.

    Args:
        model: Of the reducer.
        reducer: One with shards.
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
        self._never_called = {module for module, needed in self._needs.items() if needed}
        self._hooks = [module.register_forward_pre_hook(self._before) for module in self._never_called]

    def start(self) -> None:
        """Sends this rank's shards, those first that the forward pass needs first."""
        for bucket in reversed(range(len(self._layout.buckets))):
            if self._reducer.shards(bucket).size > 1:
                self._works[bucket] = self._gather(bucket, self._reducer.owned)

    def wait(self) -> None:
        """Returns when every held slot is the new one; to be called before the next backward pass at the latest."""
        for bucket in sorted(self._works, reverse=True):
            self._receive(bucket)

    def gather_state(self, shards: Sequence[Tensor], keep: bool) -> list[Tensor]:
        """Whole tensors (float32, shaped like the held slots) from every rank's shards of them, where `keep` is true.

        Every rank calls it, between two steps. It moves as many bytes as the weights' gather.
        """
        self.wait()
        whole = []
        for index in range(len(self._layout.buckets)):
            self._gather(index, shards).wait()
            whole += [run.view_as(slot).clone() for slot, run in self._runs(index) if keep]
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
        for place, (_, run) in zip(own, self._runs(index), strict=True):
            low, high = spans[place]
            run[low:high].copy_(shards[place])
        cuts = bucket.cuts(self._layout.block)
        return self._reducer.shards(index).start_all_gather(self._reducer.sum.scratch(index), cuts)

    def _receive(self, index: int) -> None:
        self._works.pop(index).wait()
        slots, runs = zip(*self._runs(index), strict=True)
        torch._foreach_copy_([slot.detach().view(-1) for slot in slots], list(runs))

    def _runs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each slot of a bucket: its tensor, and its run of the memory in which it travels."""
        bucket = self._layout.buckets[index]
        slots = self._layout.held[bucket.first : bucket.stop]
        return zip((s.tensor for s in slots), bucket.views(self._reducer.sum.scratch(index)), strict=True)

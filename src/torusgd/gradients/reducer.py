"""Gradients leave in buckets while backward still runs: hooks, a static order, and the wait at the end.

Slots are numbered in the order in which gradients become ready (the reverse of the parameters' order), so a bucket is
a run of slots. Buckets leave in one static order on all ranks, whatever order autograd finishes them in.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.base import AllReduce, Work
from ..comm.buckets import Buckets, lay_out
from ..comm.reduce_scatter import ShardCollectives
from ..comm.shards import block_stops, own_spans
from .float_sum import FloatGradientSum
from .integer_sum import Bucket, GradientSum, IntegerGradientSum, Span, SumStatus, parts_of

WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Reducer:
    """Collects the gradients of a step from autograd, sums them over virtual workers and ranks, and gives the mean.

    For each step: `begin`, then for each virtual worker of this rank `begin_worker`, backward, `end_worker`; then
    `finish`, and if its status is accepted `apply_mean`. With `measuring`, the pass only finds each gradient's
    largest element, to set the scales.

    Args:
        model: Its parameters that require a gradient are reduced; float32, contiguous.
        reduction: `exact`, `float32`, `float16` or `bfloat16`.
        virtual_workers: V over all ranks.
        allreduce: Sums a message over the ranks.
        buckets: The rule of their sizes, see `lay_out`.
        shards: Given, each rank gets the sums of one shard of each bucket only, cut at the norms' blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        reduction: str,
        virtual_workers: int,
        allreduce: AllReduce,
        buckets: Buckets,
        shards: ShardCollectives | None = None,
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named.reverse()
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.numels = [p.numel() for p in self.parameters]
        self.first_ready = self.last_ready = 0.0
        """when this rank's first and last bucket of the step were ready to leave (time.perf_counter)"""
        self.ready = [0.0] * len(named)
        """when each gradient of the last virtual worker was there (time.perf_counter)"""
        self._device = next(model.parameters()).device
        self._reduction, self._workers = reduction, virtual_workers
        self._allreduce, self._shards = allreduce, shards
        self._take_buckets(lay_out(buckets, self.numels))
        self._maxima = torch.zeros(len(named), device=self._device)
        self._works: list[Work] = []
        self._tails: Tensor | None = None
        self._is_measuring = False
        self._is_last = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot, p in enumerate(self.parameters)
        ]

    def lay_out_anew(self, buckets: list[Bucket]) -> None:
        """Takes other buckets, between two steps and on all ranks; the scales stay. Not with shards."""
        assert self._shards is None
        state = self.sum.state()
        self._take_buckets(buckets)
        self.sum.load_state(state)

    def _take_buckets(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self._bucket_of = [i for i, b in enumerate(buckets) for _ in range(b.first, b.stop)]
        self._missing = [0] * len(buckets)
        self.sum: GradientSum = (
            IntegerGradientSum(buckets, self._workers, self._device)
            if self._reduction == "exact"
            else FloatGradientSum(buckets, self._workers, self._device, WIRES[self._reduction])
        )
        self.spans: list[Span] | None = None
        """of each parameter the elements whose mean this rank gets; None: all"""
        self.pieces: list[Tensor] = list(self.parameters)
        """the parameters, or the spans of them, flat; their `grad` takes the mean"""
        if self._shards is not None:
            self.spans = [span for bucket in buckets for span in own_spans(bucket, self._shards)]
            self.pieces = parts_of([p.detach().view(-1) for p in self.parameters], self.spans)
        self._means = [torch.zeros_like(piece) for piece in self.pieces]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    @property
    def needs_measure(self) -> bool:
        """No scale is known yet: the maxima must be measured before the first sum."""
        return self.sum.needs_measure

    def state(self) -> Tensor:
        """float64 [slots]: all that the next step needs of this one."""
        return self.sum.state()

    def load_state(self, state: Tensor) -> None:
        """Takes back what `state` gave."""
        self.sum.load_state(state)

    def begin(self, measuring: bool) -> None:
        """Begins a step, or the pass that measures its scales."""
        self._is_measuring = measuring
        self._works, self._tails = [], None
        self._maxima.zero_()
        self.sum.clear()

    def begin_worker(self, last: bool) -> None:
        """Begins a virtual worker; during the rank's last one, full buckets leave at once."""
        self._is_last = last and not self._is_measuring
        self._missing = [b.stop - b.first for b in self.buckets]
        for p in self.parameters:
            p.grad = None

    def end_worker(self) -> None:
        """Ends a virtual worker: parameters without a gradient count as zero."""
        for index, missing in enumerate(self._missing):
            if missing and not self._is_measuring:
                self.sum.end_worker(index)
                self._missing[index] = 0
        if self._is_last:
            self._send_full()

    def finish_measuring(self) -> None:
        """Agrees on the largest elements over all ranks and sets the scales."""
        if dist.is_initialized():
            dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        # A maximum that is not finite is found, and told, by the step itself.
        self.sum.set_maxima(self._maxima.nan_to_num(0.0, 0.0, 0.0))

    def finish(self) -> SumStatus:
        """Waits for all messages and reads the status, the same on every rank."""
        for work in self._works:
            work.wait()
        return self.sum.finish(self._tails)

    def apply_mean(self) -> None:
        """Puts the mean gradient over all virtual workers into the `grad` of each of `pieces`."""
        self.sum.mean(self._means, self.spans)
        for piece, mean in zip(self.pieces, self._means, strict=True):
            piece.grad = mean

    def take(self, slot: int, gradient: Tensor) -> None:
        """Takes a parameter's gradient by one virtual worker, as the hooks do."""
        if self._is_measuring:
            torch.maximum(self._maxima[slot], gradient.abs().max(), out=self._maxima[slot])
            return
        bucket, self.ready[slot] = self._bucket_of[slot], time.perf_counter()
        self.sum.add(bucket, slot, gradient)
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self.sum.end_worker(bucket)
            if self._is_last:
                self._send_full()

    def _make_hook(self, slot: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.take(slot, parameter.grad)
            parameter.grad = None

        return hook

    def _send_full(self) -> None:
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self.last_ready = time.perf_counter()
            if not self._works:
                self.first_ready = self.last_ready
            self._works.append(self._send(len(self._works)))
        if self._shards is not None and self._tails is None and len(self._works) == len(self.buckets):
            self._tails = self.sum.tails()
            self._works.append(self._allreduce.start(self._tails))

    def _send(self, index: int) -> Work:
        if self._shards is None:
            return self._allreduce.start(self.sum.message(index))
        return self._shards.start_reduce_scatter(self.sum.body(index), block_stops(self.buckets[index]))

"""Gradients leave in buckets while backward still runs: hooks, a static order, and the wait at the end.

Slots are numbered in the order in which gradients become ready (the reverse of the parameters' order), so a bucket is
a run of slots. Buckets leave in one static order on all ranks, whatever order autograd finishes them in.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .floats import FloatGradientSum
from .gradients import Bucket, ExactGradientSum, GradientSum, Verdict
from .work import AllReduce, Work

WIRES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def plan_buckets(numels: Sequence[int], limit: int) -> list[Bucket]:
    """Groups tensors, in sending order, into runs of at most `limit` elements (a larger tensor stands alone).

    >>> [(b.first, b.stop, b.length) for b in plan_buckets([4, 4, 9, 1], limit=8)]
    [(0, 2, 8), (2, 3, 9), (3, 4, 1)]
    """
    groups: list[list[int]] = []
    length = limit + 1
    for numel in numels:
        if length + numel > limit:
            groups.append([])
            length = 0
        groups[-1].append(numel)
        length += numel
    buckets, first = [], 0
    for group in groups:
        offsets = [sum(group[:i]) for i in range(len(group))]
        buckets.append(Bucket(first, first + len(group), tuple(offsets), tuple(group)))
        first += len(group)
    return buckets


class Reducer:
    """Collects the gradients of a step from autograd, sums them over virtual workers and ranks, and gives the mean.

    For each step: `begin`, then for each virtual worker of this rank `begin_worker`, backward, `end_worker`; then
    `finish`, and if its verdict is accepted `apply_mean`. With `measuring`, the pass only finds each gradient's
    largest element, to set the scales.

    Args:
        model: Its parameters that require a gradient are reduced; float32, contiguous.
        reduction: `exact`, `float32`, `float16` or `bfloat16`.
        virtual_workers: V over all ranks.
        allreduce: Sums a message over the ranks.
        bucket_mib: Size of a bucket in MiB of 4-byte elements.
    """

    def __init__(
        self, model: nn.Module, reduction: str, virtual_workers: int, allreduce: AllReduce, bucket_mib: float
    ) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        named.reverse()
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        device = next(model.parameters()).device
        self.buckets = plan_buckets([p.numel() for p in self.parameters], max(int(bucket_mib * 2**18), 1))
        self.sum: GradientSum = (
            ExactGradientSum(self.buckets, virtual_workers, device)
            if reduction == "exact"
            else FloatGradientSum(self.buckets, virtual_workers, device, WIRES[reduction])
        )
        self.wait_seconds = 0.0
        """time that the step waited for messages, since the last reading"""
        self.first_ready = self.last_ready = 0.0
        """when this rank's first and last bucket of the step were ready to leave (time.perf_counter)"""
        self._allreduce = allreduce
        self._bucket_of = [i for i, b in enumerate(self.buckets) for _ in range(b.first, b.stop)]
        self._means = [torch.zeros_like(p) for p in self.parameters]
        self._maxima = torch.zeros(len(named), device=device)
        self._missing = [0] * len(self.buckets)
        self._works: list[Work] = []
        self._is_measuring = False
        self._is_last = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot, p in enumerate(self.parameters)
        ]

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, measuring: bool) -> None:
        """Begins a step, or the pass that measures its scales."""
        self._is_measuring = measuring
        self._works = []
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

    def finish(self) -> Verdict:
        """Waits for all messages and reads the verdict, the same on every rank."""
        started = time.perf_counter()
        for work in self._works:
            work.wait()
        self.wait_seconds += time.perf_counter() - started
        return self.sum.finish()

    def apply_mean(self) -> None:
        """Puts the mean gradient over all virtual workers into each parameter's `grad`."""
        self.sum.mean(self._means)
        for p, mean in zip(self.parameters, self._means, strict=True):
            p.grad = mean

    def _make_hook(self, slot: int):  # type: ignore[no-untyped-def]
        bucket = self._bucket_of[slot]

        def hook(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if self._is_measuring:
                torch.maximum(self._maxima[slot], gradient.abs().max(), out=self._maxima[slot])
            else:
                self.sum.add(bucket, slot, gradient)
                self._missing[bucket] -= 1
                if not self._missing[bucket]:
                    self.sum.end_worker(bucket)
                    if self._is_last:
                        self._send_full()
            parameter.grad = None

        return hook

    def _send_full(self) -> None:
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self.last_ready = time.perf_counter()
            if not self._works:
                self.first_ready = self.last_ready
            self._works.append(self._allreduce.start(self.sum.message(len(self._works))))

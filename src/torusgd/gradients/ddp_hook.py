"""These all-reduces inside anyone's DistributedDataParallel script, by one line."""

import queue
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..comm.allreduce import create
from ..comm.base import Work
from ..comm.buckets import Bucket
from ..comm.groups import group_of
from ..errors import UserError
from .float_sum import FloatGradientSum
from .integer_sum import GradientSum, IntegerGradientSum

Wire = Literal["float16", "bfloat16", "exact"]
_WIRES = ("float16", "bfloat16", "exact")
_Future = torch.futures.Future[torch.Tensor]
_GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)


def ddp_hook(
    model: DistributedDataParallel,
    algorithm: str = "auto",
    wire: Wire | None = None,
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
) -> "Hook":
    """Has a DistributedDataParallel model sum its gradients by one of our algorithms. Every rank calls it once.

    >>> model = DistributedDataParallel(model)  # doctest: +SKIP
    >>> ddp_hook(model)  # doctest: +SKIP

    Args:
        model: Gloo or NCCL; with no_sync, static_graph, gradient_as_bucket_view and unused parameters as usual.
        algorithm: See `torusgd.comm.allreduce.create`, as for `grid` and `profile`.
        wire: None sends gradients as they are. `float16` and `bfloat16` halve the bytes, scaled by a power of two a
            bucket so that no sum of ranks overflows. `exact` sends 32-bit integers, scaled by a power of two a tensor:
            the same bits for any algorithm and grid, with one number of ranks. A gradient that is not finite on one
            rank becomes nan on all.

    Returns:
        The hook, whose `explanation` tells what runs.

    Raises:
        UserError: where the algorithm doesn't fit, or the wire or a parameter's dtype is unknown.
    """
    if wire is not None and wire not in _WIRES:
        raise UserError(f"wire {wire}: unknown; one of {', '.join(_WIRES)}, or None")
    parameters = [p for p in model.parameters() if p.requires_grad]
    strange = next((p.dtype for p in parameters if wire is not None and p.dtype not in _GRADIENTS), None)
    if strange is not None:
        raise UserError(f"wire {wire}: takes gradients of float32, float16 and bfloat16, not {strange}; use wire=None")
    hook = Hook(model.process_group, parameters[0].device, algorithm, wire, grid, profile)
    model.register_comm_hook(hook, _on_bucket)
    return hook


def _on_bucket(hook: "Hook", bucket: GradBucket) -> _Future:
    return hook.send(bucket)


class Hook:
    """Buckets on their way: sent from autograd's thread in bucket order, finished in that order on one of its own."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        algorithm: str,
        wire: Wire | None,
        grid: tuple[int, int] | None,
        profile: Path | None,
    ) -> None:
        self._ranks, self._device, self._wire = dist.get_world_size(group), device, wire
        self._allreduce = create(algorithm, grid=grid, profile=profile, group=group, device=device)
        self.explanation: str = getattr(self._allreduce, "explanation", f"allreduce {self._allreduce.name}")
        """one line: what runs, and why"""
        self.underflow = 0.0
        """share of the last bucket's elements that a 16-bit wire rounded to zero"""
        # What only some steps need is summed by a group of its own, so that its calls mix with no others.
        self._repairs = group_of(group).duplicate() if wire is not None else None
        self._sums: dict[tuple[int, ...], GradientSum] = {}
        self._jobs: queue.SimpleQueue[tuple[_Future, Callable[[], torch.Tensor]]] = queue.SimpleQueue()
        threading.Thread(target=self._finish_all, daemon=True).start()

    def send(self, bucket: GradBucket) -> _Future:
        """What DDP calls: the future holds the mean over ranks, in the bucket's own buffer."""
        future: _Future = torch.futures.Future(devices=None if self._device.type == "cpu" else [self._device])
        buffer = bucket.buffer()
        if self._wire is None:
            work = self._allreduce.start(buffer.div_(self._ranks))
            self._jobs.put((future, lambda: _after(work, buffer)))
            return future
        numels = tuple(gradient.numel() for gradient in bucket.gradients())
        total = self._sum(bucket.index(), numels)
        sent = None
        if not total.needs_measure:
            sent = self._allreduce.start(_load(total, numels, buffer))
        self._jobs.put((future, lambda: self._receive(total, numels, buffer, sent)))
        return future

    def _sum(self, index: int, numels: tuple[int, ...]) -> GradientSum:
        """The sum of a bucket; DDP lays its buckets out anew after the first step."""
        key = (index, *numels)
        if key not in self._sums:
            bucket = Bucket(0, len(numels), tuple(accumulate(numels, initial=0))[:-1], numels)
            self._sums[key] = (
                IntegerGradientSum([bucket], self._ranks, self._device)
                if self._wire == "exact"
                else FloatGradientSum([bucket], self._ranks, self._device, getattr(torch, str(self._wire)))
            )
        return self._sums[key]

    def _receive(
        self, total: GradientSum, numels: tuple[int, ...], buffer: torch.Tensor, sent: Work | None
    ) -> torch.Tensor:
        """Puts the mean into the buffer; measures and sums anew where there was no scale yet, or the sum overflowed."""
        if sent is not None:
            sent.wait()
        status = total.finish().read() if sent is not None else None
        if status is None or status.overflow:
            maxima = torch.stack([part.abs().max() for part in buffer.split(numels)]).float().nan_to_num(0.0, 0.0, 0.0)
            total.set_maxima(self._repair(maxima, dist.ReduceOp.MAX))
            message = _load(total, numels, buffer)
            message.copy_(self._repair(message, dist.ReduceOp.SUM))
            status = total.finish().read()
        self.underflow = status.underflow
        mean = torch.empty(buffer.shape, dtype=torch.float32, device=buffer.device)
        parts = mean.split(numels)
        total.mean(parts, self._ranks)
        for slot in status.nonfinite:
            parts[slot].fill_(torch.nan)
        return buffer.copy_(mean)

    def _repair(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        reduced = tensor.cpu()
        dist.all_reduce(reduced, operation, self._repairs)
        return reduced.to(tensor.device)

    def _finish_all(self) -> None:
        stream = None if self._device.type == "cpu" else torch.cuda.Stream(self._device)
        while True:
            future, finish = self._jobs.get()
            try:
                with torch.no_grad(), torch.cuda.stream(stream):
                    future.set_result(finish())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]


def _after(work: Work, buffer: torch.Tensor) -> torch.Tensor:
    work.wait()
    return buffer


def _load(total: GradientSum, numels: tuple[int, ...], buffer: torch.Tensor) -> torch.Tensor:
    """Puts this rank's gradients into a sum; the message to send."""
    total.clear()
    for slot, part in enumerate(buffer.split(numels)):
        total.add(0, slot, part.float())
    total.end_worker(0)
    return total.message(0)

"""These all-reduces inside anyone's DistributedDataParallel script, by one line."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..comm.allreduce import create
from ..comm.base import Work
from ..comm.fixed_point import exact_all_reduce
from ..comm.groups import Group, group_of
from ..errors import UserError
from .float_sum import FloatGradientSum
from .integer_sum import GradientSum, IntegerGradientSum
from .layout import group

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
            bucket so that no sum of ranks overflows. `exact` sums in fixed point, as `exact_all_reduce` does, with
            half its bytes: 32-bit integers and a power of two a tensor that is agreed from the last step. The mean has
            the same bits for any algorithm and grid, on condition that the number of ranks and what each computes stay
            the same: DistributedDataParallel's addends are the ranks' own means. A gradient that is not finite on one
            rank becomes nan on all.

    Returns:
        The hook; its `explanation` is one line about the algorithm.

    Raises:
        UserError: if the algorithm doesn't fit, or the wire or a parameter's dtype is unknown.
    """
    if wire is not None and wire not in _WIRES:
        raise UserError(f"wire {wire}: unknown; one of {', '.join(_WIRES)}, or None")
    parameters = [p for p in model.parameters() if p.requires_grad]
    strange = next((p.dtype for p in parameters if wire is not None and p.dtype not in _GRADIENTS), None)
    if strange is not None:
        raise UserError(f"wire {wire}: takes gradients of float32, float16 and bfloat16, not {strange}; use wire=None")
    hook = Hook(group_of(model.process_group, parameters[0].device), algorithm, wire, grid, profile)
    model.register_comm_hook(hook, Hook.send)
    return hook


class Hook:
    """Buckets on their way: sent from autograd's thread in bucket order, finished in that order on one of its own."""

    def __init__(
        self, ranks: Group, algorithm: str, wire: Wire | None, grid: tuple[int, int] | None, profile: Path | None
    ) -> None:
        self._ranks, self._device, self._wire = ranks.size, ranks.device, wire
        self._allreduce = create(algorithm, grid=grid, profile=profile, group=ranks)
        self.explanation: str = self._allreduce.explanation
        """one line: what runs, and why"""
        self.underflow = 0.0
        """fraction of the last bucket's elements that the wire rounded to zero"""
        # Only some steps need a repair. It has a group of its own, since its calls come from the finishing thread, and
        # would meet those of the hook's thread in another order on another rank.
        self._repairs = group_of(ranks.process_group).duplicate() if wire is not None else None
        self._sums: dict[tuple[int, ...], GradientSum] = {}
        self._jobs: queue.SimpleQueue[tuple[_Future, Callable[[], torch.Tensor]]] = queue.SimpleQueue()
        threading.Thread(target=self._finish_all, daemon=True).start()

    def send(self, bucket: GradBucket) -> _Future:
        """The hook itself, which DDP calls: the future holds the mean over ranks, in the bucket's own buffer."""
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
        # The sum of a bucket; DDP lays its buckets out anew after the first step.
        key = (index, *numels)
        if key not in self._sums:
            one_bucket = group((), numels)
            self._sums[key] = (
                IntegerGradientSum(one_bucket, self._ranks, self._device)
                if self._wire == "exact"
                else FloatGradientSum(one_bucket, self._ranks, self._device, getattr(torch, str(self._wire)))
            )
        return self._sums[key]

    def _receive(
        self, total: GradientSum, numels: tuple[int, ...], buffer: torch.Tensor, sent: Work | None
    ) -> torch.Tensor:
        # Puts the mean into the buffer; sums anew if there was no scale yet, or the sum overflowed.
        if sent is not None:
            sent.wait()
            status = total.finish().read()
            if not status.overflow:
                self.underflow = status.underflow
                mean = torch.empty(buffer.shape, dtype=torch.float32, device=buffer.device)
                total.mean(mean.split(numels), self._ranks)
                for slot in status.nonfinite:
                    mean.split(numels)[slot].fill_(torch.nan)
                return buffer.copy_(mean)
        return self._sum_anew(total, numels, buffer)

    def _sum_anew(self, total: GradientSum, numels: tuple[int, ...], buffer: torch.Tensor) -> torch.Tensor:
        # Puts the mean into the buffer without a scale from the last step, and agrees on one for the next.
        assert self._repairs is not None
        maxima = torch.stack([gradient.abs().max() for gradient in buffer.split(numels)]).float()
        agreed = maxima.nan_to_num(0.0, 0.0, 0.0).cpu()
        self._repairs.all_reduce(agreed, maximum=True)
        total.set_maxima(agreed.to(buffer.device))
        self.underflow = 0.0
        # In float64, since a sum may be beyond the gradients' dtype though the mean is not.
        mean = exact_all_reduce(buffer.double().cpu(), self._repairs) / self._ranks
        for gradient in mean.split(numels):
            if not bool(gradient.isfinite().all()):
                gradient.fill_(torch.nan)
        return buffer.copy_(mean)

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
    # Puts this rank's gradients into a sum; the message to send.
    total.clear()
    for slot, part in enumerate(buffer.split(numels)):
        total.add(0, slot, part.float())
    total.end_worker(0)
    return total.message(0)

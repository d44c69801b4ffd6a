"""The gradients of column blocks, summed over a group's virtual workers and over the ranks that hold the same blocks.

Each (parameter, column block) is a slot of its own with a scale of its own, whatever the number of ranks that share the
blocks out; so scales, bounds and verdicts are the same for all. A rank keeps the sums of its own blocks. What the sums
of the others say (the bounds and the status) goes round the group in one short message a step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.base import AllReduce, Work
from ..comm.buckets import plan_buckets
from ..gradients.integer_sum import Bucket, IntegerGradientSum, SumStatus
from .layout import Layout
from .tail import ColumnLayer


@dataclass(frozen=True, eq=False)
class Slot:
    """A column block of a parameter."""

    parameter: str
    layer: int
    block: int
    tensor: Tensor
    """view of the parameter's rows; its `grad` takes the mean"""
    is_bias: bool

    @property
    def name(self) -> str:
        """For messages to people."""
        return f"{self.parameter} (column block {self.block})"


def slots_of(layers: Sequence[ColumnLayer]) -> list[Slot]:
    """All slots in the order in which their gradients are ready: last layer first, block by block."""
    slots = []
    for number in reversed(range(len(layers))):
        for place, block in enumerate(layers[number].blocks):
            if block.bias is not None:
                slots.append(Slot(f"{layers[number].name}.bias", number, place, block.bias, True))
            slots.append(Slot(f"{layers[number].name}.weight", number, place, block.weight, False))
    return slots


class ColumnReducer:
    """Collects the gradients of this rank's column blocks in a step, sums them, and gives the mean.

    For each step: `begin`, then for each round (a virtual worker of each rank of the group) `begin_round` and all
    `add`; then `finish`, and if its status is accepted `apply_mean`. With `measuring`, the pass only finds the largest
    elements.

    Args:
        slots: All column blocks of the tail.
        layouts: Of each layer.
        rank: This one.
        virtual_workers: V over all ranks.
        bucket_mib: Size of a bucket in MiB of 4-byte elements.
        channels: For each layer the sum over the ranks that hold the same columns.
        complete: Adds a tensor up over the group, in place (each value is told by one rank and zero on the others).
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        layouts: Sequence[Layout],
        rank: int,
        virtual_workers: int,
        bucket_mib: float,
        channels: Sequence[AllReduce],
        complete: Callable[[Tensor], object],
    ) -> None:
        self.slots = slots
        self.held = held_slots(slots, layouts, rank)
        """the slots that this rank sums and updates"""
        self.first_ready = self.last_ready = 0.0
        """when this rank's first and last bucket of the step were ready to leave (time.perf_counter)"""
        device = slots[0].tensor.device
        held = [i for i, slot in enumerate(slots) if slot in self.held]
        self._places = torch.tensor(held, device=device)
        self._tells = torch.tensor([is_teller(layouts, slot.layer, rank) for slot in self.held], device=device)
        self._workers, self._channels, self._complete = virtual_workers, channels, complete
        self._parts = [layout.parts for layout in layouts]
        self._buckets = self._plan(max(int(bucket_mib * 2**18), 1))
        self._sum = IntegerGradientSum(self._buckets, virtual_workers, device)
        self._bucket_of = [i for i, b in enumerate(self._buckets) for _ in range(b.first, b.stop)]
        self._slot_of = {(slot.layer, slot.block, slot.is_bias): i for i, slot in enumerate(self.held)}
        self._means = [torch.zeros_like(slot.tensor) for slot in self.held]
        self._bounds = torch.zeros(len(self.slots), dtype=torch.float64, device=device)
        self._pending = self._bounds
        self._maxima = torch.zeros(len(self.held), device=device)
        self._missing = [0] * len(self._buckets)
        self._works: list[Work] = []
        self._is_measuring = self._is_last = False

    def _plan(self, limit: int) -> list[Bucket]:
        """Buckets of the held slots; none holds two layers, for the virtual workers come layer by layer."""
        buckets: list[Bucket] = []
        for number in sorted({slot.layer for slot in self.held}, reverse=True):
            first = buckets[-1].stop if buckets else 0
            numels = [slot.tensor.numel() for slot in self.held if slot.layer == number]
            buckets += [
                Bucket(first + b.first, first + b.stop, b.offsets, b.numels) for b in plan_buckets(numels, limit)
            ]
        return buckets

    @property
    def needs_measure(self) -> bool:
        """No scale is known yet."""
        return self._sum.needs_measure

    def begin(self, measuring: bool) -> None:
        """Begins a step, or the pass that measures its scales."""
        self._is_measuring = measuring
        self._works = []
        self._maxima.zero_()
        self._sum.clear()

    def begin_round(self, last: bool) -> None:
        """Begins a virtual worker of each rank of the group; during the last ones, full buckets leave at once."""
        self._is_last = last and not self._is_measuring
        self._missing = [(b.stop - b.first) * self._parts[self.held[b.first].layer] for b in self._buckets]

    def add(self, layer: int, block: int, weight: Tensor, bias: Tensor | None) -> None:
        """Adds the gradients of a column block by one virtual worker (float32)."""
        for is_bias, gradient in ((True, bias), (False, weight)):
            if gradient is None:
                continue
            slot = self._slot_of[layer, block, is_bias]
            if self._is_measuring:
                torch.maximum(self._maxima[slot], gradient.abs().max(), out=self._maxima[slot])
                continue
            bucket = self._bucket_of[slot]
            self._sum.add(bucket, slot, gradient)
            self._missing[bucket] -= 1
            b = self._buckets[bucket]
            if self._missing[bucket] % (b.stop - b.first) == 0:
                self._sum.end_worker(bucket)
            if self._is_last:
                self._send_full()

    def finish_measuring(self) -> None:
        """Agrees on the largest elements over all ranks and sets the scales."""
        maxima = torch.zeros(len(self.slots), device=self._maxima.device)
        maxima[self._places] = self._maxima
        if dist.is_initialized():
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        # A maximum that is not finite is found, and told, by the step itself.
        self.load_state(maxima.nan_to_num(0.0, 0.0, 0.0).double() * self._workers)

    def finish(self) -> SumStatus:
        """Waits for all messages and reads the status, the same on every rank; slots are numbered as in `slots`."""
        for work in self._works:
            work.wait()
        own = self._sum.finish()
        table = torch.zeros(3, len(self.slots), dtype=torch.float64, device=self._maxima.device)
        table[0, self._places] = torch.where(self._tells, self._sum.reached(), 0.0)
        for row, found in ((1, own.overflow), (2, own.nonfinite)):
            table[row, self._places[found]] = self._tells[found].double()
        self._complete(table.view(-1))
        self._pending = table[0]
        overflow, nonfinite = (row.nonzero().flatten().tolist() for row in table[1:].cpu())
        return SumStatus(overflow, nonfinite)

    def apply_mean(self) -> None:
        """Puts the mean gradient over all virtual workers into the `grad` of each held column block."""
        self._sum.mean(self._means)
        for slot, mean in zip(self.held, self._means, strict=True):
            slot.tensor.grad = mean
        self.load_state(self._pending)

    def state(self) -> Tensor:
        """float64 [slots]: a bound of sum max|g| over virtual workers in the last accepted step."""
        return self._bounds.clone()

    def load_state(self, state: Tensor) -> None:
        """Takes back the bounds that `state` gave."""
        self._bounds = state.to(self._bounds)
        # A bound of zero takes the scale of the largest of all slots, of which this rank may not hold every one.
        filled = torch.where(self._bounds > 0, self._bounds, self._bounds.max())
        self._sum.load_state(filled[self._places])

    def _send_full(self) -> None:
        while len(self._works) < len(self._buckets) and not self._missing[len(self._works)]:
            bucket = len(self._works)
            self.last_ready = time.perf_counter()
            if not bucket:
                self.first_ready = self.last_ready
            channel = self._channels[self.held[self._buckets[bucket].first].layer]
            self._works.append(channel.start(self._sum.message(bucket)))


def held_slots(slots: Sequence[Slot], layouts: Sequence[Layout], rank: int) -> list[Slot]:
    """Those whose column block `rank` computes."""
    return [slot for slot in slots if slot.block in layouts[slot.layer].held(rank)]


def is_teller(layouts: Sequence[Layout], layer: int, rank: int) -> bool:
    """Whether `rank` tells its group of its blocks of a layer: several ranks of the largest group may hold the same."""
    largest = max(layout.parts for layout in layouts)
    return rank % largest < layouts[layer].parts

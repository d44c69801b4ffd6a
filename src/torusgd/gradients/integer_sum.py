"""Sums of gradients over virtual workers, ready to travel as integers; `floats` has those that travel as floats.

A sum holds the gradients of one step in flat messages, one a bucket. Every virtual worker's gradient is added as it
becomes ready; the messages are summed over ranks by any all-reduce; then every rank reads the same status and the
same mean. All of it is ours; the shared power-of-two scale follows the usual practice of integer all-reduce.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HEADROOM = 8.0
"""growth of a gradient's maximum, from one step to the next, that the scale leaves room for"""
INT32_MAX = 2**31 - 1
_CHUNK = 1 << 17
"""elements rounded at a time, so that the passes over a large tensor stay in the cache"""


@dataclass(frozen=True)
class Bucket:
    """A run of tensors that travels together: slots first..stop-1, in the order in which they are sent."""

    first: int
    stop: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements of the bucket."""
        return sum(self.numels)


Span = tuple[int, int]
"""elements [low, high) of a tensor"""


@dataclass(frozen=True)
class SumStatus:
    """What a finished sum says; the same on every rank."""

    overflow: list[int]
    """slots whose sum may have left the range: the step must be measured and redone"""
    nonfinite: list[int]
    """slots that held inf or nan"""
    underflow: float = 0.0
    """share of the elements that a 16-bit wire rounded to zero"""

    @property
    def accepted(self) -> bool:
        """Whether the mean may be used."""
        return not self.overflow and not self.nonfinite


class GradientSum(Protocol):
    """What the reducer needs of a sum."""

    needs_measure: bool
    """no scale is known yet: the maxima must be measured before the first sum"""

    def clear(self) -> None:
        """Begins a step: all sums are zero."""

    def add(self, bucket: int, slot: int, gradient: Tensor) -> None:
        """Adds one virtual worker's gradient (float32, contiguous) to a slot."""

    def end_worker(self, bucket: int) -> None:
        """Every slot of the bucket has its addend of this virtual worker, or has none."""

    def message(self, bucket: int) -> Tensor:
        """The 1-D tensor to be summed over ranks in place."""

    def body(self, bucket: int) -> Tensor:
        """1-D [length], instead of `message`: the sums alone, of which a rank may take back a shard only."""

    def tails(self) -> Tensor:
        """1-D, after the last `body`: what all ranks must know of all sums, itself to be summed over ranks."""

    def finish(self, tails: Tensor | None = None) -> SumStatus:
        """Reads the summed messages, or with `body` the summed tails."""

    def mean(self, out: Sequence[Tensor], spans: Sequence[Span] | None = None) -> None:
        """Writes the mean over virtual workers of every slot, and takes the next step's scales from this one.

        With `spans`, of each slot those elements only.
        """

    def room(self, bucket: int) -> Tensor:
        """float32 [length]: the sums' own memory, free from `mean` until the next step's first gradient."""

    def set_maxima(self, maxima: Tensor) -> None:
        """Takes the scales from measured maxima: float32 [slots], of any virtual worker."""

    def state(self) -> Tensor:
        """float64 [slots]: all that the next step needs of this one."""

    def load_state(self, state: Tensor) -> None:
        """Takes back what `state` gave."""


class IntegerGradientSum:
    """Gradients as int32, scaled by a power of two a tensor and rounded: any order of addition gives the same bits.

    The scale leaves HEADROOM over the last accepted step. Each message ends with, for every slot, a bound of
    sum |q| in units of 2**shift, rounded up and saturated, and a count of virtual workers with a non-finite value;
    so the same sum tells every rank of overflow and of the next scale. Intermediate wrap-around is harmless.
    With V virtual workers the largest element of a gradient keeps about 28 - log2(V) bits.

    Args:
        buckets: The layout.
        virtual_workers: V, addends of a step over all ranks, at most 2**20.
        device: Where gradients live.
    """

    def __init__(self, buckets: Sequence[Bucket], virtual_workers: int, device: torch.device) -> None:
        assert virtual_workers <= 2**20, "the bound of a sum has no bits left"
        self.buckets = buckets
        self.workers = virtual_workers
        slots = buckets[-1].stop if buckets else 0
        self._shift = 2.0 ** (virtual_workers.bit_length() + 1)
        # A power of two, exact in float32: V of them stay in range, and one alone says overflow.
        self._cap = 2.0 ** (30 - virtual_workers.bit_length())
        self.needs_measure = True
        self._bounds = torch.zeros(slots, dtype=torch.float64, device=device)
        self._pending = self._bounds
        self._scales = torch.ones(slots, dtype=torch.float32, device=device)
        self._scale_items: Sequence[Tensor] = self._scales.unbind()
        self._low = torch.zeros(slots, device=device)
        self._high = torch.zeros(slots, device=device)
        self._low_items, self._high_items = self._low.unbind(), self._high.unbind()
        self._messages = [
            torch.zeros(b.length + 2 * (b.stop - b.first), dtype=torch.int32, device=device) for b in buckets
        ]
        self._views = [
            message[offset : offset + numel]
            for b, message in zip(buckets, self._messages, strict=True)
            for offset, numel in zip(b.offsets, b.numels, strict=True)
        ]
        # On a GPU the passes are limited by launches, not by the cache.
        chunk = _CHUNK if device.type == "cpu" else max((n for b in buckets for n in b.numels), default=1)
        self._chunk = min(chunk, max((n for b in buckets for n in b.numels), default=1))
        self._rounded = torch.empty(self._chunk, device=device)
        self._integers = torch.empty(self._chunk, dtype=torch.int32, device=device)
        self._filled = [False] * slots

    def clear(self) -> None:
        """Begins a step: all sums are zero."""
        self._filled = [False] * len(self._filled)
        self._low.zero_()
        self._high.zero_()
        for bucket, message in zip(self.buckets, self._messages, strict=True):
            message[bucket.length :].zero_()

    def add(self, bucket: int, slot: int, gradient: Tensor) -> None:
        """Adds one virtual worker's gradient (float32) to a slot."""
        flat = gradient.reshape(-1)
        torch.aminmax(flat, out=(self._low_items[slot], self._high_items[slot]))
        total, scale = self._views[slot], self._scale_items[slot]
        first, self._filled[slot] = not self._filled[slot], True
        # No clamp before the cast: a value out of range also lifts the bound, and then the sum is never used.
        for begin in range(0, flat.numel(), self._chunk):
            part = flat[begin : begin + self._chunk]
            rounded = torch.mul(part, scale, out=self._rounded[: part.numel()]).round_()
            if first:
                total[begin : begin + self._chunk].copy_(rounded)
            else:
                integers = self._integers[: part.numel()].copy_(rounded)
                total[begin : begin + self._chunk].add_(integers)

    def end_worker(self, bucket: int) -> None:
        """Adds the bounds and the non-finite counts of one virtual worker to the bucket's message."""
        b = self.buckets[bucket]
        maxima = torch.maximum(-self._low[b.first : b.stop], self._high[b.first : b.stop])
        finite = maxima.isfinite()
        bound = (maxima * (self._scales[b.first : b.stop] / self._shift)).ceil_().clamp_(max=self._cap)
        count = b.stop - b.first
        tail = self._messages[bucket][b.length :]
        tail[:count] += torch.where(finite, bound, 0.0).to(torch.int32)
        tail[count:] += (~finite).to(torch.int32)
        self._low[b.first : b.stop].zero_()
        self._high[b.first : b.stop].zero_()

    def message(self, bucket: int) -> Tensor:
        """int32 [length + 2 * slots of the bucket]: the sums, the bounds, the non-finite counts."""
        b = self.buckets[bucket]
        for slot in range(b.first, b.stop):
            if not self._filled[slot]:
                self._views[slot].zero_()
        return self._messages[bucket]

    def body(self, bucket: int) -> Tensor:
        """int32 [length]: the sums."""
        return self.message(bucket)[: self.buckets[bucket].length]

    def tails(self) -> Tensor:
        """int32 [2 * slots]: of each bucket the bounds and the non-finite counts."""
        return torch.cat([m[b.length :] for b, m in zip(self.buckets, self._messages, strict=True)])

    def finish(self, tails: Tensor | None = None) -> SumStatus:
        """Reads the summed messages; one transfer to the host."""
        if not self.buckets:
            return SumStatus([], [])
        counts = [b.stop - b.first for b in self.buckets]
        parts = (self.tails() if tails is None else tails).split([2 * count for count in counts])
        units = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).to(torch.float64)
        bad = torch.cat([part[count:] for part, count in zip(parts, counts, strict=True)]) > 0
        bounds = units * self._shift
        flags = torch.stack([(bounds > INT32_MAX) & ~bad, bad]).cpu()
        self._pending = bounds / self._scales
        return SumStatus(flags[0].nonzero().flatten().tolist(), flags[1].nonzero().flatten().tolist())

    def reached(self) -> Tensor:
        """float64 [slots]: the bound of sum max|g| in the step that `finish` has read."""
        return self._pending

    def mean(self, out: Sequence[Tensor], spans: Sequence[Span] | None = None) -> None:
        """Writes the mean (float32) of every slot, and takes the next scales from the bounds of this step."""
        factors = (1.0 / (self._scales.to(torch.float64) * self.workers)).to(torch.float32).unbind()
        for view, target, factor in zip(parts_of(self._views, spans), out, factors, strict=True):
            flat = target.view(-1)
            # A product of integers with a float is six times slower than a copy and a product in the cache.
            for begin in range(0, flat.numel(), self._chunk):
                flat[begin : begin + self._chunk].copy_(view[begin : begin + self._chunk]).mul_(factor)
        self._bounds = self._pending
        self._take_scales()

    def room(self, bucket: int) -> Tensor:
        """The int32 of the sums, as float32."""
        return self._messages[bucket][: self.buckets[bucket].length].view(torch.float32)

    def set_maxima(self, maxima: Tensor) -> None:
        """Takes the scales from the measured maximum of each slot over all virtual workers: float32 [slots]."""
        self._bounds = maxima.to(torch.float64) * self.workers
        self._take_scales()

    def state(self) -> Tensor:
        """float64 [slots]: a bound of sum max|g| over virtual workers in the last accepted step."""
        return self._bounds.clone()

    def load_state(self, state: Tensor) -> None:
        """Takes back the bounds that `state` gave."""
        self._bounds = state.to(self._bounds)
        self._take_scales()

    def _take_scales(self) -> None:
        self.needs_measure = False
        self._scales = power_of_two_scale(self._bounds, float(INT32_MAX)).to(torch.float32)
        self._scale_items = self._scales.unbind()


def power_of_two_scale(bounds: Tensor, limit: float) -> Tensor:
    """The largest powers of two that keep HEADROOM * bound * scale within a limit.

    A bound of zero (a tensor whose gradient was all zero) takes the scale of the largest bound.

    Args:
        bounds: float64 [n], each >= 0.
        limit: Largest magnitude of a sum.

    Returns:
        float64 [n], between 2**-100 and 2**100.
    """
    if not bounds.numel():
        return bounds
    bounds = torch.where(bounds > 0, bounds.clamp(min=2.0**-150), 0.0)
    largest = bounds.max()
    filled = torch.where(bounds > 0, bounds, torch.where(largest > 0, largest, 1.0))
    _, exponent = torch.frexp(limit / (HEADROOM * filled))
    return torch.ldexp(torch.ones_like(filled), (exponent - 1).clamp(-100, 100))


def parts_of(tensors: Sequence[Tensor], spans: Sequence[Span] | None) -> list[Tensor]:
    """Of each 1-D tensor those elements; None: all."""
    return list(tensors) if spans is None else [t[low:high] for t, (low, high) in zip(tensors, spans, strict=True)]

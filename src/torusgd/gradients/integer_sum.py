"""Sums of gradients over virtual workers, ready to travel as integers; `float_sum` has those that travel as floats.

A sum holds the gradients of one step in flat messages, one a bucket. Every virtual worker's gradient is added as it
becomes ready; the messages are summed over ranks by any all-reduce; then every rank finds the same status and the
same mean. All of it is ours; the shared power-of-two scale follows the usual practice of integer all-reduce.

What a message carries:

    payload    the sums: int32, or int64 from 8,192 virtual workers on (`comm.exact_sum.gradient_integers`)
    trailer    for every slot a bound of sum |q| in units of 2**shift, rounded up and saturated,
               and a count of virtual workers whose gradient was not finite;
               then two values that count the elements that were rounded to zero (see `COUNT_BITS`)

so that the same sum informs every rank of overflow, of inf and nan, and of the next step's scale. Where a rank gets
back only a shard of a sum, or not all slots, the trailers travel in a message of their own.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..arithmetic.reductions import over
from ..comm.exact_sum import gradient_integers
from .integer_hash import IntegerHash
from .layout import Bucket, Span

HEADROOM = 8.0  # growth of a gradient's maximum, from one step to the next, that the scale leaves room for
LIMITS = {torch.int32: 2**31 - 1, torch.int64: 2**62}  # largest magnitudes: half of int64's, compared as float64
COUNT_BITS = 16  # of the lower value of a count, which may be beyond int32: 8,191 addends of it are not
# elements rounded at a time, so that the passes over a large tensor stay in the cache; a hash may begin at each
_CHUNK = 1 << 17


class SumReport(NamedTuple):
    """What a finished sum says, on the host; the same on every rank."""

    overflow: list[int]  # slots whose sum may have left the range: the step must be measured and redone
    nonfinite: list[int]
    underflow: float = 0.0  # share of all gradients' elements that became zero, on a wire of integers or of 16 bits


class SumStatus(NamedTuple):
    """The status of a finished sum, on its device."""

    flags: Tensor  # bool [2, slots]: out of range, not finite
    underflow: Tensor

    def read(self, to_host: Callable[[Tensor], Tensor] = Tensor.cpu) -> SumReport:
        """Transfers the status to the host, at once: the one place of a step where it waits for the gradients' sum."""
        *flags, lost = to_host(torch.cat([self.flags.view(-1).float(), self.underflow.view(1)])).tolist()
        slots = range(len(flags) // 2)
        overflow, nonfinite = ([i for i in slots if flags[offset + i]] for offset in (0, len(slots)))
        return SumReport(overflow, nonfinite, lost)


class GradientSum(Protocol):
    """What the reducer needs of a sum. Slots are numbered among those held, `state` and flags among all."""

    buckets: Sequence[Bucket]
    needs_measure: bool  # no scale is known yet: the maxima must be measured before the first sum
    _addends: int
    _messages: list[Tensor]
    _views: list[Tensor]  # of each slot, where its sum is
    _filled: list[bool]  # whether a slot has an addend

    def clear(self) -> None:
        """Begins a step: all sums are zero."""

    def add(self, bucket: int, slot: int, gradient: Tensor) -> None:
        """Adds one virtual worker's gradient (float32, contiguous) to a slot."""

    def end_worker(self, bucket: int) -> None:
        """Every slot of the bucket has its addend of this virtual worker, or has none."""

    def message(self, bucket: int) -> Tensor:
        """1-D: payload and trailer, to be summed over ranks in place."""
        b = self.buckets[bucket]
        for slot in range(b.first, b.stop):
            if not self._filled[slot]:
                self._views[slot].zero_()
        return self._messages[bucket]

    def payload(self, bucket: int) -> Tensor:
        """1-D [length], instead of `message`: the sums alone, of which a rank may take back a shard only."""
        return self.message(bucket)[: self.buckets[bucket].length]

    def trailers(self) -> Tensor:
        """1-D, after the last `payload`: what all ranks must know of all sums, itself to be summed over ranks."""

    def finish(self, trailers: Tensor | None = None) -> SumStatus:
        """Reads the summed messages, or with `payload` the summed trailers."""

    def mean(self, out: Sequence[Tensor], addends: int, spans: Sequence[Span] | None = None) -> None:
        """Writes the sum over `addends`, of every slot or its span, and takes the next step's scales."""

    def scratch(self, bucket: int) -> Tensor:
        """float32 [length]: the sums' own memory, free from `mean` until the next step's first gradient."""

    def set_maxima(self, maxima: Tensor) -> None:
        """Takes the scales from the measured maximum of each of all slots over all virtual workers: float32 [slots]."""
        self.load_state(maxima.double() * self._addends)

    def state(self) -> Tensor:
        """float64 [slots]: all that the next step needs of this one."""

    def load_state(self, state: Tensor) -> None:
        """Takes back what `state` gave."""


class IntegerGradientSum(GradientSum):
    """Gradients as integers, scaled by a power of two a slot and rounded: any order of addition gives the same bits.

    The scale leaves HEADROOM over the last accepted step. Intermediate wrap-around is harmless: only the final range
    counts. With V virtual workers the largest element of a gradient keeps about 28 - log2(V) bits of an int32, and all
    the bits that a float32 has of an int64.

    Args:
        buckets: Of the slots that this rank sums.
        addends: V, the most addends of a step over all ranks, at most 2**20; it decides the width of the integers.
        places: Of each slot here its number among the slots of all ranks; None: this rank sums them all.
        sections: Lengths of the runs of all slots within which a slot without a bound takes the largest; None: one.
        elements: Of all slots; None: of those here.
        headroom: Growth from one step to the next that the scales leave room for, a power of two.
    """

    def __init__(
        self, buckets: Sequence[Bucket], addends: int, device: torch.device, places: Sequence[int] | None = None,
        sections: Sequence[int] | None = None, elements: int | None = None, headroom: float = HEADROOM,
    ) -> None:  # fmt: skip
        self.buckets, self._addends, self._headroom = buckets, addends, headroom
        self._elements = sum(b.length for b in buckets) if elements is None else elements
        self._dtype = gradient_integers(addends)
        self._limit = LIMITS[self._dtype]
        here = buckets[-1].stop if buckets else 0
        self._places = torch.tensor(range(here) if places is None else places, dtype=torch.int64, device=device)
        self._sections = list(sections) if sections is not None else [here]
        everywhere = sum(self._sections)
        self._shift = 2.0 ** (addends.bit_length() + 1)
        # A power of two, exact in float32: V of them stay in range, and one alone says overflow.
        self._cap = 2.0 ** (torch.iinfo(self._dtype).bits - 2 - addends.bit_length())
        self.needs_measure = True
        self._bounds = torch.zeros(everywhere, dtype=torch.float64, device=device)
        self._pending = self._bounds
        self._all_scales = torch.ones(everywhere, dtype=torch.float64, device=device)
        self._scales = torch.ones(here, dtype=torch.float32, device=device)
        self._scale_items = self._scales.unbind()  # views
        self._low, self._high = torch.zeros(2, here, device=device).unbind()
        self._low_items, self._high_items = self._low.unbind(), self._high.unbind()
        self._messages = [
            torch.zeros(b.length + 2 * (b.stop - b.first) + 2, dtype=self._dtype, device=device) for b in buckets
        ]
        self._views = [view for b, message in zip(buckets, self._messages, strict=True) for view in b.views(message)]
        # On a GPU the passes are limited by launches, not by the cache.
        longest = max((n for b in buckets for n in b.numels), default=1)
        self._chunk = min(_CHUNK, longest) if device.type == "cpu" else longest
        self._rounded = torch.empty(self._chunk, device=device)
        self._integers = torch.empty(self._chunk, dtype=self._dtype, device=device)
        self._filled = [False] * here
        # elements of the present virtual worker's gradients in each bucket that were rounded to zero
        self._lost: list[int | Tensor] = [0] * len(buckets)

    def clear(self) -> None:
        self._filled = [False] * len(self._filled)
        self._low.zero_()
        self._high.zero_()
        self._lost = [0] * len(self.buckets)
        for bucket, message in zip(self.buckets, self._messages, strict=True):
            message[bucket.length :].zero_()

    def clear_bucket(self, bucket: int) -> None:
        """Forgets the addends of one bucket, after its last `end_worker`."""
        b = self.buckets[bucket]
        self._filled[b.first : b.stop] = [False] * (b.stop - b.first)
        self._messages[bucket][b.length :].zero_()

    def add(self, bucket: int, slot: int, gradient: Tensor, hash_into: IntegerHash | None = None) -> None:
        # Gradient 4: scaled by a power of two, rounded and added as integers, whose sum has no order.
        flat = gradient.reshape(-1)
        torch.aminmax(flat, out=(self._low_items[slot], self._high_items[slot]))
        total = self._views[slot]
        is_first, self._filled[slot] = not self._filled[slot], True
        for begin in range(0, flat.numel(), self._chunk):
            run, sums = flat[begin : begin + self._chunk], total[begin : begin + self._chunk]
            if is_first and hash_into is None:
                integers = self._round(slot, run, into=sums)
            else:
                integers = self._round(slot, run, into=self._integers[: run.numel()])
                sums.copy_(integers) if is_first else sums.add_(integers)
            if hash_into is not None:
                hash_into.add(slot, begin, integers)
            self._lost[bucket] += _count_nonzero(run) - _count_nonzero(integers)

    def reach(self, slot: int) -> float:
        """How many units of the slot's sum the largest element is that was added since the last `end_worker`."""
        # One wait for a GPU. In float64, where no product of float32 and a scale becomes zero.
        return float(torch.maximum(-self._low_items[slot], self._high_items[slot]).double() * self._scale_items[slot])

    def only_hash(self, slot: int, gradient: Tensor, into: IntegerHash) -> None:
        """Hashes the integers that a gradient (float32) becomes, as `add` does, and adds them to nothing."""
        flat = gradient.reshape(-1)
        for begin in range(0, flat.numel(), self._chunk):
            run = flat[begin : begin + self._chunk]
            into.add(slot, begin, self._round(slot, run, into=self._integers[: run.numel()]))

    def _round(self, slot: int, run: Tensor, into: Tensor) -> Tensor:
        # At most `_chunk` elements of a slot as integers.
        # No clamp before the cast: a value out of range also lifts the bound, and then the sum is never used.
        return into.copy_(torch.mul(run, self._scale_items[slot], out=self._rounded[: run.numel()]).round_())

    def end_worker(self, bucket: int) -> None:
        b = self.buckets[bucket]
        maxima = torch.maximum(-self._low[b.first : b.stop], self._high[b.first : b.stop])
        scales, trailer = self._scales[b.first : b.stop], self._messages[bucket][b.length :]
        _add_to_trailer(trailer, maxima, scales, self._lost[bucket], self._shift, self._cap)
        self._lost[bucket] = 0
        self._low[b.first : b.stop].zero_()
        self._high[b.first : b.stop].zero_()

    def trailers(self) -> Tensor:
        """Integers [2 * all slots + 2]: bounds and counts; zero for slots that are summed on other ranks."""
        rows = torch.zeros(2, len(self._bounds), dtype=self._dtype, device=self._bounds.device)
        if not self.buckets:
            return torch.cat([rows.view(-1), rows.new_zeros(2)])
        here = join_trailers([m[b.length :] for b, m in zip(self.buckets, self._messages, strict=True)])
        rows[:, self._places] = here[:-2].view(2, -1)
        return torch.cat([rows.view(-1), here[-2:]])

    def finish(self, trailers: Tensor | None = None) -> SumStatus:
        """Finds what has left the range or was not finite, and the bounds from which `mean` takes the next scales."""
        bounds, bad, lost = read_trailers(self.trailers() if trailers is None else trailers, self._shift)
        self._pending = bounds / self._all_scales
        flags = torch.stack([(bounds > self._limit) & ~bad, bad])
        return SumStatus(flags, over(lost, self._elements * self._addends))

    def mean(self, out: Sequence[Tensor], addends: int, spans: Sequence[Span] | None = None) -> None:
        self._write_means(out, (1.0 / (self._scales.to(torch.float64) * addends)).to(torch.float32), spans)
        self.load_state(self._pending)

    def _write_means(self, out: Sequence[Tensor], factors: Tensor, spans: Sequence[Span] | None) -> None:
        for view, target, factor in zip(runs_of(self._views, spans), out, factors.unbind(), strict=True):
            flat = target.view(-1)
            # A product of integers with a float is six times slower than a copy and a product in the cache.
            for begin in range(0, flat.numel(), self._chunk):
                flat[begin : begin + self._chunk].copy_(view[begin : begin + self._chunk]).mul_(factor)

    def scratch(self, bucket: int) -> Tensor:
        """The memory of the sums as float32, or of int64 the first half of it."""
        length = self.buckets[bucket].length
        return self._messages[bucket][:length].view(torch.float32)[:length]

    def state(self) -> Tensor:
        """float64 [all slots]: a bound of sum max|g| over virtual workers in the last accepted step."""
        return self._bounds.clone()

    def load_state(self, state: Tensor) -> None:
        self.needs_measure = False
        # In the memory that they have: captured passes read scales there.
        self._bounds.copy_(state)
        runs = self._bounds.split(self._sections)
        self._all_scales.copy_(torch.cat([power_of_two_scale(r, float(self._limit), self._headroom) for r in runs]))
        self._scales.copy_(self._all_scales[self._places])


def add_gradients(gradients: Sequence[Tensor], scales: Tensor, message: Tensor, found: Tensor) -> None:
    """Adds the rounded gradients (float32, of any memory format) of one virtual worker to a bucket's message.

    `scales` are float32 [slots], powers of two; `message`, int32 or int64, begins with the sums. `found`, int32
    [slots + 1], has of each slot the bits of the largest magnitude so far as float32, ordered as magnitudes are, with
    nan above inf; then the count of elements that were rounded to zero.
    """
    flats = [gradient.reshape(-1) for gradient in gradients]
    values = torch.cat(flats)
    # No clamp before the cast: a value out of range also lifts the bound, and then the sum is never used.
    integers = torch.mul(values, _of_elements(scales, flats)).round_().to(message.dtype)
    message[: len(values)].add_(integers)
    magnitudes = torch.stack(torch._foreach_norm(flats, ord=torch.inf)).abs()
    torch.maximum(found[:-1], magnitudes.view(torch.int32), out=found[:-1])
    found[-1:] += torch.count_nonzero(values) - torch.count_nonzero(integers)


def add_bounds(found: Tensor, scales: Tensor, message: Tensor, length: int, shift: float, cap: float) -> None:
    """Adds the bounds and the counts of one virtual worker to a bucket's trailer, and clears `found`.

    `found` is as `add_gradients` left it; the elements of `message` from `length` on are the trailer of
    `IntegerGradientSum`; bounds are in units of `shift`, and at most `cap`.
    """
    _add_to_trailer(message[length:], found[:-1].view(torch.float32), scales, found[-1:], shift, cap)
    found.zero_()


def _add_to_trailer(
    trailer: Tensor, maxima: Tensor, scales: Tensor, lost: int | Tensor, shift: float, cap: float
) -> None:
    # Of one virtual worker: each slot's largest magnitude, and the count of elements that were rounded to zero.
    finite = maxima.isfinite()
    units = (maxima * (scales / shift)).ceil_().clamp_(max=cap)
    bounds, bad, counts = _fields(trailer)
    bounds += torch.where(finite, units, 0.0).to(trailer.dtype)
    bad += ~finite
    counts[:1] += lost & ((1 << COUNT_BITS) - 1)
    counts[1:] += lost >> COUNT_BITS


def mean(sums: Sequence[Tensor], factors: Tensor, scale: float, out: Sequence[Tensor]) -> None:
    """Writes sum * factor * scale of every slot (float32), from the sums (integers) of each bucket."""
    first = 0
    for each in sums:  # by buckets, as the sums were made: memory for one at a time, and the same tables
        stop, count = first, 0
        while count < len(each):
            count += out[stop].numel()
            stop += 1
        targets = out[first:stop]
        values = each.float().mul_(_of_elements(factors[first:stop], targets))
        if scale != 1.0:
            values.mul_(scale)
        parts = values.split([target.numel() for target in targets])
        torch._foreach_copy_([target.view(-1) for target in targets], list(parts))
        first = stop


class BucketedSum(IntegerGradientSum):
    """As a GPU takes them: gradients, of any memory format, wait for the others of their bucket, and are added at once.

    A kernel takes a GPU less time than its host needs to launch it: a dozen for each of a ResNet-50's 161 gradients
    would be three quarters of a step. The integers, messages, scales and status are those of `IntegerGradientSum`.
    """

    # The operators of a bucket; torusgd.cuda has others.
    _add_gradients, _add_bounds, _mean = staticmethod(add_gradients), staticmethod(add_bounds), staticmethod(mean)

    @cached_property
    def _found(self) -> list[Tensor]:
        """Of each bucket what `add_gradients` finds."""
        return [torch.zeros(b.stop - b.first + 1, dtype=torch.int32, device=self._scales.device) for b in self.buckets]

    @cached_property
    def _waiting(self) -> list[dict[int, Tensor]]:
        """Of each bucket the gradients of a virtual worker so far, by slot."""
        return [{} for _ in self.buckets]

    def clear(self) -> None:
        super().clear()
        self._waiting = [{} for _ in self.buckets]  # without those of a step that was given up

    def add(self, bucket: int, slot: int, gradient: Tensor, hash_into: IntegerHash | None = None) -> None:
        if hash_into is None:
            assert slot not in self._waiting[bucket], "a worker's gradients come before the next one's"
            self._waiting[bucket][slot] = gradient
        else:  # which takes them one by one
            super().add(bucket, slot, gradient, hash_into)

    def end_worker(self, bucket: int) -> None:
        b, waiting = self.buckets[bucket], self._waiting[bucket]
        if not waiting:
            super().end_worker(bucket)
            return
        # Not before: until a step's first gradient the memory may hold what is still under way (`scratch`).
        if any(self._filled[b.first : b.stop]):
            self.message(bucket)  # zeros where there was no gradient yet
        else:
            self._messages[bucket][: b.length].zero_()
        self._filled[b.first : b.stop] = [True] * (b.stop - b.first)
        for slot, numel in zip(range(b.first, b.stop), b.numels, strict=True):
            if slot not in waiting:
                waiting[slot] = torch.zeros(numel, device=self._scales.device)
        message, found, scales = self._messages[bucket], self._found[bucket], self._scales[b.first : b.stop]
        self._add_gradients([waiting[slot] for slot in range(b.first, b.stop)], scales, message, found)
        waiting.clear()
        self._add_bounds(found, scales, message, b.length, self._shift, self._cap)

    def _write_means(self, out: Sequence[Tensor], factors: Tensor, spans: Sequence[Span] | None) -> None:
        if spans is not None or not self.buckets:
            super()._write_means(out, factors, spans)
            return
        payloads = [message[: b.length] for b, message in zip(self.buckets, self._messages, strict=True)]
        self._mean(payloads, factors, 1.0, list(out))


def _of_elements(values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    # Of each element of the tensors in a row the value of its tensor.
    return values.index_select(0, _owners(tuple(tensor.numel() for tensor in tensors), values.device))


# A table and a look-up, since torch's `repeat_interleave` goes value by value, and tensors are of very unlike sizes.
@lru_cache(maxsize=4096)
def _owners(numels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(numels), dtype=np.int32), numels)).to(device)


def read_trailers(found: Tensor, shift: float) -> tuple[Tensor, Tensor, Tensor]:
    """What summed trailers, integers [2 * slots + 2], say: bounds of sum |q|, slots with inf or nan, elements lost."""
    (units, counts), (low, high) = found[:-2].view(2, -1), found[-2:]
    return units.to(torch.float64) * shift, counts > 0, low.to(torch.float64) + high.to(torch.float64) * 2**COUNT_BITS


def join_trailers(trailers: Sequence[Tensor]) -> Tensor:
    """The trailers of several messages as that of one: all bounds, all counts, and the elements lost in all.

    The low value of what is lost again has `COUNT_BITS` bits:

    >>> join_trailers([torch.tensor([5, 0, 2_000_000_000, 3], dtype=torch.int32)] * 2)
    tensor([    5,     5,     0,     0, 10240, 61041], dtype=torch.int32)
    """
    bounds, bad, lost = zip(*map(_fields, trailers), strict=True)
    low, high = torch.stack(lost).sum(dim=0, dtype=torch.int64)
    total = low + (high << COUNT_BITS)
    counts = torch.stack([total & ((1 << COUNT_BITS) - 1), total >> COUNT_BITS]).to(trailers[0].dtype)
    return torch.cat([*bounds, *bad, counts])


def _fields(trailer: Tensor) -> Sequence[Tensor]:
    # Views of a trailer: bounds and counts of its slots, and the two values that count the elements lost.
    slots = len(trailer) // 2 - 1
    return trailer.split([slots, slots, 2])


def _count_nonzero(values: Tensor) -> int | Tensor:
    # Elements that are not zero; on a GPU as a tensor, for which the host need not wait.
    if values.device.type != "cpu":
        return torch.count_nonzero(values)
    # Four times as fast as torch's own, which for a small tensor would be a third of the time of a sum.
    numbers = values.detach().numpy()
    return int(np.count_nonzero(numbers != 0.0 if values.is_floating_point() else numbers))


def power_of_two_scale(bounds: Tensor, limit: float, headroom: float = HEADROOM) -> Tensor:
    """The largest powers of two that keep headroom * bound * scale within a limit.

    A bound of zero (a tensor whose gradient was all zero) takes the scale of the largest bound. `bounds` are float64
    [n], each >= 0, `limit` is the largest magnitude of a sum; the scales are float64 [n], between 2**-100 and 2**100.
    """
    if not bounds.numel():
        return bounds
    bounds = torch.where(bounds > 0, bounds.clamp(min=2.0**-150), 0.0)
    top = bounds.max()
    filled = torch.where(bounds > 0, bounds, torch.where(top > 0, top, 1.0))
    _, exponent = torch.frexp(limit / (headroom * filled))
    # By the bits of their exponents, since 2**n by a library's power is not exact on every device.
    return (((exponent.long() - 1).clamp(-100, 100) + 1023) << 52).view(torch.float64)


def runs_of(tensors: Sequence[Tensor], spans: Sequence[Span] | None) -> list[Tensor]:
    """Of each 1-D tensor the elements of its span; None: all."""
    return list(tensors) if spans is None else [t[low:high] for t, (low, high) in zip(tensors, spans, strict=True)]

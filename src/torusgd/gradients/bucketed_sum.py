"""Exact sums as a GPU takes them: the gradients of a bucket at a time, by a few operations on all of its elements.

A kernel takes a GPU less time than its host needs to launch it: a dozen for each of a ResNet-50's 161 gradients would
be three quarters of a step. The integers, messages, scales and status are those of `IntegerGradientSum`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import integer_sum
from .integer_hash import IntegerHash
from .integer_sum import IntegerGradientSum
from .layout import Bucket, Span


class BucketedSum(IntegerGradientSum):
    """Gradients (float32), of any memory format, wait for the others of their bucket, and are added together."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        addends: int,
        device: torch.device,
        places: Sequence[int] | None = None,
        sections: Sequence[int] | None = None,
        elements: int | None = None,
    ) -> None:
        super().__init__(buckets, addends, device, places, sections, elements)
        self._found = [torch.zeros(b.stop - b.first + 1, dtype=torch.int32, device=device) for b in buckets]
        self._waiting: list[dict[int, Tensor]] = [{} for _ in buckets]

    def clear(self) -> None:
        super().clear()
        self._waiting = [{} for _ in self.buckets]  # without those of a step that was given up

    def add(self, bucket: int, slot: int, gradient: Tensor, hash_into: IntegerHash | None = None) -> None:
        if hash_into is None:
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
        slots = zip(range(b.first, b.stop), b.numels, strict=True)
        device = self._scales.device
        self._add_all(
            bucket, [waiting[slot] if slot in waiting else torch.zeros(n, device=device) for slot, n in slots]
        )
        waiting.clear()

    def _add_all(self, bucket: int, gradients: Sequence[Tensor]) -> None:
        b, message, found = self.buckets[bucket], self._messages[bucket], self._found[bucket]
        scales = self._scales[b.first : b.stop]
        add_gradients(gradients, scales, message, found)
        add_bounds(found, scales, message, b.length, self._shift, self._cap)

    def mean(self, out: Sequence[Tensor], addends: int, spans: Sequence[Span] | None = None) -> None:
        if spans is not None:
            super().mean(out, addends, spans)
            return
        factors = (1.0 / (self._scales.double() * addends)).float()
        payloads = [message[: b.length] for b, message in zip(self.buckets, self._messages, strict=True)]
        mean(payloads, factors, 1.0, out)
        self._bounds = self._pending
        self._take_scales()


def add_gradients(gradients: Sequence[Tensor], scales: Tensor, message: Tensor, found: Tensor) -> None:
    """Adds the rounded gradients (float32, of any memory format) of one virtual worker to a bucket's message.

    `scales` are float32 [slots], powers of two; `message`, int32 or int64, begins with the sums. `found`, int32
    [slots + 1], has of each slot the bits of the largest magnitude so far as float32, ordered as magnitudes are, with
    nan above inf; then the count of elements that were rounded to zero.
    """
    flats = [gradient.reshape(-1) for gradient in gradients]
    values = torch.cat(flats)
    of_element = _repeated(scales, flats)
    # No clamp before the cast: a value out of range also lifts the bound, and then the sum is never used.
    integers = torch.mul(values, of_element).round_().to(message.dtype)
    message[: len(values)].add_(integers)
    magnitudes = torch.stack(torch._foreach_norm(flats, ord=torch.inf)).abs()
    torch.maximum(found[:-1], magnitudes.view(torch.int32), out=found[:-1])
    found[-1:] += torch.count_nonzero(values) - torch.count_nonzero(integers)


def add_bounds(found: Tensor, scales: Tensor, message: Tensor, length: int, shift: float, cap: float) -> None:
    """Adds the bounds and the counts of one virtual worker to a bucket's trailer, and clears `found`.

    `found` is as `add_gradients` left it; the elements of `message` from `length` on are the trailer of
    `IntegerGradientSum`; bounds are in units of `shift`, and at most `cap`.
    """
    slots = len(scales)
    maxima = found[:-1].view(torch.float32)
    finite = maxima.isfinite()
    units = (maxima * (scales / shift)).ceil_().clamp_(max=cap)
    bounds, bad, lost = message[length:].split([slots, slots, 2])
    bounds += torch.where(finite, units, 0.0).to(message.dtype)
    bad += ~finite
    lost[:1] += found[-1:] & ((1 << integer_sum.COUNT_BITS) - 1)
    lost[1:] += found[-1:] >> integer_sum.COUNT_BITS
    found.zero_()


def mean(sums: Sequence[Tensor], factors: Tensor, scale: float, out: Sequence[Tensor]) -> None:
    """Writes sum * factor * scale of every slot (float32), from the sums (integers) of each bucket."""
    values = torch.cat(list(sums)).float()
    values.mul_(_repeated(factors, out))
    if scale != 1.0:
        values.mul_(scale)
    torch._foreach_copy_([target.view(-1) for target in out], list(values.split([target.numel() for target in out])))


def _repeated(values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    # Each value as often as its tensor has elements. `repeat_interleave` gives a thread of a GPU one value, and so a
    # large tensor to one thread: on an H200 that was 6 ms for a ResNet-50.
    return torch.cat([value.expand(tensor.numel()) for value, tensor in zip(values.unbind(), tensors, strict=True)])

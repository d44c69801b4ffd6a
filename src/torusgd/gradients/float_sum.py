"""Gradients that travel as floats, the papers' way; `integer_sum` has the exact sums and what both have in common."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .integer_sum import GradientSum, SumStatus, power_of_two_scale, runs_of
from .layout import Bucket, Span

FLOAT16_MAX = 65504.0


class FloatGradientSum(GradientSum):
    """Gradients as float32, float16 or bfloat16: as the papers sent them; bits depend on the number of ranks.

    A rank adds its virtual workers in float32. A 16-bit message is scaled by a power of two a bucket, agreed from the
    last accepted step, so that no partial sum of ranks overflows. Its trailer holds the bound of the bucket, a count of
    ranks with a non-finite value, and of elements that became zero the share times the rank's virtual workers. float32
    needs no scale and no trailer; a `wide` bucket beside 16-bit ones travels as float32, has both all the same, and
    loses no bit by a power of two.
    """

    def __init__(
        self, buckets: Sequence[Bucket], addends: int, device: torch.device, wire: torch.dtype, wide: Sequence[int] = ()
    ) -> None:
        self.buckets, self._addends, self._wire = buckets, addends, wire
        self.needs_measure = self._is_scaled = wire != torch.float32
        slots, count = buckets[-1].stop, len(buckets)
        self._bucket_of = torch.tensor([i for i, b in enumerate(buckets) for _ in b.numels], device=device)
        self._firsts = torch.tensor([b.first for b in buckets], device=device)
        self._bounds = torch.zeros(count, dtype=torch.float64, device=device)
        self._pending = self._bounds
        self._scales = torch.ones(count, dtype=torch.float32, device=device)
        # this rank's part of each bucket's bound
        self._local = torch.zeros(count, dtype=torch.float32, device=device)
        self._totals = [torch.zeros(b.length, device=device) for b in buckets]
        self._messages = self._totals
        if self._is_scaled:
            dtypes = [torch.float32 if number in wide else wire for number in range(count)]
            pairs = zip(buckets, dtypes, strict=True)
            self._messages = [torch.zeros(b.length + 3, dtype=dtype, device=device) for b, dtype in pairs]
        self._views = [view for b, total in zip(buckets, self._totals, strict=True) for view in b.views(total)]
        whole = addends * max(sum(b.length for b in buckets), 1)
        self._weights = torch.tensor([b.length / whole for b in buckets], device=device)  # of the buckets' underflow
        self._filled, self._workers = [False] * slots, [0] * count
        self._maxima: dict[int, Tensor] = {}

    def clear(self) -> None:
        self._filled, self._workers = [False] * len(self._filled), [0] * len(self.buckets)
        self._local.zero_()

    def add(self, bucket: int, slot: int, gradient: Tensor) -> None:
        flat = gradient.reshape(-1)
        if self._is_scaled:
            self._maxima[slot] = largest(flat)
        total = self._views[slot]
        total.add_(flat) if self._filled[slot] else total.copy_(flat)
        self._filled[slot] = True

    def end_worker(self, bucket: int) -> None:
        b = self.buckets[bucket]
        self._workers[bucket] += 1
        maxima = [self._maxima.pop(slot) for slot in range(b.first, b.stop) if slot in self._maxima]
        if maxima:
            self._local[bucket] += torch.stack(maxima).max()

    def message(self, bucket: int) -> Tensor:
        """float32 [length], or the wire's dtype [length + 3]: the sums, the bound, non-finite count, underflow."""
        message = super().message(bucket)
        if not self._is_scaled:
            return message
        total, scale, bound = self._totals[bucket], self._scales[bucket], self._local[bucket]
        payload, finite = message[: len(total)], bound.isfinite()
        payload.copy_(torch.mul(total, scale, out=total))
        lost = (total.count_nonzero() - payload.count_nonzero()) / max(len(total), 1)
        message[-3] = torch.where(finite, bound * scale, 0.0).clamp(max=FLOAT16_MAX)
        message[-2] = (~finite).to(message.dtype)
        message[-1] = lost * self._workers[bucket]
        return message

    def trailers(self) -> Tensor:
        """float32 [2 * slots + 2 * buckets]: largest magnitudes, non-finite counts; bounds and underflow."""
        # The magnitudes are of this rank's own sums, since no rank will see the whole sum; a 16-bit message's total is
        # scaled already when it has been handed out.
        magnitudes = _largest(self._views)
        finite, bounds = magnitudes.isfinite(), self._local
        lost = [m[b.length + 2].float() for b, m in zip(self.buckets, self._messages, strict=True) if self._is_scaled]
        underflow = torch.stack(lost) if lost else torch.zeros_like(bounds)
        bounds = torch.where(bounds.isfinite(), bounds, 0.0)
        return torch.cat([torch.where(finite, magnitudes, 0.0), (~finite).float(), bounds, underflow])

    def finish(self, trailers: Tensor | None = None) -> SumStatus:
        if trailers is not None:
            # No partial sum is beyond the sum of the ranks' largest elements; half the range is left for rounding.
            slots, count = len(self._views), len(self.buckets)
            reach, bad, self._pending, lost = trailers.double().split([slots, slots, count, count])
            beyond, was_bad = reach > torch.finfo(self._wire).max / 2, bad > 0
            if self._is_scaled:
                return SumStatus(torch.stack([beyond & ~was_bad, was_bad]), (lost.float() * self._weights).sum())
            bad = beyond | was_bad
        else:
            views = [view for b, message in zip(self.buckets, self._messages, strict=True) for view in b.views(message)]
            bad = ~_largest(views).isfinite()
        if not self._is_scaled:
            return SumStatus(torch.stack([torch.zeros_like(bad), bad]), torch.zeros((), device=bad.device))
        ends = torch.stack([m[b.length :].float() for b, m in zip(self.buckets, self._messages, strict=True)])
        self._pending = ends[:, 0].to(torch.float64) / self._scales
        # A sum that is not finite where no addend was bad has overflowed; the bucket's first slot stands for it.
        was_bad = ends[:, 1] > 0
        is_bad = torch.stack([bad[b.first : b.stop].any() for b in self.buckets])
        overflow = torch.zeros_like(bad)
        overflow[self._firsts] = (is_bad & ~was_bad) | ~ends[:, 0].isfinite()
        flags = torch.stack([overflow, bad & was_bad[self._bucket_of]])
        return SumStatus(flags, (ends[:, 2] * self._weights).sum())

    def mean(self, out: Sequence[Tensor], addends: int, spans: Sequence[Span] | None = None) -> None:
        # Of one dimension: by a number without any, torch would multiply 16-bit sums in 16 bits.
        factors = (1.0 / (self._scales.to(torch.float64) * addends)).to(torch.float32).split(1)
        for index, b in enumerate(self.buckets):
            own = None if spans is None else spans[b.first : b.stop]
            for slot, run in enumerate(runs_of(b.views(self._messages[index]), own), b.first):
                torch.mul(run, factors[index], out=out[slot].view(-1))
        if self._is_scaled:
            # A bucket of zeros, or in which nothing was finite, keeps the scale that it has.
            self._bounds = torch.where(self._pending > 0, self._pending, self._bounds)
            self._take_scales()

    def scratch(self, bucket: int) -> Tensor:
        return self._totals[bucket]

    def state(self) -> Tensor:
        """float64 [slots]: the bound of each bucket, spread over its slots so that buckets may differ on resume."""
        return self._bounds[self._bucket_of]

    def load_state(self, state: Tensor) -> None:
        self._bounds = torch.stack([state[b.first : b.stop].max() for b in self.buckets]).to(self._bounds)
        self.needs_measure = False
        self._take_scales()

    def _take_scales(self) -> None:
        if self._is_scaled:
            self._scales = power_of_two_scale(self._bounds, FLOAT16_MAX).to(torch.float32)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    # float32 [tensors]: of each the largest magnitude; nan or inf where it holds one.
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors), ord=torch.inf)).float()
    # On a CPU a norm takes ten times as long.
    return torch.stack([largest(each) for each in tensors]).float()


def largest(tensor: Tensor) -> Tensor:
    """The largest magnitude; nan or inf where there is one, 0 of a tensor without elements."""
    low, high = torch.aminmax(tensor if tensor.numel() else tensor.new_zeros(1))
    return torch.maximum(-low, high)

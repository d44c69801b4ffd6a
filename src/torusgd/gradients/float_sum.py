"""Gradients that travel as floats, the papers' way; `gradients` has the exact sums and what both have in common."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .integer_sum import Bucket, Span, SumStatus, parts_of, power_of_two_scale

FLOAT16_MAX = 65504.0


class FloatGradientSum:
    """Gradients as float32, float16 or bfloat16: as the papers sent them; bits depend on the number of ranks.

    A rank adds its virtual workers in float32. A 16-bit message is scaled by a power of two a bucket, agreed from the
    last accepted step, so that no partial sum of ranks overflows; it ends with the bound of the bucket, a count of
    ranks with a non-finite value and the share of elements that became zero.
    """

    def __init__(
        self, buckets: Sequence[Bucket], virtual_workers: int, device: torch.device, wire: torch.dtype
    ) -> None:
        self.buckets = buckets
        self.workers = virtual_workers
        self._wire = wire
        self._is_scaled = wire != torch.float32
        self.needs_measure = self._is_scaled
        self._slots = buckets[-1].stop
        self._bounds = torch.zeros(len(buckets), dtype=torch.float64, device=device)
        self._pending = self._bounds
        self._scales = torch.ones(len(buckets), dtype=torch.float32, device=device)
        self._local = torch.zeros(len(buckets), dtype=torch.float32, device=device)
        self._totals = [torch.zeros(b.length, device=device) for b in buckets]
        self._messages = (
            [torch.zeros(b.length + 3, dtype=wire, device=device) for b in buckets] if self._is_scaled else self._totals
        )
        self._views = [
            total[offset : offset + numel]
            for b, total in zip(buckets, self._totals, strict=True)
            for offset, numel in zip(b.offsets, b.numels, strict=True)
        ]
        self._filled = [False] * self._slots
        self._maxima: dict[int, Tensor] = {}
        self._largest = torch.zeros(self._slots, device=device)

    def clear(self) -> None:
        """Begins a step: all sums are zero."""
        self._filled = [False] * self._slots
        self._local.zero_()

    def add(self, bucket: int, slot: int, gradient: Tensor) -> None:
        """Adds one virtual worker's gradient (float32) to a slot."""
        flat = gradient.reshape(-1)
        if self._is_scaled:
            low, high = torch.aminmax(flat)
            self._maxima[slot] = torch.maximum(-low, high)
        if self._filled[slot]:
            self._views[slot].add_(flat)
        else:
            self._views[slot].copy_(flat)
            self._filled[slot] = True

    def end_worker(self, bucket: int) -> None:
        """Adds this virtual worker's largest element to the bucket's bound."""
        maxima = [
            self._maxima.pop(s)
            for s in range(self.buckets[bucket].first, self.buckets[bucket].stop)
            if s in self._maxima
        ]
        if maxima:
            self._local[bucket] += torch.stack(maxima).max()

    def message(self, bucket: int) -> Tensor:
        """float32 [length], or the wire's dtype [length + 3]: the sums, the bound, non-finite count, underflow."""
        b = self.buckets[bucket]
        for slot in range(b.first, b.stop):
            if not self._filled[slot]:
                self._views[slot].zero_()
        if not self._is_scaled:
            return self._totals[bucket]
        message, scale, bound = self._messages[bucket], self._scales[bucket], self._local[bucket]
        torch.mul(self._totals[bucket], scale, out=self._totals[bucket])
        message[: b.length].copy_(self._totals[bucket])
        lost = ((message[: b.length] == 0) & (self._totals[bucket] != 0)).sum() / max(b.length, 1)
        finite = bound.isfinite()
        message[b.length] = torch.where(finite, bound * scale, 0.0).clamp(max=FLOAT16_MAX)
        message[b.length + 1] = (~finite).to(message.dtype)
        message[b.length + 2] = lost
        return message

    def body(self, bucket: int) -> Tensor:
        """The sums as they travel; notes their largest magnitude, since a rank won't see the whole sum."""
        b, message = self.buckets[bucket], self.message(bucket)
        # The totals are scaled already.
        for slot in range(b.first, b.stop):
            low, high = torch.aminmax(self._views[slot])
            self._largest[slot] = torch.maximum(-low, high)
        return message[: b.length]

    def tails(self) -> Tensor:
        """float32 [2 * slots + 2 * buckets]: largest magnitudes, non-finite counts; bounds and underflow."""
        finite, bounds = self._largest.isfinite(), self._local
        lost = [m[b.length + 2].float() for b, m in zip(self.buckets, self._messages, strict=True) if self._is_scaled]
        return torch.cat(
            [
                torch.where(finite, self._largest, 0.0),
                (~finite).float(),
                torch.where(bounds.isfinite(), bounds, 0.0),
                torch.stack(lost) if lost else torch.zeros_like(bounds),
            ]
        )

    def finish(self, tails: Tensor | None = None) -> SumStatus:
        """Reads the summed messages; one transfer to the host, and a second where it has to name a slot."""
        if tails is not None:
            return self._finish_by_tails(tails)
        values = [m[: b.length] for b, m in zip(self.buckets, self._messages, strict=True)]
        fine = torch.stack([torch.stack(torch.aminmax(v)).isfinite().all() for v in values])
        if not self._is_scaled:
            return SumStatus([], self._bad_slots(fine.cpu(), values))
        tails = torch.stack([m[b.length :] for b, m in zip(self.buckets, self._messages, strict=True)])
        self._pending = tails[:, 0].to(torch.float64) / self._scales
        report = torch.stack([fine.float(), tails[:, 1].float(), tails[:, 2].float()]).cpu()
        was_bad = report[1] > 0
        overflow = (report[0] == 0) & ~was_bad | ~tails[:, 0].isfinite().cpu()
        return SumStatus(
            [self.buckets[i].first for i in overflow.nonzero().flatten().tolist()],
            self._bad_slots(~was_bad, values),
            float(report[2].mean()),
        )

    def _finish_by_tails(self, tails: Tensor) -> SumStatus:
        """No partial sum is beyond the sum of the ranks' largest elements; half the range is left for rounding."""
        reach, bad, bounds, lost = tails.split([self._slots] * 2 + [len(self.buckets)] * 2)
        self._pending = bounds.to(torch.float64)
        far = reach > torch.finfo(self._wire).max / 2
        report = torch.cat([far.float(), bad, lost]).cpu()
        beyond, was_bad = report[: self._slots] > 0, report[self._slots : 2 * self._slots] > 0
        if not self._is_scaled:
            return SumStatus([], (beyond | was_bad).nonzero().flatten().tolist())
        return SumStatus(
            (beyond & ~was_bad).nonzero().flatten().tolist(),
            was_bad.nonzero().flatten().tolist(),
            float(report[2 * self._slots :].mean()),
        )

    def mean(self, out: Sequence[Tensor], spans: Sequence[Span] | None = None) -> None:
        """Writes the mean (float32) of every slot, and takes the next scales from the bounds of this step."""
        factors = (1.0 / (self._scales.to(torch.float64) * self.workers)).to(torch.float32)
        for index, b in enumerate(self.buckets):
            sums = [self._messages[index][offset : offset + n] for offset, n in zip(b.offsets, b.numels, strict=True)]
            own = None if spans is None else spans[b.first : b.stop]
            for slot, part in enumerate(parts_of(sums, own), b.first):
                torch.mul(part, factors[index], out=out[slot].view(-1))
        if self._is_scaled:
            self._bounds = self._pending
            self._take_scales()

    def room(self, bucket: int) -> Tensor:
        """The rank's own sums, in float32."""
        return self._totals[bucket]

    def set_maxima(self, maxima: Tensor) -> None:
        """Takes the scale of each bucket from the measured maximum of each slot: float32 [slots]."""
        largest = torch.stack([maxima[b.first : b.stop].max() for b in self.buckets])
        self._bounds = largest.to(torch.float64) * self.workers
        self._take_scales()

    def state(self) -> Tensor:
        """float64 [slots]: the bound of each bucket, spread over its slots so that buckets may differ on resume."""
        counts = torch.tensor([b.stop - b.first for b in self.buckets], device=self._bounds.device)
        return self._bounds.repeat_interleave(counts)

    def load_state(self, state: Tensor) -> None:
        """Takes back the bounds that `state` gave."""
        bounds = state.to(self._bounds)
        self._bounds = torch.stack([bounds[b.first : b.stop].max() for b in self.buckets])
        self._take_scales()

    def _take_scales(self) -> None:
        self.needs_measure = False
        self._scales = power_of_two_scale(self._bounds, FLOAT16_MAX).to(torch.float32)

    def _bad_slots(self, fine: Tensor, values: Sequence[Tensor]) -> list[int]:
        return [
            slot
            for index in (~fine).nonzero().flatten().tolist()
            for slot, offset, numel in zip(
                range(self.buckets[index].first, self.buckets[index].stop),
                self.buckets[index].offsets,
                self.buckets[index].numels,
                strict=True,
            )
            if not values[index][offset : offset + numel].isfinite().all()
        ]

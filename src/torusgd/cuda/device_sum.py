"""Exact sums of gradients as a GPU takes them: a bucket at a time, by operators that leave all decisions on the device.

The integers, messages, scales and status are those of `IntegerGradientSum`; what differs is how often the host calls.
There each gradient is rounded when it comes, which is fastest where it is still in a cache. Here the gradients of a
bucket wait for one another, and then one call takes them all (`operators`). All sums lie in one piece of memory, so
that one call clears them, and nothing moves between two steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..gradients.integer_hash import IntegerHash
from ..gradients.integer_sum import IntegerGradientSum, SumStatus, power_of_two_scale
from ..gradients.layout import Bucket, ParameterLayout, Span
from .operators import operators


class DeviceGradientSum(IntegerGradientSum):
    """Takes the gradients of a bucket by two operators; for all slots on every rank.

    Args:
        buckets: Of all slots.
        addends: V, the most addends of a step over all ranks.
        device: Where gradients live.

    Attributes:
        going: float32 [1]: 1 while the device takes steps, 0 once it has refused one (`operators.verdict`).
    """

    def __init__(self, buckets: Sequence[Bucket], addends: int, device: torch.device) -> None:
        super().__init__(buckets, addends, device)
        lengths = [len(message) for message in self._messages]
        self._all = torch.zeros(sum(lengths), dtype=self._dtype, device=device)
        self._messages = list(self._all.split(lengths))
        self._views = [view for b, message in zip(buckets, self._messages, strict=True) for view in b.views(message)]
        self._factors = torch.zeros_like(self._scales)
        self._found = [torch.zeros(b.stop - b.first + 1, dtype=torch.int32, device=device) for b in buckets]
        self._sizes = [torch.tensor(b.numels, device=device) for b in buckets]
        self._all_sizes = torch.cat(self._sizes)
        self._payloads = [message[: b.length] for b, message in zip(buckets, self._messages, strict=True)]
        self._waiting: list[dict[int, Tensor]] = [{} for _ in buckets]
        self.going = torch.ones(1, device=device)

    def clear(self) -> None:
        """Begins a step: all sums are zero."""
        self._all.zero_()

    def add(self, bucket: int, slot: int, gradient: Tensor, hash_into: IntegerHash | None = None) -> None:
        """Takes one virtual worker's gradient (any floating dtype and memory format), which waits for its bucket."""
        assert hash_into is None, "a run that audits adds gradients one by one"
        self._waiting[bucket][slot] = gradient

    def end_worker(self, bucket: int) -> None:
        """Adds the bucket's gradients of one virtual worker; one that did not come is zero."""
        b, waiting, found = self.buckets[bucket], self._waiting[bucket], self._found[bucket]
        gradients = [
            waiting[slot] if slot in waiting else torch.zeros(n, device=found.device)
            for slot, n in zip(range(b.first, b.stop), b.numels, strict=True)
        ]
        waiting.clear()
        scales, message = self._scales[b.first : b.stop], self._messages[bucket]
        operators.add_gradients(gradients, self._sizes[bucket], scales, message, found)
        operators.add_bounds(found, scales, message, b.length, self._shift, self._cap)

    def message(self, bucket: int) -> Tensor:
        """See `IntegerGradientSum`."""
        return self._messages[bucket]

    def decide(self, control: Tensor, ordinary: Tensor, running: Tensor, momenta: Tensor, report: Tensor) -> None:
        """The verdict on a step whose messages have arrived, and all that follows from it but the weights.

        The arguments are those of `operators.verdict`. `write_mean` then writes the mean.
        """
        trailers = [m[b.length :] for b, m in zip(self.buckets, self._messages, strict=True)]
        operators.verdict(
            trailers,
            control,
            ordinary,
            self._addends,
            self._shift,
            self._limit,
            self._elements,
            self.going,
            self._bounds,
            self._scales,
            self._factors,
            running,
            momenta,
            report,
        )

    def write_mean(self, out: Sequence[Tensor], loss_scale: float) -> None:
        """Writes the mean (float32) of every slot without the loss scale, after `decide`."""
        operators.mean(self._payloads, self._all_sizes, self._factors, 1.0 / loss_scale, list(out))

    def mean(self, out: Sequence[Tensor], addends: int, spans: Sequence[Span] | None = None) -> None:
        """See `GradientSum`; for a step on which the host has decided."""
        assert spans is None, "all of the sums are here"
        self._factors.copy_(1.0 / (self._scales.double() * addends))
        operators.mean(self._payloads, self._all_sizes, self._factors, 1.0, list(out))
        self._bounds.copy_(self._pending)
        self._take_scales()

    def set_maxima(self, maxima: Tensor) -> None:
        """See `GradientSum`."""
        self._bounds.copy_(maxima.double() * self._addends)
        self._take_scales()

    def load_state(self, state: Tensor) -> None:
        """See `GradientSum`."""
        self._bounds.copy_(state)
        self._take_scales()

    def finish(self, trailers: Tensor | None = None) -> SumStatus:
        """See `GradientSum`; for the host to decide on a step."""
        self._all_scales = self._scales.double()
        return super().finish(trailers)

    def _take_scales(self) -> None:
        self.needs_measure = False
        self._scales.copy_(power_of_two_scale(self._bounds, float(self._limit)))


def device_sum(addends: int, device: torch.device, layout: ParameterLayout) -> DeviceGradientSum:
    """The sum of a layout's gradients, all of whose slots every rank holds."""
    assert layout.is_whole, "column blocks are summed one by one"
    return DeviceGradientSum(layout.buckets, addends, device)

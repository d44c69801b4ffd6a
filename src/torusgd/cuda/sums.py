"""Exact sums by operators that leave all decisions on the device.

The integers, messages, scales and status are those of `BucketedSum` and `ControlMessage`. No operator makes the host
wait or changes a shape, and all write into memory that never moves: they may be captured in a CUDA graph. The forms
here and in `integer_sum` are made of torch's own operators; `triton_kernels` has kernels with the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..arithmetic.reductions import over
from ..comm.base import AllReduce, Work
from ..comm.exact_sum import NARROW, decode
from ..gradients import integer_sum
from ..gradients.integer_sum import BucketedSum, add_bounds, add_gradients, mean, power_of_two_scale
from ..gradients.layout import Bucket
from ..step.control_vector import ControlMessage, add_statistics
from .kernels import operators, register

REPORT = 3  # values of the verdict's report: 1 or 0 (refused), loss, underflow


register(add_gradients, writes={"message", "found"})
register(add_bounds, writes={"message", "found"})
register(mean, writes={"out"})
register(add_statistics, writes={"sums"})


class KernelSum(BucketedSum):
    """`BucketedSum` by kernels of a whole bucket, each in place of a dozen of torch's; the bits are the same."""

    _add_gradients, _add_bounds, _mean = operators.add_gradients, operators.add_bounds, operators.mean


class DeviceGradientSum(KernelSum):
    """Adds and decides by operators that a CUDA graph may hold; `going` is 1 until the device has refused a step."""

    def __init__(self, buckets: Sequence[Bucket], addends: int, device: torch.device) -> None:
        super().__init__(buckets, addends, device)
        lengths = [len(message) for message in self._messages]
        # All sums in one piece of memory, so that one call clears them.
        self._all = torch.zeros(sum(lengths), dtype=self._dtype, device=device)
        self._messages = list(self._all.split(lengths))
        self._views = [view for b, message in zip(buckets, self._messages, strict=True) for view in b.views(message)]
        self._factors = torch.zeros_like(self._scales)
        self._payloads = [message[: b.length] for b, message in zip(buckets, self._messages, strict=True)]
        self.going = torch.ones(1, device=device)

    def clear(self) -> None:
        self._all.zero_()
        self._filled, self._waiting = [True] * len(self._filled), [{} for _ in self.buckets]

    def decide(self, control: Tensor, ordinary: Tensor, running: Tensor, momenta: Tensor, report: Tensor) -> None:
        """The verdict (`Verdict`) on a step whose messages have arrived, and all that follows but the weights."""
        trailers = [m[b.length :] for b, m in zip(self.buckets, self._messages, strict=True)]
        given = Verdict(
            trailers, control, ordinary, self._addends, self._shift, self._limit, self._elements, self.going,
            self._bounds, self._scales, self._factors, running, momenta, report,
        )  # fmt: skip
        operators.verdict(*vars(given).values())

    def write_mean(self, out: Sequence[Tensor], loss_scale: float) -> None:
        """Writes the mean (float32) of every slot without the loss scale, after `decide`."""
        operators.mean(self._payloads, self._factors, 1.0 / loss_scale, list(out))

    def finish(self, trailers: Tensor | None = None) -> integer_sum.SumStatus:
        self._all_scales.copy_(self._scales)  # which the device has decided
        return super().finish(trailers)


class DeviceControl(ControlMessage):
    """A control vector that never moves, since CUDA graphs write it, with `room` words for all sections."""

    def __init__(self, width: int, device: torch.device, to_host: Callable[[Tensor], Tensor], room: int) -> None:
        super().__init__(width, device, to_host)
        self._memory = self.message = torch.zeros(len(self._memory) + room, dtype=torch.int64, device=device)

    def add(self, batch_norm: Tensor, loss: Tensor) -> None:
        operators.add_statistics(self._values, batch_norm, loss, is_first=not self.counts.contributions)
        self.counts.contributions += 1

    def add_captured(self, batch_norm: Tensor, loss: Tensor) -> None:
        """The part of `add` that goes into a CUDA graph, which is the same for the first pass and for all others."""
        operators.add_statistics(self._values, batch_norm, loss, is_first=False)

    def will_be_added(self) -> None:
        """The rest of it, before such a graph is replayed."""
        if not self.counts.contributions:
            self._values.zero_()
        self.counts.contributions += 1

    def send(self, allreduce: AllReduce, sections: Mapping[str, Tensor]) -> Work:
        memory, work = self._memory, super().send(allreduce, sections)
        assert self._memory is memory, "graphs write it there"
        return work


@dataclass(frozen=True)
class Verdict:
    """What `verdict` reads and writes, in the order of the operator's arguments; see `IntegerGradientSum`."""

    trailers: Sequence[Tensor]  # of the summed messages of all buckets
    control: Tensor  # int64, the summed control vector: limbs of batch statistics and loss, then counts and sections
    ordinary: Tensor  # int64, counts and sections of a step in which all ranks computed all and nobody wants anything
    addends: int
    shift: float
    limit: int
    elements: int  # of all gradients of a virtual worker
    going: Tensor  # float32 [1], written: 1, or 0 once a step was refused
    bounds: Tensor  # float64 [slots], written: then those of this step
    scales: Tensor  # float32 [slots], written: then those of the next step
    factors: Tensor  # float32 [slots], written: for `mean`, of this step
    running: Tensor  # float32, written: batch norm's running statistics
    momenta: Tensor
    report: Tensor  # float64 [REPORT], written: for the host, which reads it later


def verdict(v: Verdict) -> None:
    """Decides on the device what every rank decides alike, and latches: once a step is refused, so are all after it.

    A step is refused if a sum has left its range, a gradient or a batch statistic is not finite, or the counts of the
    control vector are not those of an ordinary step. Then only `going`, `factors` and `report` are written.
    """
    sums, counts = v.control.split([len(v.control) - len(v.ordinary), len(v.ordinary)])
    statistics = decode(sums.view(NARROW.rows, -1), NARROW)
    reach, bad, lost = integer_sum.read_trailers(integer_sum.join_trailers(v.trailers), v.shift)
    fits = ~(bad | (reach > v.limit)).any() & statistics[:-1].isfinite().all() & (counts == v.ordinary).all()
    v.going.mul_(fits)
    is_going = v.going > 0
    old = v.scales.double()
    v.factors.copy_(1.0 / (old * v.addends))
    statistics = over(statistics, v.addends)
    v.report.copy_(torch.stack([v.going[0].double(), statistics[-1], over(lost, v.elements * v.addends)]))
    v.bounds.copy_(torch.where(is_going, reach / old, v.bounds))
    v.scales.copy_(torch.where(is_going, power_of_two_scale(reach / old, float(v.limit)), old))
    moved = v.running.mul(1 - v.momenta).add_(v.momenta * statistics[:-1].float())
    v.running.copy_(torch.where(is_going, moved, v.running))


register(verdict, writes={"going", "bounds", "scales", "factors", "running", "report"})

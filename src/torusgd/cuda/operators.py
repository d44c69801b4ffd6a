"""What a step does with gradients on a device, each registered as one operator of torch: `torch.ops.torusgd`.

A GPU is given its work ahead of time, and each operator costs the host some microseconds whatever it computes. So one
call takes the gradients of a whole bucket, and one call finds what the host would otherwise have to ask the device for.
None of them makes the host wait, none changes a shape, all write into memory that stays where it is: they may be
captured in a CUDA graph.

    add_gradients   rounds the gradients of a bucket and adds them to its message
    add_bounds      adds what the message says of them: bounds, counts
    mean            the mean gradient from the summed messages
    add_statistics  adds the batch statistics and the loss of a pass to the exact sums of a step
    verdict         whether the step may be used, the next scales, batch norm's running statistics

The forms here are made of torch's own operators and run on any device; `triton_kernels` has the first two and
`triton_verdict` the others as kernels, with the same bits. The integers are those of `IntegerGradientSum` on a CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.exact_sum import NARROW, decode, encode
from ..gradients.integer_sum import COUNT_BITS, power_of_two_scale, read_trailers, total_lost
from ..kernels import register

ACCEPTED, LOSS, UNDERFLOW = range(3)
"""places in the verdict's report"""
REPORT = 3


def add_gradients(gradients: Sequence[Tensor], sizes: Tensor, scales: Tensor, message: Tensor, found: Tensor) -> None:
    """Adds the rounded gradients of one virtual worker to a bucket's message.

    Args:
        gradients: Of the bucket's slots, in order; of any floating dtype and memory format, taken in logical order.
        sizes: int64 [slots], their elements.
        scales: float32 [slots], powers of two.
        message: int32 or int64, begins with the sums.
        found: int32 [slots + 1]: of each slot the bits of the largest magnitude so far as float32, which are ordered as
            the magnitudes are, with nan above inf; then the count of elements that were rounded to zero.
    """
    flats = [gradient.reshape(-1) for gradient in gradients]
    values = torch.cat(flats).float()
    of_element = torch.repeat_interleave(scales, sizes, output_size=len(values))
    # No clamp before the cast: a value out of range also lifts the bound, and then the sum is never used.
    integers = torch.mul(values, of_element).round_().to(message.dtype)
    message[: len(values)].add_(integers)
    magnitudes = torch.stack(torch._foreach_norm(flats, ord=torch.inf)).float().abs()
    torch.maximum(found[:-1], magnitudes.view(torch.int32), out=found[:-1])
    found[-1:] += torch.count_nonzero(values) - torch.count_nonzero(integers)


def add_bounds(found: Tensor, scales: Tensor, message: Tensor, length: int, shift: float, cap: float) -> None:
    """Adds the bounds and the counts of one virtual worker to a bucket's trailer, and clears `found`.

    Args:
        found: As `add_gradients` left it.
        scales: As there.
        message: Its elements from `length` on are the trailer of `IntegerGradientSum`.
        length: Of the sums.
        shift: Bounds are in units of so much.
        cap: The largest of them.
    """
    slots = len(scales)
    maxima = found[:-1].view(torch.float32)
    finite = maxima.isfinite()
    units = (maxima * (scales / shift)).ceil_().clamp_(max=cap)
    bounds, bad, lost = message[length:].split([slots, slots, 2])
    bounds += torch.where(finite, units, 0.0).to(message.dtype)
    bad += ~finite
    lost[:1] += found[-1:] & ((1 << COUNT_BITS) - 1)
    lost[1:] += found[-1:] >> COUNT_BITS
    found.zero_()


def mean(sums: Sequence[Tensor], sizes: Tensor, factors: Tensor, scale: float, out: Sequence[Tensor]) -> None:
    """Writes sum * factor * scale of every slot.

    Args:
        sums: int32 or int64, of each bucket those of its slots.
        sizes: int64 [slots], their elements.
        factors: float32 [slots]: one over scale and addends.
        scale: A power of two: one over the loss scale.
        out: float32, of each slot.
    """
    values = torch.cat(list(sums)).float()
    values.mul_(torch.repeat_interleave(factors, sizes, output_size=len(values)))
    if scale != 1.0:
        values.mul_(scale)
    torch._foreach_copy_([target.view(-1) for target in out], list(values.split([target.numel() for target in out])))


def add_statistics(sums: Tensor, statistics: Tensor, loss: Tensor, is_first: bool) -> None:
    """Adds the batch statistics and the loss of a pass to exact sums, or begins them.

    Args:
        sums: int64 [NARROW.rows, values + 1].
        statistics: float32 [values].
        loss: float32 [].
        is_first: Whatever the sums hold is of no account.
    """
    limbs = encode(torch.cat([statistics, loss.reshape(1)]), NARROW)
    sums.copy_(limbs if is_first else sums + limbs)


def verdict(
    trailers: Sequence[Tensor],
    control: Tensor,
    ordinary: Tensor,
    addends: int,
    shift: float,
    limit: int,
    elements: int,
    going: Tensor,
    bounds: Tensor,
    scales: Tensor,
    factors: Tensor,
    running: Tensor,
    momenta: Tensor,
    report: Tensor,
) -> None:
    """Decides on the device what every rank decides alike, and latches: once a step is refused, so are all after it.

    A step is refused where a sum has left its range, a gradient or a batch statistic is not finite, or the counts of
    the control vector are not those of an ordinary step. Then only `going`, `factors` and `report` are written.

    Args:
        trailers: Of the summed messages of all buckets.
        control: int64, the summed control vector: limbs of batch statistics and loss, then the counts.
        ordinary: int64, the counts of a step in which all ranks have computed all and nobody asks for anything.
        addends: Virtual workers of the step.
        shift: Of the bounds.
        limit: Largest magnitude of a sum.
        elements: Of all gradients of a virtual worker.
        going: float32 [1]: 1, or 0 once a step was refused.
        bounds: float64 [slots], as `IntegerGradientSum.state`; then those of this step.
        scales: float32 [slots]; then those of the next step.
        factors: float32 [slots]; for `mean`, of this step.
        running: float32, batch norm's running statistics.
        momenta: float32, the share of a step in each of them.
        report: float64 [REPORT], for the host, which reads it later.
    """
    sums, counts = control.split([len(control) - len(ordinary), len(ordinary)])
    statistics = decode(sums.view(NARROW.rows, -1), NARROW)
    reach, bad, lost = read_trailers(joined(trailers), shift)
    fits = ~(bad | (reach > limit)).any() & statistics[:-1].isfinite().all() & (counts == ordinary).all()
    going *= fits
    is_going = going > 0
    old = scales.double()
    factors.copy_(1.0 / (old * addends))
    report.copy_(torch.stack([going[0].double(), statistics[-1] / addends, lost / (elements * addends)]))
    bounds.copy_(torch.where(is_going, reach / old, bounds))
    scales.copy_(torch.where(is_going, power_of_two_scale(reach / old, float(limit)), old))
    moved = running.mul(1 - momenta).add_(momenta * (statistics[:-1] / addends).float())
    running.copy_(torch.where(is_going, moved, running))


def joined(trailers: Sequence[Tensor]) -> Tensor:
    """The trailers of all buckets as that of one: all bounds, all counts, and the elements lost in all."""
    parts = [trailer.split([len(trailer) // 2 - 1, len(trailer) // 2 - 1, 2]) for trailer in trailers]
    bounds, bad, lost = zip(*parts, strict=True)
    return torch.cat([*bounds, *bad, total_lost(lost)])


for _schema, _function, _kernels in (
    (
        "add_gradients(Tensor[] gradients, Tensor sizes, Tensor scales, Tensor(a!) message, Tensor(b!) found) -> ()",
        add_gradients,
        "triton_kernels",
    ),
    (
        "add_bounds(Tensor(a!) found, Tensor scales, Tensor(b!) message, int length, float shift, float cap) -> ()",
        add_bounds,
        "triton_kernels",
    ),
    (
        "add_statistics(Tensor(a!) sums, Tensor statistics, Tensor loss, bool is_first) -> ()",
        add_statistics,
        "triton_verdict",
    ),
    (
        "verdict(Tensor[] trailers, Tensor control, Tensor ordinary, int addends, float shift, int limit, "
        "int elements, Tensor(a!) going, Tensor(b!) bounds, Tensor(c!) scales, Tensor(d!) factors, Tensor(e!) running, "
        "Tensor momenta, Tensor(f!) report) -> ()",
        verdict,
        "triton_verdict",
    ),
    (
        "mean(Tensor[] sums, Tensor sizes, Tensor factors, float scale, Tensor(a!)[] out) -> ()",
        mean,
        "triton_verdict",
    ),
):
    register(_schema, _function, f"{__package__}.{_kernels}")

operators = torch.ops.torusgd
"""the registered operators, by name"""

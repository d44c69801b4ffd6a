"""The operators that a GPU runs once a pass or once a step, as Triton kernels: statistics, verdict and mean.

`operators` has the same made of torch's own operators, some 80 small launches. The bits are the same: integers, float64
operations that are exact but for one, and float32 ones that are rounded one by one (`enable_fp_fusion=False`).

    add_statistics   one kernel
    verdict          two: all that may refuse the step, each of whose programs can do so; then all that follows from it
    mean             one kernel for all buckets
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..comm.exact_sum import LIMB_BITS, NARROW
from ..gradients.integer_sum import COUNT_BITS, HEADROOM
from ..kernels import blocks_of, kept_table

BLOCK = 1024
"""elements of one program"""
_LIMBS, _TOP = NARROW.limbs, NARROW.top


@triton.jit
def _power_of_two(exponent):
    """2**exponent as float64, for exponents of normal numbers."""
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["is_first"])
def _add_statistics(
    sums,
    statistics,
    loss,
    count,
    is_first,
    LIMBS: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts values into limbs as `exact_sum.encode`; each scaling is by a power of two, each difference exact."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_value = at < count
    value = tl.load(statistics + at, mask=is_value, other=0.0)
    value = tl.where(at == count, tl.load(loss), value).to(tl.float64)
    is_here = at <= count
    is_old = at <= tl.where(is_first > 0, -1, count)
    is_bad = (tl.abs(value) < _power_of_two(tl.full([1], TOP + 43, tl.int64))) == 0
    rest = tl.where(is_bad, 0.0, value)
    for limb in tl.static_range(LIMBS):
        weight = _power_of_two(tl.full([1], TOP - BITS * limb, tl.int64))
        digits = (rest * _power_of_two(tl.full([1], BITS * limb - TOP, tl.int64))).to(tl.int64)
        row = sums + limb * (count + 1) + at
        tl.store(row, tl.load(row, mask=is_old, other=0) + digits, mask=is_here)
        rest = rest - digits.to(tl.float64) * weight
    row = sums + LIMBS * (count + 1) + at
    tl.store(row, tl.load(row, mask=is_old, other=0) + is_bad.to(tl.int64), mask=is_here)


@triton.jit
def _decoded(sums, at, is_here, width, LIMBS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr):
    """The values of summed limbs, as `exact_sum.decode`; carries go from the lowest limb up."""
    total = tl.zeros_like(at).to(tl.float64)
    for limb in tl.static_range(LIMBS):
        # The carry out of all lower limbs, and this limb less its own carry; the highest limb keeps all it has.
        carry = tl.zeros_like(at).to(tl.int64)
        for lower in tl.static_range(LIMBS - 1 - limb):
            carry = (tl.load(sums + (LIMBS - 1 - lower) * width + at, mask=is_here, other=0) + carry) >> BITS
        digit = tl.load(sums + limb * width + at, mask=is_here, other=0) + carry
        if limb > 0:
            digit = digit - ((digit >> BITS) << BITS)
        total = total + digit.to(tl.float64) * _power_of_two(tl.full([1], TOP - BITS * limb, tl.int64))
    return total


@triton.jit
def _examine(
    base,
    places,
    slots,
    control,
    ordinary,
    counts,
    width,
    shift,
    limit,
    going,
    LIMBS: tl.constexpr,
    COUNTS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Refuses the step for a slot or a count (program 0), or for a statistic of one block (the others)."""
    block = tl.program_id(0)
    if block == 0:
        slot = tl.arange(0, SLOTS)
        units = tl.load(base + tl.load(places + 2 * slot, mask=slot < slots, other=0), mask=slot < slots, other=0)
        bad = tl.load(base + tl.load(places + 2 * slot + 1, mask=slot < slots, other=0), mask=slot < slots, other=0)
        refuses = ((units.to(tl.float64) * shift > limit) | (bad > 0)).to(tl.int32)
        count = tl.arange(0, COUNTS)
        found = tl.load(control + (LIMBS + 1) * width + count, mask=count < counts, other=0)
        usual = tl.load(ordinary + count, mask=count < counts, other=0)
        if tl.max(refuses, axis=0) + tl.max((found != usual).to(tl.int32), axis=0) > 0:
            tl.store(going, 0.0)
    else:
        at = (block - 1) * BLOCK + tl.arange(0, BLOCK)
        not_finite = tl.load(control + LIMBS * width + at, mask=at < width - 1, other=0)
        if tl.max(not_finite, axis=0) > 0:
            tl.store(going, 0.0)


@triton.jit
def _follow(
    base,
    places,
    slots,
    buckets,
    control,
    width,
    addends,
    shift,
    limit,
    all_elements,
    going,
    bounds,
    scales,
    factors,
    running,
    momenta,
    report,
    LIMBS: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    HEADROOM: tl.constexpr,
    SLOTS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What follows for the slots and the host (program 0), and for the running statistics of one block (the others)."""
    block = tl.program_id(0)
    is_going = tl.load(going) > 0.0
    if block == 0:
        slot = tl.arange(0, SLOTS)
        units = tl.load(base + tl.load(places + 2 * slot, mask=slot < slots, other=0), mask=slot < slots, other=0)
        old = tl.load(scales + slot, mask=slot < slots, other=1.0).to(tl.float64)
        tl.store(factors + slot, (1.0 / (old * addends)).to(tl.float32), mask=slot < slots)
        bound = units.to(tl.float64) * shift / old
        is_moved = slot < tl.where(is_going, slots, 0)
        tl.store(bounds + slot, bound, mask=is_moved)
        # As `power_of_two_scale`: the exponent of a float64 stands in its bits.
        least = _power_of_two(tl.full([1], -150, tl.int64))
        known = tl.where(bound > 0.0, tl.maximum(bound, least), 0.0)
        top = tl.max(known, axis=0)
        filled = tl.where(bound > 0.0, known, tl.where(top > 0.0, top, 1.0))
        exponent = ((limit / (filled * HEADROOM)).to(tl.int64, bitcast=True) >> 52) - 1023
        exponent = tl.minimum(tl.maximum(exponent, -100), 100)
        tl.store(scales + slot, _power_of_two(exponent).to(tl.float32), mask=is_moved)

        bucket = slots + tl.arange(0, BUCKETS)
        is_bucket = bucket < slots + buckets
        low = tl.load(base + tl.load(places + 2 * bucket, mask=is_bucket, other=0), mask=is_bucket, other=0)
        high = tl.load(base + tl.load(places + 2 * bucket + 1, mask=is_bucket, other=0), mask=is_bucket, other=0)
        lost = tl.sum(low.to(tl.int64) + (high.to(tl.int64) << COUNT_BITS), axis=0)
        tl.store(report, tl.load(going).to(tl.float64))
        last = width - 1 + tl.arange(0, 1)
        loss = _decoded(control, last, last < width, width, LIMBS, TOP, BITS) / addends
        loss = tl.where(tl.load(control + LIMBS * width + last) > 0, float("nan"), loss)
        tl.store(report + 1 + tl.arange(0, 1), loss)
        tl.store(report + 2, lost.to(tl.float64) / all_elements)
    else:
        at = (block - 1) * BLOCK + tl.arange(0, BLOCK)
        is_here = at < tl.where(is_going, width - 1, 0)
        batch = (_decoded(control, at, is_here, width, LIMBS, TOP, BITS) / addends).to(tl.float32)
        share = tl.load(momenta + at, mask=is_here, other=0.0)
        moved = tl.load(running + at, mask=is_here, other=0.0) * (1.0 - share) + share * batch
        tl.store(running + at, moved, mask=is_here)


@triton.jit
def _mean(sums, runs, blocks, factors, scale, BLOCK: tl.constexpr):
    """The mean of one block of a slot."""
    block = blocks + 4 * tl.program_id(0)
    slot, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    here = tl.arange(0, BLOCK)
    total = tl.load(sums + tl.load(runs + 2 * slot) + begin + here, mask=here < count, other=0)
    out = tl.load(runs + 2 * slot + 1).to(tl.pointer_type(tl.float32)) + begin + here
    tl.store(out, total.to(tl.float32) * tl.load(factors + slot) * scale, mask=here < count)


def add_statistics(sums: Tensor, statistics: Tensor, loss: Tensor, is_first: bool) -> None:
    """See `operators.add_statistics`."""
    count = len(statistics)
    _add_statistics[(triton.cdiv(count + 1, BLOCK),)](
        sums,
        statistics,
        loss,
        count,
        # No constant: what the first pass of a step compiles, a graph may launch for the others.
        int(is_first),
        LIMBS=_LIMBS,
        TOP=_TOP,
        BITS=LIMB_BITS,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


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
    """See `operators.verdict`."""
    places, slots, counts, width = _places(trailers), len(scales), len(ordinary), len(running) + 1
    grid, widest = (1 + triton.cdiv(width, BLOCK),), triton.next_power_of_2(slots)
    _examine[grid](
        trailers[0],
        places,
        slots,
        control,
        ordinary,
        counts,
        width,
        shift,
        limit,
        going,
        LIMBS=_LIMBS,
        COUNTS=triton.next_power_of_2(counts),
        SLOTS=widest,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    _follow[grid](
        trailers[0],
        places,
        slots,
        len(trailers),
        control,
        width,
        addends,
        shift,
        limit,
        elements * addends,
        going,
        bounds,
        scales,
        factors,
        running,
        momenta,
        report,
        LIMBS=_LIMBS,
        TOP=_TOP,
        BITS=LIMB_BITS,
        COUNT_BITS=COUNT_BITS,
        HEADROOM=HEADROOM,
        SLOTS=widest,
        BUCKETS=triton.next_power_of_2(len(trailers)),
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def mean(sums: Sequence[Tensor], sizes: Tensor, factors: Tensor, scale: float, out: Sequence[Tensor]) -> None:
    """See `operators.mean`."""
    numels, device = tuple(target.numel() for target in out), factors.device
    first, begins, targets = sums[0].data_ptr(), list[int](), iter(numels)
    for run in sums:  # each begins with a slot
        at = (run.data_ptr() - first) // run.element_size()
        stop = at + len(run)
        while at < stop:
            begins.append(at)
            at += next(targets)
    runs = kept_table(tuple((at, target.data_ptr()) for at, target in zip(begins, out, strict=True)), device)
    blocks = blocks_of(numels, BLOCK, device)
    _mean[(len(blocks),)](sums[0], runs, blocks, factors, scale, BLOCK=BLOCK, enable_fp_fusion=False)


def _places(trailers: Sequence[Tensor]) -> Tensor:
    """int64 [slots + buckets, 2], in elements from the first trailer on: bound and count of each slot, then of each
    bucket the two values that count elements lost."""
    first, rows, lost = trailers[0].data_ptr(), list[tuple[int, int]](), list[tuple[int, int]]()
    for trailer in trailers:
        begin, slots = (trailer.data_ptr() - first) // trailer.element_size(), len(trailer) // 2 - 1
        rows += [(begin + slot, begin + slots + slot) for slot in range(slots)]
        lost.append((begin + 2 * slots, begin + 2 * slots + 1))
    return kept_table((*rows, *lost), trailers[0].device)

"""The operators of torch.ops.torusgd as Triton kernels, with the bits of their forms by torch's own operators.

Each is one kernel, those of gradients and bounds one a bucket, but for two:

    verdict   two: all that may refuse the step, each of whose programs can do so; then all that follows from it
    update    `_momentum`, one program a block: weights and momentum, or nothing if the step is refused; with LARS after
              `_block_norms` of 4,096 elements each, and `_rates`, one program a layer: the tree over its blocks' norms,
              and the rate that a variant of LARS makes of it

`add_gradients` reads a gradient once, in its own layout, and its sum once, and writes that: 0.07 to 0.1 ms
for a ResNet-50 by an H100's bandwidth. For `look_up` torch's own operators take six launches, and read and write 29
bytes for each value, where 5 would do.

Integer maxima and counts are atomic, which no order can change; of floats only norms are sums, which have the bits of
`optim.norms` on a GPU: squares in float64, by lanes, then in a tree. Other float64 operations are exact but for one,
float32 ones are rounded one by one (`enable_fp_fusion=False`).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..comm import exact_sum
from ..gradients import integer_sum
from ..optim import norms as definition
from ..optim.lars import VARIANTS
from .flat_weights import Update
from .kernels import blocks_of, cached_table, table_of
from .sums import Verdict

BLOCK = tl.constexpr(1024)  # elements of one program
LIMBS, TOP = tl.constexpr(exact_sum.NARROW.limbs), tl.constexpr(exact_sum.NARROW.top)
BITS = tl.constexpr(exact_sum.LIMB_BITS)
COUNT_BITS, HEADROOM = tl.constexpr(integer_sum.COUNT_BITS), tl.constexpr(integer_sum.HEADROOM)
MOST_COUNTED = tl.constexpr((1 << integer_sum.COUNT_BITS) - 1)
NORM_BLOCK, LANES = tl.constexpr(definition.BLOCK), tl.constexpr(definition.LANES)
LANE_STAGES = tl.constexpr(definition.LANES.bit_length() - 1)
# Block norms that a tree takes at a time, a power of two; a layer has at most the square of it, 4e9 elements.
WIDTH, STAGES = tl.constexpr(1024), tl.constexpr(10)
_BYTES = 4


@triton.jit
def offset_in_memory(index, channels, points):
    # From the offset in logical order (filter, channel, point) to that in memory (filter, point, channel).
    filter_ = index // (channels * points)
    channel = index // points % channels
    return filter_ * channels * points + index % points * channels + channel


@triton.jit(do_not_specialize=["slots"])  # or each kind of bucket compiles one
def _add_gradients(how, blocks, scales, message, found, slots):
    # One block of one slot: rounds and adds its elements, and finds the largest and those that vanish.
    block = blocks + 4 * tl.program_id(0)
    slot, begin, count, target = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    address, channels, points = tl.load(how + 3 * slot), tl.load(how + 3 * slot + 1), tl.load(how + 3 * slot + 2)
    here = tl.arange(0, BLOCK)
    is_here = here < count
    at = offset_in_memory(begin + here, channels, points)
    value = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=is_here, other=0.0)
    scaled = value * tl.load(scales + slot)
    # Half to even, as torch.round: what is left above the floor is exact.
    low = tl.floor(scaled)
    left = scaled - low
    is_odd = low - 2.0 * tl.floor(low * 0.5) != 0.0
    rounded = tl.where((left > 0.5) | ((left == 0.5) & is_odd), low + 1.0, low)
    sums = message + target + here
    old = tl.load(sums, mask=is_here, other=0)
    tl.store(sums, old + rounded.to(old.dtype), mask=is_here)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(found + slot, tl.max(bits, axis=0))
    tl.atomic_add(found + slots, tl.sum(((value != 0.0) & (rounded == 0.0)).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["length", "slots"])
def _add_bounds(found, scales, message, length, slots, unit, cap, SLOTS: tl.constexpr):
    # All slots of a bucket in one program.
    slot = tl.arange(0, SLOTS)
    is_slot = slot < slots
    bits = tl.load(found + slot, mask=is_slot, other=0)
    is_finite = bits < 0x7F800000
    units = tl.ceil(bits.to(tl.float32, bitcast=True) * (tl.load(scales + slot, mask=is_slot, other=0.0) * unit))
    units = tl.where(is_finite, tl.minimum(units, cap), 0.0)
    bounds, bad, lost = message + length + slot, message + length + slots + slot, message + length + 2 * slots
    old = tl.load(bounds, mask=is_slot, other=0)
    tl.store(bounds, old + units.to(old.dtype), mask=is_slot)
    tl.store(bad, tl.load(bad, mask=is_slot, other=0) + (bits >= 0x7F800000).to(old.dtype), mask=is_slot)
    count = tl.load(found + slots)
    tl.store(lost, tl.load(lost) + (count & MOST_COUNTED))
    tl.store(lost + 1, tl.load(lost + 1) + (count >> COUNT_BITS))
    tl.store(found + slot, tl.zeros_like(bits), mask=is_slot)
    tl.store(found + slots, 0)


@triton.jit
def _power_of_two(exponent):
    # 2**exponent as float64, for exponents of normal numbers.
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["is_first"])
def _add_statistics(sums, statistics, loss, count, is_first):
    # Cuts values into limbs as `exact_sum.encode`; each scaling is by a power of two, each difference exact.
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
def _decoded(sums, at, is_here, width):
    # The values of summed limbs, as `exact_sum.decode`; carries go from the lowest limb up.
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
    base, indices, slots, control, ordinary, counts, width, shift, limit, going,
    COUNTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    # Refuses the step for a slot or a count (program 0), or for a statistic of one block (the others).
    block = tl.program_id(0)
    if block == 0:
        slot = tl.arange(0, SLOTS)
        units = tl.load(base + tl.load(indices + 2 * slot, mask=slot < slots, other=0), mask=slot < slots, other=0)
        bad = tl.load(base + tl.load(indices + 2 * slot + 1, mask=slot < slots, other=0), mask=slot < slots, other=0)
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
    base, indices, slots, buckets, control, width, addends, shift, limit, all_elements, going, bounds, scales,
    factors, running, momenta, report,
    SLOTS: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    # What follows for the slots and the host (program 0), and for the running statistics of one block (the others).
    block = tl.program_id(0)
    is_going = tl.load(going) > 0.0
    if block == 0:
        slot = tl.arange(0, SLOTS)
        units = tl.load(base + tl.load(indices + 2 * slot, mask=slot < slots, other=0), mask=slot < slots, other=0)
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
        exponent = (((1.0 / (filled * HEADROOM)) * limit).to(tl.int64, bitcast=True) >> 52) - 1023
        exponent = tl.minimum(tl.maximum(exponent, -100), 100)
        tl.store(scales + slot, _power_of_two(exponent).to(tl.float32), mask=is_moved)

        bucket = slots + tl.arange(0, BUCKETS)
        is_bucket = bucket < slots + buckets
        low = tl.load(base + tl.load(indices + 2 * bucket, mask=is_bucket, other=0), mask=is_bucket, other=0)
        high = tl.load(base + tl.load(indices + 2 * bucket + 1, mask=is_bucket, other=0), mask=is_bucket, other=0)
        lost = tl.sum(low.to(tl.int64) + (high.to(tl.int64) << COUNT_BITS), axis=0)
        tl.store(report, tl.load(going).to(tl.float64))
        last = width - 1 + tl.arange(0, 1)
        loss = _decoded(control, last, last < width, width) / addends
        loss = tl.where(tl.load(control + LIMBS * width + last) > 0, float("nan"), loss)
        tl.store(report + 1 + tl.arange(0, 1), loss)
        tl.store(report + 2, lost.to(tl.float64) / all_elements)
    else:
        at = (block - 1) * BLOCK + tl.arange(0, BLOCK)
        is_here = at < tl.where(is_going, width - 1, 0)
        batch = (_decoded(control, at, is_here, width) / addends).to(tl.float32)
        share = tl.load(momenta + at, mask=is_here, other=0.0)
        moved = tl.load(running + at, mask=is_here, other=0.0) * (1.0 - share) + share * batch
        tl.store(running + at, moved, mask=is_here)


@triton.jit
def _mean(sums, runs, blocks, factors, scale):
    block = blocks + 4 * tl.program_id(0)
    slot, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    here = tl.arange(0, BLOCK)
    total = tl.load(sums + tl.load(runs + 2 * slot) + begin + here, mask=here < count, other=0)
    out = tl.load(runs + 2 * slot + 1).to(tl.pointer_type(tl.float32)) + begin + here
    tl.store(out, total.to(tl.float32) * tl.load(factors + slot) * scale, mask=here < count)


def add_gradients(gradients: Sequence[Tensor], scales: Tensor, message: Tensor, found: Tensor) -> None:
    # In a layout that the kernel reads: as `torch.autograd.grad` gives it, it may be that of a transposed tensor. They
    # live until the kernel is launched.
    last = torch.channels_last
    laid_out = [g if g.is_contiguous() or g.is_contiguous(memory_format=last) else g.contiguous() for g in gradients]
    how = table_of([layout_of(gradient) for gradient in laid_out], message.device)
    blocks = blocks_of(tuple(gradient.numel() for gradient in gradients), BLOCK.value, message.device)
    _add_gradients[(len(blocks),)](how, blocks, scales, message, found, len(gradients), enable_fp_fusion=False)


def add_bounds(found: Tensor, scales: Tensor, message: Tensor, length: int, shift: float, cap: float) -> None:
    slots = len(scales)
    widest = triton.next_power_of_2(slots)
    _add_bounds[(1,)](found, scales, message, length, slots, 1.0 / shift, cap, SLOTS=widest, enable_fp_fusion=False)


def add_statistics(sums: Tensor, statistics: Tensor, loss: Tensor, is_first: bool) -> None:
    count, blocks = len(statistics), triton.cdiv(len(statistics) + 1, BLOCK.value)
    # `is_first` is no constant: what the first pass of a step compiles, a graph may launch for the others.
    _add_statistics[(blocks,)](sums, statistics, loss, count, int(is_first), enable_fp_fusion=False)


def verdict(v: Verdict) -> None:
    indices, slots, counts, width = _indices(v.trailers), len(v.scales), len(v.ordinary), len(v.running) + 1
    grid, widest = (1 + triton.cdiv(width, BLOCK.value),), triton.next_power_of_2(slots)
    _examine[grid](
        v.trailers[0], indices, slots, v.control, v.ordinary, counts, width, v.shift, v.limit, v.going,
        COUNTS=triton.next_power_of_2(counts), SLOTS=widest, enable_fp_fusion=False,
    )  # fmt: skip
    _follow[grid](
        v.trailers[0], indices, slots, len(v.trailers), v.control, width, v.addends, v.shift, v.limit,
        v.elements * v.addends, v.going, v.bounds, v.scales, v.factors, v.running, v.momenta, v.report,
        SLOTS=widest, BUCKETS=triton.next_power_of_2(len(v.trailers)), enable_fp_fusion=False,
    )  # fmt: skip


def mean(sums: Sequence[Tensor], factors: Tensor, scale: float, out: Sequence[Tensor]) -> None:
    numels, device = tuple(target.numel() for target in out), factors.device
    first, begins, targets = sums[0].data_ptr(), list[int](), iter(numels)
    for run in sums:  # each begins with a slot
        at = (run.data_ptr() - first) // run.element_size()
        stop = at + len(run)
        while at < stop:
            begins.append(at)
            at += next(targets)
    runs = cached_table(tuple((at, target.data_ptr()) for at, target in zip(begins, out, strict=True)), device)
    blocks = blocks_of(numels, BLOCK.value, device)
    _mean[(len(blocks),)](sums[0], runs, blocks, factors, scale, enable_fp_fusion=False)


def _indices(trailers: Sequence[Tensor]) -> Tensor:
    # int64 [slots + buckets, 2], in elements from the first trailer on: bound and count of each slot, then of each
    # bucket the two values that count elements lost.
    first, rows, lost = trailers[0].data_ptr(), list[tuple[int, int]](), list[tuple[int, int]]()
    for trailer in trailers:
        begin, slots = (trailer.data_ptr() - first) // trailer.element_size(), len(trailer) // 2 - 1
        rows += [(begin + slot, begin + slots + slot) for slot in range(slots)]
        lost.append((begin + 2 * slots, begin + 2 * slots + 1))
    return cached_table((*rows, *lost), trailers[0].device)


def layout_of(tensor: Tensor) -> tuple[int, int, int]:
    """Address, channels and points of a channel of a channels-last tensor; of a contiguous one as of one channel."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), 1, tensor.numel()
    return tensor.data_ptr(), tensor.shape[1], tensor.shape[2] * tensor.shape[3]


@triton.jit
def _block_norms(tensors, blocks, values, norms, DECAYED: tl.constexpr):
    # The norm of one block of a tensor; or with DECAYED of a tensor and the decay of another, where there is one.
    block = blocks + 4 * tl.program_id(0)
    number, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    first = tl.load(tensors + 3 * number).to(tl.pointer_type(tl.float32))
    lane = tl.arange(0, LANES)
    squares = tl.zeros([LANES], tl.float64)
    for chunk in range(0, NORM_BLOCK, LANES):
        at, is_here = begin + chunk + lane, chunk + lane < count
        value = tl.load(first + at, mask=is_here, other=0.0)
        if DECAYED:
            second, layer = tl.load(tensors + 3 * number + 1), tl.load(tensors + 3 * number + 2)
            decay = tl.load(values + 5 * layer + 1).to(tl.float32)
            is_pair = chunk + lane < tl.where(second != 0, count, 0)
            weight = tl.load(second.to(tl.pointer_type(tl.float32)) + at, mask=is_pair, other=0.0)
            value = tl.where(second != 0, tl.fma(decay, weight, value), value)
        wide = value.to(tl.float64)
        squares += wide * wide
    for stage in tl.static_range(LANE_STAGES):
        squares = tl.sum(tl.reshape(squares, [2, LANES >> (stage + 1)]), axis=0)
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.sum(squares, axis=0)).to(tl.float32))


@triton.jit
def _tree(values):
    # The sum by pairs of neighbours, then of those, until one is left.
    for stage in tl.static_range(STAGES):
        values = tl.sum(tl.reshape(values, [WIDTH >> (stage + 1), 2]), axis=1)
    return tl.sum(values, axis=0)


@triton.jit
def _norm(norms, first, count):
    # The norm of a tensor from those of its blocks; trees of whole runs are branches of the one tree.
    index = tl.arange(0, WIDTH)
    runs = tl.zeros([WIDTH], tl.float64)
    for run in range(0, tl.cdiv(count, WIDTH)):
        at = run * WIDTH + index
        part = tl.load(norms + first + at, mask=at < count, other=0.0).to(tl.float64)
        runs = tl.where(index == run, _tree(part * part), runs)
    return tl.sqrt(_tree(runs))


@triton.jit
def _rates(values, runs, norms, all_blocks, THRESHOLD: tl.constexpr, ZERO_IS_PLAIN: tl.constexpr, CLIP: tl.constexpr):
    # The rate of one layer over that of its group, as `lars.layer_rates` has it.
    layer = tl.program_id(0)
    row = values + 5 * layer
    rate, trust, decay, eps = tl.load(row), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    first, count = tl.load(runs + 2 * layer), tl.load(runs + 2 * layer + 1)
    weight = _norm(norms, first, count)
    gradient = _norm(norms, all_blocks + first, count)
    denominator = gradient + decay * weight
    is_plain = weight == 0.0
    if THRESHOLD:
        denominator = tl.where(denominator < eps, denominator + eps, denominator)
        is_plain = is_plain | (weight < eps)
    else:
        denominator = denominator + eps
    is_plain = is_plain | (denominator == 0.0)
    if ZERO_IS_PLAIN:
        is_plain = is_plain | (gradient == 0.0)
    ratio = tl.where(is_plain, 1.0, trust * weight / denominator)
    scaled = tl.where(ratio > rate, rate, ratio) if CLIP else rate * ratio
    tl.store(row, tl.where(trust > 0.0, scaled, rate))


@triton.jit
def _momentum(
    tensors, blocks, values, going, momentum,
    IS_LARS: tl.constexpr, RATE_INSIDE: tl.constexpr, NESTEROV: tl.constexpr, HAS_MOMENTUM: tl.constexpr,
):  # fmt: skip
    # Weights and momentum of one block of a tensor, unless the step is refused.
    # It rounds as torch's foreach operators on a GPU round: a product and a sum in one (fma) where those take `alpha`,
    # otherwise each alone, for which the compiler must not join them (`enable_fp_fusion=False`).
    block = blocks + 4 * tl.program_id(0)
    layer, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    here = tl.arange(0, NORM_BLOCK)
    weights = tl.load(tensors + 3 * layer).to(tl.pointer_type(tl.float32)) + begin + here
    momenta = tl.load(tensors + 3 * layer + 1).to(tl.pointer_type(tl.float32)) + begin + here
    gradients = tl.load(tensors + 3 * layer + 2).to(tl.pointer_type(tl.float32)) + begin + here
    is_here = here < tl.where(tl.load(going) > 0.0, count, 0)
    rate, wide_decay = tl.load(values + 5 * layer).to(tl.float32), tl.load(values + 5 * layer + 1)
    weight = tl.load(weights, mask=is_here, other=0.0)
    gradient = tl.load(gradients, mask=is_here, other=0.0)
    step = tl.fma(wide_decay.to(tl.float32), weight, gradient)
    if not IS_LARS:  # where torch adds no decay of zero
        step = tl.where(wide_decay != 0.0, step, gradient)
    if RATE_INSIDE:
        step = step * rate
    if HAS_MOMENTUM:
        pushed = tl.load(momenta, mask=is_here, other=0.0) * momentum + step
        tl.store(momenta, pushed, mask=is_here)
        step = tl.fma(momentum, pushed, step) if NESTEROV else pushed
    if RATE_INSIDE:
        weight = weight - step
    elif IS_LARS:
        weight = weight - step * rate
    else:
        weight = tl.fma(-rate, step, weight)
    tl.store(weights, weight, mask=is_here)


@triton.jit
def _look_up(pixels, table, out, values, channels, points, IS_LAST: tl.constexpr):
    # One block of the values, in the order in which they lie in memory afterwards.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < values
    if IS_LAST:  # image, point, channel
        channel = at % channels
        image, point = at // (channels * points), at // channels % points
        byte = tl.load(pixels + (image * channels + channel) * points + point, mask=is_here, other=0)
    else:
        channel = at // points % channels
        byte = tl.load(pixels + at, mask=is_here, other=0)
    found = tl.load(table + channel * 256 + byte.to(tl.int32), mask=is_here, other=0.0)
    tl.store(out + at, found, mask=is_here)


def update(u: Update) -> None:
    """The kernels of `flat_weights.update`; with LARS the layers' rates replace those of the groups in `values`."""
    device = u.weights.device
    weights, momenta = ([flat.data_ptr() + _BYTES * begin for begin in u.offsets] for flat in (u.weights, u.momenta))
    addresses = [*zip(weights, momenta, (gradient.data_ptr() for gradient in u.gradients), strict=True)]
    numels = tuple(gradient.numel() for gradient in u.gradients)
    blocks = blocks_of(numels, NORM_BLOCK.value, device)
    row = VARIANTS.get(u.rule)
    if row is not None:
        pairs = [(weight, 0, layer) for layer, weight in enumerate(weights)]
        for layer, (weight, _, gradient) in enumerate(addresses):
            pairs.append((gradient, weight if row.decayed_gradient else 0, layer))
        both = blocks_of(numels * 2, NORM_BLOCK.value, device)
        norms = torch.empty(len(both), device=device)
        table = cached_table(tuple(pairs), device)
        _block_norms[(len(both),)](table, both, u.values, norms, DECAYED=row.decayed_gradient, enable_fp_fusion=False)
        # of each tensor the first of its blocks among all, and how many it has
        counts = [-(-numel // NORM_BLOCK.value) for numel in numels]
        runs = tuple(zip(accumulate(counts, initial=0), counts, strict=False))
        _rates[(len(numels),)](
            u.values, cached_table(runs, device), norms, len(blocks), THRESHOLD=row.eps_is_threshold,
            ZERO_IS_PLAIN=row.zero_gradient_is_plain, CLIP=row.clip, enable_fp_fusion=False,
        )  # fmt: skip
    _momentum[(len(blocks),)](
        cached_table(tuple(addresses), device), blocks, u.values, u.going, u.momentum, IS_LARS=row is not None,
        RATE_INSIDE=row is not None and row.rate_in_buffer, NESTEROV=u.rule == "nesterov",
        HAS_MOMENTUM=row is not None or u.momentum > 0, enable_fp_fusion=False,
    )  # fmt: skip


def look_up(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    _, channels, height, width = pixels.shape
    values, is_last = pixels.numel(), not out.is_contiguous()
    grid = (triton.cdiv(values, BLOCK.value),)
    _look_up[grid](pixels.contiguous(), table, out, values, channels, height * width, IS_LAST=is_last)

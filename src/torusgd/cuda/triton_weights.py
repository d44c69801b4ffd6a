"""The update of all weights as Triton kernels, and what a pass reads: 16-bit copies of weights, and images.

    _block_norms   one program a block of 4,096 elements
    _rates         one program a layer: the tree over its blocks' norms, and the rate that a variant of LARS makes of it
    _momentum      one program a block: weights and momentum, or nothing if the step is refused
    _copy_weights  one program a block
    _look_up       one program a block of an image's values, as `to_device.look_up`. Torch's own operators take six
                   launches there, and read and write 29 bytes for each value, where 5 would do

Norms have the bits of `optim.norms` on a GPU: squares in float64, by lanes, then in a tree.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..optim import norms as definition
from ..optim.lars import VARIANTS
from .flat_weights import Update
from .kernels import blocks_of, cached_table
from .triton_sums import BFLOAT16, layout_of, offset_in_memory
from .triton_sums import BLOCK as COPY_BLOCK

BLOCK, LANES = tl.constexpr(definition.BLOCK), tl.constexpr(definition.LANES)
LANE_STAGES = tl.constexpr(definition.LANES.bit_length() - 1)
WIDTH, STAGES = tl.constexpr(1024), tl.constexpr(10)
"""block norms that a tree takes at a time, a power of two; a layer has at most the square of it, 4e9 elements"""
_BYTES = 4


@triton.jit
def _block_norms(tensors, blocks, values, norms, DECAYED: tl.constexpr):
    # The norm of one block of a tensor; or with DECAYED of a tensor and the decay of another, where there is one.
    block = blocks + 4 * tl.program_id(0)
    number, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    first = tl.load(tensors + 3 * number).to(tl.pointer_type(tl.float32))
    lane = tl.arange(0, LANES)
    squares = tl.zeros([LANES], tl.float64)
    for chunk in range(0, BLOCK, LANES):
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
    here = tl.arange(0, BLOCK)
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
def _copy_weights(tensors, blocks):
    # One block of one weight: rounds its elements to nearest, ties to even, and puts each where the copy has it.
    block = blocks + 4 * tl.program_id(0)
    number, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    row = tensors + 5 * number
    here = tl.arange(0, COPY_BLOCK)
    is_here = here < count
    value = tl.load(tl.load(row).to(tl.pointer_type(tl.float32)) + begin + here, mask=is_here, other=0.0)
    target, kind = tl.load(row + 1), tl.load(row + 2)
    at = offset_in_memory(begin + here, tl.load(row + 3), tl.load(row + 4))
    is_brain = kind.to(tl.int32) + tl.zeros_like(here) == BFLOAT16
    # The upper half of a float32, rounded as integers: Triton's interpreter would cut the lower half off.
    bits = value.to(tl.int32, bitcast=True)
    upper = tl.where((bits & 0x7FFFFFFF) <= 0x7F800000, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    tl.store(target.to(tl.pointer_type(tl.int16)) + at, upper.to(tl.int16), mask=is_here & is_brain)
    tl.store(target.to(tl.pointer_type(tl.float16)) + at, value.to(tl.float16), mask=is_here & (is_brain == 0))


@triton.jit
def _look_up(pixels, table, out, values, channels, points, IS_LAST: tl.constexpr):
    # One block of the values, in the order in which they lie in memory afterwards.
    at = tl.program_id(0).to(tl.int64) * COPY_BLOCK + tl.arange(0, COPY_BLOCK)
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
    addresses = [
        (u.weights.data_ptr() + _BYTES * offset, u.momenta.data_ptr() + _BYTES * offset, gradient.data_ptr())
        for offset, gradient in zip(u.offsets, u.gradients, strict=True)
    ]
    numels = tuple(gradient.numel() for gradient in u.gradients)
    blocks = blocks_of(numels, BLOCK.value, device)
    row = VARIANTS.get(u.rule)
    if row is not None:
        pairs = [(weight, 0, layer) for layer, (weight, _, _) in enumerate(addresses)]
        pairs += [
            (gradient, weight if row.decayed_gradient else 0, layer)
            for layer, (weight, _, gradient) in enumerate(addresses)
        ]
        both = blocks_of(numels * 2, BLOCK.value, device)
        norms = torch.empty(len(both), device=device)
        _block_norms[(len(both),)](
            cached_table(tuple(pairs), device), both, u.values, norms, DECAYED=row.decayed_gradient,
            enable_fp_fusion=False,
        )  # fmt: skip
        # of each tensor the first of its blocks among all, and how many it has
        counts = [-(-numel // BLOCK.value) for numel in numels]
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


def copy_weights(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    device = weights[0].device
    rows = tuple((weight.data_ptr(), *layout_of(copy)) for weight, copy in zip(weights, copies, strict=True))
    blocks = blocks_of(tuple(weight.numel() for weight in weights), COPY_BLOCK.value, device)
    _copy_weights[(len(blocks),)](cached_table(rows, device), blocks)


def look_up(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    _, channels, height, width = pixels.shape
    values, is_last = pixels.numel(), not out.is_contiguous()
    grid = (triton.cdiv(values, COPY_BLOCK.value),)
    _look_up[grid](pixels.contiguous(), table, out, values, channels, height * width, IS_LAST=is_last)

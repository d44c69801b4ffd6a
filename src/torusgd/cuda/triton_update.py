"""Norms of layers and the update of all weights as Triton kernels: one for SGD, three for LARS.

    _block_norms   one program a block of 4,096 elements
    _rates         one program a layer: the tree over its blocks' norms, and the rate that a variant of LARS makes of it
    _momentum      one program a block: weights and momentum, or nothing where the step is refused

Norms have a definition of their own on a GPU, near that of `norms` (a relative 1e-6) and the same for whole tensors and
for shards: inside a block element i belongs to lane i modulo 256; each lane adds its squares in float64 (in which the
square of a float32 is exact) one after another; the lanes are added in a tree, always the upper half to the lower one.
Nothing of it is left to a library's choice. From there on it is the float64 tree of `norms`.

The update rounds where torch's foreach operators on a GPU round: a product and a sum in one (fma) where those take
`alpha`, otherwise each alone, for which the compiler must not join them (`enable_fp_fusion=False`).
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels import blocks_of, kept_table, table_of
from ..optim.flat import rows_of
from ..optim.lars import VARIANTS
from ..optim.norms import BLOCK

_LANES, _LANE_STAGES = 256, 8
_WIDTH, _STAGES = 1024, 10
"""block norms that a tree takes at a time, a power of two; a layer has at most the square of it, 4e9 elements"""
_BYTES = 4


@triton.jit
def _block_norms(
    tensors,
    blocks,
    values,
    norms,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    DECAYED: tl.constexpr,
):
    """The norm of one block of a tensor; or with DECAYED of a tensor and the decay of another, where there is one."""
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
    for stage in tl.static_range(STAGES):
        squares = tl.sum(tl.reshape(squares, [2, LANES >> (stage + 1)]), axis=0)
    tl.store(norms + tl.program_id(0), tl.sqrt(tl.sum(squares, axis=0)).to(tl.float32))


@triton.jit
def _tree(values, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """The sum by pairs of neighbours, then of those, until one is left."""
    for stage in tl.static_range(STAGES):
        values = tl.sum(tl.reshape(values, [WIDTH >> (stage + 1), 2]), axis=1)
    return tl.sum(values, axis=0)


@triton.jit
def _norm(norms, first, count, WIDTH: tl.constexpr, STAGES: tl.constexpr):
    """The norm of a tensor from those of its blocks; trees of whole runs are branches of the one tree."""
    index = tl.arange(0, WIDTH)
    runs = tl.zeros([WIDTH], tl.float64)
    for run in range(0, tl.cdiv(count, WIDTH)):
        at = run * WIDTH + index
        part = tl.load(norms + first + at, mask=at < count, other=0.0).to(tl.float64)
        runs = tl.where(index == run, _tree(part * part, WIDTH, STAGES), runs)
    return tl.sqrt(_tree(runs, WIDTH, STAGES))


@triton.jit
def _rates(
    values,
    runs,
    norms,
    all_blocks,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    THRESHOLD: tl.constexpr,
    ZERO_IS_PLAIN: tl.constexpr,
    CLIP: tl.constexpr,
):
    """The rate of one layer in the place of that of its group, as `lars.layer_rates` has it."""
    layer = tl.program_id(0)
    row = values + 5 * layer
    rate, trust, decay, eps = tl.load(row), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    first, count = tl.load(runs + 2 * layer), tl.load(runs + 2 * layer + 1)
    weight = _norm(norms, first, count, WIDTH, STAGES)
    gradient = _norm(norms, all_blocks + first, count, WIDTH, STAGES)
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
    tensors,
    blocks,
    values,
    going,
    momentum,
    IS_LARS: tl.constexpr,
    RATE_INSIDE: tl.constexpr,
    NESTEROV: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weights and momentum of one block of a tensor, unless the step is refused."""
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


def block_norms(tensors: Sequence[Tensor]) -> Tensor:
    """See `norms.all_block_norms`."""
    device = tensors[0].device
    flats = [tensor.detach().reshape(-1).float() for tensor in tensors]
    blocks = blocks_of(tuple(flat.numel() for flat in flats), BLOCK, device)
    norms = torch.empty(len(blocks), device=device)
    if len(blocks):
        table = table_of([(flat.data_ptr(), 0, 0) for flat in flats], device)
        _launch_norms(table, blocks, norms, norms, is_decayed=False)
    return norms


def update(
    weights: Tensor,
    momenta: Tensor,
    gradients: Sequence[Tensor],
    going: Tensor,
    offsets: Sequence[int],
    groups: Sequence[int],
    scaled: Sequence[bool],
    rates: Sequence[float],
    decays: Sequence[float],
    trusts: Sequence[float],
    momentum: float,
    rule: str,
    eps: float,
    peak: float,
    foreach: bool | None,
    values: Tensor | None = None,
) -> None:
    """See `flat.update`."""
    device = weights.device
    addresses = [
        (weights.data_ptr() + _BYTES * offset, momenta.data_ptr() + _BYTES * offset, gradient.data_ptr())
        for offset, gradient in zip(offsets, gradients, strict=True)
    ]
    numels = tuple(gradient.numel() for gradient in gradients)
    blocks = blocks_of(numels, BLOCK, device)
    row = VARIANTS.get(rule)
    if values is None:
        values = table_of(rows_of(groups, scaled, rates, decays, trusts, rule, eps, peak), device)
    if row is not None and any(trusts):
        pairs = [(weight, 0, layer) for layer, (weight, _, _) in enumerate(addresses)]
        pairs += [
            (gradient, weight if row.decayed_gradient else 0, layer)
            for layer, (weight, _, gradient) in enumerate(addresses)
        ]
        both = blocks_of(numels * 2, BLOCK, device)
        norms = torch.empty(len(both), device=device)
        _launch_norms(kept_table(tuple(pairs), device), both, values, norms, is_decayed=row.decayed_gradient)
        _rates[(len(numels),)](
            values,
            _runs_of_blocks(numels, device),
            norms,
            len(blocks),
            WIDTH=_WIDTH,
            STAGES=_STAGES,
            THRESHOLD=row.eps_is_threshold,
            ZERO_IS_PLAIN=row.zero_gradient_is_plain,
            CLIP=row.clip,
            enable_fp_fusion=False,
        )
    _momentum[(len(blocks),)](
        kept_table(tuple(addresses), device),
        blocks,
        values,
        going,
        momentum,
        IS_LARS=row is not None,
        RATE_INSIDE=row is not None and row.rate_in_buffer,
        NESTEROV=rule == "nesterov",
        HAS_MOMENTUM=row is not None or momentum > 0,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )


def _launch_norms(tensors: Tensor, blocks: Tensor, values: Tensor, norms: Tensor, is_decayed: bool) -> None:
    _block_norms[(len(blocks),)](
        tensors,
        blocks,
        values,
        norms,
        BLOCK=BLOCK,
        LANES=_LANES,
        STAGES=_LANE_STAGES,
        DECAYED=is_decayed,
        enable_fp_fusion=False,
    )


def _runs_of_blocks(numels: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [tensors, 2]: the first of each tensor's blocks among all, and how many it has."""
    counts = [-(-numel // BLOCK) for numel in numels]
    return kept_table(tuple(zip(accumulate(counts, initial=0), counts, strict=False)), device)

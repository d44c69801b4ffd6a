"""The operators that a GPU runs once a bucket and virtual worker, as one Triton kernel each.

`operators` has the same made of torch's own operators, some ten launches a bucket, each of which reads or writes the
bucket. Here a gradient is read once, in its own dtype and layout, and its sum read and written once: 0.07 to 0.1 ms for
a ResNet-50 by an H100's bandwidth. Integer maxima and counts are atomic, which no order can change; there is no
floating-point sum. `kernels.register` has them run on CUDA tensors; Triton is the extra `triton`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gradients.integer_sum import COUNT_BITS
from ..kernels import blocks_of, table_of

BLOCK = 1024
"""elements of one program"""
BFLOAT16 = 1
"""the number of this dtype in a table"""
_KINDS = {torch.float32: 0, torch.bfloat16: BFLOAT16, torch.float16: 2}


@triton.jit
def place_in_memory(index, channels, places):
    """From the place in logical order (filter, channel, place) to that in memory (filter, place, channel)."""
    filter_ = index // (channels * places)
    channel = index // places % channels
    return filter_ * channels * places + index % places * channels + channel


@triton.jit
def _add_gradients(how, blocks, scales, message, found, slots, BLOCK: tl.constexpr):
    """One block of one slot: rounds and adds its elements, and finds the largest and those that vanish."""
    block = blocks + 4 * tl.program_id(0)
    slot, begin, count, target = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    address, kind = tl.load(how + 4 * slot), tl.load(how + 4 * slot + 1)
    channels, places = tl.load(how + 4 * slot + 2), tl.load(how + 4 * slot + 3)
    here = tl.arange(0, BLOCK)
    kinds = kind.to(tl.int32) + tl.zeros_like(here)
    is_here = here < count
    at = place_in_memory(begin + here, channels, places)
    single = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=is_here & (kinds == 0), other=0.0)
    brain = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + at, mask=is_here & (kinds == 1), other=0.0)
    half = tl.load(address.to(tl.pointer_type(tl.float16)) + at, mask=is_here & (kinds == 2), other=0.0)
    value = tl.where(kinds == 0, single, tl.where(kinds == 1, brain.to(tl.float32), half.to(tl.float32)))
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


@triton.jit
def _add_bounds(found, scales, message, length, slots, unit, cap, BITS: tl.constexpr, SLOTS: tl.constexpr):
    """All slots of a bucket in one program."""
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
    tl.store(lost, tl.load(lost) + (count & ((1 << BITS) - 1)))
    tl.store(lost + 1, tl.load(lost + 1) + (count >> BITS))
    tl.store(found + slot, tl.zeros_like(bits), mask=is_slot)
    tl.store(found + slots, 0)


def add_gradients(gradients: Sequence[Tensor], sizes: Tensor, scales: Tensor, message: Tensor, found: Tensor) -> None:
    """See `operators.add_gradients`."""
    laid_out = [_dense(gradient) for gradient in gradients]  # they live until the kernel is launched
    rows = [layout_of(gradient) for gradient in laid_out]
    how = table_of(rows, message.device)
    blocks = blocks_of(tuple(gradient.numel() for gradient in gradients), BLOCK, message.device)
    _add_gradients[(len(blocks),)](
        how, blocks, scales, message, found, len(gradients), BLOCK=BLOCK, enable_fp_fusion=False
    )


def add_bounds(found: Tensor, scales: Tensor, message: Tensor, length: int, shift: float, cap: float) -> None:
    """See `operators.add_bounds`."""
    slots = len(scales)
    _add_bounds[(1,)](
        found,
        scales,
        message,
        length,
        slots,
        1.0 / shift,
        cap,
        BITS=COUNT_BITS,
        SLOTS=triton.next_power_of_2(slots),
        enable_fp_fusion=False,
    )


def _dense(gradient: Tensor) -> Tensor:
    """A gradient in one of the layouts that the kernel reads: as `torch.autograd.grad` gives it, it may have others,
    such as that of a transposed tensor."""
    is_read = gradient.is_contiguous() or (
        gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)
    )
    return gradient if is_read else gradient.contiguous()


def layout_of(tensor: Tensor) -> tuple[int, int, int, int]:
    """Address, kind, channels, places of a channel; one channel where logical order is that of the memory.

    The tensor is contiguous, or channels-last with four dims.
    """
    kind = _KINDS[tensor.dtype]
    if tensor.is_contiguous():
        return tensor.data_ptr(), kind, 1, tensor.numel()
    return tensor.data_ptr(), kind, tensor.shape[1], tensor.shape[2] * tensor.shape[3]

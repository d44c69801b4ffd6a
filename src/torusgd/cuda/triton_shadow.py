"""The 16-bit copies of all weights as one Triton kernel (`shadow` has the same made of torch's own operators)."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..kernels import blocks_of, kept_table
from .triton_kernels import BFLOAT16, layout_of, place_in_memory

BLOCK = 1024
"""elements of one program"""


@triton.jit
def _copy_weights(tensors, blocks, BFLOAT16: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one weight: rounds its elements to nearest, ties to even, and puts each where the copy has it."""
    block = blocks + 4 * tl.program_id(0)
    number, begin, count = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    row = tensors + 5 * number
    here = tl.arange(0, BLOCK)
    is_here = here < count
    value = tl.load(tl.load(row).to(tl.pointer_type(tl.float32)) + begin + here, mask=is_here, other=0.0)
    target, kind = tl.load(row + 1), tl.load(row + 2)
    at = place_in_memory(begin + here, tl.load(row + 3), tl.load(row + 4))
    is_brain = kind.to(tl.int32) + tl.zeros_like(here) == BFLOAT16
    # The upper half of a float32, rounded as integers: Triton's interpreter would cut the lower half off.
    bits = value.to(tl.int32, bitcast=True)
    upper = tl.where((bits & 0x7FFFFFFF) <= 0x7F800000, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    tl.store(target.to(tl.pointer_type(tl.int16)) + at, upper.to(tl.int16), mask=is_here & is_brain)
    tl.store(target.to(tl.pointer_type(tl.float16)) + at, value.to(tl.float16), mask=is_here & (is_brain == 0))


def copy_weights(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """See `shadow.copy_weights`."""
    device = weights[0].device
    rows = tuple((weight.data_ptr(), *layout_of(copy)) for weight, copy in zip(weights, copies, strict=True))
    blocks = blocks_of(tuple(weight.numel() for weight in weights), BLOCK, device)
    _copy_weights[(len(blocks),)](kept_table(rows, device), blocks, BFLOAT16=BFLOAT16, BLOCK=BLOCK)

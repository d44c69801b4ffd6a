"""The look-up that normalises images on a GPU, as one Triton kernel (`upload` has the same made of torch's operators).

Torch's own takes six launches, and moves the images as int32 and as float32 before they have their places: it reads and
writes 29 bytes for each value, where 5 do.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""values of one program"""


@triton.jit
def _look_up(pixels, table, out, values, channels, places, IS_LAST: tl.constexpr, BLOCK: tl.constexpr):
    """One block of the values, in the order in which they lie in memory afterwards."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_here = at < values
    if IS_LAST:  # image, place, channel
        channel = at % channels
        image, place = at // (channels * places), at // channels % places
        byte = tl.load(pixels + (image * channels + channel) * places + place, mask=is_here, other=0)
    else:
        channel = at // places % channels
        byte = tl.load(pixels + at, mask=is_here, other=0)
    found = tl.load(table + channel * 256 + byte.to(tl.int32), mask=is_here, other=0.0)
    tl.store(out + at, found, mask=is_here)


def look_up(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    """See `to_device.look_up`."""
    _, channels, height, width = pixels.shape
    values = pixels.numel()
    _look_up[(triton.cdiv(values, BLOCK),)](
        pixels.contiguous(),
        table,
        out,
        values,
        channels,
        height * width,
        IS_LAST=not out.is_contiguous(),
        BLOCK=BLOCK,
    )

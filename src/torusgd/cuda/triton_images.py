"""The look-up that normalises images in a captured pass, as one Triton kernel with the values of `to_device.look_up`.

Torch's own operators take six launches there, and move the images as int32 and as float32 before they lie where they
belong: 29 bytes are read and written for each value, and 5 would do.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(1024)
"""values of one program"""


@triton.jit
def _look_up(pixels, table, out, values, channels, points, IS_LAST: tl.constexpr):
    """One block of the values, in the order in which they lie in memory afterwards."""
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


def look_up(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    """One kernel."""
    _, channels, height, width = pixels.shape
    values, is_last = pixels.numel(), not out.is_contiguous()
    grid = (triton.cdiv(values, BLOCK.value),)
    _look_up[grid](pixels.contiguous(), table, out, values, channels, height * width, IS_LAST=is_last)

"""The box of an image that becomes the network's input, and its resampling; `augment` draws random boxes."""

import numpy as np
import torch

from .types import Pixels, Region


def scaled(height: int, width: int, shorter: int) -> Region:
    """The whole image with its shorter side scaled to `shorter` (the longer one rounded down, as torchvision does).

    Of an image more than four times as long as wide only the middle is taken: the centre crop that follows never shows
    more, and an image of a single row would need gigabytes.
    """
    side = min(height, width)
    tall, wide = min(height, 4 * side), min(width, 4 * side)
    top, left = (height - tall) // 2, (width - wide) // 2
    return Region(top, left, tall, wide, shorter * tall // side, shorter * wide // side)


def render(image: Pixels, region: Region) -> Pixels:
    """The region scaled by bilinear interpolation with antialiasing.

    Args:
        image: uint8 [height, width, channels].

    Returns:
        uint8 [channels, rows, columns], contiguous; each value within one level of Pillow's bilinear resize.
    """
    # Always a copy, because `image` may lie in a decoder's scratch memory, which the next image overwrites.
    return np.array(resample(image, region).transpose(2, 0, 1), order="C")


def resample(image: Pixels, region: Region) -> Pixels:
    """As `render`, but uint8 [rows, columns, channels]; a view of the image if its size stays."""
    # Cut first, then scaled: pixels outside the box don't bleed in, as in torchvision.
    box = image[region.top : region.top + region.height, region.left : region.left + region.width]
    if (region.rows, region.columns) == (region.height, region.width):
        return box
    # torch's kernel for uint8 runs on the calling thread alone and releases the interpreter's lock, so that the threads
    # of the loader resize in parallel.
    planes = torch.from_numpy(np.require(box, requirements=["C", "W"])[None]).permute(0, 3, 1, 2)
    resized = np.empty((1, region.rows, region.columns, box.shape[2]), np.uint8)
    # As torch.nn.functional.interpolate(planes, ..., mode="bilinear", antialias=True), which has no `out`: without it
    # the kernel ends by separating the channels, pixel by pixel.
    torch.ops.aten._upsample_bilinear2d_aa.out(
        planes, resized.shape[1:3], False, None, None, out=torch.from_numpy(resized).permute(0, 3, 1, 2)
    )
    return resized[0]


def cut_at(image: Pixels, size: tuple[int, int], corner: tuple[float, float]) -> Pixels:
    """Rows x columns out of [..., height, width]; `corner` in [0, 1) says how far down and right."""
    rows, columns = size
    height, width = image.shape[-2:]
    top, left = int(corner[0] * (height - rows + 1)), int(corner[1] * (width - columns + 1))
    return image[..., top : top + rows, left : left + columns]


def centre(image: Pixels, size: tuple[int, int]) -> Pixels:
    """The middle rows x columns of [..., height, width], offsets rounded as torchvision's CenterCrop does."""
    rows, columns = size
    height, width = image.shape[-2:]
    top, left = round((height - rows) / 2), round((width - columns) / 2)
    return image[..., top : top + rows, left : left + columns]

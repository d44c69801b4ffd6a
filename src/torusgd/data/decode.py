"""JPEG and PNG bytes to pixels, no more of them than wanted. The bytes are untrusted.

EXIF orientation is ignored, as torchvision ignores it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UserError
from .view import Choose, Region, render

Pixels = npt.NDArray[np.uint8]

# A header may claim 65,535 x 65,535 pixels, 12 GB of them; the largest cameras make about 200 million.
MAX_PIXELS = 250_000_000

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


class Undecodable(Exception):
    """The bytes are no picture that can be decoded; the message says why."""


def load_decoders() -> tuple[Any, Any]:
    """The modules simplejpeg and cv2.

    Raises:
        UserError: They are not installed.
    """
    try:
        import cv2
        import simplejpeg
    except ImportError as error:
        raise UserError(
            f"data.source: JPEG and PNG files need simplejpeg and OpenCV ({error}); pip install 'torusgd[images]'"
        ) from error
    cv2.setNumThreads(0)  # the loader has threads of its own; OpenCV's would take the cores from training
    return simplejpeg, cv2


def picture_size(data: bytes) -> tuple[int, int]:
    """Height and width in pixels, from the header alone.

    Raises:
        Undecodable: Neither JPEG nor PNG, no size in the header, or more than MAX_PIXELS.
    """
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        height, width = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    elif data.startswith(_JPEG):
        height, width = _jpeg_size(data)
    elif not data:
        raise Undecodable("the file is empty")
    else:
        raise Undecodable("neither JPEG nor PNG")
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise Undecodable(f"its header says {width} x {height} pixels; at most {MAX_PIXELS} are decoded")
    return height, width


def _jpeg_size(data: bytes) -> tuple[int, int]:
    at = 2
    while (at := data.find(b"\xff", at)) >= 0 and at + 9 <= len(data):
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start of frame
            return int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD9:  # no segment
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise Undecodable("a JPEG without a size, cut short in its header")


def decode(data: bytes, channels: int, shrink: int = 1) -> Pixels:
    """All pixels of a JPEG or PNG.

    Args:
        channels: 3 for RGB, 1 for grey; the picture is converted.
        shrink: 1, 2, 4 or 8: a JPEG is decoded at that fraction of its size (rounded up), which is cheaper.

    Returns:
        uint8 [height, width, channels].

    Raises:
        Undecodable: Also for a file that is cut short. Flaws that libjpeg only warns of are let pass.
    """
    size = picture_size(data)
    simplejpeg, cv2 = load_decoders()
    if data.startswith(_PNG):
        shrink = 1
    height, width = (-(-side // shrink) for side in size)
    pixels = None
    if data.startswith(_JPEG):
        try:
            pixels = simplejpeg.decode_jpeg(
                data, "RGB" if channels == 3 else "GRAY", min_height=height, min_width=width, min_factor=shrink
            )
        except ValueError as error:
            if "Premature end of JPEG file" in str(error):
                raise Undecodable("a JPEG that is cut short") from error
    if pixels is None:  # a PNG, or a JPEG that the fast decoder doesn't take
        pixels = _decode_any(cv2, data, channels, shrink)
    if pixels.shape[:2] != (height, width):
        raise Undecodable(f"{pixels.shape[1]} x {pixels.shape[0]} pixels where its header says {width} x {height}")
    return pixels.reshape(height, width, channels)


def _decode_any(cv2: Any, data: bytes, channels: int, shrink: int) -> Pixels:
    if channels == 1:
        mode = cv2.IMREAD_GRAYSCALE if shrink == 1 else getattr(cv2, f"IMREAD_REDUCED_GRAYSCALE_{shrink}")
    else:
        mode = cv2.IMREAD_COLOR if shrink == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{shrink}")
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise Undecodable(str(error).strip()) from error
    if pixels is None:
        raise Undecodable("damaged or cut short")
    return pixels if channels == 1 else np.ascontiguousarray(pixels[:, :, ::-1])


def decode_region(data: bytes, channels: int, choose: Choose) -> Pixels:
    """The region that `choose(height, width)` names, uint8 [channels, rows, columns].

    A JPEG is decoded at 1/2, 1/4 or 1/8 where the box keeps enough pixels for its size even so.

    Raises:
        Undecodable: As `decode`.
    """
    region = choose(*picture_size(data))
    shrink = shrink_for(region) if data.startswith(_JPEG) else 1
    return render(decode(data, channels, shrink), shrunk(region, shrink))


# How many decoded pixels an output pixel needs, in each direction, before a smaller decode is taken.
_MARGIN = 1.0


def shrink_for(region: Region) -> int:
    """The largest of 1, 2, 4 and 8 at which the box still has enough pixels."""
    room = min(region.height / region.rows, region.width / region.columns) / _MARGIN
    return max(shrink for shrink in (1, 2, 4, 8) if shrink <= max(room, 1))


def shrunk(region: Region, shrink: int) -> Region:
    """The same box on a picture of 1/shrink the size, its edges moved outwards to whole pixels."""
    top, left = region.top // shrink, region.left // shrink
    bottom, right = -(-(region.top + region.height) // shrink), -(-(region.left + region.width) // shrink)
    return Region(top, left, bottom - top, right - left, region.rows, region.columns)

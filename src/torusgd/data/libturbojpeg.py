"""The box of a JPEG and nothing around it, by libjpeg-turbo 3 where a machine has it (`libturbojpeg.so.0`).

simplejpeg, which decodes everywhere else, decodes whole rows from the top down. libjpeg-turbo's own library can leave
out the inverse cosine transform and the colours of all that lies above, below and beside a box; the Huffman codes
above and beside it must be read in any case.

Not a bit may depend on whether a machine has the library. So it is used only once it has given the same bytes as
simplejpeg for some small pictures (`_agrees`), only for files of the commonest kinds, and at the first warning of a
flaw it gives up, so that whatever is damaged is decoded as it is without the library.

https://libjpeg-turbo.org, turbojpeg.h of version 3: tj3SetCroppingRegion, tj3Decompress8.
"""

import ctypes
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from glob import escape, glob
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from .types import Pixels

log = logging.getLogger(__name__)

_DECOMPRESS = 1  # TJINIT_DECOMPRESS
_STOP_ON_WARNING, _WIDTH, _HEIGHT, _SAVE_MARKERS = 0, 5, 6, 25  # TJPARAM_...
_PIXEL_FORMATS = {1: 6, 3: 0}  # TJPF_GRAY, TJPF_RGB

_MARGIN = 2
"""Decoded pixels around the box, since chroma is interpolated from neighbours, and the library repeats the outermost
where a region ends. One is enough (tests/data/test_libturbojpeg.py)."""

Memory = Callable[[int], Pixels | None]
"""uint8 [at least so many], to put pixels into, or None"""


class _Region(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class _Factor(ctypes.Structure):
    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


class LibTurboJpeg:
    """The library; safe to use from several threads.

    Args:
        library: As ctypes opens it.

    Raises:
        AttributeError: It is older than version 3.
    """

    def __init__(self, library: Any) -> None:
        handle, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        for function, result, arguments in (
            (library.tj3Init, handle, (number,)),
            (library.tj3Destroy, None, (handle,)),
            (library.tj3Set, number, (handle, number, number)),
            (library.tj3Get, number, (handle, number)),
            (library.tj3DecompressHeader, number, (handle, ctypes.c_char_p, size)),
            (library.tj3SetScalingFactor, number, (handle, _Factor)),
            (library.tj3SetCroppingRegion, number, (handle, _Region)),
            (library.tj3Decompress8, number, (handle, ctypes.c_char_p, size, ctypes.c_void_p, number, number)),
        ):
            function.restype, function.argtypes = result, arguments
        self._library = library

    def box(
        self,
        data: bytes,
        size: tuple[int, int],
        block: int,
        shrink: int,
        box: tuple[int, int, int, int],
        channels: int,
        memory: Memory,
    ) -> Pixels | None:
        """A box of a JPEG.

        Args:
            data: A baseline JPEG.
            size: Its height and width, in full size.
            block: The width of its blocks (iMCUs), in full size: 8 or 16.
            shrink: 1, 2, 4 or 8.
            box: Top, left, height, width, counted in the pixels of the smaller picture.
            channels: 1 or 3.
            memory: Gives what the pixels are put into.

        Returns:
            uint8 [height, width, channels], in that memory; None where the file has a flaw, where its size is another
            one, or where there is no memory.
        """
        rows, columns = (-(-side // shrink) for side in size)
        top, left, height, width = box
        block = max(1, block // shrink)
        x, y = max(0, left - _MARGIN) // block * block, max(0, top - _MARGIN)
        wide, tall = min(columns, left + width + _MARGIN) - x, min(rows, top + height + _MARGIN) - y
        kept = memory(tall * wide * channels)
        if kept is None:
            return None
        # One for each picture, as simplejpeg has: it would keep tables from one file for the next that lacks them, and
        # after a damaged header it is of no more use.
        call, handle = self._library, self._library.tj3Init(_DECOMPRESS)
        if handle is None:
            return None
        call.tj3Set(handle, _STOP_ON_WARNING, 1)
        call.tj3Set(handle, _SAVE_MARKERS, 0)  # no colour profiles; refused before 3.1, which keeps none
        is_done = (
            call.tj3DecompressHeader(handle, data, len(data)) == 0
            and (call.tj3Get(handle, _HEIGHT), call.tj3Get(handle, _WIDTH)) == size
            and call.tj3SetScalingFactor(handle, _Factor(1, shrink)) == 0
            and call.tj3SetCroppingRegion(handle, _Region(x, y, wide, tall)) == 0
            and call.tj3Decompress8(handle, data, len(data), kept.ctypes.data, 0, _PIXEL_FORMATS[channels]) == 0
        )
        call.tj3Destroy(handle)
        if not is_done:
            return None
        pixels = kept[: tall * wide * channels].reshape(tall, wide, channels)
        return pixels[top - y : top - y + height, left - x : left - x + width]


_loading = threading.Lock()


def load(simplejpeg: Any) -> LibTurboJpeg | None:
    """The machine's library; None where there is none, or none whose pixels are those of simplejpeg."""
    with _loading:  # loaders have several threads, and one answer is enough for all
        return _load(simplejpeg)


@cache
def _load(simplejpeg: Any) -> LibTurboJpeg | None:
    for path in _candidates():
        try:
            found = LibTurboJpeg(ctypes.CDLL(path))
        except (OSError, AttributeError):  # not there; older than version 3
            continue
        if _agrees(found, simplejpeg):
            return found
        log.warning("%s gives other pixels than simplejpeg, and is left unused", path)
    return None


def _candidates() -> Iterator[str]:
    """Where the library may lie: beside this Python (conda), in the system, in its makers' package, in a wheel."""
    yield str(Path(sys.prefix, "lib", "libturbojpeg.so.0"))
    yield "libturbojpeg.so.0"
    yield "/opt/libjpeg-turbo/lib64/libturbojpeg.so.0"
    wheel = find_spec("turbojpeg")
    if wheel is not None and wheel.origin is not None:
        yield from sorted(glob(f"{escape(str(Path(wheel.origin).parent))}/turbojpeg.libs/libturbojpeg-*.so*"))


_SIZE = (61, 83)
_KINDS = {"444": 8, "422": 16, "420": 16, "Gray": 8}
"""the kinds of chroma that are decoded here, and the width of their blocks"""
_BOXES = ((0, 0, 1, 1), (1, 3, 4, 2), (2, 5, 3, 4), (3, 1, 2, 8), (0, 6, 6, 4), (5, 8, 2, 2))
"""top, left, height and width in eighths of 64 x 88 pixels, in which the pictures lie"""


def _agrees(library: LibTurboJpeg, simplejpeg: Any) -> bool:
    """Whether the library gives the same bytes as simplejpeg: pictures of each kind, every size, boxes all over."""
    for kind, block in _KINDS.items():
        picture = _picture(kind, simplejpeg)
        for data, shrink in product((picture, _overflowing(picture)), (1, 2, 4, 8)):
            rows, columns = (-(-side // shrink) for side in _SIZE)
            for channels, colours in ((1, "GRAY"), (3, "RGB")):
                whole = simplejpeg.decode_jpeg(data, colours, False, False, rows, columns, shrink)
                for eighths in _BOXES:
                    # One pixel before the eighths where that can be, so that edges are odd at every size.
                    down, right, height, width = (max(1, 8 * eighth // shrink - 1) for eighth in eighths)
                    box = (down - 1, right - 1, height, width)
                    taken = library.box(data, _SIZE, block, shrink, box, channels, _new_memory)
                    expected = whole[down - 1 : down - 1 + height, right - 1 : right - 1 + width]
                    if taken is None or not np.array_equal(taken, expected):
                        return False
    return True


def _picture(kind: str, simplejpeg: Any) -> bytes:
    """A JPEG of waves and noise in all colours."""
    rows, columns = np.mgrid[: _SIZE[0], : _SIZE[1]]
    waves = np.stack([np.sin(rows / 7), np.cos(columns / 9), np.sin((rows + columns) / 11)], axis=2)
    noise = np.random.default_rng(0).integers(-40, 41, waves.shape)
    pixels = np.clip(128 + 90 * waves + noise, 0, 255).astype(np.uint8)
    if kind == "Gray":
        return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels[..., :1]), 90, "GRAY", kind)
    return simplejpeg.encode_jpeg(pixels, 90, "RGB", kind)


def _overflowing(data: bytes) -> bytes:
    """A JPEG with its quantisation steps raised to 255.

    Then the cosine transform leaves its range, as in a damaged file without a flaw in its code, and builds of
    libjpeg-turbo with SIMD instructions give other pixels than those without.
    """
    return re.sub(rb"(\xff\xdb\x00\x43[\x00\x01])[\x00-\xff]{64}", rb"\1" + b"\xff" * 64, data)


def _new_memory(size: int) -> Pixels:
    return np.empty(size, np.uint8)

"""JPEG and PNG bytes to pixels, no more of them than a crop needs, and what all sources of such bytes have in common.

JPEGs are decoded by libjpeg or, with `data.decoder: nvjpeg`, cut and resampled too by a GPU with NVIDIA's nvJPEG, by
way of torchvision. The pixels are not the same, so the recipe names the decoder. The bytes are untrusted: sizes are
checked before memory is allocated. EXIF orientation is ignored, as by torchvision.
"""

import base64
import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError, first_line, needs
from .geometry import render, resample
from .types import Choose, CorruptImage, Int64, Pixels, Region

MOST_BYTES = 1 << 28  # the largest encoded picture that is read; no camera makes one above 256 MiB
# Of a JPEG in one scan, 3 bytes each while it is decoded; the largest cameras make about 200 million.
MAX_PIXELS = 250_000_000
# A pixel of a PNG takes 6 bytes and counts twice; one of a JPEG in several scans (progressive) takes up to 12 and
# counts four times. So the largest picture takes 750 MB, while a header of a few bytes may claim 65,535 x 65,535.
_PNG_WEIGHT, _SCANS_WEIGHT = 2, 4
# Encoders write 1 to about 15. Each is a pass over the whole picture, for 60 bytes of file.
_MOST_SCANS = 100
_MOST_SCANNED = 1 << 30  # pixels times scans: two seconds of decoding; 16 scans of the largest progressive picture
# Weighted pixels beyond which a process decodes one picture at a time, which bounds the memory of all threads.
_LARGE = 1 << 26
_COLOURS = {1: "GRAY", 3: "RGB"}
_LARGEST_SCRATCH = 1 << 24  # bytes that a thread reuses for its next picture
_local = threading.local()
_one_large = threading.Lock()

_MOST_AT_ONCE = 64  # pictures of one call of nvJPEG, which bounds its memory beside their pixels
# From pictures and channels to uint8 [channels, height, width] each; RuntimeError if one can't be decoded.
DecodeMany = Callable[[Sequence[bytes], int], Sequence[Tensor]]

JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


class Undecodable(Exception):
    """The bytes are no picture that can be decoded; the message says why."""


def load_decoders() -> tuple[Any, Any]:
    """The modules simplejpeg and cv2; UserError if they are not installed."""
    packages = "simplejpeg opencv-python-headless (the extra images)"
    with needs("data.source: JPEG and PNG files need simplejpeg and OpenCV", packages):
        import cv2
        import simplejpeg
    cv2.setNumThreads(0)  # the loader has threads of its own; OpenCV's would take the cores from training
    return simplejpeg, cv2


def picture_size(data: bytes) -> tuple[int, int]:
    """Height and width in pixels, from the header; Undecodable if `decode` would refuse what the header says."""
    return _read_header(data)[:2]


class _Header(NamedTuple):
    height: int
    width: int
    weighted: int  # pixels, weighted by the memory that they take
    frame: int  # offset of a JPEG's start-of-frame marker


def _read_header(data: bytes) -> _Header:
    scans, weight, frame = 1, 1, -1
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) >= 24:
        height, width = int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
        weight = _PNG_WEIGHT
    elif data.startswith(JPEG):
        frame = _jpeg_frame(data)
        height, width = (int.from_bytes(data[at : at + 2], "big") for at in (frame + 5, frame + 7))
        # Each scan begins with a marker behind the frame's. Coded pixels never hold these two bytes; a thumbnail may,
        # but lies before the frame. `bytes.count` takes four times as long, which was a fiftieth of a picture's time.
        rest = np.frombuffer(data, np.uint8)[frame:]
        scans = int(np.count_nonzero((rest[:-1] == 0xFF) & (rest[1:] == 0xDA)))
        weight = _SCANS_WEIGHT if scans > 1 or data[frame + 1] not in (0xC0, 0xC1) else 1
    else:
        raise Undecodable("neither JPEG nor PNG" if data else "the file is empty")
    if height < 1 or width < 1 or weight * height * width > MAX_PIXELS:
        raise Undecodable(f"its header says {width} x {height} pixels; at most {MAX_PIXELS // weight} are decoded")
    if scans > _MOST_SCANS or scans * height * width > _MOST_SCANNED:
        most = f"at most {_MOST_SCANS} are decoded, and 2^30 pixels in all"
        raise Undecodable(f"{scans} scans of {width} x {height} pixels; {most}")
    return _Header(height, width, weight * height * width, frame)


def is_common_jpeg(data: bytes) -> bool:
    """Whether it is a whole JPEG that every decoder knows: baseline or progressive, 8 bits, grey or luma and chroma."""
    try:
        frame = _read_header(data).frame
    except Undecodable:
        return False
    if frame < 0 or data[frame + 1] not in (0xC0, 0xC2) or data[frame + 4] != 8 or not data.endswith(b"\xff\xd9"):
        return False
    adobe = data.find(b"\xff\xee\x00\x0eAdobe", 0, frame)  # its last byte says how the colours are coded
    is_plain_rgb = data[frame + 9] == 3 and adobe >= 0 and data[adobe + 15] == 0
    return data[frame + 9] in (1, 3) and not is_plain_rgb


def _jpeg_frame(data: bytes) -> int:
    """The offset of the start-of-frame marker, before precision, height, width and colours."""
    at = 2
    while (at := data.find(b"\xff", at)) >= 0 and at + 10 <= len(data):
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return at
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD9:  # a marker alone, without a segment
            at += 2
        else:  # a segment, which begins with its length
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise Undecodable("a JPEG without a size, cut short in its header")


def decode(data: bytes, channels: int, shrink: int = 1, buffer: Pixels | None = None) -> Pixels:
    """All pixels of a JPEG or PNG, uint8 [height, width, channels]: 3 for RGB, 1 for grey; the picture is converted.

    With `shrink` 2, 4 or 8 a JPEG is decoded at that fraction of its size (rounded up), maybe into `buffer`.
    Undecodable also if the file is cut short, but not for flaws that libjpeg only warns of.
    """
    header = _read_header(data)
    shrink = shrink if data.startswith(JPEG) else 1
    height, width = (-(-side // shrink) for side in (header.height, header.width))
    # One large picture may take 750 MB; each thread of a loader could meet one.
    with _one_large if header.weighted > _LARGE else nullcontext():
        simplejpeg, cv2 = load_decoders()
        pixels = None
        if data.startswith(JPEG):
            try:
                pixels = simplejpeg.decode_jpeg(data, _COLOURS[channels], False, False, height, width, shrink, buffer)
            except ValueError as error:
                if "Premature end of JPEG file" in str(error):
                    raise Undecodable("a JPEG that is cut short") from error
        if pixels is None:  # a PNG, or a JPEG that the fast decoder doesn't take
            if _PNG_WEIGHT * height * width > MAX_PIXELS:  # OpenCV's pixels are BGR, and turned in a copy
                raise Undecodable(f"{width} x {height} pixels of a JPEG of an unusual kind")
            pixels = _decode_any(cv2, data, channels, shrink)
    if pixels.shape[:2] != (height, width):
        raise Undecodable(f"{pixels.shape[1]} x {pixels.shape[0]} pixels where its header says {width} x {height}")
    return pixels.reshape(height, width, channels)


def _decode_any(cv2: Any, data: bytes, channels: int, shrink: int) -> Pixels:
    mode = "IMREAD_" if shrink == 1 else "IMREAD_REDUCED_"
    mode += ("GRAYSCALE" if channels == 1 else "COLOR") + ("" if shrink == 1 else f"_{shrink}")
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), getattr(cv2, mode) | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise Undecodable(f"OpenCV can't decode it: {error.err}") from error
    if pixels is None:
        raise Undecodable("damaged or cut short")
    return pixels if channels == 1 else np.ascontiguousarray(pixels[:, :, ::-1])


def decode_region(data: bytes, channels: int, choose: Choose) -> Pixels:
    """The region that `choose(height, width)` names, uint8 [channels, rows, columns]; raises as `decode`.

    UserError if the region is an `exact` one, and the decoder here gives other pixels than the specified ones.
    """
    header = _read_header(data)
    region = choose(header.height, header.width)
    if region.exact:
        require_specified(data)
    return _decoded_region(data, header, channels, region)


def _decoded_region(data: bytes, header: _Header, channels: int, region: Region) -> Pixels:
    if not data.startswith(JPEG):
        return _rendered(decode(data, channels), region)
    # Two things save time: a JPEG is decoded at a half, a quarter or an eighth of its size if the network takes a much
    # smaller image, and only down to the lower edge of the crop.
    shrink, region = fit(region, header.height, header.width)
    top, left, tall, wide = (-(-edge // shrink) for edge in (region.top, region.left, region.height, region.width))
    buffer = _scratch(header.height * header.width * channels)
    pixels = _upper_rows(data, header, channels, shrink, region.top + region.height + 2 * shrink, buffer)
    if pixels is None:
        pixels = decode(data, channels, shrink, buffer)
    return _rendered(pixels, replace(region, top=top, left=left, height=tall, width=wide))


def _rendered(pixels: Pixels, region: Region) -> Pixels:
    if pixels.shape[2] != 3:
        return render(pixels, region)
    _, cv2 = load_decoders()  # OpenCV separates three channels in a third of numpy's time
    planes = np.empty((3, region.rows, region.columns), np.uint8)
    cv2.split(resample(pixels, region), list(planes))
    return planes


# Decoded pixels for each output pixel, in each direction, that a smaller decode must leave. On the test's picture the
# result is then within 43 dB of that of the full decode with the same box; whose edges move to whole decoded pixels.
_MARGIN = 1.5


def fit(region: Region, height: int, width: int) -> tuple[int, Region]:
    """The factor (1, 2, 4 or 8) by which a JPEG of that size can be decoded smaller for this region, and the latter."""
    # The smaller of the two directions decides, since both must leave pixels enough.
    most = min(region.height / region.rows, region.width / region.columns) / _MARGIN
    shrink = max(shrink for shrink in (1, 2, 4, 8) if shrink <= max(most, 1))
    # Edges move outwards, so that no pixel of the box is lost, to multiples of the factor: whole pixels of the result.
    top, left = region.top // shrink * shrink, region.left // shrink * shrink
    bottom = min(height, -(-(region.top + region.height) // shrink) * shrink)
    right = min(width, -(-(region.left + region.width) // shrink) * shrink)
    return shrink, replace(region, top=top, left=left, height=bottom - top, width=right - left)


def _upper_rows(
    data: bytes, header: _Header, channels: int, shrink: int, rows: int, buffer: Pixels | None
) -> Pixels | None:
    """At least the upper `rows` of a JPEG, counted in full size; None if it must be decoded whole."""
    # The last row may be blurred, since the decoder has no rows below it: callers request some more than they use.
    # simplejpeg always decodes a whole picture, so it gets a header with a smaller height. It decodes that many rows,
    # then complains of the data that are left over, which is the sign that the rows are complete.
    # A progressive file has all rows only at its end, so it is decoded whole. So is a file without its end marker: one
    # that is cut short below the crop must not pass as whole.
    frame = header.frame
    if data[frame + 1] != 0xC0 or rows >= header.height or not data.endswith(b"\xff\xd9") or buffer is None:
        return None
    simplejpeg, _ = load_decoders()
    # The height stands five bytes behind the marker.
    data = data[: frame + 5] + rows.to_bytes(2, "big") + data[frame + 7 :]
    tall, wide = -(-rows // shrink), -(-header.width // shrink)
    try:
        simplejpeg.decode_jpeg(data, _COLOURS[channels], False, False, tall, wide, shrink, buffer)
    except ValueError as error:
        if "extraneous bytes before marker 0xd" not in str(error):
            return None
    return buffer[: tall * wide * channels].reshape(tall, wide, channels)


def _scratch(size: int) -> Pixels | None:
    """This thread's memory for the next decode, reused each time; None for a very large picture."""
    if size > _LARGEST_SCRATCH:
        return None
    memory: Pixels | None = getattr(_local, "scratch", None)
    if memory is None or memory.size < size:
        memory = _local.scratch = np.empty(size, np.uint8)
    return memory


# Libraries differ by version, build and processor in the inverse transform, in how they blow chroma up, and in what
# they make of rare kinds. The set (by `python -m tools.decoder_set`) has pictures of each kind and SHA-256 hashes of
# what is to come out of them, whole at each scale, in colour and in grey, and cut and scaled.
DECODER_SET = "decoder_set.json"
SET_VERSION = 1  # other pixels are another set


def pixels_sha256(data: bytes) -> str:
    """The hash of a picture's pixels, by all ways in which the package decodes; empty if it can't be decoded."""
    digest = hashlib.sha256()
    try:
        for channels in (3, 1):
            for shrink in (1, 2, 4, 8):
                digest.update(decode(data, channels, shrink).tobytes())
            for side in (24, 14, 7, 3):  # of which the last three are cut out of a smaller picture
                region = Region(1, 2, 24, 25, side, side, exact=True)
                digest.update(_decoded_region(data, _read_header(data), channels, region).tobytes())
    except Undecodable:
        return ""
    return digest.hexdigest()


@cache
def other_decoders(is_jpeg: bool) -> tuple[str, ...]:
    """Names of the set's JPEGs, or PNGs, of which this machine's decoders make other pixels."""
    return tuple(
        name
        for name, (data, sha256) in json.loads(files(__package__).joinpath(DECODER_SET).read_text()).items()
        if name.startswith("JPEG") == is_jpeg and pixels_sha256(base64.b64decode(data)) != sha256
    )


def require_specified(data: bytes) -> None:
    """UserError if the decoder of a picture's kind of file gives other pixels than the specified ones."""
    is_jpeg = data.startswith(b"\xff\xd8")
    if wrong := other_decoders(is_jpeg):
        kind, remedy = "PNG", "take another version of opencv-python-headless"
        if is_jpeg:
            kind, remedy = "JPEG", "pack the images elsewhere, without loss: torusgd data pack PATH OUT --png"
        raise UserError(f"data.pixels: the {kind} decoder of this machine gives other pixels ({wrong[0]}); {remedy}")


class NvJpeg:
    """A decoder on one GPU, for several threads, which enter the context of one `stream`."""

    # The decoders in hardware work in parallel within a call, and torchvision runs one call at a time. So a thread that
    # makes a batch has all its pictures decoded in one call (`together`).
    # One stream, since memory that another stream has just freed may still be read there, and torchvision's decoder
    # doesn't wait for that.
    def __init__(self, decode: DecodeMany, stream: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._decode, self._stream = decode, stream
        self._of_thread = threading.local()

    @contextmanager
    def together(self, pictures: Mapping[int, bytes], channels: int) -> Iterator[None]:
        """Decodes these pictures, by index, in one call; inside the block `region` has them for this thread."""
        # The bytes of a picture alone decide which decoder it gets, never the answer of the GPU or the other pictures.
        common = {index: data for index, data in pictures.items() if is_common_jpeg(data)}
        self._of_thread.decoded = dict(zip(common, self._decoded(list(common.values()), channels), strict=True))
        try:
            yield
        finally:
            self._of_thread.decoded = {}

    def region(self, index: int, encoded: Callable[[], bytes], channels: int, choose: Choose) -> Pixels:
        """As `decode.decode_region`; a picture that is not among those of `together` is decoded alone."""
        found = getattr(self._of_thread, "decoded", {}).get(index)
        if found is None:
            data = encoded()
            if not is_common_jpeg(data):
                return decode_region(data, channels, choose)
            (found,) = self._decoded([data], channels)
        if isinstance(found, Undecodable):
            raise found
        with self._stream():
            region = choose(*found.shape[1:])
            box = found[:, region.top : region.top + region.height, region.left : region.left + region.width]
            if (region.rows, region.columns) != (region.height, region.width):
                # As `geometry.render`, in float32, for torch resizes uint8 on CPUs only, and rounded half to even.
                whole, size = box[None].float(), (region.rows, region.columns)
                resized = F.interpolate(whole, size, mode="bilinear", antialias=True, align_corners=False)
                box = resized[0].round_().clamp_(0, 255).to(torch.uint8)
            return np.array(box.cpu().numpy(), order="C")

    def _decoded(self, pictures: Sequence[bytes], channels: int) -> list[Tensor | Undecodable]:
        parts = (pictures[begin : begin + _MOST_AT_ONCE] for begin in range(0, len(pictures), _MOST_AT_ONCE))
        return [found for part in parts for found in self._call(part, channels)]

    def _call(self, pictures: Sequence[bytes], channels: int) -> list[Tensor | Undecodable]:
        """One call; if it fails because of one picture, a call for each half."""
        try:
            with self._stream():
                return list(self._decode(pictures, channels))
        except RuntimeError as error:
            if len(pictures) > 1:
                # nvJPEG doesn't say which picture failed.
                half = len(pictures) // 2
                return self._call(pictures[:half], channels) + self._call(pictures[half:], channels)
            # No fault of the picture: to replace it would make the bits depend on free memory.
            if "out of memory" in str(error):
                raise
            return [Undecodable(f"nvJPEG can't decode it: {first_line(error)}")]


def nvjpeg(device: torch.device) -> NvJpeg:
    """The decoder of this rank's GPU; UserError if there is no torchvision."""
    stream = torch.cuda.Stream(device)
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        remedy = "pip install torchvision (the extra torchvision)"
        raise UserError(f"data.decoder: nvjpeg needs torchvision ({first_line(error)}); {remedy}") from error

    def decode(pictures: Sequence[bytes], channels: int) -> Sequence[Tensor]:
        inputs = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in pictures]
        return decode_jpeg(inputs, mode=ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB, device=device)

    return NvJpeg(decode, lambda: torch.cuda.stream(stream))


class EncodedImages(ABC):
    """A `RegionSource` of pictures in 3 channels, RGB, or 1, grey; each subclass says where their bytes are."""

    reads_ahead: bool = False  # whether `expect` makes reading faster

    def __init__(self, classes: Sequence[str], labels: Int64, channels: int) -> None:
        self.classes, self.labels, self.channels = tuple(classes), labels, channels
        self._decoder: NvJpeg | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The bytes of one image as stored; Undecodable if more than `MOST_BYTES`, OSError if they can't be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """The location of an image, for messages."""

    @abstractmethod
    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        """Adds to a hash of hashlib what is known of the images without opening them, and the sizes of a sample."""

    def first(self, count: int) -> Self:
        part = copy(self)  # shallow: it shares readers and caches
        part.labels = self.labels[:count]
        return part

    def decoded_by(self, decoder: NvJpeg) -> Self:
        other = copy(self)
        other._decoder = decoder
        return other

    def expect(self, indices: Int64) -> None:  # noqa: B027 - of use to some subclasses only
        """Starts to read the images at `indices` [n], which are needed soon; returns at once."""

    def read(self, index: int) -> Pixels:
        """The whole image, uint8 [height, width, channels]; raises as `Source.read`."""
        try:
            return decode(self.encoded(index), self.channels)
        except Undecodable as error:
            raise CorruptImage(index, f"{self.where(index)}: {error}") from error

    def together(self, indices: Int64) -> AbstractContextManager[None]:
        """A block in which this thread reads regions of the images at `indices` [n], decoded at once by a GPU."""
        if self._decoder is None:
            return nullcontext()
        pictures = dict[int, bytes]()
        for index in indices.tolist():
            # A failure here counts only when `read_region` meets it again.
            with suppress(OSError, Undecodable):
                pictures[index] = self.encoded(index)
        return self._decoder.together(pictures, self.channels)

    def read_region(self, index: int, choose: Choose) -> Pixels:
        """The region that `choose(height, width)` returns, uint8 [channels, rows, columns]; raises as `read`."""
        try:
            if self._decoder is not None:
                return self._decoder.region(index, partial(self.encoded, index), self.channels, choose)
            return decode_region(self.encoded(index), self.channels, choose)
        except Undecodable as error:
            raise CorruptImage(index, f"{self.where(index)}: {error}") from error

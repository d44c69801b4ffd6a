"""JPEGs decoded, cut and resampled by a GPU with NVIDIA's nvJPEG, by way of torchvision (`data.decoder: nvjpeg`).

The pixels are not those of libjpeg, so the recipe names the decoder.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError, first_line
from .decode import EncodedImages, Undecodable, decode_region, is_common_jpeg
from .registry import PICTURES
from .types import Choose, Pixels, Region, Source

_MOST_AT_ONCE = 64  # pictures of one call, which bounds the memory of nvJPEG beside their pixels
# From pictures and channels to uint8 [channels, height, width] each; RuntimeError if one can't be decoded.
DecodeMany = Callable[[Sequence[bytes], int], Sequence[Tensor]]


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
            return _render(found, choose(*found.shape[1:]))

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


def _render(pixels: Tensor, region: Region) -> Pixels:
    """As `geometry.render`, in float32 and rounded half to even: uint8 [channels, rows, columns] on the host."""
    box = pixels[:, region.top : region.top + region.height, region.left : region.left + region.width]
    if (region.rows, region.columns) != (region.height, region.width):
        size = (region.rows, region.columns)
        # In float32: torch resizes uint8 on CPUs only.
        resized = F.interpolate(box[None].float(), size, mode="bilinear", antialias=True, align_corners=False)
        box = resized[0].round_().clamp_(0, 255).to(torch.uint8)
    return np.array(box.cpu().numpy(), order="C")


def decode_on_gpu(sources: tuple[Source, Source], device: torch.device) -> tuple[Source, Source]:
    """The sources of a recipe with `data.decoder: nvjpeg`, with JPEGs decoded by this rank's GPU."""
    train, held_out = sources
    if not (isinstance(train, EncodedImages) and isinstance(held_out, EncodedImages)):
        raise UserError(f"data.decoder: nvjpeg decodes the pictures of {', '.join(PICTURES)} only")
    stream = torch.cuda.Stream(device)
    nvjpeg = NvJpeg(_torchvision(device), lambda: torch.cuda.stream(stream))
    return train.decoded_by(nvjpeg), held_out.decoded_by(nvjpeg)


def _torchvision(device: torch.device) -> DecodeMany:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"data.decoder: nvjpeg needs torchvision ({first_line(error)}); "
            "pip install torchvision (the extra torchvision)"
        ) from error
    modes: dict[int, Any] = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB}

    def decode(pictures: Sequence[bytes], channels: int) -> Sequence[Tensor]:
        inputs = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in pictures]
        found: Sequence[Tensor] = decode_jpeg(inputs, mode=modes[channels], device=device)
        return found

    return decode

"""JPEGs decoded by a GPU with NVIDIA's nvJPEG, by way of torchvision (`data.decoder: nvjpeg`).

A GPU has decoders of its own, which a core of a CPU equals a small part of, but only if they get many pictures in one
call: they work side by side within a call, and torchvision lets in one call at a time. So a thread that makes a batch
has all its pictures decoded at once (`together`). The box that is wanted is cut out and resampled on the GPU too, and
what comes back is as large as the network's input.

The pixels are not those of libjpeg, so which decoder it is stands in the recipe. Who decodes a picture is decided by
its own bytes, never by what the GPU says of them or by the other pictures of a batch: nvJPEG decodes those that
`is_common_jpeg` names, the usual decoder all others.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError, first_line
from .decode import Undecodable, decode_region, is_common_jpeg
from .sources import PICTURES
from .types import Choose, GpuSource, Pixels, Region, Source

_MOST_AT_ONCE = 64
"""pictures of one call, which bounds what nvJPEG takes for itself beside their pixels"""

DecodeMany = Callable[[Sequence[bytes], int], Sequence[Tensor]]
"""from pictures and channels to uint8 [channels, height, width] each; RuntimeError where one can't be decoded"""


class NvJpeg:
    """Decodes what threads ask for, on one GPU.

    Args:
        decode: Of the pictures of one call.
        stream: In which a thread's work is done: one for all, since memory that another stream has just given back may
            still be read there, and torchvision's decoder doesn't wait for that.
    """

    def __init__(self, decode: DecodeMany, stream: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._decode, self._stream = decode, stream
        self._of_thread = threading.local()

    @contextmanager
    def together(self, pictures: Mapping[int, bytes], channels: int) -> Iterator[None]:
        """Inside, this thread finds these pictures, by index, decoded."""
        common = {index: data for index, data in pictures.items() if is_common_jpeg(data)}
        self._of_thread.decoded = dict(zip(common, self._decoded(list(common.values()), channels), strict=True))
        try:
            yield
        finally:
            self._of_thread.decoded = {}

    def region(self, index: int, encoded: Callable[[], bytes], channels: int, choose: Choose) -> Pixels:
        """See `decode.decode_region`; a picture that is not among those of `together` is decoded alone."""
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
        found: list[Tensor | Undecodable] = []
        for begin in range(0, len(pictures), _MOST_AT_ONCE):
            found += self._call(pictures[begin : begin + _MOST_AT_ONCE], channels)
        return found

    def _call(self, pictures: Sequence[bytes], channels: int) -> list[Tensor | Undecodable]:
        """One call; if a picture spoils it, one call for each half."""
        try:
            with self._stream():
                return list(self._decode(pictures, channels))
        except RuntimeError as error:
            if len(pictures) > 1:
                half = len(pictures) // 2
                return self._call(pictures[:half], channels) + self._call(pictures[half:], channels)
            if "out of memory" in str(error):
                raise
            return [Undecodable(f"nvJPEG can't decode it: {first_line(error)}")]


def _render(pixels: Tensor, region: Region) -> Pixels:
    """As `view.render`, in float32 and rounded half to even: uint8 [channels, rows, columns] on the host."""
    box = pixels[:, region.top : region.top + region.height, region.left : region.left + region.width]
    if (region.rows, region.columns) != (region.height, region.width):
        size = (region.rows, region.columns)
        resized = F.interpolate(box[None].float(), size, mode="bilinear", antialias=True, align_corners=False)
        box = resized[0].round_().clamp_(0, 255).to(torch.uint8)
    return np.array(box.cpu().numpy(), order="C")


def decode_on_gpu(sources: Iterable[Source], device: torch.device) -> None:
    """Has a GPU decode the JPEGs of sources.

    Args:
        sources: Of a recipe with `data.decoder: nvjpeg`.
        device: A GPU, of this rank.

    Raises:
        UserError: There is no torchvision, or a source has no JPEGs.
    """
    stream = torch.cuda.Stream(device)
    nvjpeg = NvJpeg(_torchvision(device), lambda: torch.cuda.stream(stream))
    for source in sources:
        if not isinstance(source, GpuSource):
            raise UserError(f"data.decoder: nvjpeg decodes the pictures of {', '.join(PICTURES)} only")
        source.decode_with(nvjpeg)


def _torchvision(device: torch.device) -> DecodeMany:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"data.decoder: nvjpeg needs torchvision ({first_line(error)}); pip install 'torusgd[torchvision]'"
        ) from error
    modes: dict[int, Any] = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB}

    def decode(pictures: Sequence[bytes], channels: int) -> Sequence[Tensor]:
        inputs = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in pictures]
        found: Sequence[Tensor] = decode_jpeg(inputs, mode=modes[channels], device=device)
        return found

    return decode

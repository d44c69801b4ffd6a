"""Batches on their way to a device, and images that are normalised there."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..recipe.data_schema import Augment, Data
from .geometry import Warps
from .pipeline import Allocate, Batch, Pipeline, allocate_by_torch
from .types import Pixels, Source

_TARGET = 8  # bytes of a target


def can_normalise_later(augment: Augment) -> bool:
    """Whether normalising is the last change of an image, so that it is a function of each byte."""
    # Brightness, contrast and noise change values that are not bytes any more; erased boxes hold the mean, and mixed
    # images hold values between two bytes.
    changes = (augment.brightness, augment.noise, augment.erase, augment.mixup, augment.cutmix)
    return not any(changes) and augment.contrast <= 1


def allocate_pinned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A new array, in pinned memory if there is a GPU."""
    # torch's allocator uses pinned memory again once no copy reads it any more, so that this is a ring of buffers.
    return allocate_by_torch(shape, dtype, is_pinned=torch.cuda.is_available())


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host, ready to be copied to a device: for a GPU in pinned memory."""
    # From other memory the driver may make the host wait for everything that was queued on the GPU before.
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


class BytePipeline(Pipeline):
    """A `Pipeline` of uint8 images and the table with which `place` normalises them (`can_normalise_later`)."""

    # A GPU receives images as bytes, a quarter of their size as float32, from pinned memory, on a stream of their own:
    # while it computes, the images of the next passes arrive, with their targets in one piece of memory (`parts`).
    dtype = np.uint8

    def __init__(self, source: Source, data: Data, seed: int, allocate: Allocate = allocate_by_torch) -> None:
        super().__init__(source, data, seed, allocate)
        # The CPU's last operation, a product and a sum for each value, is a look-up on the device: a byte has 256
        # values, and the CPU makes the table of their normalised values by the same two roundings. So the network sees
        # the same bits.
        every_byte = np.arange(256, dtype=np.uint8).repeat(data.channels).reshape(256, data.channels, 1, 1)
        table = np.empty(every_byte.shape, dtype=np.float32)
        super()._write(every_byte, None, range(256), table)
        self.table = torch.from_numpy(table.reshape(256, data.channels).T.copy())

    def memory(self, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], Pixels | None]:
        """As of `Pipeline`; images first, targets after them at a multiple of 8 bytes."""
        pixels = prod(shape)
        # Rounded up, so that the targets begin where an int64 may begin.
        message = self.allocate((-(-pixels // _TARGET) * _TARGET + _TARGET * shape[0],), self.dtype)
        return message[:pixels].reshape(shape), message

    def joined(self, batch: Batch, message: Pixels | None) -> Batch:
        assert message is not None
        whole = torch.from_numpy(message)
        parts(whole, batch.images.shape)[1].copy_(batch.targets)
        # The batch's targets keep memory of their own: torch knows a pinned block by its first address alone, and would
        # free the block before a copy from a view further on has ended.
        return replace(batch, message=whole)

    def _write(self, images: Pixels, warps: Warps | None, places: range, out: Any) -> None:
        out[...] = images


def parts(message: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Images and targets in a `Batch.message`, as views: uint8 [n, channels, height, width] (`shape`) and int64 [n]."""
    return message[: prod(shape)].view(*shape), message[len(message) - _TARGET * shape[0] :].view(torch.int64)


def place(batch: Batch, device: torch.device, memory_format: torch.memory_format) -> Tensor:
    """A batch's images, normalised, on a device: float32 [n, channels, height, width] in that memory format."""
    # A new tensor, since one channel counts as both formats and the first convolution would choose the other.
    placed = torch.empty(batch.images.shape, device=device, memory_format=memory_format)
    pixels = arriving(batch.images, device)
    if batch.table is None:
        return placed.copy_(pixels)
    look_up(pixels, on_device(batch.table, device), placed)
    return placed


def look_up(pixels: Tensor, table: Tensor, out: Tensor) -> None:
    """Writes the value in `table`, float32 [channels, 256], of each pixel, uint8 [n, channels, h, w], to `out`."""
    # The tables of all channels in a row, so that one index picks channel and byte.
    firsts = 256 * torch.arange(len(table), dtype=torch.int32, device=pixels.device)
    places = pixels.int().add_(firsts.view(1, -1, 1, 1))
    out.copy_(table.view(-1).index_select(0, places.view(-1)).view(pixels.shape))


def arriving(images: Tensor, device: torch.device) -> Tensor:
    """The images of a batch, or its message, on a device; on a GPU a second stream copies them while it computes."""
    if device.type != "cuda":
        return images.to(device)
    current = torch.cuda.current_stream(device)
    with torch.cuda.stream(_copies(device)):
        pixels = images.to(device, non_blocking=True)
    # A wait on the GPU, not of the host.
    current.wait_stream(_copies(device))
    # Else the allocator could hand out this memory while the computing stream still reads it.
    pixels.record_stream(current)
    return pixels


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache  # by identity, as tensors hash
def on_device(table: Tensor, device: torch.device) -> Tensor:
    return table.to(device)

"""Types of this room: arrays, a region of an image, and the interfaces of a source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
UInt16 = npt.NDArray[np.uint16]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Region:
    """A box of an image, in pixels, and the size (rows x columns) that it is scaled to."""

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int
    # Scaled by single operations in a written order, the same on any machine, and out of specified pixels; else by
    # torch's kernel, out of what a decoder gives.
    exact: bool = False


# From the height and width of an image to the region to read; raises UserError if the image has none.
Choose = Callable[[int, int], Region]


class CorruptImage(Exception):
    """The bytes of an image can't be decoded: training replaces it, evaluation leaves it out."""

    # A failure to read the bytes is an OSError instead: it is retried, then ends the run.
    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"image {index}: {reason}")
        self.index, self.reason = index, reason


@runtime_checkable
class Source(Protocol):
    """Labelled images by index. Several threads call `read` at a time."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""

    @property
    def labels(self) -> Int64:
        """The label of each image, int64 [len(self)]."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Pixels:
        """One image, uint8 [height, width, channels]; sizes may differ. CorruptImage or OSError if it can't be had."""


@runtime_checkable
class ArraySource(Source, Protocol):
    """A source of images of one size, none corrupt: it reads whole batches at once."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""

    def read_many(self, indices: Int64) -> Pixels:
        """The images at `indices` [n], uint8 [n, height, width, channels]."""


@runtime_checkable
class RegionSource(Source, Protocol):
    """A source of encoded images, which decodes only the region and the resolution that the network takes."""

    def read_region(self, index: int, choose: Choose) -> Pixels:
        """The region that `choose(height, width)` returns, uint8 [channels, rows, columns]; raises as `read` does."""

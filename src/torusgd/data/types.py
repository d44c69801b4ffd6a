"""What the files of this folder hand to each other: arrays, regions of an image, and the interface of a source."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Region:
    """A box of an image, in pixels, and the size that it is scaled to."""

    top: int
    left: int
    height: int
    width: int
    rows: int
    columns: int


Choose = Callable[[int, int], Region]
"""From an image's height and width to the region wanted; raises UserError where there can be none."""


class CorruptImage(Exception):
    """The bytes of an image can't be decoded; training replaces it, evaluation excludes it.

    Trouble in reading the bytes is an OSError instead: it is retried, then stops the run.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"image {index}: {reason}")
        self.index = index
        self.reason = reason


@runtime_checkable
class Source(Protocol):
    """Labelled images by index. `read` is called from several threads at a time."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label."""

    @property
    def labels(self) -> Int64:
        """The label of each image, int64 [len(self)]."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Pixels:
        """One image, uint8 [height, width, channels]; sizes may differ.

        Raises:
            CorruptImage: Its bytes can't be decoded.
            OSError: Its bytes can't be read.
        """


@runtime_checkable
class ArraySource(Source, Protocol):
    """A source whose images are all of one size and never corrupt: whole batches are read at once."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""

    def read_many(self, indices: Int64) -> Pixels:
        """The images at `indices` [n], uint8 [n, height, width, channels]."""


@runtime_checkable
class RegionSource(Source, Protocol):
    """A source of encoded images: it decodes no more than the region and the resolution that are wanted."""

    def read_region(self, index: int, choose: Choose) -> Pixels:
        """The region that `choose(height, width)` names, uint8 [channels, rows, columns]; raises as `read` does."""


class Decoder(Protocol):
    """Decodes pictures in the place of the usual decoder (`nvjpeg.NvJpeg`)."""

    def together(self, pictures: Mapping[int, bytes], channels: int) -> AbstractContextManager[None]:
        """Inside, this thread finds these pictures, by index, decoded."""

    def region(self, index: int, encoded: Callable[[], bytes], channels: int, choose: Choose) -> Pixels:
        """See `RegionSource`; raises decode.Undecodable."""


@runtime_checkable
class GpuSource(RegionSource, Protocol):
    """A source of encoded images whose decoder can be exchanged for that of a GPU, which takes many at a time."""

    def decode_with(self, decoder: Decoder) -> None:
        """From now on."""

    def together(self, indices: Int64) -> AbstractContextManager[None]:
        """Inside, this thread reads regions of the images at `indices` [n]."""


@runtime_checkable
class MarkedSource(Source, Protocol):
    """A source that can be told from others without a look at its images."""

    @property
    def mark(self) -> str:
        """A hash of what is known of the images: their names, their sizes."""


@runtime_checkable
class ForeseeingSource(Source, Protocol):
    """A source that reads faster when it knows what will be asked for."""

    def expect(self, indices: Int64) -> None:
        """The images at `indices` [n] will be read soon; returns at once."""


@runtime_checkable
class FileSource(Source, Protocol):
    """A source of one file an image."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each image's file, within the folder of its class."""

    def file(self, index: int) -> str:
        """Where an image lies."""

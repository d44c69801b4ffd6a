"""What all sources of JPEG and PNG bytes have in common, whether they lie in files, in tar files or in tables."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from functools import partial
from typing import Any, ClassVar, Protocol, Self

from .decode import Undecodable, decode, decode_region, picture_size
from .types import Choose, CorruptImage, Int64, Pixels

MOST_BYTES = 1 << 28
"""the largest encoded picture that is read; no camera makes one above 256 MiB"""


class Decoder(Protocol):
    """A decoder in place of the usual one (`nvjpeg.NvJpeg`)."""

    def together(self, pictures: Mapping[int, bytes], channels: int) -> AbstractContextManager[None]:
        """Decodes these pictures, by index, in one call; inside the block `region` has them for this thread."""

    def region(self, index: int, encoded: Callable[[], bytes], channels: int, choose: Choose) -> Pixels:
        """The region as `decode.decode_region` returns it; raises Undecodable."""


class EncodedImages(ABC):
    """A `RegionSource`; each subclass says where the bytes of an image are.

    Args:
        classes: The class names, by label.
        labels: int64 [images].
        channels: 3 for RGB, 1 for grey; pictures are converted.

    Attributes:
        reads_ahead: Whether `expect` makes reading faster.
    """

    reads_ahead: ClassVar[bool] = False

    def __init__(self, classes: Sequence[str], labels: Int64, channels: int) -> None:
        self.classes = tuple(classes)
        self.labels = labels
        self.channels = channels
        self._decoder: Decoder | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The bytes of one image as they are stored.

        Raises:
            Undecodable: They are more than `MOST_BYTES`.
            OSError: They can't be read.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """The location of an image, for messages."""

    @abstractmethod
    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        """Adds to a hash of hashlib what is known of the images without opening them, and the sizes of a sample."""

    def first(self, count: int) -> Self:
        """A source of the first `count` images."""
        # A shallow copy shares readers and caches.
        part = copy(self)
        part.labels = self.labels[:count]
        return part

    def decoded_by(self, decoder: Decoder) -> Self:
        """A source of the same images, decoded otherwise."""
        other = copy(self)
        other._decoder = decoder
        return other

    def expect(self, indices: Int64) -> None:  # noqa: B027 - of use to some subclasses only
        """Starts to read the images at `indices` [n], which are needed soon; returns at once."""

    def size(self, index: int) -> tuple[int, int]:
        """Height and width from the picture's header; raises Undecodable."""
        return picture_size(self.encoded(index))

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

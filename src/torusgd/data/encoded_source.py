"""What all sources of JPEG and PNG bytes have in common, whether each lies in a file, in a tar file or in a table."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

from .decode import Undecodable, decode, decode_region, picture_size
from .types import Choose, CorruptImage, Decoder, Int64, Pixels

MOST_BYTES = 1 << 28
"""of an encoded picture; one above 256 MiB is none that a camera made"""


class EncodedImages(ABC):
    """A `RegionSource`; a source of its own says where the bytes of an image are.

    Args:
        classes: The class names, by label.
        labels: int64 [images].
        channels: 3 for RGB, 1 for grey; pictures are converted.
    """

    def __init__(self, classes: Sequence[str], labels: Int64, channels: int) -> None:
        self.classes = tuple(classes)
        self.labels = labels
        self.channels = channels
        self._decoder: Decoder | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def encoded(self, index: int) -> bytes:
        """The bytes of one image as they are kept.

        Raises:
            Undecodable: They are more than `MOST_BYTES`.
            OSError: They can't be read.
        """

    @abstractmethod
    def where(self, index: int) -> str:
        """Where an image lies, for people."""

    def size(self, index: int) -> tuple[int, int]:
        """Height and width by the picture's header; raises Undecodable."""
        return picture_size(self.encoded(index))

    def read(self, index: int) -> Pixels:
        """See `Source`."""
        try:
            return decode(self.encoded(index), self.channels)
        except Undecodable as error:
            raise CorruptImage(index, f"{self.where(index)}: {error}") from error

    def decode_with(self, decoder: Decoder) -> None:
        """See `GpuSource`."""
        self._decoder = decoder

    def together(self, indices: Int64) -> AbstractContextManager[None]:
        """See `GpuSource`; one that can't be read now is read, and told of, when its turn comes."""
        if self._decoder is None:
            return nullcontext()
        pictures = dict[int, bytes]()
        for index in indices.tolist():
            with suppress(OSError, Undecodable):
                pictures[index] = self.encoded(index)
        return self._decoder.together(pictures, self.channels)

    def read_region(self, index: int, choose: Choose) -> Pixels:
        """See `RegionSource`."""
        try:
            if self._decoder is not None:
                return self._decoder.region(index, partial(self.encoded, index), self.channels, choose)
            return decode_region(self.encoded(index), self.channels, choose)
        except Undecodable as error:
            raise CorruptImage(index, f"{self.where(index)}: {error}") from error

"""Some images of a source, as a source."""

from typing import Any

from .decode import EncodedImages
from .types import ArraySource, Int64, Pixels, RegionSource, Source


def subset(source: Source, indices: Int64) -> Source:
    """The images at `indices` [n] of a source, in their order, with the same ways to read them."""
    return _EncodedSubset(source, indices) if isinstance(source, EncodedImages) else _Subset(source, indices)


class _Subset:
    """Of a source that is not `EncodedImages`."""

    def __init__(self, source: Source, indices: Int64) -> None:
        self.classes, self.labels = source.classes, source.labels[indices]
        self._read, self._indices = source.read, indices
        # Only what the source has, since `isinstance` of a protocol looks for the attributes.
        if isinstance(source, ArraySource):
            self.shape = source.shape
            self.read_many = lambda positions: source.read_many(indices[positions])
        if isinstance(source, RegionSource):
            self.read_region = lambda index, choose: source.read_region(int(indices[index]), choose)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Pixels:
        return self._read(int(self._indices[index]))


class _EncodedSubset(EncodedImages):
    """Of encoded images, which are decoded here."""

    def __init__(self, source: EncodedImages, indices: Int64) -> None:
        super().__init__(source.classes, source.labels[indices], source.channels)
        self._source, self._indices, self.reads_ahead = source, indices, source.reads_ahead

    def encoded(self, index: int) -> bytes:
        return self._source.encoded(int(self._indices[index]))

    def where(self, index: int) -> str:
        return self._source.where(int(self._indices[index]))

    def add_to_hash(self, digest: Any, sample: Int64) -> None:
        digest.update(self._indices.astype("<i8").data)
        self._source.add_to_hash(digest, self._indices[sample])

    def expect(self, indices: Int64) -> None:
        self._source.expect(self._indices[indices])

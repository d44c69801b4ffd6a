"""Which data a run reads, as one hash: names, sizes and labels of all images, and a look at some of them.

Reading a data set whole takes as long as an epoch. So a hash covers what is known without opening an image, and of a
keyed sample what is in it: other files, another order, other labels or another version of the pictures are found, one
image that was changed in its place may not be.
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from ..errors import UserError
from ..rng import DATA_SAMPLE, keyed_integer
from .file_lists import Names
from .types import ArraySource, FileSource, Int64, MarkedSource, Source

SAMPLE = 32
"""images of each split that are looked at"""


def data_sha256(train: Source, held_out: Source) -> str:
    """One hash of the training and the held-out images.

    Of files it covers all names, and the sizes of a sample; of images in larger files what the source knows of them; of
    arrays the shape, and the pixels of a sample; of any source the classes and all labels. A source of one's own that
    has none of these is known by its classes and labels alone.

    Raises:
        UserError: A file of the sample is not there.
    """
    digest = hashlib.sha256()
    for split, source in enumerate((train, held_out)):
        digest.update(_joined([str(len(source)), *source.classes]))
        digest.update(np.ascontiguousarray(source.labels, dtype="<i8").data)
        sample: Int64 = np.unique(keyed_integer(len(source), DATA_SAMPLE, split, np.arange(SAMPLE)))
        if isinstance(source, FileSource):
            digest.update(_joined(source.names))
            digest.update(repr([_size(source.file(int(index))) for index in sample]).encode())
        elif isinstance(source, MarkedSource):
            digest.update(source.mark.encode())
        elif isinstance(source, ArraySource):
            digest.update(repr(source.shape).encode())
            digest.update(np.ascontiguousarray(source.read_many(sample)).data)
    return digest.hexdigest()


def _joined(names: Sequence[str]) -> bytes | memoryview:
    """The names with a NUL between two; a long list has them so in memory already."""
    return names.text.data if isinstance(names, Names) else "\0".join(names).encode(errors="surrogateescape")


def _size(path: str) -> int:
    """Bytes of a file."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}, though it is listed") from error

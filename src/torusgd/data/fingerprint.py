"""One hash of the data that a run reads: names, sizes and labels of all images, and a sample of their content.

To read a data set whole takes as long as an epoch. So the hash covers what is known without opening an image, and the
content of a keyed sample: it finds other files, another order, other labels and another version of the pictures; a
single image that was changed in its place it may miss.
"""

import hashlib

import numpy as np

from ..rng import DATA_SAMPLE, keyed_integer
from .encoded_source import EncodedImages
from .types import ArraySource, Int64, Source

SAMPLE = 32
"""images in the sample of each split"""


def data_sha256(train: Source, held_out: Source) -> str:
    """One hash of the training and the held-out images.

    It covers the classes and all labels of any source; of encoded images what `EncodedImages.add_to_hash` adds; of
    arrays the shape, and the pixels of a sample. A source of your own without `read_many` adds nothing more.

    Raises:
        UserError: A file of the sample is not there.
    """
    digest = hashlib.sha256()
    for split, source in enumerate((train, held_out)):
        digest.update("\0".join([str(len(source)), *source.classes]).encode(errors="surrogateescape"))
        digest.update(np.ascontiguousarray(source.labels, dtype="<i8").data)
        # Keyed by the split alone, so that every run and every rank looks at the same images.
        sample: Int64 = np.unique(keyed_integer(len(source), DATA_SAMPLE, split, np.arange(SAMPLE)))
        if isinstance(source, EncodedImages):
            source.add_to_hash(digest, sample)
        elif isinstance(source, ArraySource):
            digest.update(repr(source.shape).encode())
            digest.update(np.ascontiguousarray(source.read_many(sample)).data)
    return digest.hexdigest()

"""Images and their order: sources, decoding, keyed augmentation, and the pipeline that makes batches in the background.

A batch is a function of the recipe and of the samples' positions in the stream, never of a rank.
"""

from .loader import Loader, Share
from .order import StreamOrder
from .pipeline import Batch, Pipeline
from .registry import open_sources
from .types import ArraySource, Choose, CorruptImage, Region, RegionSource, Source

__all__ = [
    "ArraySource", "Batch", "Choose", "CorruptImage", "Loader", "Pipeline", "Region", "RegionSource", "Share", "Source",
    "StreamOrder", "open_sources",
]  # fmt: skip

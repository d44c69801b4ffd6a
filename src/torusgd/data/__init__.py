"""Data: the order of samples, sources of images, and the pipeline that makes batches of them."""

from .loader import Loader, Share
from .order import StreamOrder
from .pipeline import Batch, Pipeline
from .sources import open_sources
from .types import ArraySource, Choose, CorruptImage, Region, RegionSource, Source

__all__ = [
    "ArraySource",
    "Batch",
    "Choose",
    "CorruptImage",
    "Loader",
    "Pipeline",
    "Region",
    "RegionSource",
    "Share",
    "Source",
    "StreamOrder",
    "open_sources",
]

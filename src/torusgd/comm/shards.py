"""Shards of buckets and of their tensors: where one may be cut, and which elements of each tensor a rank then has."""

from functools import lru_cache

from ..gradients.integer_sum import Bucket, Span
from ..optim.norms import BLOCK
from .reduce_scatter import ShardCollectives


@lru_cache(256)
def block_stops(bucket: Bucket) -> tuple[int, ...]:
    """Where a bucket may be cut: at the 4,096-element blocks that norms are defined by, so none is split.

    >>> block_stops(Bucket(first=0, stop=2, offsets=(0, 5000), numels=(5000, 100)))
    (0, 4096, 5000, 5100)
    """
    inner = [offset + i for offset, n in zip(bucket.offsets, bucket.numels, strict=True) for i in range(0, n, BLOCK)]
    return (*sorted(set(inner)), bucket.length)


def own_spans(bucket: Bucket, shards: ShardCollectives) -> list[Span]:
    """Of each tensor of a bucket the elements in this rank's shard; (0, 0) where there are none."""
    low, high = shards.span(shards.rank, bucket.length, block_stops(bucket))
    spans = []
    for offset, numel in zip(bucket.offsets, bucket.numels, strict=True):
        begin, end = max(low - offset, 0), min(high - offset, numel)
        spans.append((begin, end) if begin < end else (0, 0))
    return spans

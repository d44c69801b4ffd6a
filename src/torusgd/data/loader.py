"""Batches made in the background while the network computes, each known by its step and virtual worker."""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from ..recipe.section import ImageSizes
from .loader_processes import LoaderProcesses
from .order import StreamOrder
from .pipeline import Batch, Pipeline


@dataclass(frozen=True)
class Share:
    """One virtual worker's samples of a step: the stream's positions start..start+count-1."""

    step: int
    worker: int
    start: int
    count: int
    augment: bool
    sizes: ImageSizes | None = None
    """None: those of the pipeline's data"""


class Loader:
    """Makes the batches of shares with a pool of threads, at most `ahead` of them at a time.

    It knows no ranks and no position: the caller of `take` says which shares are likely to follow, so that ranks may
    come, go and take over virtual workers between two steps. Decoding, resizing and array arithmetic release the
    interpreter's lock, so that threads use some cores, and no batch is copied between processes; for more cores there
    is `LoaderProcesses`. Neither it nor `threads` nor `ahead` changes a bit of a batch.

    Args:
        pipeline: Makes the batches; as many at a time as there are threads.
        order: The stream of the positions.
        threads: At least 1.
        ahead: Batches being made or waiting, at least 1; the bound on memory.

    Attributes:
        wait_seconds: The consumer's time in `take`, in all.

    >>> loader = Loader(pipeline, StreamOrder(len(source), seed=0), threads=1, ahead=2)  # doctest: +SKIP
    >>> shares = [Share(step, 0, 32 * step, 32, augment=True) for step in range(10)]  # doctest: +SKIP
    >>> for share in shares:  # doctest: +SKIP
    ...     batch = loader.take(share, following=shares[share.step + 1 :])
    """

    def __init__(self, pipeline: Pipeline | LoaderProcesses, order: StreamOrder, threads: int, ahead: int) -> None:
        if threads < 1 or ahead < 1:
            raise ValueError(f"threads and ahead must be at least 1, got {threads} and {ahead}")
        self.wait_seconds = 0.0
        self._pipeline = pipeline
        self._order = order
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="torusgd-loader")
        self._pending: dict[Share, Future[Batch]] = {}

    def take(self, share: Share, following: Iterable[Share] = ()) -> Batch:
        """The batch of a share; raises any exception of its making.

        Args:
            share: Made now, unless it was begun before.
            following: The shares that are likely to be taken next, in this order; as many are begun as there is room
                for, and others that were begun before are dropped.
        """
        # Batch 2: made by a thread before anyone needs it.
        wanted = [share, *islice(following, self._ahead - 1)]
        # Shares that follow no longer, since ranks have left or joined, must not fill the bound on memory.
        for stale in self._pending.keys() - set(wanted):
            self._pending.pop(stale).cancel()
        for each in wanted:
            if each not in self._pending:
                self._pending[each] = self._pool.submit(self._make, each)
                # The pool may have no free thread for some time; the reads of a bucket begin at once.
                if self._pipeline.reads_ahead:
                    self._pipeline.expect(self._order.at(each.start, each.count)[0])
        started = time.perf_counter()
        try:
            return self._pending.pop(share).result()
        finally:
            ended = time.perf_counter()
            self.wait_seconds += ended - started

    def close(self) -> None:
        """Drops all batches under way and ends the threads; a batch being made is finished first."""
        for future in self._pending.values():
            future.cancel()
        self._pending = {}
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, share: Share) -> Batch:
        indices, epochs = self._order.at(share.start, share.count)
        return self._pipeline.training_batch(indices, epochs, share.augment, share.sizes)

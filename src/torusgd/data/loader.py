"""Batches made in the background, in order, while the network computes."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from .order import StreamOrder
from .pipeline import Batch, Pipeline


@dataclass(frozen=True)
class Share:
    """One virtual worker's samples of a step: the stream's positions start..start+count-1."""

    start: int
    count: int
    augment: bool


class Loader:
    """Makes the batches of shares with a pool of threads, at most `ahead` of them before they are asked for.

    Threads, not processes: decoding, resizing and array arithmetic release the interpreter's lock, and a batch
    need not be copied between processes. Neither `threads` nor `ahead` changes a bit of a batch.

    Args:
        pipeline: Makes the batches.
        order: The stream that positions refer to.
        threads: At least 1.
        ahead: Batches being made or waiting, at least 1; the bound on memory.

    Attributes:
        wait_seconds: For how long the consumer has been kept waiting, in all.

    >>> loader = Loader(pipeline, StreamOrder(len(source), seed=0), threads=1, ahead=2)  # doctest: +SKIP
    >>> for batch in loader.run(Share(start, 32, augment=True) for start in range(0, 320, 32)):  # doctest: +SKIP
    ...     train(batch.images, batch.targets)
    """

    def __init__(self, pipeline: Pipeline, order: StreamOrder, threads: int, ahead: int) -> None:
        if threads < 1 or ahead < 1:
            raise ValueError(f"threads and ahead must be at least 1, got {threads} and {ahead}")
        self.wait_seconds = 0.0
        self._pipeline = pipeline
        self._order = order
        self._ahead = ahead
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="torusgd-loader")
        self._pending: deque[Future[Batch]] = deque()

    def run(self, shares: Iterable[Share]) -> Iterator[Batch]:
        """The batch of each share, in order. What making a batch raised is raised in its place.

        `shares` is read in the consumer's thread, `ahead` of the batches. One run at a time: a new one drops what
        an older one had under way.
        """
        self._drop()
        pending = self._pending = deque()
        rest = iter(shares)
        try:
            while True:
                while len(pending) < self._ahead and (share := next(rest, None)) is not None:
                    pending.append(self._pool.submit(self._make, share))
                if not pending:
                    return
                started = time.perf_counter()
                try:
                    batch = pending.popleft().result()
                finally:
                    self.wait_seconds += time.perf_counter() - started
                yield batch
                del batch  # so that it isn't kept while the next one is waited for
                if pending is not self._pending:
                    raise RuntimeError("this run of the loader was dropped when a newer one began, or by close()")
        finally:
            for future in pending:
                future.cancel()

    def close(self) -> None:
        """Drops all batches under way and ends the threads; a batch being made is finished first."""
        self._drop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        for future in self._pending:
            future.cancel()
        self._pending = deque()

    def _make(self, share: Share) -> Batch:
        indices, epochs = self._order.at(share.start, share.count)
        return self._pipeline.training_batch(indices, epochs, share.augment)

"""The order of training samples: an endless stream whose whole state is the number of samples consumed."""

import threading
from concurrent.futures import Future

import numpy as np

from ..rng import ORDER, keyed_permutation
from .types import Int64

EARLY = 0.9  # fraction of an epoch after which the next permutation is made, so that no batch waits for it
COPY = 1 << 40  # added to the epoch of a repeated image's later copies; no run has so many epochs


class StreamOrder:
    """An endless stream of sample indices; each epoch is a permutation that depends on (seed, epoch) only.

    Nothing is dropped at the end of an epoch: a request continues into the next one. Any process can compute any
    stretch of the stream, so any number of ranks can divide the samples of a step, and a run resumes in mid-epoch from
    one integer. Safe to use from several threads.

    Args:
        length: Samples in an epoch, at least 1.
        seed: The recipe's seed, an integer of 64 bits.
        repeats: Copies of each image in a row (repeated augmentation, Hoffer et al., arXiv 1901.09335).

    In a training loop of your own, with `world_size` ranks:

    >>> order = StreamOrder(length=5, seed=0)
    >>> consumed, batch, rank, world_size = 0, 4, 1, 2
    >>> share = batch // world_size
    >>> indices, epochs = order.at(consumed + rank * share, share)  # this rank's samples of the step
    >>> consumed += batch                                           # all that a checkpoint must hold

    The stream's first ten positions are two whole epochs:

    >>> indices, epochs = order.at(0, 10)
    >>> sorted(indices[:5].tolist()), sorted(indices[5:].tolist()), epochs.tolist()
    ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])
    """

    def __init__(self, length: int, seed: int, repeats: int = 1) -> None:
        if not (_is_whole(length) and length >= 1):
            raise ValueError(f"length: a stream needs at least 1 sample an epoch, got {length!r}")
        if not (_is_whole(repeats) and repeats >= 1):
            raise ValueError(f"repeats: a stream has each image at least once, got {repeats!r}")
        if not (_is_whole(seed) and -(2**63) <= seed < 2**63):
            raise ValueError(f"seed: needs an integer of 64 bits, got {seed!r}")
        self.length, self.seed, self.repeats = length, seed, repeats
        self._epochs: dict[int, Future[Int64]] = {}
        self._lock = threading.Lock()

    def permutation(self, epoch: int) -> Int64:
        """The indices of one epoch, int64 [length]."""
        return keyed_permutation(self.length, ORDER, self.seed, epoch)

    def at(self, start: int, count: int) -> tuple[Int64, Int64]:
        """The samples at the stream's positions start..start+count-1, and the epoch of each, from 0: int64 [count].

        Augmentation is keyed by the epoch, to which copies after the first add `copy * COPY`.
        """
        if not (_is_whole(start) and _is_whole(count) and start >= 0 and count >= 0):
            raise ValueError(f"start and count must be whole numbers, not negative, got {start!r} and {count!r}")
        if start + count > 2**63 - 1:
            raise ValueError(f"start: positions end at 2**63 - 1, got {start} and {count} more")
        # Batch 3: positions become samples. Copies first, then epochs, so that an image follows itself.
        places, copies = np.divmod(np.arange(start, start + count, dtype=np.int64), self.repeats)
        epochs, offsets = np.divmod(places, self.length)
        indices = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            indices[here] = self._made(epoch).result()[offsets[here]]
        # A permutation of a million takes a while; at the edge of an epoch every rank would wait for it.
        if count and offsets[-1] >= EARLY * self.length:
            self._made(int(epochs[-1]) + 1)
        return indices, epochs + copies * COPY

    def _made(self, epoch: int) -> "Future[Int64]":
        with self._lock:
            if epoch not in self._epochs:
                # A batch may span two epochs, and the next permutation is made early: three are in use at most.
                self._epochs = {each: made for each, made in self._epochs.items() if abs(each - epoch) <= 1}
                made = self._epochs[epoch] = Future[Int64]()
                threading.Thread(target=self._make, args=(epoch, made), daemon=True).start()
            return self._epochs[epoch]

    def _make(self, epoch: int, made: "Future[Int64]") -> None:
        try:
            made.set_result(self.permutation(epoch))
        except BaseException as error:
            made.set_exception(error)


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer)

import itertools
import re
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.own import Stripes
from tests.data.test_pipeline import own_data, pictures
from tests.messages import refused
from tests.polling import until
from torusgd.data import Batch, Loader, Pipeline, Share, StreamOrder
from torusgd.data import pipeline as module


def shares(count: int, size: int = 4) -> Iterator[Share]:
    return (Share(number, 0, number * size, size, augment=number % 3 != 2) for number in range(count))


def run(background: Loader, wanted: Iterable[Share]) -> Iterator[Batch]:
    """Takes the batches in order, each with what follows it."""
    wanted = list(wanted)
    for number, share in enumerate(wanted):
        yield background.take(share, wanted[number + 1 :])


def loader(source: Stripes, threads: int = 2, ahead: int = 3) -> Loader:
    return Loader(Pipeline(source, own_data(), 0), StreamOrder(len(source), 0), threads, ahead)


class Gated(Stripes):
    """A source that waits in `read` until the test lets it go on."""

    def __init__(self, gates: int = 0) -> None:
        super().__init__(30)
        self.gate, self.lock, self.begun = threading.Semaphore(gates), threading.Lock(), 0

    def read(self, index: int) -> np.ndarray:
        with self.lock:
            self.begun += 1
        assert self.gate.acquire(timeout=240)
        return super().read(index)


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (1, 4), (3, 2), (4, 9)])
def test_batches_are_those_of_the_pipeline_in_order(tmp_path: Path, threads: int, ahead: int) -> None:
    pipeline, order, before = pictures(tmp_path), StreamOrder(12, 0), torch.get_num_threads()
    background = Loader(pipeline, order, threads, ahead)
    batches = list(run(background, shares(12)))
    assert torch.get_num_threads() == before, "the consumer's own are left alone"
    for share, batch in zip(shares(12), batches, strict=True):
        expected = pipeline.training_batch(*order.at(share.start, share.count), share.augment)
        assert torch.equal(batch.images, expected.images)
        assert torch.equal(batch.targets, expected.targets)
    background.close()


def test_no_more_than_ahead_is_made_and_batches_handed_over_are_not_retained() -> None:
    source, taken = Gated(1000), weakref.WeakSet[Batch]()
    background = loader(source, threads=8, ahead=3)
    for number, batch in enumerate(run(background, shares(20, size=1)), 1):
        taken.add(batch)
        assert source.begun <= number + 2  # those handed over, and two ahead
        assert len(taken) <= 2, "the one in hand, and the one that the loop's variable holds until it has the next"
    background.close()
    for threads, ahead in ((0, 1), (1, 0)):
        with refused(f"{threads} threads, {ahead} ahead", "threads and ahead ", kind=ValueError):
            loader(Stripes(5), threads, ahead)


def test_an_error_is_raised_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", ())
    source = Stripes(30)
    source.unreadable[int(StreamOrder(30, 0).at(9, 1)[0][0])] = 99  # in the third batch
    background = loader(source, threads=3, ahead=5)
    taking = run(background, shares(7))
    assert len([next(taking), next(taking)]) == 2
    with refused("a stripe out of reach of a thread", kind=OSError, STRIPE=re.compile("stripe \\d+")):
        next(taking)
    source.unreadable.clear()
    assert len(list(run(background, shares(7)))) == 7
    background.close()


def test_shares_may_be_asked_for_again_and_in_another_order() -> None:
    background = loader(Stripes(30), ahead=4)
    first, again = (list(itertools.islice(run(background, shares(8)), 3)) for _ in range(2))
    assert all(torch.equal(a.images, b.images) for a, b in zip(first, again, strict=True))
    # Another rank's shares now: what was begun for the old ones goes.
    other = Share(7, 1, 40, 4, augment=True)
    expected = background._pipeline.training_batch(*background._order.at(40, 4), True)
    assert torch.equal(background.take(other).images, expected.images)
    assert not background._pending
    background.close()


def test_close_drops_what_was_not_begun() -> None:
    before, source = set(threading.enumerate()), Gated(1)
    background = loader(source, threads=1, ahead=6)
    taking = run(background, shares(20, size=1))
    next(taking)
    until(lambda: source.begun == 2, "the next one waits at the gate, and four more are queued")
    closing = threading.Thread(target=background.close)
    closing.start()
    source.gate.release(1000)
    closing.join(timeout=240)
    assert not closing.is_alive()
    assert source.begun <= 3
    assert not set(threading.enumerate()) - before
    with pytest.raises(RuntimeError):
        next(taking)


def test_time_kept_waiting_is_counted_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Gated()
    background = loader(source, threads=1, ahead=1)
    ticks = itertools.count()

    def clock() -> int:
        source.gate.release()  # nothing can be made before the loader has looked at the clock
        return next(ticks)

    monkeypatch.setattr(time, "perf_counter", clock)
    taking = run(background, shares(3, size=1))
    for number in range(1, 4):
        next(taking)
        assert background.wait_seconds == number  # one tick from before the wait to after it
        next(ticks)  # the consumer computes
    background.close()

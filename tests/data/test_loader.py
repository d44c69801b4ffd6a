"""Batches that threads and processes make ahead: those of the pipeline, in order, whatever ends."""

import itertools
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.comm.gloo_world import start_forkserver
from tests.data.own import Stripes
from tests.data.pictures import folder_data, write_folder
from tests.data.test_pipeline import own_data, pictures
from tests.messages import refused, refuses
from tests.polling import until
from torusgd.data import Batch, Loader, Pipeline, Share, StreamOrder, loader, open_sources
from torusgd.data import pipeline as module
from torusgd.data.file_lists import make_here
from torusgd.data.loader import LoaderProcesses, open_pipeline
from torusgd.data.to_device import BytePipeline
from torusgd.data.to_device import parts as in_message
from torusgd.errors import RunError
from torusgd.recipe.data_schema import Augment
from torusgd.recipe.section import ImageSizes


def shares(count: int, size: int = 4) -> Iterator[Share]:
    return (Share(number, 0, number * size, size, augment=number % 3 != 2) for number in range(count))


def run(background: Loader, wanted: Iterable[Share]) -> Iterator[Batch]:
    """Takes the batches in order, each with what follows it."""
    wanted = list(wanted)
    for number, share in enumerate(wanted):
        yield background.take(share, wanted[number + 1 :])


def background_of(source: Stripes, threads: int = 2, ahead: int = 3) -> Loader:
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
    for share, batch in zip(shares(12), run(background, shares(12)), strict=True):
        assert torch.get_num_threads() == before, "the consumer's own are left alone"
        expected = pipeline.training_batch(*order.at(share.start, share.count), share.augment)
        assert torch.equal(batch.images, expected.images)
        assert torch.equal(batch.targets, expected.targets)
    background.close()


def test_no_more_than_ahead_is_made_and_batches_handed_over_are_not_retained() -> None:
    source, taken = Gated(1000), weakref.WeakSet[Batch]()
    background = background_of(source, threads=8, ahead=3)
    for number, batch in enumerate(run(background, shares(20, size=1)), 1):
        taken.add(batch)
        assert source.begun <= number + 2  # those handed over, and two ahead
        assert len(taken) <= 2, "the one in hand, and the one that the loop's variable holds until it has the next"
    background.close()
    for threads, ahead in ((0, 1), (1, 0)):
        with refused(f"{threads} threads, {ahead} ahead", "threads and ahead ", kind=ValueError):
            background_of(Stripes(5), threads, ahead)


def test_an_error_is_raised_where_it_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSES", ())
    source = Stripes(30)
    source.unreadable[int(StreamOrder(30, 0).at(9, 1)[0][0])] = 99  # in the third batch
    background = background_of(source, threads=3, ahead=5)
    taking = run(background, shares(7))
    assert len([next(taking), next(taking)]) == 2
    refuses("a stripe out of reach of a thread", next, taking, kind=OSError, STRIPE=re.compile("stripe \\d+"))
    source.unreadable.clear()
    assert len(list(run(background, shares(7)))) == 7
    background.close()


def test_shares_may_be_asked_for_again_and_in_another_order() -> None:
    background = background_of(Stripes(30), ahead=4)
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
    background = background_of(source, threads=1, ahead=6)
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
    background = background_of(source, threads=1, ahead=1)
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


FIRST = np.arange(6), np.zeros(6, dtype=np.int64)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Starts some, of a pipeline that is returned beside them, and ends them after the test."""
    start_forkserver()  # as in a run: what a process imports after its fork starts threads that don't hold signals back
    started, folder = list[LoaderProcesses](), write_folder(tmp_path)

    def start(make: Any = Pipeline, count: int = 1, path: Path = folder, **changes: Any) -> Any:
        data = folder_data(**changes)
        pipeline = make(open_sources(data, folder, 0)[0], data, 0)
        started.append(LoaderProcesses(pipeline, partial(open_pipeline, make, data, path, 0, make_here), count))
        return pipeline, started[-1]

    yield start
    for each in started:
        each.close()


def equal(one: Batch, other: Batch) -> bool:
    def parts(batch: Batch) -> list[Any]:
        joined = None if batch.message is None else in_message(batch.message, batch.images.shape)[1]
        arrays: Any = (batch.positions, batch.images, batch.targets, batch.partners, batch.shares, batch.table, joined)
        return [batch.replaced, *(each if each is None else (each.dtype, each.tolist()) for each in arrays)]

    return parts(one) == parts(other)


def test_batches_of_processes_have_the_bits_of_threads_be_they_bytes_mixed_or_larger(processes: Any) -> None:
    pipeline, several = processes(count=2)
    order = StreamOrder(len(pipeline.source), 0)
    background = Loader(several, order, threads=2, ahead=4)
    for share, batch in zip(shares(9), list(run(background, shares(9))), strict=True):
        assert equal(batch, pipeline.training_batch(*order.at(share.start, share.count), share.augment))
    background.close()
    bytewise, its = processes(BytePipeline)
    assert its.training_batch(*FIRST, True).table is bytewise.table
    for sizes in (None, ImageSizes((40, 40), 44)):
        assert equal(its.training_batch(*FIRST, True, sizes), bytewise.training_batch(*FIRST, True, sizes))
    mixing, its = processes(augment=Augment(mixup=0.5, erase=0.5))
    assert its.training_batch(*FIRST, True).partners is not None
    assert equal(its.training_batch(*FIRST, True), mixing.training_batch(*FIRST, True))


def test_what_is_wrong_reaches_the_rank(tmp_path: Path, processes: Any, caplog: pytest.LogCaptureFixture) -> None:
    next((tmp_path / "train").rglob("*.jpg")).write_bytes(b"torn")
    _, its = processes(path=tmp_path / "nowhere")
    refuses("data at a missing path", its.training_batch, *FIRST, True, about="--data ", PATH=tmp_path / "nowhere")
    _, its = processes()
    with refused("a loader process with a defect", kind=RunError, NUMPYS=re.compile("index .*")):
        its.training_batch(np.array([10**6]), np.zeros(1, dtype=np.int64), True)
    with caplog.at_level(logging.WARNING):
        assert its.training_batch(np.arange(12), np.zeros(12, dtype=np.int64), True).replaced == 1, "it goes on"
    assert "replaced: image" in caplog.text
    # One whose rank has ended ends without a word.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=loader._serve, args=(context.Pipe()[1], "/proc/self/fd/9999", None))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_killed_or_suspended_process_is_replaced_and_a_second_end_is_one_line(processes, tmp_path, monkeypatch):
    before = set(active_children())
    _, its = processes()
    its.training_batch(*FIRST, True)
    (process,) = set(active_children()) - before
    os.kill(process.pid or 0, signal.SIGTERM)  # held back: the rank may want another batch before it stops
    wanted = its.training_batch(*FIRST, True).images
    assert len(wanted) == 6
    os.kill(process.pid or 0, signal.SIGKILL)
    assert its.training_batch(*FIRST, True).images.equal(wanted)
    (process,) = set(active_children()) - before
    monkeypatch.setattr(loader, "FROZEN_SECONDS", 0.1)
    os.kill(process.pid or 0, signal.SIGSTOP)
    assert its.training_batch(*FIRST, True).images.equal(wanted)
    assert process.exitcode == -signal.SIGKILL
    # One that ends at each batch, as for want of memory, is not replaced for ever.
    exchange = loader._Process._exchange

    def end_first(process: Any, wanted: Any) -> Any:
        process._process.kill()
        process._process.join()
        return exchange(process, wanted)

    monkeypatch.setattr(loader._Process, "_exchange", end_first)
    refuses("a loader process that was killed", its.training_batch, *FIRST, True, kind=RunError, TMP=tmp_path)
    its.close()
    until(lambda: not set(active_children()) - before, "none is left")

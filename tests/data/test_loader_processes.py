import logging
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comm.gloo_world import start_forkserver
from tests.data.pictures import folder_data, write_folder
from tests.messages import refused
from tests.polling import until
from torusgd.data import Batch, Pipeline, StreamOrder, loader, open_sources
from torusgd.data.file_lists import make_here
from torusgd.data.loader import Loader, LoaderProcesses, Share, open_pipeline
from torusgd.data.to_device import BytePipeline
from torusgd.data.to_device import parts as in_message
from torusgd.errors import RunError
from torusgd.recipe.data_schema import Augment
from torusgd.recipe.section import ImageSizes

FIRST = np.arange(6), np.zeros(6, dtype=np.int64)


@pytest.fixture(scope="module", autouse=True)
def forkserver() -> None:
    """As in a run: what a process imports after its fork starts threads that don't hold signals back."""
    start_forkserver()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Starts some, of a pipeline that is returned beside them, and ends them after the test."""
    started: list[LoaderProcesses] = []
    folder = write_folder(tmp_path)

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


def test_batches_have_the_bits_of_threads_and_outlive_the_next(processes: Any) -> None:
    pipeline, several = processes(count=2)
    order = StreamOrder(len(pipeline.source), 0)
    shares = [Share(step, 0, 4 * step, 4, augment=step % 3 != 2) for step in range(9)]
    loader = Loader(several, order, threads=2, ahead=4)
    batches = [loader.take(share, shares[share.step + 1 :]) for share in shares]
    for share, batch in zip(shares, batches, strict=True):
        assert equal(batch, pipeline.training_batch(*order.at(share.start, share.count), share.augment))
    loader.close()


def test_bytes_mixed_images_and_larger_ones(processes: Any) -> None:
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
    with refused("data at a missing path", "--data ", PATH=tmp_path / "nowhere"):
        its.training_batch(*FIRST, True)
    _, its = processes()
    with refused("a loader process with a defect", kind=RunError, NUMPYS=re.compile("index .*")):
        its.training_batch(np.array([10**6]), np.zeros(1, dtype=np.int64), True)
    with caplog.at_level(logging.WARNING):
        assert its.training_batch(np.arange(12), np.zeros(12, dtype=np.int64), True).replaced == 1, "it goes on"
    assert "replaced in epoch 0" in caplog.text
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
    with refused("a loader process that was killed", kind=RunError, TMP=tmp_path):
        its.training_batch(*FIRST, True)
    its.close()
    until(lambda: not set(active_children()) - before, "none is left")

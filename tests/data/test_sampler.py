"""The stream of samples, and of a DataLoader: nothing lost or repeated, whatever draws ahead, on any ranks."""

import itertools
import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.comm.gloo_world import start_forkserver
from tests.messages import refuses
from tests.polling import until
from torusgd import BatchSizeSchedule, StreamSampler
from torusgd.data.order import COPY, StreamOrder
from torusgd.errors import UserError

LENGTH = 37


def stream(count: int, length: int = LENGTH, seed: int = 0, repeats: int = 1) -> list[int]:
    return StreamOrder(length, seed, repeats).at(0, count)[0].tolist()


@given(st.integers(1, 40), st.integers(0, 2**63 - 1), st.lists(st.integers(0, 60), max_size=8))
@settings(deadline=None, max_examples=50)
def test_any_split_of_the_stream_gives_the_same_stream(length: int, seed: int, counts: list[int]) -> None:
    whole = np.stack(StreamOrder(length, seed).at(0, sum(counts)))
    order, starts = StreamOrder(length, seed), np.cumsum([0, *counts]).tolist()
    spans = list(zip(starts, counts, strict=False))
    for asked in (spans, spans[::-1]):  # the answer does not depend on what was asked before
        for start, count in asked:
            assert np.array_equal(np.stack(order.at(start, count)), whole[:, start : start + count])


@given(st.integers(1, 50), st.integers(0, 1000), st.integers(0, 4))
@settings(deadline=None, max_examples=50)
def test_each_epoch_is_a_permutation_and_nothing_is_dropped(length: int, seed: int, epoch: int) -> None:
    indices, epochs = StreamOrder(length, seed).at(epoch * length, length)
    assert (sorted(indices.tolist()), set(epochs.tolist())) == (list(range(length)), {epoch})


def test_a_permutation_is_made_once_by_many_threads_and_ahead_of_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, release, plain = list[int](), Event(), StreamOrder.permutation

    def permutation(self: StreamOrder, epoch: int) -> Any:
        made.append(epoch)
        assert release.wait(240)
        return plain(self, epoch)

    monkeypatch.setattr(StreamOrder, "permutation", permutation)
    order = StreamOrder(100, seed=0)
    with ThreadPoolExecutor(16) as pool:
        parts = [pool.submit(order.at, 5 * number, 5) for number in range(16)]
        until(lambda: made, "an epoch is begun")
        release.set()
    assert np.array_equal(np.concatenate([part.result()[0] for part in parts]), plain(order, 0)[:80])
    assert made == [0]
    release.clear()
    order.at(88, 3)  # does not wait for the next epoch's
    until(lambda: len(made) == 2, "the next epoch is begun")
    release.set()
    order.at(98, 5)
    assert made == [0, 1]


def test_the_order_is_pinned_and_repeats_stand_side_by_side_with_draws_of_their_own() -> None:
    """A checkpoint of an older version must go on with the same samples."""
    pinned = [1, 3, 0, 1, 3, 4, 2, 5, 6, 1, 4, 2], [0] * 2 + [1] * 7 + [2] * 3
    assert tuple(each.tolist() for each in StreamOrder(7, seed=3).at(5, 12)) == pinned
    indices, epochs = StreamOrder(4, 0, repeats=3).at(0, 14)
    plain, _ = StreamOrder(4, 0).at(0, 5)
    assert indices.tolist() == np.repeat(plain, 3)[:14].tolist()
    assert ((epochs // COPY).tolist(), (epochs % COPY).tolist()) == ([0, 1, 2] * 4 + [0, 1], [0] * 12 + [1] * 2)
    assert StreamOrder(4, 0, repeats=3).at(5, 4)[0].tolist() == indices[5:9].tolist()


def test_nonsense_what_does_not_fit_and_a_state_of_another_stream_or_an_older_one_are_refused() -> None:
    refuses("a stream without samples", StreamOrder, 0, 0, about="length: ", kind=ValueError)
    for name, place in {"before its start": (-1, 2), "beyond 64 bits": (2**63 - 3, 3)}.items():
        refuses(f"a stream {name}", StreamOrder(3, 0).at, *place, about="start", kind=ValueError)
    wrong: list[Any] = [(3, 0.5), (3, 2**63), (3, 2**70), (5.5, 0), (5, 0, 0), (5, 0, 1.5)]
    for arguments in wrong:
        with pytest.raises(ValueError, match="seed: needs an integer of 64 bits" if arguments[0] == 3 else "a stream "):
            StreamOrder(*arguments)
    with pytest.raises(ValueError, match="whole numbers"):
        StreamOrder(3, 0).at(0.5, 2)  # type: ignore[arg-type]
    for match, arguments in WRONG.items():
        with pytest.raises(ValueError, match=match):
            list(StreamSampler(**{"length": LENGTH, "batch_size": 6, "rank": 0, "world_size": 1, **arguments}))
    sampler = StreamSampler(LENGTH, 6)
    old = sampler.state_dict()
    sampler.step(2)
    for other in (StreamSampler(LENGTH + 1, 6), StreamSampler(LENGTH, 6, seed=1), StreamSampler(LENGTH, 5)):
        with pytest.raises(ValueError, match="another stream"):
            other.load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="step 2 was loaded"):
        sampler.load_state_dict(old)
    with pytest.raises(ValueError, match="none of a StreamSampler"):
        sampler.load_state_dict({})
    for steps in (1.5, -1, float("nan")):
        with pytest.raises(ValueError, match="steps: a whole number, at least 0, got"):
            sampler.seek(steps)
    assert sampler.steps == 2


def endless(epochs: Any) -> Any:
    return itertools.chain.from_iterable(itertools.repeat(epochs))


def steps_of(samplers: list[StreamSampler], count: int, lists: int) -> list[list[list[int]]]:
    """The micro-batches of each of the next steps over all ranks; each rank draws so many lists a step."""
    found, drawn = [], [endless(sampler) for sampler in samplers]
    for _ in range(count):
        found.append([next(each) for each in drawn for _ in range(lists)])
        for sampler in samplers:
            sampler.step()
    return found


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [sample for step in steps for part in step for sample in part]


SIZES = st.sampled_from([1, 2, 3, 4, 6])


@settings(max_examples=30)
@given(
    st.integers(1, 50), st.integers(1, 5), SIZES, SIZES, st.integers(0, 15), st.integers(0, 2**40), st.integers(1, 3)
)
def test_a_stop_and_other_ranks_change_nothing(length, micro, before, after, stop, seed, repeats: int) -> None:
    batch = 12 * micro

    def ranks(size: int) -> list[StreamSampler]:
        same = {"seed": seed, "world_size": size, "micro_batches": 12, "repeats": repeats}
        return [StreamSampler(length, batch, rank=rank, **same) for rank in range(size)]

    first = ranks(before)
    found = steps_of(first, stop, 12 // before)
    second = ranks(after)
    for sampler in second:
        sampler.load_state_dict(first[-1].state_dict())
    found += steps_of(second, 5, 12 // after)
    assert flat(found) == stream((stop + 5) * batch, length, seed, repeats)
    assert found == steps_of(ranks(1), stop + 5, 12)


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_any_number_of_ranks_shares_a_batch_without_micro_batches(size: int) -> None:
    found = steps_of([StreamSampler(LENGTH, 10, rank=rank, world_size=size) for rank in range(size)], 9, 1)
    assert flat(found) == stream(90)
    lengths = [len(part) for step in found for part in step]
    assert max(lengths) - min(lengths) <= 1


def grown(consumed: int) -> int:
    return 4 if consumed < 50 else 10


def test_batches_that_grow_go_on_from_their_place_and_change_the_rate_in_the_step_alone() -> None:
    sampler = StreamSampler(LENGTH, grown)
    assert [len(step[0]) for step in steps_of([sampler], 14, 1)] == [4] * 13 + [10]
    again = StreamSampler(LENGTH, grown)
    again.load_state_dict(sampler.state_dict())
    assert steps_of([again], 1, 1)[0][0] == stream(72)[62:]
    with pytest.raises(ValueError, match="consumed"):
        StreamSampler(LENGTH, 4).load_state_dict(sampler.state_dict())
    schedule = BatchSizeSchedule({20: 10, 0: 4}, rate="sqrt")
    sampler = StreamSampler(LENGTH, schedule)
    weight = torch.zeros(1, requires_grad=True)
    old, optimizer = (torch.optim.SGD([weight], lr=1.0) for _ in range(2))
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for each in (old, optimizer):
        sampler.follow(each)
    for _ in range(2):  # as a library's second run with the same optimizer calls it
        schedule.follow(optimizer, sampler)
    old.step()
    assert sampler.steps == 0, "the last one counts"
    moved: list[float] = []
    for _ in range(7):
        before, weight.grad = weight.item(), torch.ones(1)
        optimizer.step()
        decay.step()
        moved.append((before - weight.item()) * 2 ** len(moved))
    assert [sampler.batch(step) for step in range(7)] == [4, 4, 4, 4, 4, 10, 10]
    assert moved == pytest.approx([1.0] * 5 + [2.5**0.5] * 2, rel=1e-5)
    assert (decay.get_last_lr(), sampler.steps, sampler.consumed) == ([0.5**7], 7, 40)
    for batches in ({}, {1: 4}, {0: 0}, {0: 2.5}):
        with pytest.raises(UserError, match="batches: "):
            BatchSizeSchedule(batches)


def test_the_length_is_that_of_the_epoch_wherever_it_stands() -> None:
    sampler = StreamSampler(LENGTH, 4, micro_batches=2)
    for length in (20, 18, 18, 18):  # steps end at 40, 76, 112, 148 samples: after each whole epoch of 37
        assert len(sampler) == length
        drawn = 0
        for drawn, _ in enumerate(sampler, 1):
            assert len(sampler) == length or drawn == 2 * (length // 2)
            if drawn % 2 == 0:
                sampler.step()
        assert drawn == length
    assert sampler.epoch == 4


def trained(sampler: StreamSampler, loader: Any, steps: int, lists: int) -> list[int]:
    """What a loop has trained on after so many steps; the loader has drawn more."""
    seen: list[int] = []
    for parts, batch in enumerate(itertools.islice(endless(loader), steps * lists), 1):
        seen += batch.tolist()
        if parts % lists == 0:
            sampler.step()
    return seen


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (2, {"prefetch_factor": 4}), (4, {"persistent_workers": True}), (2, {"persistent_workers": True})],
)
def test_what_a_loader_drew_ahead_is_not_lost(workers: int, options: dict[str, Any]) -> None:
    def loader(sampler: StreamSampler) -> DataLoader[int]:
        numbers: Any = range(LENGTH)
        return DataLoader(numbers, batch_sampler=sampler, num_workers=workers, **options)

    first = StreamSampler(LENGTH, 6, micro_batches=2)
    seen = trained(first, loader(first), 9, 2)
    second = StreamSampler(LENGTH, 6)
    second.load_state_dict(first.state_dict())
    assert seen + trained(second, loader(second), 9, 1) == stream(18 * 6)


def test_samples_that_nobody_counted_or_that_were_divided_twice_are_reported() -> None:
    sampler = StreamSampler(LENGTH, 6)
    list(sampler)
    for counted in (0, 3):  # as where a library gave every second batch to another rank
        sampler.step(counted)
        with pytest.raises(RuntimeError, match=f"7 steps were drawn and {counted} steps counted"):
            list(sampler)
    sampler.step(4)
    assert len(list(sampler)) == 6
    with pytest.raises(UserError, match="stream_loader"):  # as Accelerate's BatchSamplerShard begins
        getattr(sampler, "batch_size", None)


WRONG: dict[str, Any] = {
    "length": {"length": 0}, "batch_size": {"batch_size": 0}, "0 micro-batches": {"micro_batches": 0},
    "2.5 micro-batches": {"micro_batches": 2.5},
    "3 micro-batches of a batch of 2": {"batch_size": 2, "world_size": 3},
    "one a rank at least": {"micro_batches": 2, "world_size": 3}, "rank 2 of 2": {"rank": 2, "world_size": 2},
}  # fmt: skip


def train_and_save(folder: Path, sleeps_at: int) -> None:
    """Twenty steps, saved after each; sleeps for ever between one of them and its save."""
    os.setsid()  # a group of its own, with its loaders
    multiprocessing.set_start_method("fork", force=True)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.0)
    sampler, saved, seen = StreamSampler(LENGTH, 6), folder / "state.json", list[int]()
    if saved.exists():
        state, seen = json.loads(saved.read_text()).values()
        sampler.load_state_dict(state)
    numbers: Any = range(LENGTH)
    loader = DataLoader(numbers, batch_sampler=sampler, num_workers=2, persistent_workers=True)
    while sampler.steps < 20:
        for batch in loader:
            seen += batch.tolist()
            optimizer.step()
            sampler.step()
            if sampler.steps == sleeps_at:
                (folder / "between").touch()
                time.sleep(600)
            (folder / "new.json").write_text(json.dumps({"sampler": sampler.state_dict(), "seen": seen}))
            (folder / "new.json").replace(saved)
            if sampler.steps == 20:
                os._exit(0)


def test_a_kill_between_the_optimizers_step_and_the_save(tmp_path: Path) -> None:
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    first, again = (context.Process(target=train_and_save, args=(tmp_path, sleeps_at)) for sleeps_at in (11, 0))
    first.start()
    until(lambda: (tmp_path / "between").exists() or None, "the step before the save")
    os.killpg(first.pid or 0, signal.SIGKILL)
    first.join()
    again.start()
    again.join(240)
    # The eleventh step's weights are lost with the process, and so it is done again: with the same samples.
    assert json.loads((tmp_path / "state.json").read_text())["seen"] == stream(120)

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.messages import refused
from tests.polling import until
from torusgd.data import StreamOrder
from torusgd.data.order import COPY


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
    assert sorted(indices.tolist()) == list(range(length))
    assert set(epochs.tolist()) == {epoch}


def test_a_permutation_is_made_once_by_many_threads_and_ahead_of_its_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, release, plain = list[int](), Event(), StreamOrder.permutation

    def permutation(self: StreamOrder, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        made.append(epoch)
        assert release.wait(240)
        return plain(self, epoch)

    monkeypatch.setattr(StreamOrder, "permutation", permutation)
    order = StreamOrder(100, seed=0)
    with ThreadPoolExecutor(16) as pool:
        parts = [pool.submit(order.at, 5 * number, 5) for number in range(16)]
        until(lambda: made, "an epoch is begun")
        release.set()
        got = np.concatenate([part.result()[0] for part in parts])
    assert np.array_equal(got, plain(order, 0)[:80])
    assert made == [0]
    release.clear()
    order.at(88, 3)  # does not wait for the next epoch's
    until(lambda: len(made) == 2, "the next epoch is begun")
    release.set()
    order.at(98, 5)
    assert made == [0, 1]


def test_the_order_is_pinned() -> None:
    """A checkpoint of an older version must go on with the same samples."""
    indices, epochs = StreamOrder(7, seed=3).at(5, 12)
    assert indices.tolist() == [1, 3, 0, 1, 3, 4, 2, 5, 6, 1, 4, 2]
    assert epochs.tolist() == [0] * 2 + [1] * 7 + [2] * 3


def test_repeats_stand_side_by_side_with_draws_of_their_own() -> None:
    indices, epochs = StreamOrder(4, 0, repeats=3).at(0, 14)
    plain, _ = StreamOrder(4, 0).at(0, 5)
    assert indices.tolist() == np.repeat(plain, 3)[:14].tolist()
    assert (epochs // COPY).tolist() == [0, 1, 2] * 4 + [0, 1]
    assert (epochs % COPY).tolist() == [0] * 12 + [1] * 2
    assert StreamOrder(4, 0, repeats=3).at(5, 4)[0].tolist() == indices[5:9].tolist()


def test_nonsense_is_refused() -> None:
    with refused("a stream without samples", "length: ", kind=ValueError):
        StreamOrder(0, 0)
    with refused("a stream before its start", "start ", kind=ValueError):
        StreamOrder(3, 0).at(-1, 2)
    with refused("a stream beyond 64 bits", "start", kind=ValueError):
        StreamOrder(3, 0).at(2**63 - 3, 3)
    for arguments, match in (
        *(((3, seed), "seed: needs an integer of 64 bits") for seed in (0.5, 2**63, 2**70)),
        *((each, "a stream ") for each in ((5.5, 0), (5, 0, 0), (5, 0, 1.5))),
    ):
        with pytest.raises(ValueError, match=match):
            StreamOrder(*arguments)
    with pytest.raises(ValueError, match="whole numbers"):
        StreamOrder(3, 0).at(0.5, 2)  # type: ignore[arg-type]

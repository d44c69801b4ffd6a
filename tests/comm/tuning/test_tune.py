"""Which all-reduces `auto` times before it chooses, and how often."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tests.plan.measured import link, network

from torusgd.comm.algorithms import Algorithm
from torusgd.comm.connection import Clock, Span, shuffled
from torusgd.comm.groups import alone
from torusgd.comm.tuning import tune
from torusgd.comm.tuning.profile import Profile, expect

LARGE = 1 << 22
ALONE = Clock(alone())


def profile(ranks: int) -> Profile:
    return network(tuple(range(ranks)), message=0.0, between=link(1e-3, 1e-8))


def timed(
    monkeypatch: pytest.MonkeyPatch, takes: Any, ranks: int = 8, **changes: Any
) -> tuple[list[Any], list[Algorithm | None]]:
    """Timings of rivals that take `takes(algorithm)`, and what ran, in order."""
    ran: list[Algorithm | None] = []

    def run(connection: Any, size: int, algorithm: Algorithm | None) -> Span:
        ran.append(algorithm)
        return Span(1.0, 1.0 + takes(algorithm))

    monkeypatch.setattr(tune, "_time_sum", run)
    engine, group = SimpleNamespace(effective=lambda plan: plan), SimpleNamespace(size=ranks)
    connection: Any = SimpleNamespace(engine=engine, group=group, clock=ALONE)
    told = {"size": LARGE, "rivals": 5, "repetitions": 3, "seconds": 0.0, "known": set(), **changes}
    return tune._rivals(connection, profile(ranks), **told), ran


def test_who_is_far_behind_is_timed_once_and_who_is_close_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    timings, ran = timed(
        monkeypatch, lambda plan: {"native": 1.0, "ring": 0.5}.get(plan.name if plan else "native", 0.4)
    )
    counted = Counter("native" if plan is None else plan.name for plan in ran)
    assert counted["native"] == 1 + 1, "the first run, which connects, does not count"
    stays = {timing.algorithm for timing in timings if timing.median == pytest.approx(0.4)}
    assert len(stays) > 1
    assert all(counted[name] >= 1 + 3 for name in stays)


def test_the_quickest_is_tried_in_other_numbers_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(plan: Algorithm | None) -> float:
        return 1.0 if plan is None or not plan.name.startswith("torus:direct") else 0.9 / plan.chunks

    timings, _ = timed(monkeypatch, seconds)
    assert {each.chunks for each in timings if each.algorithm == "torus:direct"} == {1, 2, 4}
    measured = profile(8).model_copy(update={"timings": tuple(timings)})
    chosen = expect(measured, LARGE)[0]
    assert chosen is not None
    assert (chosen.name, chosen.chunks) == ("torus:direct", 4)


def test_nobody_comes_first_or_after_the_same_one_in_every_turn() -> None:
    """After a pause a connection is slow: seen as a seventh of the time of whoever came after Gloo's own all-reduce."""
    orders = [shuffled(range(6), turn) for turn in range(1, 8)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert orders == [shuffled(range(6), turn) for turn in range(1, 8)], "the same on all ranks"
    assert len({order[0] for order in orders}) > 3
    for one in range(6):
        assert len({order[order.index(one) - 1] for order in orders if order.index(one)}) > 2


def test_small_messages_are_timed_no_oftener_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ran = timed(monkeypatch, lambda plan: 0.1, size=1 << 18, seconds=1e9)
    assert max(Counter(ran).values()) == 1 + 3
    _, ran = timed(monkeypatch, lambda plan: 0.1, seconds=1e9)
    assert max(Counter(ran).values()) == 1 + tune._MOST_TURNS


def test_a_size_takes_about_as_long_as_its_neighbours() -> None:
    measured = profile(4)
    assert tune._foreseen(measured, 1 << 18, 10, {}) == 0
    assert tune._foreseen(measured, 1 << 20, 10, {1 << 18: 1.0, 1 << 22: 4.0}) == 2.0
    assert tune._foreseen(measured, 1 << 14, 10, {1 << 18: 1.0}) == 1.0
    assert tune._foreseen(measured, 1 << 22, 10, {1 << 18: 1.0}) == pytest.approx(1 + 10 * 2e-8 * 15 * (1 << 18))

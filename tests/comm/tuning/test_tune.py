"""Which all-reduces `auto` times before it chooses, and how often; the benchmark of all of them."""

import json
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks, run_ranks, write_profile
from tests.plan.measured import link, network

from torusgd.comm.algorithms import NAMES, Algorithm
from torusgd.comm.connection import Clock, Span, connect, shuffled
from torusgd.comm.groups import alone, group_of
from torusgd.comm.tuning import tune
from torusgd.comm.tuning.bench import Record, bench_allreduce
from torusgd.comm.tuning.profile import InStep, Profile, expect
from torusgd.errors import UserError

LARGE = 1 << 22
ALONE = Clock(alone())


def profile(ranks: int) -> Profile:
    return network(tuple(range(ranks)), message=0.0, between=link(1e-3, 1e-8))


def timed(monkeypatch: pytest.MonkeyPatch, takes: Any, **changes: Any) -> tuple[list[Any], list[Algorithm | None]]:
    """Timings of rivals on 8 ranks that take `takes(name, chunks)`, and what ran, in order."""
    ran: list[Algorithm | None] = []

    def run(connection: Any, size: int, plan: Algorithm | None) -> Span:
        ran.append(plan)
        return Span(1.0, 1.0 + takes(*("native", 1) if plan is None else (plan.name, plan.chunks)))

    monkeypatch.setattr(tune, "_time_sum", run)
    engine, group = SimpleNamespace(effective=lambda plan: plan), SimpleNamespace(size=8)
    connection: Any = SimpleNamespace(engine=engine, group=group, clock=ALONE)
    told = {"size": LARGE, "rivals": 5, "repetitions": 3, "seconds": 0.0, "known": set(), **changes}
    return tune._rivals(connection, profile(8), **told), ran


def test_who_is_far_behind_is_timed_once_and_who_is_close_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    timings, ran = timed(monkeypatch, lambda name, chunks: {"native": 1.0, "ring": 0.5}.get(name, 0.4))
    counted = Counter("native" if plan is None else plan.name for plan in ran)
    assert counted["native"] == 1 + 1, "the first run, which connects, does not count"
    stays = {timing.algorithm for timing in timings if timing.median == pytest.approx(0.4)}
    assert len(stays) > 1
    assert all(counted[name] >= 1 + 3 for name in stays)


def test_the_quickest_is_tried_in_other_numbers_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    timings, _ = timed(monkeypatch, lambda name, chunks: 0.9 / chunks if name.startswith("torus:direct") else 1.0)
    assert {each.chunks for each in timings if each.algorithm == "torus:direct"} == {1, 2, 4}
    found = profile(8).model_copy(update={"timings": tuple(timings)})
    assert str(expect(found, LARGE)[0]) == "torus:direct 2x4 in 4 chunks"


def test_nobody_comes_first_or_after_the_same_one_in_every_turn() -> None:
    """After a pause a connection is slow: seen as a seventh of the time of whoever came after Gloo's own all-reduce."""
    orders = [shuffled(range(6), turn) for turn in range(1, 8)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert orders == [shuffled(range(6), turn) for turn in range(1, 8)], "the same on all ranks"
    assert len({order[0] for order in orders}) > 3
    for one in range(6):
        assert len({order[order.index(one) - 1] for order in orders if order.index(one)}) > 2


def test_small_messages_are_timed_no_oftener_and_large_ones_by_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, turns in ((1 << 18, 3), (LARGE, tune._MOST_TURNS)):
        _, ran = timed(monkeypatch, lambda name, chunks: 0.1, size=size, seconds=1e9, rivals=1)
        assert max(Counter(ran).values()) == 1 + turns
        assert any(plan.name == "ring" for plan in ran if plan) == (size == LARGE), "the formulas know no full links"


def test_a_size_takes_about_as_long_as_its_neighbours() -> None:
    measured = profile(4)
    assert tune._foreseen(measured, 1 << 18, 10, {}) == 0
    assert tune._foreseen(measured, 1 << 20, 10, {1 << 18: 1.0, 1 << 22: 4.0}) == 2.0
    assert tune._foreseen(measured, 1 << 14, 10, {1 << 18: 1.0}) == 1.0
    assert tune._foreseen(measured, 1 << 22, 10, {1 << 18: 1.0}) == pytest.approx(1 + 10 * 2e-8 * 15 * (1 << 18))


SIZES = (4, 4096, 100_000)


def records(profile: Path) -> list[dict]:
    return json.loads(json.dumps([asdict(record) for record in bench_allreduce(SIZES, repetitions=3, profile=profile)]))


def test_a_record_for_each_algorithm_and_size_alike_on_all_ranks(tmp_path):
    first, *others = run_ranks(4, records, write_profile(tmp_path, 4))
    assert others == [first] * 3
    assert [(r["bytes"], r["algorithm"]) for r in first] == [(size, name) for size in SIZES for name in NAMES]
    for record in first:
        assert (record["ranks"], record["n"]) == (4, 3)
        assert 0 < record["min_s"] <= record["median_s"] <= record["max_s"]
        if record["algorithm"] in ("torus", "hierarchical"):
            assert record["grid"] == [2, 2]
        if record["algorithm"] in ("native", "ring"):
            assert record["grid"] is None
    assert Record("ring", 1000, 4, None, "ring", 1e-3, 1e-3, 1e-3, 5).bus_bandwidth == pytest.approx(1.5e6)


@on_ranks(2)
def test_mistakes_are_told():
    with pytest.raises(UserError, match=r"^sizes 3:"):
        bench_allreduce(sizes=[3])
    for size in (1 << 60, 4 * 10**30):
        with pytest.raises(UserError, match=r"^sizes: .* do not fit into memory; give smaller ones$"):
            bench_allreduce(sizes=[4, size], algorithms=["native"])
    with pytest.raises(UserError, match=r"^grid 3x3: native, ring take none; add torus or hierarchical, or leave"):
        bench_allreduce(sizes=[4], algorithms=["native", "ring"], grid=(3, 3))
    dist.barrier()  # who ends before another has connected fails that one's `connect`


@on_ranks(2)
def test_what_is_given_twice_is_timed_once() -> None:
    found = bench_allreduce(sizes=[4, 4], algorithms=["native", "ring", "native"], repetitions=1)
    assert [record.algorithm for record in found] == ["native", "ring"]


@on_ranks(2)
def test_what_the_sizes_took_on_a_loaded_machine_is_not_left_for_the_rest():
    given, rivals = list[float](), tune._rivals

    def late(*args: Any, **named: Any) -> Any:
        time.sleep((0.1, 1.5)[torch.distributed.get_rank()])
        return rivals(*args)

    def in_step(*args: Any, **named: Any) -> InStep:
        given.append(args[3])
        return InStep(size=args[2], hidden=0, waited=0)

    def crowding(*args: Any, **named: Any) -> tuple[()]:
        given.append(args[1])
        return ()

    tune._rivals, tune.in_step, tune.crowding = late, in_step, crowding
    with closing(connect(group_of())) as connection:
        tune.measure(connection, 1.5)
    in_steps, crowded = given  # of one size alone
    assert max(in_steps, crowded) <= 0, "on the rank too that took less"


@on_ranks(2)
def test_crowding_is_of_the_task_that_is_given():
    seconds = (0.02, 0.06)[torch.distributed.get_rank()]  # so that two at once take three times as long as rank 0
    with closing(connect(group_of())) as connection:
        (crowd,) = tune.crowding(connection, 0.0, lambda: time.sleep(seconds))
    assert crowd.ranks == 2
    assert crowd.slowdown == pytest.approx(3, rel=0.3)

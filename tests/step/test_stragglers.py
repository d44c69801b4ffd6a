"""The slowest rank is named, with what made it slow."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.step.test_corruption import NOTHING_SENT, view

from torusgd.comm.groups import group_of
from torusgd.comm.monitor import DeviceClock, Monitor
from torusgd.step.rank_times import EVERY, LinkProbe, Stragglers, slowest
from torusgd.step.stats import StepClock

EVEN, LINKS = [(0.1, 1.0, 3.0)] * 4, [0.01, 0.2, 0.3, 0.01]


def reducer() -> Any:
    return SimpleNamespace(first_ready=lambda: 0.0, last_ready=lambda: 0.0, clock=DeviceClock(torch.device("cpu")))


def compare(ranks: list[tuple[float, float, float]], links: list[float] | None = None):
    """Ranks as (data, compute, network) seconds; what all of them read from the summed message."""
    total = torch.zeros(len(ranks) * 5, dtype=torch.int64)
    for rank, (data, compute, network) in enumerate(ranks):
        ready = reducer()
        link: Any = SimpleNamespace(seconds=links[rank], measure=lambda: None) if links else None
        ready.first_ready = ready.last_ready = partial(float, data + compute)
        with patch("torusgd.step.rank_times.time.perf_counter", side_effect=[0.0, data + compute + network]):
            lateness = Stragglers(rank, len(ranks), ready, partial(float, data), link)
            lateness.before_accept(view(0), NOTHING_SENT)
        total += lateness.before_send(view(EVERY))
    return slowest(total, range(len(ranks)))


@pytest.mark.parametrize(("ranks", "links", "rank", "cause", "behind"), [
    ([(0.1, 1.0, 2.0), (0.1, 1.0, 2.0), (2.9, 1.0, 0.2)], None, 2, "data", 2.8),
    ([(0.1, 3.0, 0.1), *[(0.1, 1.0, 2.1)] * 3], None, 0, "compute", 2.0), (EVEN, None, None, "network", 0.0),
    (EVEN, LINKS, 2, "network", 0.29), ([(3.1, 1.0, 0.1), *[(0.1, 1.0, 3.1)] * 3], LINKS, 0, "data", 3.0),
])  # fmt: skip
def test_the_slowest_rank_is_named_with_the_cause(
    ranks: list[tuple[float, float, float]], links: list[float] | None, rank: int | None, cause: str, behind: float
) -> None:
    found = compare(ranks, links)
    assert found.cause == cause
    assert found.rank == rank or rank is None
    assert found.behind == pytest.approx(behind, abs=0.01)


def test_most_steps_carry_no_notes() -> None:
    lateness = Stragglers(0, 4, reducer(), lambda: 0.0)
    assert not lateness.before_send(view(EVERY)).numel()  # a run that goes on at this step has noted nothing yet
    lateness.before_accept(view(0), NOTHING_SENT)
    assert [step for step in range(1, 3 * EVERY) if lateness.before_send(view(step)).numel()] == [EVERY, 2 * EVERY]
    alone = Stragglers(0, 1, reducer(), lambda: 0.0)
    alone.before_accept(view(0), NOTHING_SENT)
    assert not alone.before_send(view(EVERY)).numel()
    assert slowest(torch.zeros(0, dtype=torch.int64), []) is None


def _probe_and_close() -> float:
    probe = LinkProbe(group_of())
    for _ in range(2):
        probe.measure()
    # A rank that closes while a neighbour has begun to measure must not leave it waiting for its part.
    probe.close()
    return probe.seconds


@pytest.mark.parametrize("size", [3, 4])
def test_a_probe_that_is_closed_ends_on_all_ranks_with_what_was_requested(size: int) -> None:
    assert min(run_ranks(size, _probe_and_close)) > 0


def test_a_step_whose_passes_nobody_timed_says_nothing_of_a_rank_s_speed() -> None:
    loader: Any = SimpleNamespace(wait_seconds=0.0)
    clock = StepClock(loader, Monitor())
    assert clock.speed() == 0.0
    clock.begin_work(lambda: 1.0)
    clock.end_work(lambda: 3.0, workers=2)
    assert clock.speed() == 1.0
    clock.start()
    assert clock.speed() == 0.0

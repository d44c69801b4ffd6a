"""The clock that ranks share: offsets within their bound, a start at one moment, times by the last begin and end."""

import time
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

from tests.comm.gloo_world import alike, on_ranks, run_ranks

from torusgd.comm import connection as clock
from torusgd.comm.connection import Clock, Elapsed, Span
from torusgd.comm.groups import alone, group_of

AHEAD = 12.5


@on_ranks(3)
def test_one_clock_is_found_by_measurement_and_another_one_within_its_bound() -> None:
    """Rank 1's clock is ahead, as in another time namespace; rank 2's is that of rank 0."""
    group = group_of()
    ahead = AHEAD if group.rank == 1 else 0.0
    shifted = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead, sleep=time.sleep)
    with patch.object(clock, "time", shifted):
        common = Clock(group)
    assert common.offset == 0.0 if group.rank != 1 else 0 < abs(common.offset + AHEAD) <= common.bound


@on_ranks(2)
def test_clocks_of_other_machines_and_the_time_from_the_last_begin_to_the_last_end() -> None:
    with patch.object(clock, "machine_number", lambda: group_of().rank):
        common = Clock(group_of())
    assert 0 <= abs(common.offset) <= alike(common.bound) > 0
    begin, end = ((1.0, 4.0), (1.5, 3.0))[group_of().rank]
    taken = Clock(group_of()).elapsed([Span(begin, end), Span(7.0, 8.0)])
    assert taken == [Elapsed(2.5, 0.5, 0.0, 4.0), Elapsed(1.0, 0.0, 0.0, 8.0)]
    assert list(map(str, taken)) == [
        "2.5e+03 ms (began 5e+02 ms apart, clocks +- 0) doubtful", "1e+03 ms (began 0 ms apart, clocks +- 0)",
    ]  # fmt: skip


def starts() -> list[float]:
    common = Clock(group_of())
    return [common.start() for _ in range(5)]


def test_no_rank_starts_before_another_has_come() -> None:
    together = list(zip(*run_ranks(2, starts), strict=True))
    assert all(max(before) < min(after) for before, after in pairwise(together))


def test_a_rank_alone_has_its_own_clock() -> None:
    common = Clock(alone())
    assert (common.offset, common.bound) == (0.0, 0.0)
    begin, end = common.span(lambda: None)
    assert common.elapsed([Span(begin, end)]) == [Elapsed(end - begin, 0.0, 0.0, end)]

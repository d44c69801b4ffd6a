"""Messages that are watched: what of their way was hidden, and that nobody waits for ever."""

import time

import pytest
import torch
import torch.distributed as dist

from torusgd.comm.allreduce import create
from torusgd.comm.base import CommTimeout
from torusgd.comm.connection import new_group
from torusgd.comm.liveness import StepLimit
from torusgd.comm.monitor import Monitor, hidden_share

from .gloo_world import run_ranks


def test_messages_that_travel_together_count_once():
    monitor = Monitor()
    for left, ended in ((1.0, 3.0), (2.0, 4.0), (2.5, 2.75), (6.0, 7.0)):
        monitor.arrived(left, ended)
    assert monitor.on_way == 4.0
    monitor.arrived(8.0, None)
    assert hidden_share(monitor.on_way, 1.0) is None


def test_what_is_hidden_is_a_share():
    assert hidden_share(0.0, 0.0) is None
    assert hidden_share(2.0, 0.5) == 0.75
    assert hidden_share(1.0, 1.001) == 0.0


def sum_early_and_wait_late(names: list[str]) -> list[tuple[float, float, float]]:
    """Seconds on the way, waited, and from start to end of a sum that came 0.2 s before somebody waited for it."""
    found = []
    for allreduce in [create(name) for name in names]:
        monitor, begin = Monitor(), time.perf_counter()
        work = monitor.over(allreduce).start(torch.ones(1000))
        while not work.done():
            time.sleep(0.001)
        time.sleep(0.2)
        work.wait()
        work.wait()
        found.append((monitor.on_way, monitor.waited, time.perf_counter() - begin))
        allreduce.close()
    return found


def test_the_way_ends_when_the_sum_is_there_with_every_engine():
    for found in run_ranks(2, sum_early_and_wait_late, ["native", "ring"]):
        for on_way, waited, total in found:
            assert 0 < on_way <= total - 0.2
            assert 0 < waited <= total - 0.2


def wait_for_a_rank_that_sleeps(names: list[str]) -> list[str]:
    told = []
    for allreduce in [create(name) for name in names]:
        time.sleep(2.5 * dist.get_rank())
        monitor = Monitor()
        work = monitor.over(allreduce).start(torch.ones(10))
        if dist.get_rank() == 0:
            monitor.liveness = limit = StepLimit(monitor)
            limit.seconds = 1.0
            with pytest.raises(CommTimeout) as caught:
                work.wait()
            told.append(str(caught.value))
            limit.seconds = None
        work.wait()
    return told


def test_a_rank_that_does_not_answer_is_overdue():
    assert run_ranks(2, wait_for_a_rank_that_sleeps, ["native", "ring"])[0] == ["no answer within 1 s"] * 2


def timeouts() -> list[float]:
    made = [new_group(None, "gloo", limit) for limit in (None, 7.0)]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made]


def test_a_new_group_waits_no_longer_than_the_one_it_is_made_from():
    assert run_ranks(2, timeouts) == [[50.0, 7.0]] * 2

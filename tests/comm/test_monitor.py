"""Messages that are watched: what of their way was hidden, that nobody waits for ever, and when a device came there."""

import time
from functools import partial
from itertools import chain, repeat
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks
from tests.polling import until
from tests.step.trainers import job_of, trainer_of

from torusgd.comm import monitor as monitor_module
from torusgd.comm.allreduce import create
from torusgd.comm.base import CommTimeout, LateRank, Liveness, Work
from torusgd.comm.groups import group_of
from torusgd.comm.monitor import DeviceClock, Monitor, hidden_share


def test_messages_that_travel_together_count_once_and_what_is_hidden_is_a_share():
    monitor = Monitor()
    for left, ended in ((1.0, 3.0), (2.0, 4.0), (2.5, 2.75), (6.0, 7.0)):
        monitor.arrived(left, ended)
    assert monitor.on_way == 4.0
    monitor.arrived(8.0, None)
    cases = ((monitor.on_way, 1.0), (0.0, 0.0), (2.0, 0.5), (1.0, 1.001))
    assert [hidden_share(*case) for case in cases] == [None, None, 0.75, 0.0]


def is_there(work: Work) -> bool:
    return work.done() and work.ended() is not None


@on_ranks(2)
def test_the_way_ends_when_the_sum_is_there_with_every_engine() -> None:
    """The sum is there before anybody waits for it."""
    for allreduce in [create(name) for name in ("native", "ring")]:
        monitor, begin = Monitor(), time.perf_counter()
        work = monitor.over(allreduce).start(torch.ones(1000))
        until(partial(is_there, work), "the sum is there")
        there = time.perf_counter()
        work.wait()
        assert 0 < monitor.on_way <= there - begin
        work.wait()
        assert 0 < monitor.waited <= time.perf_counter() - there
        allreduce.close()


class Answers(Liveness):
    """A liveness that names these late ranks one time after the other, and the last ones from then on."""

    def __init__(self, *answers: list[LateRank]) -> None:
        self.asked, self._answers = 0, answers

    def progress(self, phase: str, step: int, unit: int) -> None:
        raise AssertionError("a wait makes no progress")

    def late(self) -> list[LateRank]:
        self.asked += 1
        return self._answers[min(self.asked, len(self._answers)) - 1]


@on_ranks(2)
def test_a_wait_ends_with_the_names_of_the_late_ranks() -> None:
    """Rank 0 gives up once its liveness names rank 1, which sleeps until then; then it waits for it after all."""
    world, late = group_of(), LateRank("no heartbeat for 9 s", 1, "a1", "forward", 3)
    for allreduce in [create(name) for name in ("native", "ring")]:
        calls = Answers([], [late])
        monitor = Monitor(calls)
        if world.rank == 0:
            work = monitor.over(allreduce).start(torch.ones(10))
            with pytest.raises(CommTimeout, match="rank 1 on a1 in forward of step 3: no heartbeat for 9 s") as caught:
                work.wait()
            assert (caught.value.late, calls.asked) == ((late,), 2)
            world.send(torch.zeros(1), 1, tag=9).wait()
        else:
            world.receive(torch.zeros(1), 0, tag=9).wait()
            work = monitor.over(allreduce).start(torch.ones(10))
        monitor.liveness = Liveness()
        work.wait()


def copied(*answers: bool) -> Any:
    """A copy from a GPU that waits for a lost rank: whether it is there, the last answer again and again."""
    event: Any = SimpleNamespace(query=chain(answers, repeat(answers[-1])).__next__)
    return monitor_module._Copied(event)


def test_a_host_that_waits_for_a_gpu_learns_which_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL has no answer for it: the GPU would wait for ever."""
    monkeypatch.setattr(monitor_module, "SLICE", 0.01)
    lost = LateRank("no heartbeat for 30 s", rank=3, host="b2")
    liveness = Answers([], [], [lost])
    monitor_module._wait_in_slices(copied(False, False, False, True), Liveness(), inf)
    with pytest.raises(CommTimeout) as error:
        monitor_module._wait_in_slices(copied(False), liveness, inf)
    assert (error.value.late, liveness.asked) == ((lost,), 3)


def test_a_limit_of_the_caller_ends_a_wait_without_late_ranks_and_a_tensor_of_the_host_is_there_already() -> None:
    with pytest.raises(CommTimeout) as caught:
        Monitor().watch(copied(False)).wait(limit=0.01)
    assert caught.value.late == ()
    tensor = torch.ones(2)
    assert Monitor().to_host(tensor) is tensor


@pytest.mark.gpu
def test_a_lost_rank_is_named_while_the_gpu_is_still_busy() -> None:
    """As behind a sum of NCCL that never ends: here behind a kernel of some ten seconds."""
    monitor, lost = Monitor(), LateRank("no heartbeat for 30 s", rank=3, host="b2")
    # What is loaded or allocated for the first time may wait for a kernel that runs.
    there = torch.ones(1, device="cuda")
    assert monitor.to_host(there).item() == 1.0
    torch.cuda._sleep(1)
    monitor.liveness = Answers([lost])
    torch.cuda._sleep(20_000_000_000)
    with pytest.raises(CommTimeout) as error:
        monitor.to_host(there)
    assert error.value.late == (lost,)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_a_cpus_mark_is_now() -> None:
    clock = DeviceClock(torch.device("cpu"))
    before = time.perf_counter()
    mark = clock.mark()
    after = time.perf_counter()
    assert before <= mark() <= after
    assert mark() == mark()


@pytest.mark.gpu
def test_a_gpus_mark_is_when_it_came_there_and_not_when_it_was_launched() -> None:
    clock, big = DeviceClock(torch.device("cuda", 0)), torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    clock.set()
    for _ in range(20):
        big @ big
    mark, launched = clock.mark(), time.perf_counter()
    torch.cuda.synchronize()
    assert launched < mark() < time.perf_counter() + 1e-3


@on_ranks(2)
def test_a_wait_outside_of_steps_finds_a_late_rank_and_is_no_hang_itself() -> None:
    class OneHangs(Liveness):
        hangs, asked = False, 0

        def late(self) -> list[LateRank]:
            self.asked += 1
            return [LateRank("no progress for 60 s", rank=1)] if self.hangs else []

    liveness, world, store = OneHangs(), group_of(), dist.distributed_c10d._get_default_store()
    trainer_of(job_of(), world, liveness)
    if world.rank == 1:
        store.wait(["the others have found it"])
        return
    liveness.hangs, before = True, liveness.asked
    for wait in (world.all_gather, world.all_reduce, partial(world.broadcast, source=1)):
        with pytest.raises(CommTimeout, match="no progress for 60 s"):
            wait(torch.ones(1))
    assert liveness.asked == before + 3
    store.set("the others have found it", "")

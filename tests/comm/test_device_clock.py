"""When a device came to a place: on a GPU by events, which are asked for later."""

import time
from types import SimpleNamespace

import pytest
import torch

from torusgd.comm.monitor import DeviceClock


class Gpu:
    """A GPU that comes to a place `late` milliseconds after the program has launched it."""

    def __init__(self) -> None:
        self.late = 0.0
        self.asked = 0

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        made = SimpleNamespace()
        made.record = lambda: setattr(made, "at", 1e3 * time.perf_counter() + self.late)
        made.elapsed_time = self._elapsed(made)
        return made

    def _elapsed(self, begin: SimpleNamespace):
        def elapsed(end: SimpleNamespace) -> float:
            self.asked += 1
            return end.at - begin.at

        return elapsed


def test_a_gpus_mark_is_when_it_came_there_and_not_when_it_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    clock = DeviceClock(torch.device("cuda", 0))
    launched = time.perf_counter()
    gpu.late = 5000.0
    mark = clock.mark()
    assert not gpu.asked
    gpu.late = 0.0
    clock.set()  # the next step's origin; the mark keeps its own
    assert mark() - launched == pytest.approx(5.0, abs=2.0)
    assert gpu.asked == 1


def test_a_cpus_mark_is_now() -> None:
    clock = DeviceClock(torch.device("cpu"))
    before = time.perf_counter()
    mark = clock.mark()
    after = time.perf_counter()
    assert before <= mark() <= after
    assert mark() == mark()


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    clock, big = DeviceClock(torch.device("cuda", 0)), torch.ones(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    clock.set()
    for _ in range(20):
        big @ big
    mark, launched = clock.mark(), time.perf_counter()
    torch.cuda.synchronize()
    assert launched < mark() < time.perf_counter() + 1e-3

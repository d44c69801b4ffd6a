"""Steps that the host launches before it knows how the ones before them have ended.

`TrainStep.run` reads its device twice in a step, and between the answer and the next kernel the device has nothing to
do. Here whether a step's gradients may be used is found on the device (`sums.verdict`), where the update looks; the
host reads the verdict of a step after it has launched the next ones.

The verdict latches. What is not an ordinary step (a sum out of its range, a gradient or statistic that is not finite, a
missing virtual worker, a replaced image, a rank that wants to stop, to save or to change) changes nothing on the
device, nor do the steps after it. When the host learns of it, it forgets those, and `TrainStep.run` takes that step
anew from the same state, with the same bits.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.monitor import Monitor
from ..gradients.integer_hash import IntegerHash
from ..recipe.schedule import Step
from ..step.control_vector import VERSION, Counts
from ..step.deadlines import StepDeadline
from ..step.journal import JournalEntry, synchronous
from ..step.membership import Membership
from ..step.stats import StepStats
from ..step.step import TrainStep
from ..step.watch import Requests, StepView
from .flat_weights import FlatUpdate
from .sums import REPORT, DeviceControl, DeviceGradientSum

AHEAD = 2  # steps that the host launches beyond the one whose verdict it waits for


class _Launched(NamedTuple):
    """A step that the device has been given; scale and steps in a row are those of the precision before it."""

    step: Step
    read: Callable[[], Tensor]  # waits until the device has come there, and gives the verdict's report
    loss_scale: float
    accepted_in_a_row: int
    is_whole: bool  # False: this rank replaced an image, or could not read one, and the device will refuse the step


def nothing_to_recompute(worker: int) -> IntegerHash:
    raise AssertionError(f"no watcher of an ordinary step recomputes a virtual worker: {worker}")


class RunAhead:
    """Takes a run's ordinary steps, the same on every rank, ahead of the device; all others by `TrainStep.run`."""

    def __init__(self, step: TrainStep, flat: FlatUpdate, monitor: Monitor) -> None:
        self._step, self._flat, self._monitor = step, flat, monitor
        size, device = step.world.size, step.world.device
        usual = Counts(version=VERSION * size, ranks=size, contributions=step.recipe.virtual_workers)
        # Behind the counts stands the section of requests, all zeros unless a rank has one.
        self._ordinary = torch.tensor([*vars(usual).values(), *[0] * Requests.words], device=device)
        self._launched: deque[_Launched] = deque()

    def run(self, membership: Membership, wanted: JournalEntry | StepDeadline) -> StepStats | None:
        """See `TrainStep.run`; afterwards the device may have gone on, up to the next look at the weights."""
        begin = time.perf_counter()
        self._step.clock.start()
        self._step.clock.passes_done()
        following = wanted.step + len(self._launched)
        while len(self._launched) <= AHEAD and self._is_ordinary(following):
            self._launch(following, membership)
            following += 1
        if not self._launched:
            return self._step.run(membership, wanted)
        launched = self._launched[0]
        assert launched.step.index == wanted.step, "steps are taken in their order"
        self._step.liveness.progress("train", wanted.step, membership.mine[0])
        stats = self._stats_of(launched)
        if stats is not None:
            self._launched.popleft()
            return stats
        self._forget()
        lost = time.perf_counter() - begin
        stats = self._step.run(membership, wanted)
        return stats and replace(stats, times=replace(stats.times, seconds=stats.times.seconds + lost))

    def _is_ordinary(self, index: int) -> bool:
        # Whether a step may be launched before the ones before it have ended: no watcher wants to see it.
        run = self._step
        if index >= len(run.schedule) or run.reducer.sum.needs_measure or not self._flat.is_begun:
            return False
        if self._launched and not self._launched[-1].is_whole:
            return False
        average = run.state.average
        is_averaged = average is not None and average.is_due(run.schedule[index])
        return not (is_averaged or any(watcher.due(index) for watcher in run.watchers))

    def _launch(self, index: int, membership: Membership) -> None:
        # Gives the device all of a step, as `TrainStep.run` does it, but for the decision.
        run, precision = self._step, self._step.state.precision
        step = run.schedule[index]
        before = (precision.loss_scale, precision.accepted_in_a_row)
        run.reducer.begin()
        view = StepView(step, membership, recompute=nothing_to_recompute)
        run.take_passes(view, synchronous(index, run.recipe.virtual_workers))
        run.reducer.wait()
        report = self._end(step)
        precision.grow()
        counts = run.control.counts
        is_whole = not (counts.replaced or counts.failed)
        self._launched.append(_Launched(step, self._monitor.start_to_host(report), *before, is_whole))

    def _end(self, step: Step) -> Tensor:
        # Launches all of a step that follows its messages; the verdict's report.
        run, total, control = self._step, self._step.reducer.sum, self._step.control
        statistics = run.state.batch_norm
        assert isinstance(total, DeviceGradientSum)
        assert isinstance(control, DeviceControl)
        run.reducer.show_means()
        run.update.set_rates(step)
        report = torch.empty(REPORT, dtype=torch.float64, device=run.world.device)
        total.decide(control.message, self._ordinary, statistics.running, statistics.momenta, report)
        total.write_mean(run.reducer.means, run.state.precision.loss_scale)
        self._flat.update(total.going)
        return report

    def _stats_of(self, launched: _Launched) -> StepStats | None:
        # What a step did; None if the device has refused it.
        run, step = self._step, launched.step
        accepted, loss, underflow = launched.read().tolist()
        if not accepted:
            return None
        times = replace(run.clock.stop(), update_seconds=0.0)  # only the device knows when its passes ended
        entry, scale = synchronous(step.index, run.recipe.virtual_workers), launched.loss_scale
        return StepStats(step, times, loss, entry, underflow=underflow, loss_scale=scale)

    def _forget(self) -> None:
        # Returns once the device has passed by all that it was given, and goes on as after the last accepted step.
        first, last = self._launched[0], self._launched[-1]
        last.read()
        self._launched.clear()
        precision, total = self._step.state.precision, self._step.reducer.sum
        precision.loss_scale, precision.accepted_in_a_row = first.loss_scale, first.accepted_in_a_row
        assert isinstance(total, DeviceGradientSum)
        total.going.fill_(1.0)

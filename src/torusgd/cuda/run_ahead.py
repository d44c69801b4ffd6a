"""Steps that the host launches before it knows how the ones before them have ended.

`TrainStep.run` reads its device twice in a step, and between the answer and the next kernel the device has nothing to
do. Here whether a step's gradients may be used is found on the device (`sums.verdict`), where the update looks; the
host reads the verdict of a step after it has launched the next ones.

The verdict latches. What is not an ordinary step (a sum out of its range, a gradient or statistic that is not finite, a
missing virtual worker, a replaced image, a rank that wants to stop, to save or to change) changes nothing on the
device, nor do the steps after it. When the host learns of it, it forgets those, and `TrainStep.run` takes that step
anew from the same state, with the same bits.
"""

import warnings
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.monitor import Monitor
from ..errors import first_line
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
from .graphs import Capture, Graph
from .sums import REPORT, DeviceControl, DeviceGradientSum

AHEAD = 2  # steps that the host launches beyond the one whose verdict it waits for


class GraphedUpdate:
    """Launches the end of a step, from the second time on as one CUDA graph, if there is a `capture`."""

    # All of it works in memory that never moves. What changes from step to step the host copies beside the replay: the
    # optimizer's values before it, the report after it. What enters a graph as a number is part of its key: a step with
    # another loss scale, or a stage's other momentum, is first launched plainly, which compiles what is new, and from
    # the second one on has a graph of its own.

    def __init__(self, run: TrainStep, flat: FlatUpdate, capture: Capture | None) -> None:
        workers, size, device = run.recipe.virtual_workers, run.world.size, run.world.device
        usual = Counts(version=VERSION * size, ranks=size, contributions=workers)
        # Behind the counts stands the section of requests, all zeros unless a rank has one.
        self._ordinary = torch.tensor([*vars(usual).values(), *[0] * Requests.words], device=device)
        self._run, self._flat, self._capture = run, flat, capture
        self._report = torch.zeros(REPORT, dtype=torch.float64, device=device)
        # by the numbers in it; None: a step with these was launched, and the next one is captured
        self._graphs: dict[Hashable, Graph | None] = {}

    def end(self, step: Step) -> Tensor:
        """Launches all of a step that follows its messages; the verdict's report, to be read before the next call."""
        self._run.reducer.show_means()
        self._run.update.set_rates(step)
        self._flat.write_values()
        graph = self._graph()
        (graph.replay if graph is not None else self._decide_and_update)()
        # The host reads a CPU's report where it lies, when the next one may have been written.
        return self._report if self._report.is_cuda else self._report.clone()

    def _graph(self) -> Graph | None:
        key = (self._run.reducer.sum, self._run.state.precision.loss_scale, *self._flat.constants())
        if self._capture is None or key not in self._graphs:
            self._graphs[key] = None
        elif self._graphs[key] is None:
            try:
                self._graphs[key] = self._capture(self._decide_and_update)
            except RuntimeError as error:
                self._capture = None
                why = first_line(error)
                warnings.warn(f"updates run without a CUDA graph, with some more launches: {why}", stacklevel=3)
        return self._graphs[key]

    def _decide_and_update(self) -> None:
        run = self._run
        total, control, statistics = run.reducer.sum, run.control, run.state.batch_norm
        assert isinstance(total, DeviceGradientSum)
        assert isinstance(control, DeviceControl)
        total.decide(control.message, self._ordinary, statistics.running, statistics.momenta, self._report)
        total.write_mean(run.reducer.means, run.state.precision.loss_scale)
        self._flat.update(total.going)


class _Launched(NamedTuple):
    """A step that the device has been given; the last two are those of the precision before it."""

    step: Step
    read: Callable[[], Tensor]  # waits until the device has come there, and gives the verdict's report
    loss_scale: float
    accepted_in_a_row: int


def nothing_to_recompute(worker: int) -> IntegerHash:
    raise AssertionError(f"no watcher of an ordinary step recomputes a virtual worker: {worker}")


class RunAhead:
    """Takes a run's ordinary steps, the same on every rank, ahead of the device; all others by `TrainStep.run`."""

    def __init__(self, step: TrainStep, update: GraphedUpdate, monitor: Monitor) -> None:
        self._step, self._update, self._monitor = step, update, monitor
        self._launched: deque[_Launched] = deque()

    def run(self, membership: Membership, wanted: JournalEntry | StepDeadline) -> StepStats | None:
        """See `TrainStep.run`; afterwards the device may have gone on, up to the next look at the weights."""
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
        stats = self._stats_of(launched)
        if stats is None:
            self._forget()
            return self._step.run(membership, wanted)
        self._launched.popleft()
        return stats

    def _is_ordinary(self, index: int) -> bool:
        # Whether a step may be launched before the ones before it have ended: no watcher wants to see it.
        run = self._step
        if index >= len(run.schedule) or run.reducer.sum.needs_measure:
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
        report = self._update.end(step)
        precision.grow()
        self._launched.append(_Launched(step, self._monitor.start_to_host(report), *before))

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

"""Steps that the host hands to the device before it knows how the ones before them have ended.

`TrainStep.run` asks its device twice in a step, and between the answer and the next kernel the device has nothing to
do. Here the host asks for nothing: whether a step's gradients may be used is found on the device
(`gradients.operators.verdict`), and the update looks there. The host reads the verdict of a step when it has handed
over the next ones.

The verdict latches. What is not an ordinary step (a sum out of its range, a gradient or statistic that is not finite,
a missing virtual worker, a replaced image, a rank that is asked to stop, to save or to change) changes nothing on the
device, and nor do the steps after it. When the host learns of it, it forgets those, and `TrainStep.run` takes that
step anew from the same state, with the same bits as if nobody had run ahead.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ..comm.monitor import Monitor
from ..gradients.integer_hash import IntegerHash
from ..recipe.compatibility import CUDA_STREAMS, Setup, obstacle
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..step.closing import Open
from ..step.journal import JournalEntry, synchronous
from ..step.membership import Membership
from ..step.stats import StepStats
from ..step.step import TrainStep
from ..step.watch import StepView
from .device_sum import DeviceGradientSum
from .operators import ACCEPTED, LOSS, UNDERFLOW
from .update_graph import GraphedUpdate

AHEAD = 2
"""steps that the host hands over beyond the one whose verdict it waits for"""


@dataclass(frozen=True)
class _Launched:
    """A step that the device has been given."""

    step: Step
    read: Callable[[], Tensor]
    """the verdict's report, once the device has come there"""
    loss_scale: float
    accepted_in_a_row: int
    """of the precision, before the step"""


def runs_ahead(recipe: Recipe, options: RuntimeOptions) -> bool:
    """Whether a GPU takes a run's steps this way: all are summed exactly, and SGD or LARS updates them whole."""
    return not obstacle(CUDA_STREAMS, Setup(recipe, options, "cuda"))


def nothing_to_recompute(worker: int) -> IntegerHash:
    """A step that is handed over has no watcher that recomputes: those are due, and it is not."""
    raise AssertionError(worker)


class RunAhead:
    """Takes a run's ordinary steps up to AHEAD before the device; all others by `TrainStep.run`.

    Which steps are ordinary is the same on every rank.

    Args:
        step: Of the run: synchronous, with a `DeviceGradientSum`, a flat update, no audit and no clipping.
        update: Of that step.
        monitor: Waits for the reports.
    """

    def __init__(self, step: TrainStep, update: GraphedUpdate, monitor: Monitor) -> None:
        self._step, self._update, self._monitor = step, update, monitor
        self._launched: deque[_Launched] = deque()

    def run(self, membership: Membership, asked: JournalEntry | Open) -> StepStats | None:
        """See `TrainStep.run`; afterwards the device may have gone on, up to the next look at the weights."""
        self._step.clock.start()
        self._step.clock.passes_done()
        following = asked.step + len(self._launched)
        while len(self._launched) <= AHEAD and self._is_ordinary(following):
            self._launch(following, membership)
            following += 1
        if not self._launched:
            return self._step.run(membership, asked)
        launched = self._launched[0]
        assert launched.step.index == asked.step, "steps are taken in their order"
        stats = self._settle(launched)
        if stats is None:
            self._forget()
            return self._step.run(membership, asked)
        self._launched.popleft()
        return stats

    def _is_ordinary(self, index: int) -> bool:
        """Whether a step may be handed over before the ones before it have ended."""
        run = self._step
        if index >= len(run.schedule) or run.reducer.sum.needs_measure:
            return False
        average = run.state.average
        is_averaged = average is not None and average.is_due(run.schedule[index])
        return not (is_averaged or any(watcher.due(index) for watcher in run.watchers))

    def _launch(self, index: int, membership: Membership) -> None:
        """Gives the device all of a step, as `TrainStep.run` does it, but for the decision."""
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

    def _settle(self, launched: _Launched) -> StepStats | None:
        """What a step did; None where the device has refused it."""
        run, step = self._step, launched.step
        report = launched.read().tolist()
        if not report[ACCEPTED]:
            return None
        return StepStats(
            step=step,
            times=replace(run.clock.stop(), update_seconds=0.0),  # only the device knows when its passes ended
            loss=report[LOSS],
            entry=synchronous(step.index, run.recipe.virtual_workers),
            underflow=report[UNDERFLOW],
            loss_scale=launched.loss_scale,
        )

    def _forget(self) -> None:
        """Returns when the device has passed by all that it was given, and goes on as after the last accepted step."""
        first, last = self._launched[0], self._launched[-1]
        last.read()
        self._launched.clear()
        precision, total = self._step.state.precision, self._step.reducer.sum
        precision.loss_scale, precision.accepted_in_a_row = first.loss_scale, first.accepted_in_a_row
        assert isinstance(total, DeviceGradientSum)
        total.going.fill_(1.0)

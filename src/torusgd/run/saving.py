"""A run's state on its way into a checkpoint: at most once a step, and before an error ends the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..comm.base import Liveness
from ..comm.groups import Group
from ..errors import CorruptionError, RunError, warn
from ..rundir.checkpoint import CheckpointTimes, CheckpointWriter, step_on_disk
from ..step.drift import DriftWatch
from ..step.step import TrainStep
from .progress import RunState, as_checkpoint

SLOW_DISK = 60
"""seconds after which a checkpoint that is still being written is reported, again and again"""


class LastSaved(NamedTuple):
    """The newest checkpoint of a run."""

    step: int
    rank: int
    """which wrote it, and writes the next one as long as it is there"""
    at: float
    """when it was taken, or the run began (time.monotonic of that rank)"""


def saved_on_disk(checkpoints: Path, world: Group, reached: int) -> int:
    """The step of the newest checkpoint; every rank calls it, rank 0 looks. `reached`: the step done."""
    saved = step_on_disk(checkpoints, unread=reached) if world.rank == 0 else 0  # the next one says what is wrong
    # The same on all ranks, since all compare their weights before one is written.
    return int(world.broadcast_text(str(saved)))


class Saver:
    """Saves the state of a run; every rank has one and calls it at the same steps, rank 0 alone writes.

    Args:
        state: Of the run; read when it is saved.
        step: Gathers the tensors.
        drift: Compares the ranks' weights before they are saved.
        writer: Writes beside the training.
        times: Says when a checkpoint was taken last, and learns of each.
        liveness: Learns that the disk takes its time, which ends no run.
        is_first: Whether this is rank 0.
        saved: The step of the last checkpoint, the same on all ranks.
    """

    def __init__(
        self,
        state: RunState,
        step: TrainStep,
        drift: DriftWatch,
        writer: CheckpointWriter,
        times: CheckpointTimes,
        liveness: Liveness,
        is_first: bool,
        saved: int,
    ) -> None:
        self._state, self._step, self._drift, self._writer, self._times = state, step, drift, writer, times
        self._liveness, self._is_first = liveness, is_first
        self._saved = saved

    def save(self) -> None:
        """Has the state of this step written, unless it is already."""
        state = self._state
        if self._saved < state.step:
            self._liveness.progress("checkpoint", state.step, 0)
            self._drift.compare(state.step, self._step.allreduce)
            tensors = self._step.state.state_dict(state.step, keep=self._is_first)
            if self._is_first:
                self._writer.save(as_checkpoint(state, tensors), self._writing)
        self._saved = state.step
        self._times.taken()

    def last(self) -> LastSaved:
        """The newest checkpoint."""
        world = self._step.world
        return LastSaved(self._saved, world.ranks[0], self._times.last)

    def wait(self) -> None:
        """Returns when all that was saved is written."""
        self._writer.wait(self._writing)

    @contextmanager
    def before_errors(self) -> Iterator[None]:
        """What ends the run has changed nothing: the last good step stands in a checkpoint before it does."""
        try:
            yield
        except CorruptionError:  # these weights may be the wrong ones: no checkpoint is made of them
            self.wait()
            raise
        except RunError:
            self.save()
            self.wait()
            raise

    def _writing(self, seconds: float) -> None:
        """Called once a second while rank 0 waits for its disk."""
        self._liveness.progress("checkpoint", self._state.step, int(seconds))
        if round(seconds) % SLOW_DISK == 0:
            warn(f"a checkpoint has been written for {seconds:.0f} s: {self._writer.folder}")

"""What a run leaves so that others can check it: records of its state (`step.records`), and checkpoints to begin from.

With `verify_every` the steps are given, and a light checkpoint goes with each record, of the tensors that the record
has hashes of. Otherwise rank 0's clock decides: at most MOST records, which together cost at most FRACTION of the time,
unless the first and the last, which are always written, cost more.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..comm.groups import Group
from ..recipe.compatibility import CUDA_GRAPHS
from ..recipe.schedule import Step
from ..rundir.checkpoint import MODEL, LightWriter, light_bytes
from ..rundir.mirror import Mirror
from ..rundir.run_dir import RunDir
from ..step import records
from ..step.evaluate import Evaluation
from ..step.model_state import StepState
from ..step.stats import StepStats
from ..text import byte_size, plural
from .job import Job, setup_of
from .saving import RunState

FRACTION = 0.001
MOST = 200


class Recorder:
    """Writes the records of a run; every rank has one and calls it after the same steps, rank 0 alone writes."""

    def __init__(self, job: Job, world: Group, every: Collection[int], steps: int) -> None:
        self._job, self._world, self._is_first = job, world, world.rank == 0
        self._every, self._steps = frozenset(every if job.options.verify_every is not None else ()), steps
        self._file: records.RecordFile | None = None
        self._writer: LightWriter | None = None
        self._began, self._cost, self._spent, self._last_step = time.monotonic(), 0.0, 0.0, 0
        self.last: tuple[records.Line, ...] = ()  # of one step, the newest with any; on every rank
        # Whether the last state is not what was expected, and a checkpoint is to be compared with it.
        self.is_refuted = self.wants_checkpoint = False
        # A GPU that is given its steps in advance takes those alone of which nothing is wanted that was not known then.
        is_paced = not self._every and job.expected is None and not CUDA_GRAPHS.is_in(setup_of(job))
        self.watch = records.RecordWatch(job.recipe.virtual_workers, self._is_fixed, self._is_due if is_paced else None)

    def begin(self, state: RunState, tensors: StepState, step: Step, last: Sequence[records.Line] = ()) -> str:
        """Opens the records behind the step of the state; every rank calls it. Returns a line for people.

        `step` is that which led to the state, if any has; `last` are the newest of the ranks that go on, which a lost
        rank 0 may not have written.
        """
        self.last = tuple(last)
        if self._is_first:
            self._open(state)
        self._began, self._last_step = time.monotonic(), state.step
        states = records.states_of(self._file.lines) if self._file is not None else {}
        # Not twice: of a first step that was cut off the scales are measured already, which this state does not have.
        if state.step == 0 and self._world.broadcast_json(not states):
            self._record(state, tensors, records.StateLine(step=0))
        is_owed = state.step > 0 and self._job.expected is None and self._is_fixed(state.step)
        if is_owed and self._world.broadcast_json(state.step not in states):  # a rank was lost as it was made
            self._record_step(state, tensors, step)
        if not self._every or not self._is_first:
            return ""
        model = {f"{MODEL}{name}": each for name, each in tensors.model.state_dict().items()}
        size = light_bytes(model | records.recorded_tensors(tensors.expected_state(True)))
        left = sum(step > state.step for step in self._every)
        sizes = f"{byte_size(size)}, {byte_size(left * size)} in all"
        return f"verify_every {self._job.options.verify_every}: {plural(left, 'light checkpoint')} of about {sizes}"

    def after_step(self, stats: StepStats, state: RunState, tensors: StepState) -> None:
        if not stats.record:
            return
        line = self._record_step(state, tensors, stats.step)
        if (expected := self._job.expected) is not None:
            recorded, checkpoint = expected.states.get(line.step), expected.checkpoints.get(line.step)
            is_refuted = recorded is not None and bool(records.first_differences(recorded, line))
            # Rank 0 has all of the digests, whoever made them.
            found = is_refuted, checkpoint is not None and checkpoint != line.tensors
            self.is_refuted, self.wants_checkpoint = self._world.broadcast_json(found)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        self._add(records.EvaluationLine(step=step, figures=records.figures_of(evaluation)))

    def result(self, summary: Mapping[str, Any], figures: Mapping[str, records.Figure]) -> dict[str, Any]:
        """Records what the run leaves; what the summary says of the records."""
        if self._file is None:
            return {}
        weights = str(summary["weights_sha256"])
        self._file.add(records.ResultLine(step=int(summary["steps"]), weights_sha256=weights, figures=dict(figures)))
        states = sum(isinstance(line, records.StateLine) for line in self._file.lines)
        return {"sha256": self._file.head, "states": states, "seconds": round(self._spent, 6)}

    def close(self) -> None:
        for each in (self._writer, self._file):
            if each is not None:
                each.close()
        self._writer = self._file = None

    def _open(self, state: RunState) -> None:
        known = state.fingerprint.as_dict()
        names = records.BeginLine.model_fields.keys() & known.keys()
        begin = records.BeginLine(step=0, **{name: known[name] for name in names})
        folder = RunDir(self._job.out)
        self._file = records.RecordFile(folder.records, state.step, state.evaluated)
        first = self._file.lines[0] if self._file.lines else None
        if first is None or first.model_copy(update={"step": begin.step}) != begin:
            # Without a begin, or with that of another run: nothing before this step can be checked.
            self._file.close()
            folder.records.unlink()
            self._file = records.RecordFile(folder.records, 0, 0)
            self._file.add(begin.model_copy(update={"step": state.step}))
        written = {(type(line), line.step) for line in self._file.lines}
        for line in self.last:
            if line.step == state.step and (type(line), line.step) not in written:
                self._file.add(line)
        conditions, mixed = state.fingerprint.conditions, state.mixed_conditions
        now = records.ConditionsLine(step=state.step, conditions=conditions, mixed=mixed)
        last = next((line for line in reversed(self._file.lines) if isinstance(line, records.ConditionsLine)), None)
        if last is None or (last.conditions, last.mixed) != (now.conditions, now.mixed):
            self._file.add(now)
        if self._every:
            copy = Mirror(self._job.bucket).put_light if self._job.bucket is not None else None
            self._writer = LightWriter(folder.verify, copy)

    def _is_fixed(self, steps: int) -> bool:
        if self._job.expected is not None:
            return steps in self._job.expected.states or steps in self._job.expected.checkpoints
        return steps in self._every or steps == self._steps

    def _is_due(self, steps: int) -> bool:
        """Whether rank 0 wants a record after so many steps, of which all but the last are done or under way."""
        if not self._is_first or steps >= self._steps:
            return False
        # This one, and the run's last, for which there must be time left, even if the machine is busier then.
        cost = self._spent + 3 * self._cost
        return steps - self._last_step >= self._steps / MOST and cost <= FRACTION * (time.monotonic() - self._began)

    def _record_step(self, state: RunState, tensors: StepState, step: Step) -> records.StateLine:
        journal = None if state.journal is None else state.journal.sha256
        rates, images = (step.lr, step.momentum, step.weight_decay_factor), self.watch.images or None
        line = records.StateLine(step=state.step, images=images, rates=rates, journal=journal)
        line = self._record(state, tensors, line)
        if state.step in self._every:
            saved = tensors.state_dict(state.step, keep=self._is_first)
            if self._writer is not None:
                self._writer.save(state.step, records.recorded_tensors(saved))
        return line

    def _record(self, state: RunState, tensors: StepState, line: records.StateLine) -> records.StateLine:
        began = time.monotonic()
        line = line.model_copy(update={"tensors": records.state_digests(tensors, state.step, self._world)})
        self._add(line)
        cost = time.monotonic() - began + self.watch.seconds
        self._last_step, self._cost, self._spent = state.step, max(self._cost, cost), self._spent + cost
        return line

    def _add(self, line: records.Line) -> None:
        self.last = (*(each for each in self.last if each.step == line.step), line)
        if self._file is not None:
            self._file.add(line)

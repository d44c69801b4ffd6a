"""One synchronous step, from the images of the virtual workers to the updated weights.

Beside the gradients (docs/architecture.md) goes the control vector: losses, batch-norm statistics, counts and the
watchers' sections of all ranks, which leave when the last forward pass is done. Nothing outside the reducer changes
until a step is accepted, so that it can be redone. Watchers (`watch`) look at a step, and change nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from ..comm.base import AllReduce, Liveness, Work
from ..comm.groups import Group
from ..data.pipeline import Batch
from ..errors import DivergedError, RunError
from ..gradients.integer_hash import IntegerHash
from ..gradients.reducer import Reduced, Reducer
from ..gradients.update import Update
from ..recipe.schedule import Schedule, Step
from ..recipe.schema import Recipe
from ..synchrony.limits import Limit
from .control_vector import ControlMessage, ControlVector
from .deadlines import PassThread, StepDeadline, arrived
from .forward_backward import ForwardBackward, blank
from .images import ImageReader
from .journal import JournalEntry, synchronous
from .membership import Membership
from .model_state import StepState
from .stats import STATS, StepClock, StepStats
from .watch import Requests, StepView, StepWatch
from .work_stealing import OwnShare, StealingShare, TakenOver, WorkStealing

# In a virtual worker's hash, beside the numbers of its slots.
_LOSS, _STATISTICS = -1, -2
# Sections of the control vector that the step itself sends.
_FINISHED, _TAKEN_OVER = "finished", "taken over"
T = TypeVar("T")


def _given(found: Iterable[T | None]) -> T | None:
    given = [each for each in found if each is not None]
    assert len(given) < 2, "two watchers want the same gradients"
    return given[0] if given else None


class _Abandoned(Exception):
    """A rank was requested to stop before it had begun all of its virtual workers."""


class _NobodyInTime(Exception):
    """A step's deadline passed before any virtual worker had finished."""


@dataclass(frozen=True)
class TrainStep:
    """Takes the steps of a schedule on this rank; `run.build` puts it together, and nothing changes it afterwards."""

    recipe: Recipe
    schedule: Schedule
    images: ImageReader
    forward_backward: ForwardBackward
    reducer: Reducer
    update: Update
    state: StepState
    allreduce: AllReduce
    control: ControlMessage
    requests: Requests
    watchers: Sequence[StepWatch]  # in the order in which they are called; `requests` is the first
    clock: StepClock
    world: Group
    liveness: Liveness
    stealing: WorkStealing | None = None  # claims of idle ranks on late ones' work; None: each computes its own share
    pass_thread: PassThread | None = None

    def run(self, membership: Membership, wanted: JournalEntry | StepDeadline) -> StepStats | None:
        """Takes the step of a journal entry; None, on all ranks, if a stop was requested: then nothing has changed.

        With a deadline in place of an entry `StepStats.entry` names those whose gradients have entered the update.

        Raises:
            CorruptionError: Ranks do not hold the same weights.
            RunError: A gradient (unless the precision is float16) or a batch statistic is not finite, a sum leaves its
                range again and again, images can't be read, or the ranks' programs differ. All ranks raise it, and
                nothing has changed.
        """
        self.clock.start()
        return self._run(membership, wanted)

    def _run(self, membership: Membership, wanted: JournalEntry | StepDeadline) -> StepStats | None:
        with record_function("step"):
            step, virtual_workers = self.schedule[wanted.step], self.recipe.virtual_workers
            view = StepView(step, membership, partial(self._recompute, step, membership))
            # A run's first sum is measured: all take part in it.
            entry = synchronous(wanted.step, virtual_workers) if self.reducer.sum.needs_measure else wanted

            def passes() -> ControlVector:
                nonlocal entry
                if isinstance(entry, JournalEntry):
                    self.take_passes(view, entry)
                    return self.control.read()
                control = self._passes_in_time(view, entry.limit)
                entry = arrived(step.index, control.words(_FINISHED))  # from now on, also if they are repeated
                return control

            # A sum that leaves its range is measured, and the passes are repeated.
            try:
                reduced = self.reducer.reduce(passes, check=lambda control: self._check(view, control, entry))
            except _NobodyInTime:
                return self._run(membership, synchronous(step.index, virtual_workers))
            except _Abandoned:
                return None
            assert isinstance(entry, JournalEntry), "the passes have decided it"
            with record_function("update"):
                return self._end(view, entry, reduced)

    def _end(self, view: StepView, entry: JournalEntry, reduced: Reduced[ControlVector]) -> StepStats:
        """Decides on the step, the same on every rank since the sums are, and updates the weights."""
        step, control, precision = view.step, reduced.result, self.state.precision
        loss_scale = precision.loss_scale
        skipped = [self.reducer.names[slot] for slot in reduced.report.nonfinite]
        view = replace(view, is_skipped=bool(skipped), is_redone=reduced.redone > 0)
        # Before the mean, which moves the scales on: what a watcher recomputes must be rounded as the step was.
        for watcher in self.watchers:
            watcher.before_accept(view, control)
        if skipped:
            precision.skip(step.index, skipped)
        else:
            # Gradient 8: the step is accepted, the integers become the mean gradient.
            if not control.is_finite:
                layer = self.state.batch_norm.name_of(int((~control.batch_norm.isfinite()).nonzero()[0]))
                raise DivergedError(f"step {step.index}: {layer}: a batch statistic is not finite, or beyond 2**57")
            self.reducer.apply_mean(control.counts.contributions)
            for watcher in self.watchers:
                watcher.with_mean(view)
            if precision.is_scaling:
                precision.accept(self.reducer.owned)
            if self.recipe.clip_grad_norm is not None:
                self.update.clip(self.recipe.clip_grad_norm)
            self.update.set_rates(step)
            self.update.step()
            self.state.batch_norm.update(control.batch_norm, step.extra_pass)
        if self.state.average is not None and self.state.average.is_due(step):
            self.update.gather_all()
            self.state.average.update(step)
        found: dict[str, Any] = {}
        for watcher in self.watchers:
            found |= watcher.after(view, control)
        return StepStats(
            step=step, times=self.clock.stop(), loss=control.loss, entry=entry, replaced=control.counts.replaced,
            redone=reduced.redone, overflowed=reduced.overflowed, skipped=skipped,
            left_out=self.recipe.virtual_workers - len(entry.workers), finished=control.words(_FINISHED),
            underflow=reduced.report.underflow, loss_scale=loss_scale,
            taken_over=TakenOver.read(control.section(_TAKEN_OVER), self.world.ranks),
            **{name: value for name, value in found.items() if name in STATS},
            figures={name: value for name, value in found.items() if name not in STATS},
        )  # fmt: skip

    def take_passes(self, view: StepView, entry: JournalEntry) -> None:
        """Forward and backward of this rank's virtual workers in an entry; its messages leave meanwhile."""
        if self.pass_thread is not None:
            self.pass_thread.wait_idle()  # two at a time would draw from one generator of random numbers
        # Gradient 1: this rank takes its virtual workers one after the other; the last one lets the messages go.
        self.control.clear()
        own = [worker for worker in view.membership.mine if worker in entry.workers]
        work: OwnShare | StealingShare = OwnShare(own) if self.stealing is None else self.stealing(view.membership)
        own_done = sent = None
        self.clock.begin_work(self.reducer.clock.mark())
        while sent is None:
            worker = None
            # A rank that is requested to stop leaves out the virtual workers that it has not begun, and sends its
            # messages all the same: by the missing contributions all ranks know that the step is abandoned. If ranks
            # compute a layer together none can leave out its part; they stop after the step.
            if self.requests.look() and not self.forward_backward.in_step:
                work.leave()
            else:
                worker = work.next()
            if work.is_helping and own_done is None:
                own_done = self.reducer.clock.mark()
            sent = self._pass(view, work, worker)
        if own_done is not None:  # ranks are compared by what they take for their own shares
            self.reducer.last_ready = own_done
        self.clock.end_work(own_done or self.reducer.clock.mark(), max(1, work.own))
        if not self.reducer.is_measuring:
            seen = replace(view, is_stopping=self.requests.is_stopping)
            for watcher in self.watchers:
                watcher.after_passes(seen)
        self.clock.passes_done()
        sent.wait()

    def _pass(self, view: StepView, work: OwnShare | StealingShare, worker: int | None) -> Work | None:
        """Forward and backward of a virtual worker, or of none; the control vector on its way if it was the last."""
        step, membership = view.step, view.membership
        batch = None if worker is None else self.images.read(step, worker, membership)
        if worker is not None and batch is None:
            self.control.counts.failed = 1  # which all ranks learn by the control vector
            # Ranks that compute a layer together wait for each other's part of it: a blank one goes on.
            batch = blank(self.recipe, step) if self.forward_backward.in_step else None
        self.liveness.progress("train", step.index, membership.mine[0] if worker is None else worker)
        hashed = observe = sent = None
        if worker is not None:
            hashed = _given(watcher.before_worker(step.index, worker, membership) for watcher in self.watchers)
            observe = _given(watcher.gradients_of(step.index, worker) for watcher in self.watchers)
        self.reducer.begin_worker(last=False, hash_into=hashed, observe=observe)
        if worker is not None and batch is not None:
            for watcher in self.watchers:
                watcher.with_batch(step.index, worker, batch)
            with record_function(f"forward {worker}"):
                loss = self.forward_backward.forward(step, worker, batch, membership).detach()
            if not self.forward_backward.is_added:
                self.control.add(self.state.batch_norm.added_by(worker), loss)
            self._hash_beside(hashed, loss)
            self.control.counts.replaced += batch.replaced
        is_last = worker is None or work.is_last()
        if is_last:
            self.reducer.is_last = True
            # It leaves before the last backward pass, beside which it travels, unless that pass fills it.
            sent = None if self.forward_backward.control_follows else self._send(view, _TAKEN_OVER, work.report())
        # A backward pass fills the memory in which the last step's weights may still be under way.
        self.update.wait_weights()
        if batch is not None:
            with record_function(f"backward {worker}"):
                self.forward_backward.backward()
        self.reducer.end_worker()
        return self._send(view, _TAKEN_OVER, work.report()) if is_last and sent is None else sent

    def _passes_in_time(self, view: StepView, limit: Limit) -> ControlVector:
        """The sums of what finishes on this rank before the deadline; then all messages leave at once."""
        # The passes run in a thread of their own: while it is late, or asleep, this rank sends zeros.
        assert self.pass_thread is not None, "only a recipe that leaves out late work has steps that time decides"
        step, membership = view.step, view.membership
        self.control.clear()
        finished = [0] * self.recipe.virtual_workers
        self.update.wait_weights()

        reads, last = False, (-1, False)

        def is_stopped(worker: int) -> bool:
            nonlocal last
            if (worker, reads) != last:  # a look at the thread is no progress of its own: it may hang
                last = worker, reads
                self.liveness.progress("train", step.index, worker)
                if reads:
                    self.images.begin_wait()
            return self.requests.look()

        def take(worker: int) -> Batch:
            nonlocal reads
            reads = True
            try:
                return self.images.take(step, worker, membership)
            finally:
                reads = False

        try:
            for passed, seconds in self.pass_thread.in_time(view, limit, take, is_stopped):
                self.reducer.begin_worker(last=False)
                for slot, gradient in passed.gradients:
                    self.reducer.add(slot, gradient)
                self.reducer.end_worker()
                self.control.add(passed.statistics, passed.loss)
                finished[passed.worker] = max(1, round(1e6 * seconds))
                for watcher in self.watchers:
                    watcher.with_batch(step.index, passed.worker, passed.batch)
                self.control.counts.replaced += passed.batch.replaced
        except (OSError, RunError) as error:
            self.images.note(error)
            self.control.counts.failed = 1
        self.reducer.begin_worker(last=True)
        sent = self._send(view, _FINISHED, finished)
        self.reducer.end_worker()
        self.clock.passes_done()
        sent.wait()
        return self.control.read()

    def _send(self, view: StepView, name: str, words: list[int]) -> Work:
        sections = {watcher.name: watcher.before_send(view) for watcher in self.watchers if watcher.name}
        sections[name] = torch.tensor(words, dtype=torch.int64)
        return self.control.send(self.allreduce, {name: each for name, each in sections.items() if each.numel()})

    def _recompute(self, step: Step, membership: Membership, worker: int) -> IntegerHash:
        """Computes a virtual worker once more, for its hash alone: nothing but the reducer's hash takes anything."""
        self.liveness.progress("audit", step.index, worker)
        batch, found = self.images.take(step, worker, membership), IntegerHash(self.world.device)
        with self.reducer.only_hashing(found):
            self._hash_beside(found, self.forward_backward.forward(step, worker, batch, membership))
            self.forward_backward.backward()
        return found

    def _hash_beside(self, found: IntegerHash | None, loss: Tensor) -> None:
        if found is not None:
            found.add(_LOSS, 0, loss.detach().reshape(1))
            found.add(_STATISTICS, 0, self.state.batch_norm.passed)

    def _check(self, view: StepView, control: ControlVector, entry: JournalEntry | StepDeadline) -> None:
        """Ends the step, on all ranks alike, unless all virtual workers of its entry were computed."""
        assert isinstance(entry, JournalEntry)
        for watcher in self.watchers:
            watcher.check(view, control)
        counts = control.counts
        if counts.failed:
            raise self.images.failure(view.step, counts.failed, counts.ranks, self.world.ranks[self.world.rank])
        if counts.contributions < len(entry.workers) or (control.words(Requests.name)[0] > 0 and not entry.workers):
            raise _Abandoned
        if not entry.workers:
            raise _NobodyInTime

    def close(self) -> None:
        """Ends what the steps began beside themselves; every rank calls it after the last one."""
        self.update.close()
        for watcher in self.watchers:
            watcher.close()
        if self.pass_thread is not None:
            self.pass_thread.close()

"""One synchronous step, from the images of the virtual workers to the updated weights.

A gradient's way:

    forward, backward     each virtual worker of this rank in turn (`ForwardBackward`)
    reducer.add           a hook rounds its gradient into a bucket, as soon as autograd has it (`Reducer`)
    all-reduce            full buckets leave while backward still runs (`comm`)
    status                found by every rank alike in what has arrived: accepted, out of range, or not finite
    apply_mean            the integers become the mean gradient, divided by the count of contributions
    update.step           the optimiser updates what this rank owns (`Update`); shards are gathered during the next step

Beside it goes the control vector: losses, batch-norm statistics and counts of all ranks, which leave when the last
forward pass is done. Nothing outside the reducer changes until a step is accepted, so that it can be redone.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from ..comm.base import AllReduce, Work
from ..comm.groups import Group
from ..comm.liveness import Liveness
from ..data.loader import Loader, Share
from ..data.pipeline import Batch
from ..errors import DiskError, RunError, is_transient
from ..gradients.integer_hash import IntegerHash
from ..gradients.reducer import Reducer
from ..gradients.update import Update
from ..precision import Precision
from ..recipe.schedule import Schedule, Step
from ..recipe.schema import Recipe
from ..synchrony.limits import Limit
from .audit import Audit
from .balance import balance
from .batchnorm import BatchNormStatistics
from .closing import Open, arrived, as_microseconds
from .control_vector import ControlMessage, ControlVector
from .drift import DriftWatch
from .forward_backward import ForwardBackward, blank
from .journal import JournalEntry, synchronous
from .membership import Membership
from .model_state import StepState
from .pass_thread import PassThread
from .stats import StepClock, StepStats
from .stragglers import Stragglers, paces, slowest
from .weight_average import MovingAverage
from .work_stealing import OwnShare, StealingShare, TakenOver, WorkStealing

_LOSS, _STATISTICS = -1, -2
"""in a virtual worker's hash, beside the numbers of its slots"""


class _Abandoned(Exception):
    """A rank was asked to stop before it had begun all of its virtual workers."""


class _NobodyInTime(Exception):
    """A step was closed before any virtual worker had finished."""


@dataclass
class TrainStep:
    """Takes the steps of a schedule on this rank; `train.build` puts it together."""

    recipe: Recipe
    schedule: Schedule
    model: nn.Module
    """updated in place; after `update.gather_all` all ranks hold the same weights"""
    loader: Loader
    forward_backward: ForwardBackward
    reducer: Reducer
    update: Update
    batch_norm: BatchNormStatistics
    state: StepState
    """what the next step needs, into and out of the model and checkpoints"""
    average: MovingAverage | None
    precision: Precision
    allreduce: AllReduce
    """over all ranks, watched by `monitor`"""
    set_rates: Callable[[Step], object]
    """gives the update's optimiser the values of a step"""
    control: ControlMessage
    audit: Audit
    """computes some virtual workers a second time, on another rank, before a step is accepted"""
    stragglers: Stragglers
    follows_speed: bool
    """whether the shares do"""
    stealing: WorkStealing | None
    """idle ranks take over the work of late ones; None: each rank computes its own share"""
    drift: DriftWatch
    clock: StepClock
    world: Group
    images_at: str
    """where the training images are, for people"""
    liveness: Liveness
    """learns of this rank's progress"""
    stop_requested: Callable[[], bool]
    """asked before each virtual worker"""
    pass_thread: PassThread | None = None
    """runs the passes of steps that time decides"""
    checkpoint_due: Callable[[int], bool] = lambda steps: False
    """asked once a step, with the steps that are then done; what one rank says holds for all"""
    keep_due: Callable[[], bool] = lambda: False
    """likewise, whether nodes keep a copy of the state after the step (`node_memory`)"""
    check_replaced: Callable[[Step, int], object] = lambda step, replaced: None
    """called with the step's count of replaced images before anything changes; what it raises ends the run"""
    next_look: Callable[[int], int] = lambda steps: steps
    """the count of steps, at least so many, after which somebody looks at the weights (`RunAhead`)"""

    def __post_init__(self) -> None:
        self._read_error, self._may_pass = "", False

    def run(self, membership: Membership, asked: JournalEntry | Open) -> StepStats | None:
        """Takes the step of a journal entry; None, on all ranks, if one was asked to stop: then nothing has changed.

        Args:
            membership: Who computes which virtual workers.
            asked: Whose gradients enter the update; or how long it waits for those that do, as `StepStats.entry` tells.

        Raises:
            CorruptionError: Ranks do not hold the same weights.
            RunError: A gradient (unless the precision is float16) or a batch statistic is not finite, a sum leaves its
                range again and again, images can't be read, or the ranks' programs differ. All ranks raise it, and
                nothing has changed.
        """
        self.clock.start()
        step, virtual_workers = self.schedule[asked.step], self.recipe.virtual_workers
        # A run's first sum is measured: all take part in it.
        entry = synchronous(asked.step, virtual_workers) if self.reducer.sum.needs_measure else asked

        def passes() -> ControlVector:
            nonlocal entry
            if isinstance(entry, JournalEntry):
                return self._passes(step, entry, membership)
            control = self._passes_in_time(step, entry.limit, membership)
            entry = arrived(step.index, control.finished)  # from now on, also if they are repeated
            return control

        # The passes and the sums. A sum that leaves its range is measured, and the passes are repeated.
        try:
            reduced = self.reducer.reduce(passes, check=lambda control: self._check_passes(step, control, entry))
        except _NobodyInTime:
            return self.run(membership, synchronous(step.index, virtual_workers))
        except _Abandoned:
            return None
        assert isinstance(entry, JournalEntry), "the passes have decided it"
        control, report = reduced.result, reduced.report
        self.stragglers.note(step.index, self.reducer, self.clock.data_seconds(), self.clock.pace)
        told = paces(control.timings) if self.follows_speed else None

        # The same decision on every rank, for the status is the same.
        loss_scale = self.precision.loss_scale
        skipped = [self.reducer.names[slot] for slot in report.nonfinite]
        audited = 0
        if skipped:
            self.precision.skip(step.index, skipped)
        else:
            self._check_batch_norm(step, control)
            audited = self.audit.compare(step.index, membership, partial(self._again, step, membership))
            self.reducer.apply_mean(control.counts.contributions)
            self.precision.accept(self.reducer.owned)
            if self.recipe.clip_grad_norm is not None:
                self.update.clip(self.recipe.clip_grad_norm)
            self.set_rates(step)
            self.update.step()
            self.batch_norm.update(control.batch_norm)
        if self.average is not None and self.average.is_due(step):
            self.update.gather_all()
            self.average.update(step)

        return StepStats(
            step=step,
            times=self.clock.stop(),
            loss=control.loss,
            replaced=control.counts.replaced,
            stop=control.counts.stop > 0,
            save=control.counts.save > 0,
            keep=control.counts.keep > 0,
            change=control.counts.change > 0,
            redone=reduced.redone,
            overflowed=reduced.overflowed,
            skipped=skipped,
            audited=audited,
            entry=entry,
            left_out=virtual_workers - len(entry.workers),
            finished=control.finished,
            underflow=report.underflow,
            loss_scale=loss_scale,
            slowest=slowest(control.timings, self.world.ranks),
            balance=None if told is None else balance(membership, *told, self.stragglers.every),
            taken_over=TakenOver.read(control.taken_over, self.world.ranks),
        )

    def _passes(self, step: Step, entry: JournalEntry, membership: Membership) -> ControlVector:
        self.take_passes(step, entry, membership)
        return self.control.read()

    def take_passes(self, step: Step, entry: JournalEntry, membership: Membership) -> None:
        """Forward and backward of this rank's virtual workers in an entry; buckets and control vector leave meanwhile.

        A rank that is asked to stop leaves out the virtual workers that it has not begun, and sends its messages all
        the same: by the missing contributions all ranks know that the step is abandoned. Where ranks compute a layer
        together none can leave out its part; they stop after the step.
        """
        if self.pass_thread is not None:
            self.pass_thread.wait_idle()  # two at a time would draw from one generator of random numbers
        self.control.clear()
        self.control.counts.save = int(self.checkpoint_due(step.index + 1))
        self.control.counts.keep = int(self.keep_due())
        work = self._work(entry, membership)
        sent, own_done = None, None
        self.clock.begin_work(self.reducer.clock.mark())
        while sent is None:
            self.control.counts.stop = int(self.stop_requested())
            self.control.counts.change = int(self.liveness.ranks_change())
            worker = None
            if self.control.counts.stop and not self.forward_backward.in_step:
                work.leave()
            else:
                worker = work.next()
            if work.is_helping and own_done is None:
                own_done = self.reducer.clock.mark()
            batch = None if worker is None else self._read(step, worker, membership)
            self.liveness.progress("train", step.index, membership.mine[0] if worker is None else worker)
            hash_into = None if worker is None else self.audit.hash_of(step.index, worker, membership)
            self.reducer.begin_worker(last=False, hash_into=hash_into)
            if worker is not None and batch is not None:
                loss = self.forward_backward.forward(step, worker, batch, membership).detach()
                if not self.forward_backward.is_added:
                    self.control.add(self.batch_norm.batch, loss)
                self._hash_beside(hash_into, loss)
                self.control.counts.replaced += batch.replaced
            is_last = worker is None or work.is_last()
            if is_last:
                self.reducer.mark_last()
                self.control.taken_over = work.told()
                sent = None if self.forward_backward.control_follows else self._send_control(step)
            # A backward pass fills the memory in which the last step's weights may still be under way.
            self.update.wait_weights()
            if batch is not None:
                self.forward_backward.backward()
            self.reducer.end_worker()
            if is_last and sent is None:
                sent = self._send_control(step)
        if own_done is not None:  # ranks are compared by what they take for their own shares
            self.reducer.last_ready = own_done
        self.clock.end_work(own_done or self.reducer.clock.mark(), max(1, work.own))
        if not self.reducer.is_measuring:
            again = partial(self._again, step, membership) if not self.control.counts.stop else None
            self.audit.start(step.index, membership, again)
        self.clock.passes_done()
        sent.wait()

    def _work(self, entry: JournalEntry, membership: Membership) -> OwnShare | StealingShare:
        """What this rank computes of an entry."""
        if self.stealing is not None:
            return self.stealing.share(membership)
        return OwnShare([worker for worker in membership.mine if worker in entry.workers])

    def _passes_in_time(self, step: Step, limit: Limit, membership: Membership) -> ControlVector:
        """The sums of what finishes on this rank before the step is closed; then all messages leave at once.

        The passes run in a thread of their own (`PassThread`): while it is late, or asleep, this rank sends zeros.
        """
        assert self.pass_thread is not None, "only a recipe that leaves out late work has steps that time decides"
        self.control.clear()
        self.control.counts.save = int(self.checkpoint_due(step.index + 1))
        self.control.finished = [0] * self.recipe.virtual_workers
        self.update.wait_weights()

        def is_stopped(worker: int) -> bool:
            self.liveness.progress("train", step.index, worker)
            self.control.counts.change = int(self.liveness.ranks_change())
            self.control.counts.stop = int(self.stop_requested())
            return self.control.counts.stop > 0

        def take(worker: int) -> Batch:
            return self._take(step, worker, membership)

        try:
            for passed, seconds in self.pass_thread.in_time(step, membership, limit, take, is_stopped):
                self.reducer.begin_worker(last=False)
                for slot, gradient in passed.gradients:
                    self.reducer.add(slot, gradient)
                self.reducer.end_worker()
                self.control.add(passed.statistics, passed.loss)
                self.control.finished[passed.worker] = as_microseconds(seconds)
                self.control.counts.replaced += passed.replaced
        except (OSError, RunError) as error:
            self._note_unread(error)
        self.reducer.begin_worker(last=True)
        sent = self._send_control(step)
        self.reducer.end_worker()
        self.clock.passes_done()
        sent.wait()
        return self.control.read()

    def _send_control(self, step: Step) -> Work:
        if self.drift.is_due(step.index):
            self.update.wait_weights()
        return self.control.send(self.allreduce, self.stragglers.message(step.index), self.drift.message(step.index))

    def _again(self, step: Step, membership: Membership, worker: int) -> IntegerHash:
        """Computes a virtual worker once more, for its hash alone: nothing but the reducer's hash takes anything."""
        self.liveness.progress("audit", step.index, worker)
        batch, found = self._take(step, worker, membership), IntegerHash(self.world.device)
        with self.reducer.only_hashing(found):
            self._hash_beside(found, self.forward_backward.forward(step, worker, batch, membership))
            self.forward_backward.backward()
        return found

    def _hash_beside(self, found: IntegerHash | None, loss: Tensor) -> None:
        """Adds to a virtual worker's hash what travels beside its gradients."""
        if found is not None:
            found.add(_LOSS, 0, loss.detach().reshape(1))
            found.add(_STATISTICS, 0, self.batch_norm.batch)

    def _read(self, step: Step, worker: int, membership: Membership) -> Batch | None:
        """The images of a virtual worker; None, or blank ones, where they can't be read, as all ranks learn."""
        self.liveness.progress("images", step.index, worker)
        self.liveness.outside("images", self.images_at)
        try:
            return self._take(step, worker, membership)
        except (OSError, RunError) as error:
            self._note_unread(error)
            return blank(self.recipe, step) if self.forward_backward.in_step else None

    def _note_unread(self, error: OSError | RunError) -> None:
        """Of this rank alone: the others must learn of it before any of them ends."""
        self._read_error = f" (rank {self.world.ranks[self.world.rank]}: {error})"
        self._may_pass = isinstance(error, OSError) and is_transient(error)
        self.control.counts.failed = 1

    def _take(self, step: Step, worker: int, membership: Membership) -> Batch:
        share = _share(step, worker)
        return self.loader.take(share, self._following(share, membership))

    def _following(self, share: Share, membership: Membership) -> Iterator[Share]:
        """What this rank reads after a share, if the virtual workers of each rank stay as they are."""
        now = self._reads(share.step, membership)
        yield from now[now.index(share) + 1 :] if share in now else ()
        for index in range(share.step + 1, len(self.schedule)):
            yield from self._reads(index, membership)

    def _reads(self, index: int, membership: Membership) -> list[Share]:
        """What this rank reads for a step: its own virtual workers, then those that it audits."""
        workers = [*membership.mine, *self.audit.others(index, membership)]
        return [_share(self.schedule[index], worker) for worker in workers]

    def _check_passes(self, step: Step, control: ControlVector, entry: JournalEntry | Open) -> None:
        """Ends the step, on all ranks alike, unless all virtual workers of its entry were computed."""
        assert isinstance(entry, JournalEntry)
        self.drift.check(control.fingerprints, step.index)
        if control.counts.failed:
            share = f"{control.counts.failed} of {control.counts.ranks} ranks"
            kind = DiskError if self._may_pass else RunError
            raise kind(f"step {step.index}: {share} can't read training images{self._read_error}")
        if control.counts.contributions < len(entry.workers) or (control.counts.stop and not entry.workers):
            raise _Abandoned
        if not entry.workers:
            raise _NobodyInTime
        self.check_replaced(step, control.counts.replaced)

    def _check_batch_norm(self, step: Step, control: ControlVector) -> None:
        if not control.is_finite:
            layer = self.batch_norm.name_of(int((~control.batch_norm.isfinite()).nonzero()[0]))
            raise RunError(
                f"step {step.index}: {layer}: a batch statistic is not finite, or beyond 2**57; the run has diverged: "
                "lower rate.lr or lengthen rate.warmup.length"
            )

    def check_weights(self, steps: int, places: Collection[int] | None = None) -> None:
        """Compares what the ranks hold after so many steps, before it is saved or handed on; every rank calls it.

        Args:
            steps: Done.
            places: Of the ranks that should hold the same; None: all.

        Raises:
            CorruptionError: They do not hold the same.
        """
        self.update.wait_weights()
        self.drift.compare(steps, self.allreduce, places)

    def close(self) -> None:
        """Ends what the steps began beside themselves; every rank calls it after the last one."""
        self.update.close()
        self.stragglers.close()
        if self.pass_thread is not None:
            self.pass_thread.close()


def _share(step: Step, worker: int) -> Share:
    return Share(step.index, worker, step.share(worker), step.images_per_worker, step.augment, step.sizes)

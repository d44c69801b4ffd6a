"""One synchronous step: from the images of the virtual workers to the updated weights.

A gradient's way: a virtual worker's forward and backward pass -> `Reducer` (a hook rounds it into a bucket, full
buckets leave while backward runs) -> the all-reduce -> the status -> the mean -> the optimiser.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.allreduce import AlgorithmAllReduce
from ..comm.buckets import Buckets
from ..comm.liveness import Liveness
from ..comm.monitor import Monitor
from ..comm.native import NativeAllReduce
from ..comm.reduce_scatter import ShardCollectives
from ..data.loader import Loader, Share
from ..data.pipeline import Batch
from ..errors import RunError
from ..gradients.reducer import Reducer
from ..gradients.update import Replicated, Sharded, Update
from ..optim import set_hyperparameters
from ..precision import Precision
from ..recipe.schedule import Schedule, Step
from ..recipe.schema import Recipe
from ..runtime import Ranks
from ..tensor_parallel.parallel_step import Hybrid, HybridPass, HybridReducer
from ..tensor_parallel.parallel_tail import HybridTail
from .batchnorm import BatchNormStatistics
from .control_vector import StepStatistics, Totals
from .forward_backward import Passing, WholePass, blank
from .link_probe import Links
from .stragglers import Slowest, Stragglers, slowest

MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank, but for the times."""

    step: Step
    loss: float
    replaced: int
    stop: bool
    """a rank was asked to stop: end the run after this step"""
    redone: int
    """times that the step was measured and redone after an overflow"""
    overflowed: list[str]
    """parameters whose sum left the integer range, before the step was redone"""
    skipped: list[str]
    """parameters with a non-finite gradient; not empty: the update was skipped (float16)"""
    underflow: float
    loss_scale: float
    """of this step; 1 unless the precision is float16"""
    slowest: Slowest | None
    """now and then, and of the step before: the rank whose gradients were ready last"""
    seconds: float
    data_seconds: float
    sync_seconds: float
    """that the step waited for messages"""
    on_way_seconds: float
    """with at least one message on its way; nan where nobody can tell (NCCL)"""
    update_seconds: float
    """of this rank's own work after its last backward pass: status, mean, optimiser, statistics"""


class TrainStep:
    """Takes the steps of a schedule on this rank.

    Args:
        recipe: What to compute.
        schedule: Its steps.
        model: Updated in place; all ranks hold the same weights.
        optimizer: As from `build_optimizer`.
        loader: Gives the images of a virtual worker.
        ranks: This process among the others.
        allreduce: Sums over ranks, as from `create`.
        buckets: The rule of the gradient buckets' sizes.
        is_sharded: Each rank updates a shard of the weights only.
        liveness: Gets to know this rank's progress; waits for messages ask it for late ranks.
        stop_requested: Asked once a step.
        hybrid: The model's tail, where it is computed in column blocks.
    """

    def __init__(
        self,
        recipe: Recipe,
        schedule: Schedule,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Loader,
        ranks: Ranks,
        allreduce: AlgorithmAllReduce | NativeAllReduce,
        buckets: Buckets,
        is_sharded: bool,
        liveness: Liveness,
        stop_requested: Callable[[], bool],
        hybrid: HybridTail | None = None,
    ) -> None:
        self.recipe = recipe
        self.schedule = schedule
        self.model = model
        self.ranks = ranks
        self.precision = Precision(recipe, ranks.device)
        self.batch_norm = BatchNormStatistics(model)
        self.monitor = Monitor()
        self.monitor.liveness = liveness
        self.allreduce = self.monitor.over(allreduce)
        """the same all-reduce, watched: a rank that doesn't answer is overdue"""
        shards = ShardCollectives(allreduce, self.monitor.watch) if is_sharded else None
        how = model, recipe.reduction, recipe.virtual_workers, self.allreduce, buckets, shards
        self.reducer: Reducer
        self.update: Update
        self._passing: Passing
        if hybrid is not None:
            columns = hybrid.reducer(recipe.virtual_workers, buckets, self.monitor)
            reducer = HybridReducer(columns, *how)
            self.reducer, self.update = reducer, Hybrid(optimizer, reducer, hybrid)
            self._passing = HybridPass(model, hybrid, columns, recipe, self.precision, self.batch_norm, ranks)
        else:
            self.reducer = Reducer(*how)
            self._passing = WholePass(model, recipe, self.precision, self.batch_norm, ranks.device)
            if shards is None:
                self.update = Replicated(optimizer, self.reducer)
            else:
                self.update = Sharded(model, optimizer, self.reducer, shards, self.allreduce)
        self._statistics = StepStatistics(self.batch_norm.running.numel(), recipe.virtual_workers, ranks.device)
        self._lateness = Stragglers(ranks.rank, ranks.size, Links() if ranks.size > 2 else None)
        self._loader = loader
        self._liveness = liveness
        self._stop_requested = stop_requested
        self._workers = ranks.share_of(recipe.virtual_workers)
        self._batches: Iterator[Batch] = iter(())
        self._next_step = -1
        self._failure = ""  # why this rank can't read its images
        self._passed = 0.0  # when the step's last backward pass ended, without what was waited for messages until then

    def close(self) -> None:
        """Ends what the steps began beside themselves; every rank calls it after the last one."""
        self._lateness.close()

    def run(self, index: int) -> StepResult:
        """Takes step `index`; once `update.settle` was called the model holds the updated weights.

        Raises:
            RunError: A gradient is not finite (and the precision is not float16), or a rank can't read its images.
        """
        started = time.perf_counter()
        data_before, sync_before, on_way_before = self._loader.wait_seconds, self.monitor.waited, self.monitor.on_way
        step = self.schedule[index]
        overflowed: list[str] = []
        redone = 0
        if self.reducer.needs_measure:
            self._measure(step)
        while True:
            totals = self._pass(step)
            status = self.reducer.finish()
            self._lateness.note(index, self.reducer, self._loader.wait_seconds - data_before)
            if totals.failed:
                share = f"{totals.failed} of {self.ranks.size} ranks"
                raise RunError(f"step {index}: {share} can't read training images{self._failure}")
            if status.nonfinite or not status.overflow:
                break
            overflowed += [self.reducer.names[slot] for slot in status.overflow]
            redone += 1
            if redone == MAX_ATTEMPTS:
                raise RunError(
                    f"step {index}: {overflowed[0]}: the gradient's sum leaves the integer range even at a "
                    "freshly measured scale; this is a defect of torusgd, please report it"
                )
            self._measure(step)
        skipped = [self.reducer.names[slot] for slot in status.nonfinite]
        loss_scale = self.precision.loss_scale
        if skipped:
            self.precision.skip(index, skipped)
        else:
            self._update(step, totals)
        seconds = time.perf_counter() - started
        return StepResult(
            step=step,
            loss=totals.loss,
            replaced=totals.replaced,
            stop=totals.stop > 0,
            redone=redone,
            overflowed=overflowed,
            skipped=skipped,
            underflow=status.underflow,
            loss_scale=loss_scale,
            slowest=slowest(totals.notes),
            seconds=seconds,
            data_seconds=self._loader.wait_seconds - data_before,
            sync_seconds=self.monitor.waited - sync_before,
            on_way_seconds=self.monitor.on_way - on_way_before,
            update_seconds=started + seconds - self.monitor.waited - self._passed,
        )

    def _update(self, step: Step, totals: Totals) -> None:
        if not bool(totals.batch_norm.isfinite().all()):
            layer = self.batch_norm.name_of(int((~totals.batch_norm.isfinite()).nonzero()[0]))
            raise RunError(
                f"step {step.index}: {layer}: a batch statistic is not finite, or beyond 2**57; the run has diverged: "
                "lower rate.lr or lengthen rate.warmup.length"
            )
        self.reducer.apply_mean()
        self.precision.accept(self.reducer.pieces)
        set_hyperparameters(
            self.update.optimizer, lr=step.lr, momentum=step.momentum, weight_decay_factor=step.weight_decay_factor
        )
        self.update.step()
        self.batch_norm.update(totals.batch_norm)

    def _pass(self, step: Step) -> Totals:
        """Forward and backward of this rank's virtual workers; messages leave on their way."""
        self._statistics.clear()
        self.reducer.begin(measuring=False)
        self._statistics.count("stop", int(self._stop_requested()))
        sent = None
        for worker in self._workers:
            self._liveness.progress("train", step.index, worker)
            last = worker == self._workers[-1]
            batch = self._read(step, worker)
            self.reducer.begin_worker(last=last)
            loss = None
            if batch is not None:
                loss = self._passing.forward(step, worker, batch)
                self._statistics.add(self.batch_norm.batch, loss.detach())
                self._statistics.count("replaced", batch.replaced)
            if last:
                sent = self._statistics.send(self.allreduce, self._lateness.message(step.index))
            self.update.settle()
            if loss is not None:
                self._passing.backward()
            self.reducer.end_worker()
        assert sent is not None
        self._passed = time.perf_counter() - self.monitor.waited
        sent.wait()
        return self._statistics.totals()

    def _measure(self, step: Step) -> None:
        """Finds each gradient's largest element over all virtual workers, without an update."""
        self._seek(step.index)
        self.reducer.begin(measuring=True)
        for worker in self._workers:
            self._liveness.progress("measure", step.index, worker)
            batch = self._read(step, worker)
            self.reducer.begin_worker(last=False)
            loss = None if batch is None else self._passing.forward(step, worker, batch)
            self.update.settle()
            if loss is not None:
                self._passing.backward()
            self.reducer.end_worker()
        self.reducer.finish_measuring()
        self._seek(step.index)

    def _read(self, step: Step, worker: int) -> Batch | None:
        """The images of a virtual worker; None, or blank ones, where they can't be read, as all ranks learn."""
        if worker == self._workers[0] and self._next_step != step.index:
            self._seek(step.index)
        if worker == self._workers[-1]:
            self._next_step = step.index + 1
        try:
            return next(self._batches)
        except OSError as error:
            if not self._failure:
                self._failure = f" (rank {self.ranks.rank}: {error})"
            self._statistics.count("failed", 1)
            self._batches = iter(())
        except StopIteration:
            pass
        return blank(self.recipe, step) if self._passing.together else None

    def _seek(self, index: int) -> None:
        shares = (
            Share(step.share(worker), step.images_per_worker, step.augment)
            for step in (self.schedule[i] for i in range(index, len(self.schedule)))
            for worker in self._workers
        )
        self._batches = self._loader.run(shares)
        self._next_step = index

"""A run on one rank: steps, evaluations and checkpoints, from the newest state that there is to the summary."""

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from ..comm.base import CommError, Liveness
from ..comm.groups import Group
from ..errors import CorruptionError, DivergedError, RunError, UserError
from ..observe.events import Telemetry, evaluation_event
from ..precision import arithmetic_of
from ..ranks.generations import Generations
from ..recipe.section import Duration
from ..rundir.checkpoint import step_on_disk
from ..signals import StopFlag
from ..step.deadlines import deadlines_of
from ..step.evaluate import Evaluation, evaluate
from ..step.images import ReplacedImages
from ..step.journal import Journal
from ..step.polish import polish_by_recipe
from ..step.records import figures_of
from ..step.stats import StepStats
from ..step.watch import Requests
from ..weights import weights_sha256
from .build import build
from .job import Job
from .newest_state import Agreed, Beginning, Retained, agree, greet, nothing_yet
from .node_memory import NodeMemory, node_memory
from .recording import Recorder
from .saving import RunResult, RunState, Saver, weights_metadata, write_result
from .state_feed import StateFeeds

T = TypeVar("T")

# Seconds from one look to the next while ranks wait for others.
_LOOK_SECONDS = 0.2


def train(job: Job, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> RunResult:
    """Trains on a rank of somebody else's launcher, which starts all ranks again if one is lost."""
    with arithmetic_of(job.recipe):
        run = Run(job, world, stop, restarts, liveness, memory=node_memory(job))
        try:
            return run.run()
        except CommError:
            run.close_files()
            raise


class Run:
    """One rank's part in a run, as long as its ranks do not change; UserError if the job can't be run.

    `restarts` counts the launcher's starts after the first. `retained` is what this rank has of the same run with other
    ranks, `generations` is given where others may join, and in the `memory` of this node copies outlive its ranks.
    """

    def __init__(
        self, job: Job, world: Group, stop: StopFlag, restarts: int, liveness: Liveness | None = None,
        retained: Retained | None = None, generations: Generations | None = None, memory: NodeMemory | None = None,
    ) -> None:  # fmt: skip
        self.liveness = liveness or Liveness()
        self.retained = retained = retained or nothing_yet(job, world, self.liveness, world.ranks)
        self.job, self.world, self.stop, self.restarts = job, world, stop, restarts
        self._generations, self.memory, self.schedule = generations, memory, retained.schedule
        self._is_first = world.rank == 0  # rank 0 alone prints and writes
        self._metadata = weights_metadata(job.recipe, retained.data.training.source.classes)
        self.steps = min(len(self.schedule), job.max_steps or len(self.schedule))
        own = self._boundaries(job.recipe.evaluate.every, job.recipe.evaluate.first)
        self._evaluations = own if job.expected is None else {*job.expected.evaluations}
        saves, last = self._boundaries(job.options.checkpoint_every), retained.saved.at if retained.saved else None
        self._saver = Saver(job, world, self.liveness, self._metadata, saves, last)
        self._recorder = Recorder(job, world, self._boundaries(job.options.verify_every), self.steps)
        traced = () if job.trace is None else range(job.trace.first - 1, job.trace.last)
        # A step that ends with a checkpoint is known to be refused where steps are launched in advance.
        looks = {*self._evaluations, *saves, *(step - 1 for step in saves), *traced, self.steps}
        requests = Requests(
            self._must_stop, self.liveness, looks, save_due=self._saver.is_due,
            copy_due=lambda: self._is_first and self.memory is not None and self.memory.is_due(),
        )  # fmt: skip
        limit, images = job.recipe.data.max_replaced, self.schedule.train_images
        replaced = ReplacedImages(limit, images, lambda: self.state.totals.replaced)
        # SIGKILL 10: all that stands on groups is built anew, around the same data and network.
        watchers, generation = [replaced, self._recorder.watch], retained.generation + 1
        known = retained.fingerprint, retained.network
        self.trainer = build(job, retained.data, world, self.liveness, requests, watchers, generation, *known)
        self.membership = self.trainer.membership
        if job.plan is not None:
            job.plan.check(job.recipe.name, [span.batch for span in self.schedule.spans], len(retained.began))
        self.state, self._counted, self._is_ready = RunState(self.trainer.fingerprint), 0.0, False
        self.journal: Journal | None = None
        self.telemetry: Telemetry | None = None
        self._feeds: StateFeeds | None = None
        self._last_evaluation: Evaluation | None = None
        self._last_event: Callable[[], dict[str, Any]] | None = None

    def run(self) -> RunResult:
        """Trains from the last good checkpoint, from what the ranks have retained, or from the start, to the end.

        RunError if it can't go on, with a checkpoint of the last good step if the disk allows it; CommError if other
        ranks are lost: those that are left may go on with what they `keep`.
        """
        try:
            agreed = self._take_newest()
            if not agreed.holders and self.state.step > self.steps:
                done = f"has done {self.state.step} steps already; give at least as many, or --fresh"
                raise UserError(f"--max-steps {self.steps}: the run in {self.job.out} {done}")
            self._is_ready = True
            state, job = self.state, self.job
            if job.recipe.synchrony.keeps_journal:
                self.journal = Journal(state.fingerprint.recipe_sha256, job.recipe.virtual_workers, state.journal)
                if self._is_first:
                    self.journal.open(self.retained.run_dir.journal)
            if self._is_first:
                self._open_telemetry(agreed)
            last = self.schedule[max(state.step, 1) - 1], agreed.last_records
            self._say(self._recorder.begin(state, self.trainer.step.state, *last))
            self._counted = self.retained.counted or time.perf_counter()
            try:
                result = self._train(*self._saved(agreed))
            except DivergedError as error:
                if job.expected is None:
                    raise
                result = RunResult({"diverged": str(error)})
            if result is None:
                is_final = job.expected is None or (job.expected.is_final and not self._recorder.is_refuted)
                result = RunResult(self._finish() if is_final else {})
            elif result.ranks_change:
                return result
        except CommError:
            # SIGKILL 6: the step is cut off. It has changed nothing but sums, so the state is that after the last one.
            # Nothing is closed before the groups are: the others shall notice at once.
            raise
        except BaseException:
            self.close()
            raise
        # What may have no end is named by what it is: threads and loaders, then what takes the last files.
        self.liveness.progress("close", self.state.step, 0)
        self.trainer.close()  # not if a rank is lost: threads and groups still wait for it
        self.liveness.outside("the disk, or the servers of --track", str(self.retained.run_dir.path))
        if self.memory is not None:
            self.memory.forget()
        self.close(result.code)
        return result

    def keep(self) -> Retained:
        """What this rank has for those that are left, once its groups are aborted after a loss or a change."""
        self._saver.wait(self.state.step)  # which reports progress to those that wait, and whether the disk took it
        self.close_files()
        self.trainer.close()
        trainer, saved = self.trainer, self._saver.last() or self.retained.saved
        generation, network = trainer.membership.generation, trainer.network
        known = replace(self.retained, fingerprint=trainer.fingerprint, network=network, generation=generation)
        if not self._is_ready:
            return known
        tensors, event = trainer.step.state.state_dict(self.state.step, keep=True), self._last_event
        of_run = replace(known, last_event=event, last_records=self._recorder.last, saved=saved)
        return replace(of_run, state=self.state, counted=self._counted, tensors=tensors)

    def close(self, code: int = 1) -> None:
        """Ends this rank's part in the run, whatever has become of the others; trackers show the exit code."""
        try:
            self.close_files()
        finally:
            self.retained.close(code)

    def close_files(self) -> None:
        """Ends what writes and sends, after what is on its way; a checkpoint that is being written is completed."""
        for each in (self._feeds, self._saver, self._recorder, self.journal, self.telemetry):
            if each is not None:
                each.close()

    def _train(self, saved: int, is_due: bool) -> RunResult | None:
        """How this rank's part ends before the last step; None: it does not. `is_due`: a checkpoint, at once."""
        state, trainer, saver = self.state, self.trainer, self._saver
        saver.saved = saved
        progress, shares = partial(self.liveness.progress, "delays", state.step), trainer.membership.shares
        deadlines = deadlines_of(self.job.recipe, self.job.replay, shares, state.step, progress)
        is_stopping = is_changing = False
        while True:
            if trainer.trace is not None:
                trainer.trace.between_steps(state.step)
            if state.step in self._evaluations and state.evaluated < state.step and not is_stopping:
                is_stopping = not self._saved_before_errors(self._evaluate_and_report)
            self._count_seconds()
            number = self._agreed_signal() if is_stopping else 0
            if is_stopping or is_due or state.step == self.steps:
                saver.save(state, trainer)
            if is_stopping or state.step == self.steps:
                saver.wait(state.step)
                self._tell_phase("stopped" if is_stopping else "finish")
                return RunResult(signal=number) if is_stopping else None
            if is_changing:
                if self._feeds is not None:
                    self._feeds.end()
                return RunResult(ranks_change=True)
            if self.liveness.lacks_ranks():
                # Nobody knows for how long: what was reached must not depend on these ranks.
                saver.save(state, trainer)
                saver.wait(state.step)
                self._tell_phase("wait for ranks")
                is_changing = _wait_for_ranks(self.world, self.liveness, state.step, self._must_stop)
                is_stopping = not is_changing
                continue
            # SIGKILL 14: after a loss this is the step that was cut off, with the same samples and the same bits.
            take = partial((trainer.ahead or trainer.step).run, self.membership, deadlines.next(state.step))
            stats = self._saved_before_errors(take)
            if stats is None:  # a rank was requested to stop between two virtual workers: the step is not taken
                is_stopping = True
                continue
            self._note(stats, deadlines.observe(stats.finished, stats.times.seconds))
            is_stopping, is_changing = stats.stop, stats.change
            is_due = stats.save or self._recorder.wants_checkpoint
            if self._recorder.is_refuted:  # what follows from a wrong state says nothing
                self.steps = state.step

    def _agreed_signal(self) -> int:
        """The signal that stopped the run, the same on every rank: each has its own time limit, and one is first."""
        # A request counts as Ctrl-C does: nobody is to start the run again.
        own = self.stop.signal or (signal.SIGINT if self._is_first and self.retained.requests.to_stop() else 0)
        found = self.world.all_gather(torch.tensor([own], device=self.world.small_device))
        return max(map(int, found)) or signal.SIGTERM

    def _saved_before_errors(self, call: Callable[[], T]) -> T:
        """What a call gives. If it ends the run it has changed nothing: first the last good step is saved."""
        try:
            return call()
        except CorruptionError:  # these weights may be the wrong ones: no checkpoint is made of them
            self._saver.wait(self.state.step)
            raise
        except RunError:
            self._saver.save(self.state, self.trainer)
            self._saver.wait(self.state.step)
            raise

    def _note(self, stats: StepStats, news: str) -> None:
        state = self.state
        state.count(stats)
        if stats.balance is not None and stats.balance.move is not None:
            self.membership = stats.balance.move.membership
        if self.journal is not None:
            self.journal.add(stats.entry)
            state.journal = self.journal.head
        self._count_seconds()
        self._last_event = partial(stats.as_event, self.schedule.train_images, state.seconds)
        if self.telemetry is not None:
            self.telemetry.step(stats, state.seconds, self.membership)
        self._say(news)
        if self._generations is not None and self._generations.joiners and self._feeds is None:
            self._feeds = StateFeeds(self._generations)
        if self._feeds is not None:
            self._feeds.after_step(self.trainer.step.state, state, not stats.skipped, self._last_event)
        self._recorder.after_step(stats, state, self.trainer.step.state)
        if stats.keep and self.memory is not None:  # behind what was written of the step: from here it is not redone
            self.memory.keep(state, self.trainer.step.state)
        self._say(self.trainer.bucket_rebuild.after_step())  # the last: a feed copies the means

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.state.seconds += now - self._counted
        self._counted = now

    def _evaluate_and_report(self) -> bool:
        """False if a stop was requested meanwhile."""
        state, target = self.state, self.job.recipe.target_top1
        started = time.perf_counter()
        self._tell_phase("evaluate")
        with self.trainer.step.state.result_in_model(state.step):
            evaluation = self._classify(self._must_stop)
        if evaluation is None:
            return False
        seconds = state.seconds + time.perf_counter() - started
        state.evaluated = state.step
        self._last_event = partial(evaluation_event, state.step, evaluation, seconds)
        self._last_evaluation = evaluation if state.step == self.steps else None
        if target is not None and state.seconds_to_target is None and evaluation.top1 >= target:
            state.seconds_to_target = seconds
        if self.telemetry is not None:
            self.telemetry.evaluation(state.step, evaluation, seconds)
        self._recorder.evaluation(state.step, evaluation)
        return True

    def _classify(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        state, held_out, allreduce = self.trainer.step.state, self.trainer.data.held_out, self.trainer.step.allreduce
        settings, progress = self.job.recipe.evaluate, partial(self.liveness.progress, "evaluate", self.state.step)
        return evaluate(state.model, held_out, settings, self.world, allreduce, state.precision, stop, progress)

    def _finish(self) -> dict[str, Any]:
        """Polishes, evaluates a last time, and leaves the weights and the summary."""
        # A stop that comes now is too late: what is left is short, and the last checkpoint already stands.
        state, step, without = self.state, self.trainer.step, None
        if step.state.average is not None:
            step.state.write_to_model(state.step)
            without = self._classify()
        with step.state.result_in_model(state.step):
            evaluation = self._last_evaluation or self._classify()
            assert evaluation is not None
            top1 = {"top1_before_polish": evaluation.top1}
            if without is not None:
                top1["top1_without_average"] = without.top1
                self._say(f"without the average of the weights top-1 is {without.top1:.2%}")
            if self.job.recipe.polish is not None:
                images, progress = self.trainer.data.training, partial(self.liveness.progress, "polish", state.step)
                model, precision = step.state.model, step.state.precision
                polish_by_recipe(model, images, self.job.recipe, self.world, step.allreduce, precision, progress)
                evaluation = self._classify()
                assert evaluation is not None
                if self.telemetry is not None:
                    self.telemetry.evaluation(state.step, evaluation, state.seconds, polished=True)
            return self._leave_result(evaluation, top1)

    def _leave_result(self, evaluation: Evaluation, top1: Mapping[str, float]) -> dict[str, Any]:
        """Writes what the model holds, and the summary, in which `top1` stands beside the evaluation."""
        state, run_dir = self.state, self.retained.run_dir
        if not math.isfinite(evaluation.loss):  # of finite weights so large that the network's output overflows
            raise DivergedError(f"step {state.step}: the loss of the held-out images is {evaluation.loss}")
        self.liveness.outside("the disk that takes the result", str(run_dir.path))
        tensors = self.trainer.step.state.model.state_dict()
        summary = {
            "recipe": self.job.recipe.name, **evaluation.as_summary(), **top1, "world_size": self.world.size,
            "restarts": self.restarts, "shares": {str(rank): n for rank, n in self.membership.by_rank.items()},
            "lost_ranks": sorted(self.liveness.lost), **state.as_summary(), "weights_sha256": weights_sha256(tensors),
        }  # fmt: skip
        if self._is_first:
            if self.job.plan is not None:
                summary["predicted"] = self.job.plan.beside(run_dir.events)
            summary["records"] = self._recorder.result(summary, {**figures_of(evaluation), **top1})
            write_result(run_dir, tensors, summary, self._metadata | {"records_sha256": summary["records"]["sha256"]})
        return summary

    def _take_newest(self) -> Agreed:
        agreed = agree(self.retained, self.world, Beginning(self.job, self.trainer, self.liveness, self.memory))
        step = self.trainer.step
        if agreed.holders:
            if self.world.rank in agreed.holders:
                step.state.load_state_dict(iter(self.retained.tensors.items()))
            else:  # the network is about to get other weights, and may get some of them only
                self.retained = replace(self.retained, state=None)
            # SIGKILL 12: before any rank takes the weights of another, after which nobody could find wrong ones.
            self.trainer.drift.compare(agreed.state.step, step.allreduce, agreed.holders)
        step.state.load_state_dict(self._as_they_come(agreed.tensors, agreed.state.step))
        self.state = agreed.state
        self._last_event = None if agreed.last_event is None else partial(dict, agreed.last_event)
        return agreed

    def _as_they_come(self, tensors: Iterable[T], step: int) -> Iterator[T]:
        """The same; on a slow link each may take long, and shows that no rank hangs."""
        for number, each in enumerate(tensors):
            self.liveness.progress("state", step, number)
            yield each

    def _tell_phase(self, phase: str) -> None:
        if self.telemetry is not None:
            self.telemetry.status.update(now=True, phase=phase)

    def _say(self, *lines: str) -> None:
        for line in filter(None, lines):
            if self.telemetry is not None:
                self.telemetry.say(line)

    def _open_telemetry(self, agreed: Agreed) -> None:
        """Rank 0 begins to write and to show what the run does, or takes that over from a lost one."""
        # SIGKILL 13: a new rank 0 adds what a lost one may not have written, and drops what is done again.
        state, path, job = self.state, self.retained.run_dir.path, self.job
        if job.options.track:
            self.liveness.outside("the servers of --track", ", ".join(job.options.track))
        trackers, about = self.retained.trackers, self.retained.about
        trackers.open(path, {**about, "recipe": job.recipe.as_dict()})
        done, is_quiet = (state.step, state.evaluated), job.expected is not None
        self.telemetry = Telemetry(path, self.schedule, self.steps, *done, about, trackers, is_quiet)
        if is_quiet:
            return
        if not agreed.holders:
            greet(self.telemetry, job, self.trainer, state, agreed.origin)
            return
        if self._last_event is not None:
            self.telemetry.complete(self._last_event())
        self._say(self.retained.news, agreed.others)
        if agreed.saved is None:  # whoever wrote into the folder was killed
            with suppress(OSError):
                self.retained.run_dir.sweep()

    def _saved(self, agreed: Agreed) -> tuple[int, bool]:
        """The step of the newest checkpoint, and whether another one must be written at once: the same on all ranks."""
        if agreed.holders and agreed.saved is not None:
            return agreed.saved.step, False
        if not agreed.holders and self.memory is None:
            return self.state.step, False  # from which the run begins, or it begins with nothing
        # Rank 0 may have been lost before it had written its last; a silent disk is the next write's error.
        step = self.state.step
        saved = step_on_disk(self.retained.run_dir.checkpoints, unread=step) if self._is_first else 0
        # The same on all ranks, since all compare their weights before one is written.
        saved = int(self.world.broadcast_json(saved))
        return saved, saved < step

    def _must_stop(self) -> bool:
        return self.stop() or (self._is_first and self.retained.requests.to_stop())

    def _boundaries(self, every: Duration | None, first: Duration | None = None) -> set[int]:
        return {step for step in self.schedule.boundaries(every, first) if step < self.steps} | {self.steps}


def _wait_for_ranks(world: Group, liveness: Liveness, step: int, stop_is_requested: Callable[[], bool]) -> bool:
    """Waits, on all ranks of a run that has too few, until they meet anew; False once a stop was requested."""
    for number in count():
        liveness.progress("wait for ranks", step, number)
        # By a vote, since ranks that left this loop after another number of turns would wait for each other.
        votes = torch.tensor([int(stop_is_requested()), int(liveness.ranks_change())], device=world.small_device)
        world.all_reduce(votes)
        stops, changes = votes.tolist()
        if stops or changes:
            return not stops
        time.sleep(_LOOK_SECONDS)
    raise AssertionError

"""A run on one rank: steps, evaluations and checkpoints, from the last good checkpoint to the summary."""

import json
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..comm.base import CommError
from ..comm.groups import Group
from ..comm.liveness import Liveness, NoLiveness
from ..errors import RunError, UserError
from ..recipe.duration import Duration
from ..recipe.schedule import Schedule, Step
from ..signals import StopFlag
from ..weights import load_weights, match_weights, weights_sha256
from .build import Job, Trainer, build
from .checkpoint import CheckpointTimes, CheckpointWriter, list_checkpoints, newest_checkpoint
from .evaluate import Evaluation, evaluate
from .events import Telemetry, evaluation_event, plan_table, warn
from .fingerprint import changes
from .journal import synchronous
from .polish import polish_by_recipe
from .result import RunResult, write_result
from .run_dir import RunDir
from .saving import Saver
from .state import RunState, resumed, share_tensors, tensors_of
from .survival import Kept, agree, fitting, nothing_yet


def train(job: Job, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> RunResult:
    """Trains on this rank: what every rank does, whoever has started it; see `Run`.

    Raises:
        UserError: The job can't be run as given.
        RunError: Training can't go on.
        CommError: Another rank is lost.
    """
    return Run(job, world, stop, restarts, liveness).run()


class Run:
    """One rank's part in a run.

    Args:
        job: What to run.
        world: All ranks.
        stop: Asked once a step.
        restarts: Times that the launcher has started the ranks again.
        liveness: Learns of this rank's progress; waits ask it for late ranks. None: nobody is ever late.
        kept: What this rank keeps of the same run with more ranks, some of which are lost; None: it begins.

    Raises:
        UserError: The job can't be run as given.
    """

    def __init__(
        self,
        job: Job,
        world: Group,
        stop: StopFlag,
        restarts: int,
        liveness: Liveness | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.liveness = liveness or NoLiveness()
        if kept is None:
            kept = nothing_yet(job, world, self.liveness, world.ranks)
        self.kept, self._gives_way = kept, ""
        if kept.began != world.ranks:
            options, self._gives_way = fitting(job.options, world.size)
            job = replace(job, options=options)
        self.job, self.world, self.stop, self.restarts = job, world, stop, restarts
        self.run_dir = RunDir(job.out)
        self.trainer: Trainer = build(job, kept.data, world, self.liveness, stop, kept.generation + 1, kept.fingerprint)
        self.trainer.step.check_replaced = self._check_replaced
        self.schedule: Schedule = self.trainer.step.schedule
        if job.plan is not None:
            job.plan.check(job.recipe.name, {span.batch for span in self.schedule.spans}, len(kept.began))
        self.steps = min(len(self.schedule), job.max_steps or len(self.schedule))
        self.state = RunState(self.trainer.fingerprint)
        self.telemetry: Telemetry | None = None
        self._last_evaluation: Evaluation | None = None
        self._last_event: Callable[[], dict[str, Any]] | None = None
        self._counted = 0.0
        self._is_ready = False
        recipe = job.recipe
        self._evaluations = self._boundaries(recipe.evaluate.every, recipe.evaluate.first)
        self._saves = self._boundaries(job.options.checkpoint_every)

    def run(self) -> RunResult:
        """Trains from the last good checkpoint, from what the ranks have kept, or from the start, to the end.

        Raises:
            RunError: Training can't go on; a checkpoint of the last good step stands where the disk allows it.
            CommError: Other ranks are lost; those that are left may go on with what they `keep`.
        """
        is_lost = False
        try:
            is_kept = self._take_kept()
            if not is_kept:
                self._restore()
                self._counted = time.perf_counter()
            self._is_ready = True
            writer = CheckpointWriter(self.run_dir.checkpoints, self.job.options.keep_checkpoints, self._metadata())
            try:
                if self._is_first:
                    self._open_telemetry(is_kept)
                is_done = self._train(writer, self._saved() if is_kept else self.state.step)
                result = RunResult(self._finish()) if is_done else RunResult(signal=self.stop.signal or signal.SIGTERM)
                self.trainer.close()  # not where a rank is lost: threads and groups still wait for it
                return result
            finally:
                writer.close()
                if self.telemetry is not None:
                    self.telemetry.close()
        except CommError:
            is_lost = True
            raise
        finally:
            if not is_lost:
                self.kept.data.loader.close()

    def keep(self) -> Kept:
        """What this rank keeps for those that are left, once its groups are aborted and `run` has raised CommError."""
        self.trainer.close()
        generation = self.trainer.membership.generation
        if not self._is_ready:
            return replace(self.kept, generation=generation, fingerprint=self.trainer.fingerprint)
        step, fingerprint = self.trainer.step, self.trainer.fingerprint
        tensors = step.state_dict(self.state.step, keep=True)
        data, began = self.kept.data, self.kept.began
        return Kept(data, began, fingerprint, generation, self.state, self._counted, tensors, self._last_event)

    def _train(self, writer: CheckpointWriter, saved: int) -> bool:
        """Steps, evaluations and checkpoints; False when asked to stop (a checkpoint is then written).

        Args:
            writer: Of checkpoints.
            saved: The step of the last one.
        """
        state, trainer = self.state, self.trainer
        times = CheckpointTimes(self._saves, 60.0 * self.job.options.checkpoint_minutes, writer)
        trainer.step.checkpoint_due = lambda steps: self._is_first and times.is_due(steps)
        saver = Saver(state, trainer.step, writer, times, self.liveness, self._is_first, saved)
        is_stopping, is_due = False, saved < state.step
        while True:
            if state.step in self._evaluations and state.evaluated < state.step and not is_stopping:
                with saver.before_errors():
                    is_stopping = not self._evaluate_and_report()
            self._count_seconds()
            if is_stopping or is_due or state.step == self.steps:
                saver.save()
            if is_stopping or state.step == self.steps:
                saver.wait()
                return not is_stopping
            with saver.before_errors():
                entry = synchronous(state.step, self.job.recipe.virtual_workers)
                stats = trainer.step.run(trainer.membership, entry)
            if stats is None:
                is_stopping = True
                continue
            state.count(stats)
            self._count_seconds()
            self._last_event = partial(stats.as_event, self.schedule.train_images, state.seconds)
            rebuilt = trainer.bucket_rebuild.after_step()
            if self.telemetry is not None:
                self.telemetry.step(stats, state.seconds)
                if rebuilt:
                    self.telemetry.say(rebuilt)
            is_stopping, is_due = stats.stop, stats.save

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.state.seconds += now - self._counted
        self._counted = now

    def _evaluate_and_report(self) -> bool:
        """Evaluates the weights of this step; False when a rank was asked to stop meanwhile."""
        state, target = self.state, self.job.recipe.target_top1
        started = time.perf_counter()
        evaluation = self._evaluate(self.stop)
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
        return True

    def _evaluate(self, stop: Callable[[], bool]) -> Evaluation | None:
        with self.trainer.step.result_in_model(self.state.step):
            return self._classify(stop)

    def _classify(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluates what the model holds."""
        step, settings = self.trainer.step, self.job.recipe.evaluate
        return evaluate(
            step.model, self.trainer.data.held_out, settings, self.world, step.allreduce, step.precision, stop,
            partial(self.liveness.progress, "evaluate", self.state.step),
        )  # fmt: skip

    def _finish(self) -> dict[str, Any]:
        """Polishes, evaluates a last time, and leaves the weights and the summary."""
        # A stop that comes now is too late: what is left is short, and the last checkpoint already stands.
        evaluation = self._last_evaluation or self._evaluate(lambda: False)
        assert evaluation is not None
        top1 = {"top1_before_polish": evaluation.top1}
        if self.trainer.step.average is not None:
            self.trainer.step.write_to_model(self.state.step)
            without = self._classify()
            assert without is not None
            top1["top1_without_average"] = without.top1
            if self.telemetry is not None:
                self.telemetry.say(f"without the average of the weights top-1 is {without.top1:.2%}")
        with self.trainer.step.result_in_model(self.state.step):
            if self.job.recipe.polish is not None:
                evaluation = self._polish()
            return self._leave_result(evaluation, top1)

    def _polish(self) -> Evaluation:
        """Polishes what the model holds, and evaluates it."""
        state, step = self.state, self.trainer.step
        polish_by_recipe(
            step.model, self.trainer.data.training, self.job.recipe, self.world, step.allreduce, step.precision,
            partial(self.liveness.progress, "polish", state.step),
        )  # fmt: skip
        evaluation = self._classify()
        assert evaluation is not None
        if self.telemetry is not None:
            self.telemetry.evaluation(state.step, evaluation, state.seconds, polished=True)
        return evaluation

    def _leave_result(self, evaluation: Evaluation, top1: Mapping[str, float]) -> dict[str, Any]:
        """Writes what the model holds, and the summary, in which `top1` stands beside the evaluation."""
        state = self.state
        self.liveness.outside("the disk that takes the result", str(self.run_dir.path))
        tensors = self.trainer.step.model.state_dict()
        summary = {
            "recipe": self.job.recipe.name,
            **evaluation.as_summary(),
            **top1,
            "steps": state.step,
            **state.totals.as_summary(),
            "seconds": round(state.seconds, 3),
            "world_size": self.world.size,
            "resumed_from": state.resumed_from,
            "restarts": self.restarts,
            "lost_ranks": sorted({*self.kept.began} - {*self.world.ranks}),
            "seconds_to_target": state.seconds_to_target,
            "weights_sha256": weights_sha256(tensors),
            "recipe_sha256": state.fingerprint.recipe_sha256,
            "train_images": state.fingerprint.train_images,
            "data_sha256": state.fingerprint.data_sha256,
            "init_sha256": state.fingerprint.init_sha256,
            "conditions": state.fingerprint.conditions,
            "other_conditions": state.other_conditions,
            "mixed_conditions": state.mixed_conditions,
        }
        if self.job.plan is not None and self._is_first:
            summary["predicted"] = self.job.plan.beside(self.run_dir.events)
        if self._is_first:
            write_result(self.run_dir, tensors, summary, self._metadata())
        return summary

    def _take_kept(self) -> bool:
        """Goes on from the newest state that one of the ranks has kept; False where none has begun."""
        if self.kept.began == self.world.ranks:
            return False
        agreed = agree(self.kept, self.world)
        if agreed is None:
            return False
        self.trainer.step.load_state_dict(agreed.tensors)
        if agreed.is_own:  # else the next comparison may fall to ranks that have got over it by another's weights
            self.trainer.step.check_weights(agreed.state.step)
        self.state, self._counted = agreed.state, self.kept.counted
        if (event := agreed.last_event) is not None:
            self._last_event = lambda: dict(event)
        return True

    def _open_telemetry(self, is_kept: bool) -> None:
        """Rank 0 begins to write and to show what the run does, or takes that over from a lost one."""
        state, path = self.state, self.run_dir.path
        tensorboard = self.job.options.tensorboard
        self.telemetry = Telemetry(path, self.schedule, state.step, state.evaluated, tensorboard)
        if not is_kept:
            self._greet(self.telemetry)
            return
        if self._last_event is not None:
            self.telemetry.complete(self._last_event())
        if self._gives_way:
            self.telemetry.say(self._gives_way)
        with suppress(OSError):
            self.run_dir.sweep()

    def _saved(self) -> int:
        """The step of the newest checkpoint on the disk: rank 0 may have been lost before it had written its last."""
        saved = 0
        if self._is_first:
            try:
                newest = next(iter(list_checkpoints(self.run_dir.checkpoints)), None)
                saved = int(newest.name.removeprefix("step-")) if newest is not None else 0
            except OSError:  # the next checkpoint tells
                saved = self.state.step
        # The same on all ranks, since all compare their weights before one is written.
        return int(self.world.broadcast_text(str(saved)))

    def _restore(self) -> None:
        """Takes the newest good checkpoint, or the weights of --init; rank 0 reads, all ranks get."""
        step, world, fingerprint = self.trainer.step, self.world, self.trainer.fingerprint
        self.liveness.outside("the checkpoint", str(self.run_dir.checkpoints))
        problem = ""
        tensors: Mapping[str, Tensor] = {}
        if self._is_first:
            try:
                initial = load_weights(self.job.init)[0] if self.job.init else {}
                checkpoint = newest_checkpoint(self.run_dir.checkpoints, warn)
                if checkpoint is not None:
                    self.state = resumed(checkpoint.progress, fingerprint)
                    where, totals = f"checkpoint of step {checkpoint.step}", self.state.totals
                    match_weights(checkpoint.model, step.model.state_dict(), where)
                    match_weights(checkpoint.state, step.expected_state(totals.skipped < self.state.step), where)
                    tensors = tensors_of(checkpoint)
                elif initial:
                    match_weights(initial, step.model.state_dict(), str(self.job.init))
                    tensors = {f"model/{name}": tensor for name, tensor in initial.items()}
            except (UserError, RunError) as error:
                problem = f"{'user' if isinstance(error, UserError) else 'disk'}:{error}"
        kind, _, problem = world.broadcast_text(problem).partition(":")
        if kind:
            raise (UserError if kind == "user" else RunError)(problem)
        self.state = RunState.from_dict(json.loads(world.broadcast_text(json.dumps(self.state.as_dict()))))
        known = self.state.mixed_conditions
        known += [each for each in self.trainer.mixed_conditions if each not in known]
        step.load_state_dict(share_tensors(tensors, world))
        if self.state.step > self.steps:
            raise UserError(
                f"--max-steps {self.steps}: the run in {self.job.out} has done {self.state.step} steps already; give "
                "at least as many, or --fresh"
            )

    def _greet(self, telemetry: Telemetry) -> None:
        state = self.state
        telemetry.console.print(plan_table(self.job.recipe, self.schedule, self.world.size))
        if self.trainer.explanation:
            telemetry.say(self.trainer.explanation)
        if state.step:
            telemetry.say(f"resumed from the checkpoint of step {state.step}")
        now = state.fingerprint.conditions
        if state.other_conditions and state.other_conditions[-1] != now:
            warn(
                f"conditions changed since the checkpoint ({changes(state.other_conditions[-1], now)}): the weights "
                "may differ in their bits from an undisturbed run"
            )
        if state.mixed_conditions:
            warn(f"ranks compute under mixed conditions ({changes(now, state.mixed_conditions[0])}): bits don't repeat")

    def _check_replaced(self, step: Step, count: int) -> None:
        replaced, limit = self.state.totals.replaced + count, self.job.recipe.data.max_replaced
        # Against at least one epoch, so that one bad image among the first few is no reason to stop.
        seen = max(step.start + step.batch, len(self.trainer.data.training.source))
        if replaced > limit * seen:
            raise RunError(
                f"step {step.index}: {replaced} training images could not be decoded, more than the "
                f"share of {limit} that data.max_replaced allows; mend the images, or raise it"
            )

    @property
    def _is_first(self) -> bool:
        """Rank 0 alone prints and writes."""
        return self.world.rank == 0

    def _boundaries(self, every: Duration | None, first: Duration | None = None) -> set[int]:
        return {step for step in self.schedule.boundaries(every, first) if step < self.steps} | {self.steps}

    def _metadata(self) -> dict[str, str]:
        recipe, classes = self.job.recipe, self.trainer.data.training.source.classes
        return {
            "classes": json.dumps(classes),
            "recipe": json.dumps(recipe.as_dict()),
            "recipe_sha256": recipe.sha256(),
        }

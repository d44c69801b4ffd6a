"""A run on one rank: steps, evaluations and checkpoints, from the last good checkpoint to the summary."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..comm.groups import Group
from ..comm.liveness import Liveness, NoLiveness
from ..data.sources import open_sources
from ..errors import RunError, UserError
from ..models import head_of
from ..recipe.duration import Duration
from ..recipe.schedule import Schedule, Step
from ..signals import EXIT_BASE, StopFlag
from ..weights import match_weights, save_weights, weights_sha256, write_text
from .build import Job, Trainer, build
from .checkpoint import CheckpointWriter, newest_checkpoint
from .evaluate import Evaluation, evaluate
from .events import Telemetry, plan_table, warn
from .fingerprint import Fingerprint, check_ranks_agree
from .initial_weights import Fit, fit, read_initial
from .journal import synchronous
from .polish import polish_by_recipe
from .run_dir import RunDir
from .state import RunState, as_checkpoint, resumed, share_tensors, tensors_of


@dataclass(frozen=True)
class RunResult:
    """How a run ended: with the summary of a finished run, or stopped by a signal after a checkpoint was written."""

    summary: dict[str, Any] = field(default_factory=dict)
    signal: int = 0

    @property
    def code(self) -> int:
        """Exit code of the command."""
        return EXIT_BASE + self.signal if self.signal else 0


def finished(job: Job) -> dict[str, Any] | None:
    """The summary of a job that its folder holds the result of; None where there is work left.

    Opening the data also finds a wrong path before any rank is started.

    Raises:
        UserError: The result is of another data set or other initial weights, or the job can't be run as given.
    """
    source, _ = open_sources(job.recipe.data, job.data, job.recipe.seed)
    steps = len(Schedule(job.recipe, len(source)))
    summary = RunDir(job.out).finished(min(steps, job.max_steps or steps))
    if summary is not None:
        initial = weights_sha256(read_initial(job.init, job.recipe).tensors) if job.init else ""
        now = Fingerprint(job.recipe.sha256(), len(source), initial, {})
        now.check_same_run(
            Fingerprint.from_dict({**now.as_dict(), **summary, "conditions": {}}), f"the run in {job.out}"
        )
    return summary


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

    Raises:
        UserError: The job can't be run as given.
    """

    def __init__(self, job: Job, world: Group, stop: StopFlag, restarts: int, liveness: Liveness | None = None) -> None:
        self.job, self.world, self.stop, self.restarts = job, world, stop, restarts
        self.liveness = liveness or NoLiveness()
        self.run_dir = RunDir(job.out)
        self.trainer: Trainer = build(job, world, self.liveness, stop, generation=restarts)
        self.trainer.step.check_replaced = self._check_replaced
        self.schedule: Schedule = self.trainer.step.schedule
        self.steps = min(len(self.schedule), job.max_steps or len(self.schedule))
        self.state = RunState(self.trainer.fingerprint)
        self.telemetry: Telemetry | None = None
        self.initial: Fit | None = None
        """what the network took of --init; rank 0 alone knows"""
        self._last_evaluation: Evaluation | None = None
        recipe = job.recipe
        self._evaluations = self._boundaries(recipe.evaluate.every, recipe.evaluate.first)
        self._saves = self._boundaries(job.options.checkpoint_every)

    def run(self) -> RunResult:
        """Trains from the last good checkpoint, or from the start, to the end.

        Raises:
            RunError: Training can't go on; a checkpoint of the last good step stands where the disk allows it.
        """
        self._restore()
        run_dir, options = self.run_dir, self.job.options
        writer = CheckpointWriter(run_dir.checkpoints, options.keep_checkpoints, self._metadata())
        if self._is_first:
            self.telemetry = Telemetry(run_dir.path, self.schedule, self.state.step, options.tensorboard)
            self._greet(self.telemetry)
        try:
            is_done = self._train(writer)
            result = RunResult(self._finish()) if is_done else RunResult(signal=self.stop.signal or signal.SIGTERM)
            self.trainer.close()  # not where a rank is lost: threads and groups still wait for it
            return result
        finally:
            self.trainer.step.loader.close()
            writer.close()
            if self.telemetry is not None:
                self.telemetry.close()

    def _train(self, writer: CheckpointWriter) -> bool:
        """Steps, evaluations and checkpoints; False when asked to stop (a checkpoint is then written)."""
        state, trainer = self.state, self.trainer
        earlier, started = state.seconds, time.perf_counter()
        saved = state.step

        def save() -> None:
            nonlocal saved
            if saved < state.step:
                tensors = trainer.step.state_dict(state.step, keep=self._is_first)
                if self._is_first:
                    writer.save(as_checkpoint(state, tensors))
            saved = state.step

        @contextmanager
        def saved_on_error() -> Iterator[None]:
            """What ends the run changes nothing: the last good step stands in a checkpoint before it does."""
            try:
                yield
            except RunError:
                save()
                self._wait_for(writer)
                raise

        is_stopping = False
        while True:
            if state.step in self._evaluations and state.evaluated < state.step and not is_stopping:
                with saved_on_error():
                    is_stopping = not self._evaluate_and_report()
            state.seconds = earlier + time.perf_counter() - started
            if is_stopping or state.step in self._saves or state.step == self.steps:
                self.liveness.progress("checkpoint", state.step, 0)
                save()
            if is_stopping or state.step == self.steps:
                self._wait_for(writer)
                return not is_stopping
            with saved_on_error():
                entry = synchronous(state.step, self.job.recipe.virtual_workers)
                stats = trainer.step.run(trainer.membership, entry)
            state.count(stats)
            state.seconds = earlier + time.perf_counter() - started
            rebuilt = trainer.bucket_rebuild.after_step()
            if self.telemetry is not None:
                self.telemetry.step(stats, state.seconds)
                if rebuilt:
                    self.telemetry.say(rebuilt)
            is_stopping = stats.stop

    def _evaluate_and_report(self) -> bool:
        """Evaluates the weights of this step; False when a rank was asked to stop meanwhile."""
        state, target = self.state, self.job.recipe.target_top1
        started = time.perf_counter()
        evaluation = self._evaluate(self.stop)
        if evaluation is None:
            return False
        state.evaluated = state.step
        self._last_evaluation = evaluation if state.step == self.steps else None
        seconds = state.seconds + time.perf_counter() - started
        if target is not None and state.seconds_to_target is None and evaluation.top1 >= target:
            state.seconds_to_target = seconds
        if self.telemetry is not None:
            self.telemetry.evaluation(state.step, evaluation, seconds)
        return True

    def _evaluate(self, stop: Callable[[], bool]) -> Evaluation | None:
        step, chunk = self.trainer.step, self.job.recipe.evaluate.images_per_chunk
        step.write_to_model(self.state.step)
        return evaluate(
            step.model, self.trainer.held_out, chunk, self.world, step.allreduce, step.precision, stop,
            partial(self.liveness.progress, "evaluate", self.state.step),
        )  # fmt: skip

    def _finish(self) -> dict[str, Any]:
        """Polishes, evaluates a last time, and leaves the weights and the summary."""
        recipe, state, step = self.job.recipe, self.state, self.trainer.step
        # A stop that comes now is too late: what is left is short, and the last checkpoint already stands.
        evaluation = self._last_evaluation or self._evaluate(lambda: False)
        assert evaluation is not None
        before = evaluation.top1
        if recipe.polish is not None:
            polish_by_recipe(
                step.model, self.trainer.training, recipe, self.world, step.allreduce, step.precision,
                partial(self.liveness.progress, "polish", state.step),
            )  # fmt: skip
            step.batch_norm.read_from_model()
            evaluation = self._evaluate(lambda: False)
            assert evaluation is not None
            if self.telemetry is not None:
                self.telemetry.evaluation(state.step, evaluation, state.seconds, polished=True)
        tensors = step.model.state_dict()
        summary = {
            "recipe": recipe.name,
            **evaluation.as_summary(),
            "top1_before_polish": before,
            "steps": state.step,
            **state.totals.as_summary(),
            "seconds": round(state.seconds, 3),
            "world_size": self.world.size,
            "resumed_from": state.resumed_from,
            "restarts": self.restarts,
            "seconds_to_target": state.seconds_to_target,
            "weights_sha256": weights_sha256(tensors),
            "recipe_sha256": state.fingerprint.recipe_sha256,
            "train_images": state.fingerprint.train_images,
            "init_sha256": state.fingerprint.init_sha256,
            "init": None if self.initial is None else self.initial.as_dict(),
            "conditions": state.fingerprint.conditions,
            "other_conditions": state.other_conditions,
        }
        if self.job.plan is not None and self._is_first:
            summary["predicted"] = self.job.plan.beside(self.run_dir.events)
        if self._is_first:
            try:
                save_weights(self.run_dir.model, tensors, self._metadata())
                write_text(self.run_dir.summary, json.dumps(summary, indent=1) + "\n")
            except OSError as error:
                raise RunError(
                    f"{self.job.out}: can't write the result: {error.strerror}; the last checkpoint holds the "
                    "trained weights: free space and give the same command again"
                ) from None
        return summary

    def _restore(self) -> None:
        """Takes the newest good checkpoint, or the weights of --init; rank 0 reads, all ranks get."""
        step, world, fingerprint = self.trainer.step, self.world, self.trainer.fingerprint
        check_ranks_agree(fingerprint, world)
        problem = ""
        tensors: Mapping[str, Tensor] = {}
        if self._is_first:
            try:
                initial = read_initial(self.job.init, self.job.recipe) if self.job.init else None
                if initial is not None:
                    self.state.fingerprint = replace(fingerprint, init_sha256=weights_sha256(initial.tensors))
                    classes = len(self.trainer.training.source.classes)
                    self.initial = fit(initial, step.model.state_dict(), lambda: head_of(self.job.recipe, classes))
                checkpoint = newest_checkpoint(self.run_dir.checkpoints, warn)
                if checkpoint is not None:
                    self.state = resumed(checkpoint.progress, self.state.fingerprint)
                    match_weights(checkpoint.model, step.model.state_dict(), f"checkpoint of step {checkpoint.step}")
                    tensors = tensors_of(checkpoint)
                elif initial is not None and self.initial is not None:
                    tensors = {f"model/{name}": initial.tensors[name] for name in self.initial.taken}
            except UserError as error:
                problem = str(error)
        problem = world.broadcast_text(problem)
        if problem:
            raise UserError(problem)
        self.state = RunState.from_dict(json.loads(world.broadcast_text(json.dumps(self.state.as_dict()))))
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
        if self.initial is not None and not state.step:
            telemetry.initial(self.initial)
        if state.step:
            telemetry.say(f"resumed from the checkpoint of step {state.step}")
        now = state.fingerprint.conditions
        if state.other_conditions and state.other_conditions[-1] != now:
            then = state.other_conditions[-1]
            changed = [f"{k} was {then.get(k)!r}, is {v!r}" for k, v in now.items() if then.get(k) != v]
            warn(
                f"conditions changed since the checkpoint ({'; '.join(changed)}): the weights may differ in their bits "
                "from an undisturbed run"
            )

    def _wait_for(self, writer: CheckpointWriter) -> None:
        """Until the checkpoint is written; a disk that takes its time, but takes the bytes, is progress."""
        writer.wait(lambda written: self.liveness.progress("checkpoint", self.state.step, written))

    def _check_replaced(self, step: Step, count: int) -> None:
        replaced, limit = self.state.totals.replaced + count, self.job.recipe.data.max_replaced
        # Against at least one epoch, so that one bad image among the first few is no reason to stop.
        seen = max(step.start + step.batch, len(self.trainer.training.source))
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
        recipe, classes = self.job.recipe, self.trainer.training.source.classes
        return {
            "classes": json.dumps(classes),
            "recipe": json.dumps(recipe.as_dict()),
            "recipe_sha256": recipe.sha256(),
        }

"""A run on one rank: data, model, steps, evaluation, checkpoints and telemetry, from the recipe to the summary."""

import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..comm.allreduce import create
from ..comm.groups import Group
from ..comm.liveness import Liveness, NoLiveness
from ..comm.monitor import hidden_share
from ..data.loader import Loader
from ..data.order import StreamOrder
from ..data.pipeline import Pipeline
from ..data.sources import open_sources
from ..errors import RunError, UserError
from ..gradients.bucket_rebuild import BucketRebuild
from ..models import build_model
from ..optim import build_optimizer
from ..recipe.duration import Duration
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe
from ..runtime import (
    Ranks,
    RuntimeOptions,
    check_world_size,
    conditions,
    loader_threads,
    prepare_process,
    ranks_of,
)
from ..signals import EXIT_BASE, StopFlag
from ..tensor_parallel.parallel_tail import hybrid_tail
from ..weights import load_weights, match_weights, save_weights, weights_sha256, write_text
from .checkpoint import CheckpointWriter, newest_checkpoint
from .compare_plan import PlanComparison
from .evaluate import Evaluation, evaluate
from .events import Telemetry, plan_table, warn
from .polish import polish_by_recipe
from .run_dir import RunDir
from .state import RunState, broadcast_text
from .step import StepResult, TrainStep


@dataclass(frozen=True)
class Job:
    """What to run, where, and how."""

    recipe: Recipe
    """no `auto` in it"""
    options: RuntimeOptions
    device: str
    out: Path
    data: Path | None = None
    init: Path | None = None
    """weights to start from"""
    max_steps: int | None = None
    plan: PlanComparison | None = None
    """to stand beside what is measured"""


@dataclass(frozen=True)
class RunResult:
    """The end of a run that nothing went wrong with, on this rank."""

    summary: dict[str, Any] = field(default_factory=dict)
    """of a finished run; empty where it was stopped"""
    signal: int = 0
    """the signal that stopped it, after a checkpoint was written"""

    @property
    def code(self) -> int:
        """Exit code of the command."""
        return EXIT_BASE + self.signal if self.signal else 0


class Run:
    """One rank's part in a run.

    Args:
        job: What to run.
        ranks: This process among the others.
        stop: Asked once a step.
        restarts: Times that the launcher has started the ranks again.
        liveness: Gets to know this rank's progress; waits ask it for late ranks.

    Raises:
        UserError: The job can't be run as given.
    """

    def __init__(self, job: Job, ranks: Ranks, stop: StopFlag, restarts: int, liveness: Liveness | None = None) -> None:
        self.job, self.ranks, self.stop, self.restarts = job, ranks, stop, restarts
        self.liveness = liveness or NoLiveness()
        recipe, options = job.recipe, job.options
        check_world_size(ranks.size, recipe)
        prepare_process(recipe, ranks.device)
        self.folder = RunDir(job.out)
        train, held_out = open_sources(recipe.data, job.data, recipe.seed)
        self.classes = train.classes
        self.training = Pipeline(train, recipe.data, recipe.seed)
        self.held_out = Pipeline(held_out, recipe.data, recipe.seed)
        self.schedule = Schedule(recipe, len(train))
        self.steps = min(len(self.schedule), job.max_steps or len(self.schedule))
        if job.plan is not None:
            job.plan.check(recipe.name, {span.batch for span in self.schedule.spans}, ranks.size)
        model = build_model(
            recipe.model,
            classes=recipe.data.classes or len(train.classes),
            channels=recipe.data.channels,
            image_size=recipe.data.image_size,
            seed=recipe.seed,
        ).to(ranks.device)
        self.allreduce = create(
            options.allreduce,
            grid=options.grid_size,
            profile=Path(options.profile) if options.profile else None,
            device=ranks.device,
        )
        self.hybrid = hybrid_tail(model, recipe, options, ranks, self.allreduce)
        optimizer = (
            build_optimizer(recipe.optimizer, model, recipe.rate.lr)
            if self.hybrid is None
            else build_optimizer(recipe.optimizer, model, recipe.rate.lr, self.hybrid.held, self.hybrid.norms())
        )
        threads = loader_threads(ranks.device)
        order = StreamOrder(len(train), recipe.seed)
        self.loader = Loader(self.training, order, threads=threads, ahead=threads + 3)
        self.stepper = TrainStep(
            recipe, self.schedule, model, optimizer, self.loader, ranks, self.allreduce, options.buckets,
            options.update == "sharded", self.liveness, stop, self.hybrid,
        )  # fmt: skip
        # Shards follow the buckets, and momentum the shards: a sharded run keeps the layout that it began with.
        may_settle = options.buckets == "auto" and options.update == "replicated"
        self.bucket_rebuild = BucketRebuild(self.stepper.reducer, self.allreduce.profile if may_settle else None)
        self.state = RunState(
            recipe.sha256(), conditions(recipe, ranks.device), len(train), resumed_from=0, init_sha256=""
        )
        self.telemetry: Telemetry | None = None
        self._last_evaluation: Evaluation | None = None
        self._evaluations = self._boundaries(recipe.evaluate.every, recipe.evaluate.first)
        self._saves = self._boundaries(options.checkpoint_every)

    def run(self) -> RunResult:
        """Trains from the last good checkpoint, or from the start, to the end.

        Raises:
            RunError: Training can't go on; a checkpoint of the last good step stands where the disk allows it.
        """
        self._restore()
        folder, options = self.folder, self.job.options
        writer = CheckpointWriter(folder.checkpoints, options.keep_checkpoints, self._metadata())
        if self.ranks.is_first:
            self.telemetry = Telemetry(folder.path, self.schedule, self.state.step, options.tensorboard)
            self._greet(self.telemetry)
        try:
            is_done = self._train(writer)
            stopped_by = 0 if is_done else self.stop.signal or signal.SIGTERM
            result = RunResult(self._finish() if is_done else {}, int(stopped_by))
            if self.hybrid is not None:
                self.hybrid.close()
            self.stepper.close()  # not where a rank is lost: threads and groups still wait for it
            self.allreduce.close()
            return result
        finally:
            self.loader.close()
            writer.close()
            if self.telemetry is not None:
                self.telemetry.close()

    def _train(self, writer: CheckpointWriter) -> bool:
        """Steps, evaluations and checkpoints; False when asked to stop (a checkpoint is then written)."""
        state = self.state
        earlier, started = state.seconds, time.perf_counter()
        saved = state.step

        def save() -> None:
            nonlocal saved
            if saved < state.step:
                checkpoint = state.checkpoint(self.stepper)
                if self.ranks.is_first:
                    writer.save(checkpoint)
            saved = state.step

        is_stopping = False
        while True:
            if state.step in self._evaluations and state.evaluated < state.step and not is_stopping:
                is_stopping = not self._evaluate_and_tell()
            state.seconds = earlier + time.perf_counter() - started
            if is_stopping or state.step in self._saves or state.step == self.steps:
                self.liveness.progress("checkpoint", state.step, 0)
                save()
            if is_stopping or state.step == self.steps:
                writer.wait()
                return not is_stopping
            try:
                result = self.stepper.run(state.step)
                self._check_replaced(result)
            except RunError:
                save()
                writer.wait()
                raise
            state.count(result)
            state.seconds = earlier + time.perf_counter() - started
            buckets = self.bucket_rebuild.after_step()
            if self.telemetry is not None:
                self.telemetry.step(result, state.seconds)
                if buckets:
                    self.telemetry.say(buckets)
            is_stopping = result.stop

    def _evaluate_and_tell(self) -> bool:
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
        self.stepper.update.complete()
        self.stepper.batch_norm.show(self.state.step)
        stepper, chunk = self.stepper, self.job.recipe.evaluate.images_per_chunk
        return evaluate(
            stepper.model, self.held_out, chunk, self.ranks, stepper.allreduce, stepper.precision, stop,
            partial(self.liveness.progress, "evaluate", self.state.step),
        )  # fmt: skip

    def _finish(self) -> dict[str, Any]:
        """Polishes, evaluates a last time, and leaves the weights and the summary."""
        recipe, state, model = self.job.recipe, self.state, self.stepper.model
        # A stop that comes now is too late: what is left is short, and the last checkpoint already stands.
        evaluation = self._last_evaluation or self._evaluate(lambda: False)
        assert evaluation is not None
        before = evaluation.top1
        if recipe.polish is not None:
            polish_by_recipe(
                model, self.training, recipe, self.ranks, self.stepper.allreduce, self.stepper.precision,
                partial(self.liveness.progress, "polish", state.step),
            )  # fmt: skip
            self.stepper.batch_norm.take()
            evaluation = self._evaluate(lambda: False)
            assert evaluation is not None
            if self.telemetry is not None:
                self.telemetry.evaluation(state.step, evaluation, state.seconds, polished=True)
        tensors = model.state_dict()
        summary = {
            "recipe": recipe.name,
            "top1": evaluation.top1,
            "top5": evaluation.top5,
            "loss": evaluation.loss,
            "top1_before_polish": before,
            "eval_images": evaluation.images,
            "excluded_images": evaluation.excluded,
            "train_loss": state.train_loss,
            "steps": state.step,
            "samples": state.samples,
            "replaced_images": state.replaced,
            "redone_steps": state.redone,
            "skipped_steps": state.skipped,
            "seconds": round(state.seconds, 3),
            "images_per_second": round(state.samples / max(state.step_seconds, 1e-9), 2),
            "data_wait_share": round(state.data_seconds / max(state.step_seconds, 1e-9), 5),
            "sync_wait_share": round(state.sync_seconds / max(state.step_seconds, 1e-9), 5),
            "hidden_share": hidden_share(state.on_way_seconds, state.sync_seconds),
            "world_size": self.ranks.size,
            "resumed_from": state.resumed_from,
            "restarts": self.restarts,
            "seconds_to_target": state.seconds_to_target,
            "weights_sha256": weights_sha256(tensors),
            "recipe_sha256": state.recipe_sha256,
            "conditions": state.conditions,
            "other_conditions": state.other_conditions,
        }
        if self.job.plan is not None and self.ranks.is_first:
            summary["predicted"] = self.job.plan.beside(self.folder.events)
        if self.ranks.is_first:
            try:
                save_weights(self.folder.model, tensors, self._metadata())
                write_text(self.folder.summary, json.dumps(summary, indent=1) + "\n")
            except OSError as error:
                raise RunError(
                    f"{self.job.out}: can't write the result: {error.strerror}; the last checkpoint holds the "
                    "trained weights: free space and give the same command again"
                ) from None
        return summary

    def _restore(self) -> None:
        """Takes the newest good checkpoint, or the weights of --init; rank 0 reads, all ranks get."""
        state, stepper = self.state, self.stepper
        problem = ""
        restored: Mapping[str, Tensor] = {}
        if self.ranks.is_first:
            try:
                tensors = load_weights(self.job.init)[0] if self.job.init else {}
                state.init_sha256 = weights_sha256(tensors) if tensors else ""
                checkpoint = newest_checkpoint(self.folder.checkpoints, warn)
                if checkpoint is not None:
                    state.restore(checkpoint, stepper)
                    restored = checkpoint.state
                elif tensors:
                    match_weights(tensors, stepper.model.state_dict(), str(self.job.init))
                    stepper.model.load_state_dict(tensors)
            except UserError as error:
                problem = str(error)
        problem = broadcast_text(problem, self.ranks.device)
        if problem:
            raise UserError(problem)
        state.share(stepper, restored)
        if state.step > self.steps:
            raise UserError(
                f"--max-steps {self.steps}: the run in {self.job.out} has done {state.step} steps already; give at "
                "least as many, or --fresh"
            )

    def _greet(self, telemetry: Telemetry) -> None:
        state = self.state
        telemetry.console.print(plan_table(self.job.recipe, self.schedule, self.ranks.size))
        if self.ranks.size > 1 and self.job.options.allreduce != "native":
            telemetry.say(self.allreduce.explanation)
        if self.hybrid is not None:
            telemetry.say(self.hybrid.explanation)
        if state.step:
            telemetry.say(f"resumed from the checkpoint of step {state.step}")
        if state.other_conditions and state.other_conditions[-1] != state.conditions:
            then = state.other_conditions[-1]
            changed = [f"{k} was {then.get(k)!r}, is {v!r}" for k, v in state.conditions.items() if then.get(k) != v]
            warn(
                f"conditions changed since the checkpoint ({'; '.join(changed)}): the weights may differ in their bits "
                "from an undisturbed run"
            )

    def _check_replaced(self, result: StepResult) -> None:
        replaced, limit = self.state.replaced + result.replaced, self.job.recipe.data.max_replaced
        # Against at least one epoch, so that one bad image among the first few is no reason to stop.
        seen = max(result.step.start + result.step.batch, len(self.training.source))
        if replaced > limit * seen:
            raise RunError(
                f"step {result.step.index}: {replaced} training images could not be decoded, more than the "
                f"share of {limit} that data.max_replaced allows; mend the images, or raise it"
            )

    def _boundaries(self, every: Duration | None, first: Duration | None = None) -> set[int]:
        return {step for step in self.schedule.boundaries(every, first) if step < self.steps} | {self.steps}

    def _metadata(self) -> dict[str, str]:
        recipe = json.dumps(self.job.recipe.as_dict())
        return {"classes": json.dumps(self.classes), "recipe": recipe, "recipe_sha256": self.state.recipe_sha256}


def train(job: Job, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> RunResult:
    """Trains on this rank: what every rank does, whoever has started it.

    Args:
        job: What to run.
        world: All ranks.
        stop: Asked once a step.
        restarts: Times that the launcher has started the ranks again.
        liveness: Of this rank and of the others.

    Raises:
        UserError: The job can't be run as given.
        RunError: Training can't go on.
        CommError: Another rank is lost.
    """
    return Run(job, ranks_of(world), stop, restarts, liveness).run()


def steps_asked(job: Job) -> int:
    """Steps of the whole job. Opening the data also finds a wrong path before any rank is started; UserError."""
    train, _ = open_sources(job.recipe.data, job.data, job.recipe.seed)
    steps = len(Schedule(job.recipe, len(train)))
    return min(steps, job.max_steps or steps)

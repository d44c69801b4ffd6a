"""How far a run has come, and what it leaves on its disk: checkpoints, at the end its weights and its summary."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from ..comm.base import Liveness
from ..comm.groups import Group
from ..data.file_lists import Once, make_here
from ..data.registry import open_sources
from ..errors import DivergedError, UserError, as_run_error, warn
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe
from ..rundir.checkpoint import FORMAT, MODEL, Checkpoint, CheckpointTimes, CheckpointWriter
from ..rundir.mirror import Mirror
from ..rundir.run_dir import RunDir
from ..signals import exit_code
from ..step.journal import JournalHead
from ..step.stats import StepStats, StepTotals
from ..text import json_text
from ..weights import Tensors, save_weights, write_text
from .build import Trainer
from .fingerprint import Conditions, Fingerprint, fingerprint_of
from .job import Job
from .trained_weights import Fit

_Steps = Annotated[int, Field(ge=0)]
# What of a fingerprint only a rank knows, which has the network.
_OF_A_NETWORK = ("drawn_sha256", "operators")


@dataclass
class RunState:
    """How far a run has come; all of it plain JSON."""

    fingerprint: Fingerprint
    resumed_from: _Steps = 0  # the step of the checkpoint that this process began from; 0: none
    step: _Steps = 0
    seconds: float = 0.0  # training time: steps, evaluations and waits for checkpoints, over all attempts
    totals: StepTotals = field(default_factory=StepTotals)
    evaluated: _Steps = 0
    seconds_to_target: float | None = None
    other_conditions: list[Conditions] = field(default_factory=list)  # of earlier parts, where they were not today's
    mixed_conditions: list[Conditions] = field(default_factory=list)  # of ranks, in any part, that were not rank 0's
    initial: Fit | None = None
    journal: JournalHead | None = None  # up to where the run has come; None: its journal follows from the recipe

    def count(self, stats: StepStats) -> None:
        self.step = stats.step.index + 1
        self.totals.add(stats)

    def as_summary(self) -> dict[str, Any]:
        summary = {
            "steps": self.step, **self.totals.as_summary(), "seconds": round(self.seconds, 3),
            "resumed_from": self.resumed_from, "seconds_to_target": self.seconds_to_target,
            **{key: value for key, value in self.fingerprint.as_dict().items() if key not in _OF_A_NETWORK},
            "init": None if self.initial is None else asdict(self.initial),
            "other_conditions": self.other_conditions, "mixed_conditions": self.mixed_conditions,
        }  # fmt: skip
        return summary if self.journal is None else {**summary, "journal": self.journal.as_summary(self.step)}

    def as_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "RunState":
        """From what `as_dict` gave; ValueError, of one line, if a value is missing or of another type."""
        known = {name: tree.get(name) for name in cls.__dataclass_fields__}
        try:
            return TypeAdapter(cls).validate_json(json.dumps(known), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def resumed(tree: Mapping[str, Any], fingerprint: Fingerprint) -> RunState:
    """The state of a run that goes on from a checkpoint's progress; UserError if it is not of this run."""
    whose, its = f"the checkpoint of step {tree.get('step')}", tree.get("format")
    if its != FORMAT:
        both = f"format {its}, this torusgd reads {FORMAT}"
        raise UserError(f"{whose} has {both}; choose another --out, or give --fresh")
    try:
        state = RunState.from_dict(tree)
    except ValueError as error:
        raise UserError(f"{whose} is damaged ({error}); remove it, or give --fresh") from None
    fingerprint.check_same_run(state.fingerprint, whose)
    if state.fingerprint.conditions != fingerprint.conditions:
        state.other_conditions.append(state.fingerprint.conditions)
    state.fingerprint, state.resumed_from = fingerprint, state.step
    return state


def share_tensors(tensors: Mapping[str, Tensor], world: Group, source: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the rank of index `source` on every rank, one after the other; every rank calls it."""
    # One at a time, and taken at once, so that no rank holds more than it needs.
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    for name, (dtype, shape) in world.broadcast_json(shapes, source).items():
        if world.rank == source:
            tensor = tensors[name].to(world.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        world.broadcast(tensor, source)
        yield name, tensor


# Seconds after which a checkpoint that is still being written is reported, again and again.
SLOW_DISK = 60


class LastSaved(NamedTuple):
    """The newest checkpoint of a run."""

    step: int
    rank: int  # which wrote it, and writes the next one as long as it is there
    at: float  # when it was taken, or the run began (time.monotonic of that rank)


class Saver:
    """Writes the checkpoints of a run; every rank has one and calls it after the same steps, rank 0 alone writes."""

    def __init__(
        self, job: Job, world: Group, liveness: Liveness, metadata: dict[str, str], steps: set[int], last: float | None
    ) -> None:
        self._world, self._liveness, self._is_first = world, liveness, world.rank == 0
        keep, bucket = job.options.keep_checkpoints, job.bucket if self._is_first else None
        copy = None if bucket is None else partial(Mirror(bucket).put_checkpoint, keep=keep)
        self._writer = CheckpointWriter(RunDir(job.out).checkpoints, keep, metadata, copy)
        self._times = CheckpointTimes(steps, 60.0 * job.options.checkpoint_minutes, self._writer, last)
        self.saved = -1  # step of the last checkpoint, which the run sets before its first step; below 0: not known yet

    def is_due(self, steps: int) -> bool:
        """Whether this rank wants a checkpoint after so many steps; called before the last of them is done."""
        return self._is_first and self._times.is_due(steps)

    def save(self, state: RunState, trainer: Trainer) -> None:
        """Has the state of this step written, unless it is already."""
        if self.saved < state.step:
            self._liveness.progress("checkpoint", state.step, 0)
            # Weights that differ among ranks must not be saved as good ones.
            trainer.drift.compare(state.step, trainer.step.allreduce)
            tensors = trainer.step.state.state_dict(state.step, keep=self._is_first)
            # The last update may have left its range, before any gradient has. Rank 0 alone has all tensors.
            lost = [n for n, each in tensors.items() if n.startswith(MODEL) and not bool(each.isfinite().all())]
            if lost := self._world.broadcast_json(lost):
                what = f"{lost[0].removeprefix(MODEL)} is not finite ({len(lost)} tensors)"
                raise DivergedError(f"step {state.step}: {what}, and no checkpoint is made of it")
            if self._is_first:
                self._writer.save(Checkpoint(tensors, state.as_dict()), partial(self._writing, state.step))
        self.saved = state.step
        self._times.taken()

    def last(self) -> LastSaved | None:
        return None if self.saved < 0 else LastSaved(self.saved, self._world.ranks[0], self._times.last)

    def wait(self, step: int) -> None:
        self._writer.wait(partial(self._writing, step))

    def close(self) -> None:
        self._writer.close()

    def _writing(self, step: int, seconds: float) -> None:
        """Called once a second while rank 0 waits for its disk."""
        self._liveness.progress("checkpoint", step, int(seconds))
        if round(seconds) % SLOW_DISK == 0:
            warn(f"a checkpoint has been written for {seconds:.0f} s: {self._writer.folder}")


@dataclass(frozen=True)
class RunResult:
    """How a rank's part in a run ended: with a summary, or by a signal after a checkpoint was written."""

    summary: dict[str, Any] = field(default_factory=dict)
    signal: int = 0
    ranks_change: bool = False  # it goes on, with ranks that join or without some that leave

    @property
    def code(self) -> int:
        """Exit code of the command."""
        return exit_code(self.signal) if self.signal else 0


def finished(job: Job, once: Once = make_here) -> dict[str, Any] | None:
    """The summary of a job that its folder holds the result of; UserError if of other data or initial weights."""
    # Opened in any case, since a wrong path is to be found before any rank is started.
    train, held_out = open_sources(job.recipe.data, job.data, job.recipe.seed, once)
    steps, folder = len(Schedule(job.recipe, len(train))), RunDir(job.out)
    if (summary := folder.read_summary()) is not None:  # before anything is removed
        now = fingerprint_of(job, train, held_out)
        then = Fingerprint.from_dict({**now.as_dict(), **summary, "conditions": {}})
        now.check_same_run(then, f"the run in {job.out}")
    return folder.finished(min(steps, job.max_steps or steps))


def weights_metadata(recipe: Recipe, classes: Sequence[str]) -> dict[str, str]:
    """What a file of weights says of itself, by which it can be used without the run's folder."""
    return {"classes": json.dumps(classes), "recipe": json.dumps(recipe.as_dict()), "recipe_sha256": recipe.sha256()}


def write_result(folder: RunDir, tensors: Tensors, summary: Mapping[str, Any], metadata: dict[str, str]) -> None:
    """Writes the weights, with the metadata, and the summary; RunError if the disk doesn't take them."""
    remedy = "the last checkpoint holds the trained weights: free space and give the same command again"
    with as_run_error(f"{folder.path}: can't write the result", remedy):
        save_weights(folder.model, tensors, metadata)
        write_text(folder.summary, json_text(summary, indent=1) + "\n")  # the last: with it the run is finished

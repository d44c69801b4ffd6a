"""The progress of a run between two steps, and how a checkpoint goes back into all ranks."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from ..comm.groups import Group
from ..errors import UserError
from ..rundir.checkpoint import FORMAT, Checkpoint
from ..step.journal import JournalHead
from ..step.stats import StepStats, StepTotals
from ..weights import Tensors
from .fingerprint import Conditions, Fingerprint
from .trained_weights import Fit

_MODEL = "model/"
_Steps = Annotated[int, Field(ge=0)]


@dataclass
class RunState:
    """How far a run has come; all of it plain JSON."""

    fingerprint: Fingerprint
    resumed_from: _Steps = 0
    """the step of the checkpoint that this process began from; 0: none"""
    step: _Steps = 0
    """steps done"""
    seconds: float = 0.0
    """training time: steps, evaluations and waits for checkpoints, over all attempts"""
    totals: StepTotals = field(default_factory=StepTotals)
    evaluated: _Steps = 0
    """step of the last evaluation"""
    seconds_to_target: float | None = None
    other_conditions: list[Conditions] = field(default_factory=list)
    """conditions of earlier parts of the run, where they were not today's"""
    mixed_conditions: list[Conditions] = field(default_factory=list)
    """of ranks, in any part of the run, whose conditions were not rank 0's"""
    initial: Fit | None = None
    """what the network took of --init"""
    journal: JournalHead | None = None
    """up to where the run has come; None: its journal follows from the recipe"""

    def count(self, stats: StepStats) -> None:
        """Adds a step that was taken."""
        self.step = stats.step.index + 1
        self.totals.add(stats)

    def as_summary(self) -> dict[str, Any]:
        """Its keys of summary.json."""
        summary = {
            "steps": self.step,
            **self.totals.as_summary(),
            "seconds": round(self.seconds, 3),
            "resumed_from": self.resumed_from,
            "seconds_to_target": self.seconds_to_target,
            "recipe_sha256": self.fingerprint.recipe_sha256,
            "train_images": self.fingerprint.train_images,
            "data_sha256": self.fingerprint.data_sha256,
            "data_revision": self.fingerprint.data_revision,
            "init_sha256": self.fingerprint.init_sha256,
            "init": None if self.initial is None else asdict(self.initial),
            "replayed_sha256": self.fingerprint.replayed_sha256,
            "conditions": self.fingerprint.conditions,
            "other_conditions": self.other_conditions,
            "mixed_conditions": self.mixed_conditions,
        }
        return summary if self.journal is None else {**summary, "journal": self.journal.as_summary(self.step)}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> "RunState":
        """From what `as_dict` gave; ValueError, of one line, where a value is missing or of another type."""
        known = {name: tree.get(name) for name in cls.__dataclass_fields__}
        try:
            return TypeAdapter(cls).validate_json(json.dumps(known), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def resumed(tree: Mapping[str, Any], fingerprint: Fingerprint) -> RunState:
    """The state of a run that goes on from a checkpoint.

    Args:
        tree: The checkpoint's progress, as `RunState.as_dict` gave it.
        fingerprint: Of the run as it is now.

    Raises:
        UserError: The checkpoint belongs to another recipe, data set or initial weights, or has another format.
    """
    whose = f"the checkpoint of step {tree.get('step')}"
    if tree.get("format") != FORMAT:
        raise UserError(
            f"{whose} has format {tree.get('format')}, this torusgd reads {FORMAT}; choose another --out, or give "
            "--fresh"
        )
    try:
        state = RunState.from_dict(tree)
    except ValueError as error:
        raise UserError(f"{whose} is damaged ({error}); remove it, or give --fresh") from None
    fingerprint.check_same_run(state.fingerprint, whose)
    if state.fingerprint.conditions != fingerprint.conditions:
        state.other_conditions.append(state.fingerprint.conditions)
    state.fingerprint, state.resumed_from = fingerprint, state.step
    return state


def as_checkpoint(state: RunState, tensors: Tensors) -> Checkpoint:
    """A checkpoint of a run's progress and of `StepState.state_dict`, which it doesn't copy."""
    model = {name.removeprefix(_MODEL): t for name, t in tensors.items() if name.startswith(_MODEL)}
    rest = {name: t for name, t in tensors.items() if not name.startswith(_MODEL)}
    return Checkpoint(model, rest, state.as_dict())


def tensors_of(checkpoint: Checkpoint) -> Tensors:
    """What `TrainStep.load_state_dict` takes, all tensors by name."""
    return {f"{_MODEL}{name}": tensor for name, tensor in checkpoint.model.items()} | checkpoint.state


def share_tensors(tensors: Mapping[str, Tensor], world: Group, source: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the rank at place `source` on every rank, one at a time: no rank holds more than it needs."""
    shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    for name, (dtype, shape) in json.loads(world.broadcast_text(json.dumps(shapes), source)).items():
        if world.rank == source:
            tensor = tensors[name].to(world.device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
        world.broadcast(tensor, source)
        yield name, tensor

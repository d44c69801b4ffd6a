"""The state of a run between two steps: what a checkpoint holds, and how it goes back into model and optimiser."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..weights import match_weights
from .checkpoint import Checkpoint
from .step import StepResult, TrainStep

_MOMENTUM = "momentum/"


@dataclass
class RunState:
    """Progress of a run; plain JSON but for the tensors, which live in the model and the optimiser."""

    recipe_sha256: str
    conditions: dict[str, str | int]
    train_images: int
    init_sha256: str
    resumed_from: int
    """the step of the checkpoint that this process began from; 0: none"""
    step: int = 0
    """steps done"""
    samples: int = 0
    seconds: float = 0.0
    """training time: steps, evaluations and waits for checkpoints, over all attempts"""
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    sync_seconds: float = 0.0
    on_way_seconds: float = 0.0
    replaced: int = 0
    redone: int = 0
    skipped: int = 0
    evaluated: int = 0
    """step of the last evaluation"""
    seconds_to_target: float | None = None
    train_loss: float | None = None
    loss_scale: float = 1.0
    accepted_in_a_row: int = 0
    other_conditions: list[dict[str, str | int]] = field(default_factory=list)
    """conditions of earlier parts of the run, where they were not today's"""

    def count(self, result: StepResult) -> None:
        """Adds a step that was taken."""
        self.step = result.step.index + 1
        self.samples = result.step.start + result.step.batch
        self.step_seconds += result.seconds
        self.data_seconds += result.data_seconds
        self.sync_seconds += result.sync_seconds
        self.on_way_seconds += result.on_way_seconds
        self.replaced += result.replaced
        self.redone += result.redone
        self.skipped += bool(result.skipped)
        self.train_loss = result.loss

    def checkpoint(self, stepper: TrainStep) -> Checkpoint:
        """This state with the stepper's tensors (not copied). Every rank calls it; rank 0 gets the momentum."""
        stepper.update.complete()
        stepper.batch_norm.show(self.step)
        self.loss_scale = stepper.precision.loss_scale
        self.accepted_in_a_row = stepper.precision.accepted_in_a_row
        momentum = stepper.update.momentum(keep=stepper.ranks.is_first)
        state = {f"{_MOMENTUM}{name}": buffer for name, buffer in momentum.items()}
        state["gradient_bounds"] = stepper.reducer.state()
        return Checkpoint(stepper.model.state_dict(), state, asdict(self))

    def restore(self, checkpoint: Checkpoint, stepper: TrainStep) -> None:
        """Takes a checkpoint's progress and tensors (on the rank that read it).

        Raises:
            UserError: It belongs to another recipe, data set or initial weights.
        """
        progress = checkpoint.progress
        names = {f.name for f in fields(self)} - {"resumed_from"}
        if not names <= progress.keys():
            raise UserError(
                f"the checkpoint of step {checkpoint.step} was written by another version of torusgd (it lacks "
                f"{min(names - progress.keys())}); choose another --out, or give --fresh"
            )
        for key, what in (
            ("recipe_sha256", "another recipe"),
            ("train_images", "another data set"),
            ("init_sha256", "other initial weights (--init)"),
        ):
            if progress[key] != getattr(self, key):
                raise UserError(
                    f"the checkpoint of step {checkpoint.step} was trained with {what} ({key} "
                    f"{progress[key]!r}, now {getattr(self, key)!r}); choose another --out, or give --fresh"
                )
        match_weights(checkpoint.model, stepper.model.state_dict(), f"checkpoint of step {checkpoint.step}")
        stepper.model.load_state_dict(checkpoint.model)
        stepper.reducer.load_state(checkpoint.state["gradient_bounds"])
        now = self.conditions
        for name in names - {"conditions"}:
            setattr(self, name, progress[name])
        if progress["conditions"] != now:
            self.other_conditions.append(progress["conditions"])
        self.resumed_from = self.step

    def share(self, stepper: TrainStep, state: Mapping[str, Tensor]) -> None:
        """Gives every rank what rank 0 restored: the progress, the weights, the momentum and the scales.

        `state` is that of rank 0's checkpoint; on other ranks nothing.
        """
        momentum = {key.removeprefix(_MOMENTUM): t for key, t in state.items() if key.startswith(_MOMENTUM)}
        if dist.is_initialized() and dist.get_world_size() > 1:
            progress = json.loads(broadcast_text(json.dumps(asdict(self)), next(stepper.model.parameters()).device))
            for name, value in progress.items():
                setattr(self, name, value)
            if self.step or self.init_sha256:
                for tensor in stepper.model.state_dict().values():
                    dist.broadcast(tensor, 0)
            if self.step:
                bounds = stepper.reducer.state()
                dist.broadcast(bounds, 0)
                stepper.reducer.load_state(bounds)
        for name, tensor in _on_all_ranks(momentum, stepper):
            stepper.update.take_momentum(name, tensor)
        stepper.batch_norm.take()
        if self.step:
            stepper.precision.loss_scale = self.loss_scale
            stepper.precision.accepted_in_a_row = self.accepted_in_a_row


def broadcast_text(text: str, device: torch.device) -> str:
    """Rank 0's text on every rank."""
    if not dist.is_initialized():
        return text
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, 0)
    if dist.get_rank() != 0:
        data = torch.empty(int(length), dtype=torch.uint8, device=device)
    if len(data):
        dist.broadcast(data, 0)
    return bytes(data.cpu().numpy()).decode()


def _on_all_ranks(tensors: Mapping[str, Tensor], stepper: TrainStep) -> Iterator[tuple[str, Tensor]]:
    """Rank 0's tensors, by the names of the parameters that they are shaped like; one at a time, to hold no more."""
    device, parameters = stepper.ranks.device, dict(stepper.model.named_parameters())
    for name in json.loads(broadcast_text(json.dumps(sorted(tensors)), device)):
        tensor = tensors[name].to(device) if stepper.ranks.is_first else torch.empty_like(parameters[name])
        if dist.is_initialized():
            dist.broadcast(tensor, 0)
        yield name, tensor

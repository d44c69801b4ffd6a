"""What the callbacks of all libraries do: exact sums, rates, comparison of ranks, precise batch norm."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..data.sampler import BatchSizeSchedule, StreamSampler
from ..errors import UserError
from ..gradients.ddp_hook import Wire, ddp_hook
from ..step.polish import polish
from .replicas import Replicas


class StepParts:
    """Puts exact sums into a DistributedDataParallel model and rates into the optimizer, and compares the ranks."""

    def __init__(
        self, model: nn.Module, optimizer: Any, sampler: StreamSampler, wire: Wire | None, compare_every: int
    ) -> None:
        # A model on one rank has nothing to sum.
        self._hook = ddp_hook(model, wire=wire) if wire and isinstance(model, DistributedDataParallel) else None
        # Accelerate's optimizers hold torch's.
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if isinstance(sampler.batches, BatchSizeSchedule):
            sampler.batches.follow(optimizer, sampler)
        ignored = ("*running_mean", "*running_var")  # each rank changes its own
        self._replicas = Replicas(model, optimizer, every=compare_every, ignore=ignored) if compare_every else None

    def step(self) -> None:
        if self._replicas is not None:
            self._replicas.step()

    def state_dict(self) -> dict[str, Any]:
        """What exact sums need to go on with the same bits; plain numbers."""
        return {} if self._hook is None else self._hook.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, on any number of ranks."""
        if self._hook is not None:
            self._hook.load_state_dict(state)


def precise_batch_norm(model: nn.Module, batches: Iterable[Tensor | Mapping[str, Tensor]]) -> int:
    """`polish` for batches that are mappings of inputs by name, as Hugging Face's models take them, or tensors.

    Raises:
        UserError: A batch is neither, such as a pair of images and labels.
    """
    device = next(model.parameters(), torch.empty(0)).device
    return polish(model, (_sent(batch, device) for batch in batches))


def _sent(batch: Any, device: torch.device) -> Tensor | dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    raise UserError(
        f"precise_batch_norm: takes tensors or mappings of inputs by name, not {type(batch).__name__}; of "
        "pairs give the images alone: (images for images, labels in loader)"
    )

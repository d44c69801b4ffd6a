"""The forward and backward pass of one virtual worker, through a network as a whole."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.pipeline import Batch
from ..precision import Precision
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..rng import DROPOUT, keyed_hash
from .batchnorm import BatchNormStatistics


class Passing(Protocol):
    """How a virtual worker goes through a network and back."""

    together: bool
    """the ranks of a group work in step: one that has no images goes on with blank ones"""

    def forward(self, step: Step, worker: int, batch: Batch) -> Tensor:
        """The loss, float32 []."""

    def backward(self) -> None:
        """Back from the loss of the last `forward`."""


class WholePass:
    """Each rank computes all of the network for its own virtual workers.

    Args:
        model: In training mode from the first pass on.
        recipe: Its seed and label smoothing.
        precision: Of the pass.
        batch_norm: Of the model.
        device: Of the model.
    """

    together = False

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        precision: Precision,
        batch_norm: BatchNormStatistics,
        device: torch.device,
    ) -> None:
        self._model, self._recipe, self._precision = model, recipe, precision
        self._batch_norm, self._device = batch_norm, device
        self._loss: Tensor | None = None

    def forward(self, step: Step, worker: int, batch: Batch) -> Tensor:
        """See `Passing`."""
        self._batch_norm.begin_pass()
        torch.manual_seed(int(keyed_hash(DROPOUT, self._recipe.seed, step.index, worker)) >> 1)
        images = self._precision.place(batch.images, self._device)
        targets = batch.targets.to(self._device, non_blocking=True)
        self._model.train()
        with self._precision.autocast():
            logits = self._model(images)
        self._loss = F.cross_entropy(logits.float(), targets, label_smoothing=self._recipe.label_smoothing)
        return self._loss

    def backward(self) -> None:
        """See `Passing`."""
        assert self._loss is not None
        loss, self._loss = self._loss, None
        self._precision.scaled(loss).backward()


def blank(recipe: Recipe, step: Step) -> Batch:
    """Images of nothing, for a rank that can't read its own while the ranks of its group wait for it."""
    images, side = step.images_per_worker, recipe.data.image_size
    height, width = (side, side) if isinstance(side, int) else side
    shape = (images, recipe.data.channels, height, width)
    return Batch(torch.zeros(shape), torch.zeros(images, dtype=torch.int64), np.arange(images), replaced=0)

"""The forward and backward pass of one virtual worker: through a whole network, or with a tail that ranks share."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..comm.groups import Group
from ..data.pipeline import Batch
from ..data.to_device import pinned, place
from ..gradients.reducer import Reducer
from ..precision import Precision
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..rng import DROPOUT, seed_torch
from ..tensor_parallel.column_pass import ColumnPass
from ..tensor_parallel.tail import ParallelTail
from .batchnorm import BatchNormStatistics
from .membership import Membership
from .weights_first import Context


class ForwardBackward(Protocol):
    """How a virtual worker goes through a network and back."""

    in_step: bool
    """the ranks of a group work in step: one that has no images goes on with blank ones"""
    control_follows: bool
    """on every rank alike: the gradients may leave in `forward`, so the control vector leaves after them"""

    @property
    def is_added(self) -> bool:
        """The last `forward` has added its statistics and its loss to the control vector itself."""

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """The loss, float32 []."""

    def backward(self) -> None:
        """Back from the loss of the last `forward`; the reducer gets the gradients."""


class WholeNetwork:
    """Each rank computes all of the network for its own virtual workers; the reducer's hooks take the gradients.

    Args:
        model: Gives the logits of images; its modes are `batch_norm`'s to set.
        recipe: Its seed and label smoothing.
        precision: Of the pass.
        batch_norm: Of the model.
        device: Of the model.
        order: Of gradients; a context of the network's forward pass.
    """

    in_step = False
    control_follows = False
    is_added = False

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        recipe: Recipe,
        precision: Precision,
        batch_norm: BatchNormStatistics,
        device: torch.device,
        order: Context = nullcontext,
    ) -> None:
        self._model, self._recipe, self.precision = model, recipe, precision
        self._batch_norm, self._device, self._order = batch_norm, device, order
        self._loss: Tensor | None = None

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership, part: int = 0) -> Tensor:
        """See `ForwardBackward`; `part` counts the passes of a virtual worker in a step (`local_steps`)."""
        # Batch 6: the batch goes to the device.
        self.begin(step, worker, part)
        self._loss = self.loss_of_images(place(batch, self._device, self.precision.memory_format), batch)
        return self._loss

    def begin(self, step: Step, worker: int, part: int = 0) -> None:
        """Before a pass: dropout's draws belong to the virtual worker, whichever rank computes it."""
        keys = (worker, part) if part else (worker,)
        seed_torch(self._device, DROPOUT, self._recipe.seed, step.index, *keys)

    def loss_of_images(self, images: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch whose images lie on the device; batch norm's statistics of this pass are left aside."""
        self._batch_norm.begin_pass()
        targets = pinned(batch.targets, self._device).to(self._device, non_blocking=True)
        with self.precision.autocast(), self._order():
            logits = self._model(images)
        return loss_of(self._recipe, logits.float(), targets, batch)

    def backward(self) -> None:
        """See `ForwardBackward`."""
        assert self._loss is not None
        loss, self._loss = self._loss, None
        # Gradient 2: autograd runs. In float16 small gradients would underflow; `accept` takes the factor out again.
        scale = self.precision.loss_scale
        (loss if scale == 1.0 else loss * scale).backward()


class SharedTail:
    """The front of the network for this rank's own virtual worker, the tail in column blocks with its group.

    Args:
        model: Whole.
        tail: Shared with the ranks of a group.
        reducer: Takes the tail's gradients, those of the whole group's virtual workers.
        wait_weights: Returns when this rank has the new weights of its column blocks.
        recipe: Its seed, label smoothing and virtual workers.
        precision: Of the pass.
        batch_norm: Of the model.
        world: All ranks.
        order: Of the front's gradients; a context of its forward pass.
    """

    in_step = True
    control_follows = False
    is_added = False

    def __init__(
        self,
        model: nn.Module,
        tail: ParallelTail,
        reducer: Reducer,
        wait_weights: Callable[[], None],
        recipe: Recipe,
        precision: Precision,
        batch_norm: BatchNormStatistics,
        world: Group,
        order: Context = nullcontext,
    ) -> None:
        self._order = order
        self._model, self._front, self._recipe, self._precision = model, tail.tail.front, recipe, precision
        self._wait_weights, self._batch_norm, self._world = wait_weights, batch_norm, world
        slots = tail.held_slots()

        def take(layer: int, block: int, weight: Tensor, bias: Tensor | None) -> None:
            if bias is not None:
                reducer.add(slots[layer, block, True], bias)
            reducer.add(slots[layer, block, False], weight)

        self._columns = ColumnPass(
            tail.tail,
            tail.parallel,
            world.rank,
            tail.groups,
            precision,
            recipe.label_smoothing,
            recipe.seed,
            take,
        )

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """See `ForwardBackward`."""
        self._batch_norm.begin_pass()
        targets = pinned(batch.targets, self._world.device)
        self._columns.begin(targets.to(self._world.device, non_blocking=True))
        seed_torch(self._world.device, DROPOUT, self._recipe.seed, step.index, worker)
        images = place(batch, self._world.device, self._precision.memory_format)
        with self._precision.autocast(), self._order():
            features = self._front(images)
        self._wait_weights()
        # Ranks that share layers work in step: each is at the same place of its own share.
        turn = membership.mine.index(worker)
        return self._columns.forward(features, step.index, lambda place: membership.shares[place][turn])

    def backward(self) -> None:
        """See `ForwardBackward`."""
        self._columns.backward()


def loss_of(recipe: Recipe, logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """The mean loss of images, float32 [].

    Args:
        recipe: Its loss and label smoothing.
        logits: float32 [n, classes].
        targets: int64 [n], those of the batch on the logits' device.
        batch: Where its images are mixed, each target is mixed too. Both losses are linear in the target, so that mixed
            targets need no table of all classes.
    """
    if batch.partners is None or batch.shares is None:
        return _loss(recipe, logits, targets, "mean")
    partners, shares = (
        pinned(each, logits.device).to(logits.device, non_blocking=True) for each in (batch.partners, batch.shares)
    )
    own, other = (_loss(recipe, logits, each, "none") for each in (targets, partners))
    return (shares * own + (1 - shares) * other).mean()


def _loss(recipe: Recipe, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """The mean loss, float32 [], or with reduction "none" that of each image, float32 [n].

    Binary cross-entropy takes each class for itself and is summed over classes: a mean over them would be a thousandth
    of it on ImageNet, and with it the gradient.
    """
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, targets, label_smoothing=recipe.label_smoothing, reduction=reduction)
    classes = logits.shape[1]
    smoothed = torch.full_like(logits, recipe.label_smoothing / classes)
    smoothed.scatter_(1, targets[:, None], 1 - recipe.label_smoothing + recipe.label_smoothing / classes)
    if reduction == "mean":
        return F.binary_cross_entropy_with_logits(logits, smoothed, reduction="sum") / len(logits)
    return F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none").sum(1)


def blank(recipe: Recipe, step: Step) -> Batch:
    """Images of nothing, for a rank that can't read its own while the ranks of its group wait for it."""
    images = step.images_per_worker
    shape = (images, recipe.data.channels, *step.sizes.sides)
    return Batch(torch.zeros(shape), torch.zeros(images, dtype=torch.int64), np.arange(images), replaced=0)

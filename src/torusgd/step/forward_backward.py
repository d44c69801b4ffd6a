"""The forward and backward pass of a virtual worker: of a whole network, with a shared tail, or in local steps."""

import time
import timeit
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from ..arithmetic import fastest_method, portable
from ..arithmetic.passes import compiled
from ..comm.groups import Group
from ..data.pipeline import Batch
from ..data.to_device import pinned, place
from ..models.registry import model_of
from ..optim import build_optimizer, set_hyperparameters
from ..precision import Precision, arithmetic_of
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..rng import DROPOUT, seed_torch
from ..tensor_parallel.column_pass import ColumnPass
from ..tensor_parallel.tail import ParallelTail
from .batchnorm import BatchNormStatistics
from .membership import Membership
from .model_state import StepState
from .weights_first import Context

# For the price of portable arithmetic: as many as two images of 224 x 224, so that a large network is measured in
# seconds.
_PIXELS = 2 * 224 * 224
_PASSES = 3


class ForwardBackward(Protocol):
    """How a virtual worker goes through a network and back."""

    in_step: bool = False  # whether the ranks of a group work in step: one without images goes on with blank ones
    control_follows: bool = False  # whether gradients may leave in `forward`, before the control vector; on all ranks
    is_added: bool = False  # whether the last `forward` has added its statistics and loss to the control vector itself

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """The loss, float32 []."""

    def backward(self) -> None:
        """Back from the loss of the last `forward`; the reducer gets the gradients."""


class WholeNetwork(ForwardBackward):
    """Each rank computes all of the network for its own virtual workers; the reducer's hooks take the gradients."""

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
        # Batch 6: the batch goes to the device.
        self.extra_pass(batch)
        self.begin(step, worker, part)
        self._loss = self.loss_of_images(place(batch, self._device, self.precision.memory_format), batch)
        return self._loss

    def extra_pass(self, batch: Batch) -> None:
        """The extra pass of a batch that has one, see `BatchNormStatistics`."""
        with self.precision.autocast():
            extra = None if batch.plain is None else place(batch.plain, self._device, self.precision.memory_format)
            self._batch_norm.extra_pass(self._model, extra)

    def begin(self, step: Step, worker: int, part: int = 0) -> None:
        # Dropout's draws belong to the virtual worker, whichever rank computes it.
        keys = (worker, part) if part else (worker,)
        seed_torch(self._device, DROPOUT, self._recipe.seed, step.index, *keys)

    def loss_of_images(self, images: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch whose images lie on the device; leaves this pass's statistics in `BatchNorm.batch`."""
        self._batch_norm.begin_pass()
        targets = pinned(batch.targets, self._device).to(self._device, non_blocking=True)
        with self.precision.autocast(), self._order():
            logits = self._model(images)
        return loss_of(self._recipe, logits.float(), targets, batch)

    def backward(self) -> None:
        assert self._loss is not None
        loss, self._loss = self._loss, None
        # Gradient 2: autograd runs. In float16 small gradients would underflow; `accept` takes the factor out again.
        scale = self.precision.loss_scale
        (loss if scale == 1.0 else loss * scale).backward()


class SharedTail(ForwardBackward):
    """The front of the network for this rank's own virtual worker, the tail in column blocks with its group."""

    in_step = True

    def __init__(
        self, recipe: Recipe, state: StepState, tail: ParallelTail, world: Group, order: Context = nullcontext
    ) -> None:
        self._recipe, self._state, self._front, self._world, self._order = recipe, state, tail.tail.front, world, order
        slots, add = tail.held_slots, state.reducer.add

        def take(layer: int, block: int, weight: Tensor, bias: Tensor | None) -> None:
            if bias is not None:
                add(slots[layer, block, True], bias)
            add(slots[layer, block, False], weight)

        self._columns = ColumnPass(tail, state.precision, recipe.label_smoothing, recipe.seed, take)

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        device, precision = self._world.device, self._state.precision
        self._state.batch_norm.begin_pass()
        self._columns.begin(pinned(batch.targets, device).to(device, non_blocking=True))
        seed_torch(device, DROPOUT, self._recipe.seed, step.index, worker)
        images = place(batch, device, precision.memory_format)
        with precision.autocast(), self._order():
            features = self._front(images)
        self._state.update.wait_weights()
        # Ranks that share layers work in step: each is at the same position of its own share.
        turn = membership.mine.index(worker)
        return self._columns.forward(features, step.index, lambda rank: membership.shares[rank][turn])

    def backward(self) -> None:
        self._columns.backward()


class LocalSteps(ForwardBackward):
    """`forward` takes a virtual worker's local steps on a copy of the network, `backward` hands over its change."""

    # A step is a round (local SGD: Stich, arXiv 1805.09767; with an outer optimizer DiLoCo, arXiv 2311.08105):
    #
    #     each virtual worker i    w_i = w; then H times w_i = w_i - SGD or LARS on the next part of its images
    #     all of them              d = mean over i of (w - w_i), an exact sum like that of gradients
    #     outer SGD                w = w - its step with d as the gradient
    #
    # The messages of a round are those of one synchronous step, so a link carries them once in H updates.

    def __init__(self, recipe: Recipe, copy: nn.Module, state: StepState) -> None:
        assert recipe.synchrony.local_steps is not None
        self._state, self._local_steps = state, recipe.synchrony.local_steps
        self._copied = BatchNormStatistics(copy)
        self._passes = WholeNetwork(copy, recipe, state.precision, self._copied, state.batch_norm.running.device)
        self._optimizer = build_optimizer(recipe.optimizer, copy, recipe.rate.lr)
        own, common = dict(copy.named_parameters()), dict(state.model.named_parameters())
        self._own: list[Tensor] = [own[name] for name in state.reducer.names]
        self._common: list[Tensor] = [common[name] for name in state.reducer.names]
        # Frozen parameters and running statistics, which a checkpoint or initial weights may have changed since.
        mine, theirs = copy.state_dict(), state.model.state_dict()
        self._fixed = [(mine[name], theirs[name]) for name in mine.keys() - set(state.reducer.names)]

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """The mean loss of the local steps, float32 []."""
        # A virtual worker begins every round with the common weights and without momentum ("reset" among the buffer
        # strategies of SlowMo, Wang et al., arXiv 1910.00643). DiLoCo keeps each worker's own state instead; here that
        # would bind virtual workers to ranks, while so the result is free of the number of ranks, one copy at a time is
        # enough, and a checkpoint holds nothing of it.
        self._state.update.wait_weights()
        with torch.no_grad():
            torch._foreach_copy_(self._own, self._common)
            for mine, theirs in self._fixed:
                mine.copy_(theirs)
        self._optimizer.state.clear()
        factor = step.weight_decay_factor
        set_hyperparameters(self._optimizer, lr=step.lr, momentum=step.momentum, weight_decay_factor=factor)
        losses, statistics, images = [], torch.zeros_like(self._copied.batch), len(batch.images) // self._local_steps
        for part in range(self._local_steps):
            own = slice(part * images, (part + 1) * images)
            partners, shares = (None if each is None else each[own] for each in (batch.partners, batch.shares))
            of_part = batch.images[own], batch.targets[own], batch.positions[own], 0, partners, shares, batch.table
            loss = self._passes.forward(step, worker, Batch(*of_part), membership, part)
            self._passes.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(loss.detach())
            statistics += self._copied.batch
        self._state.batch_norm.batch.copy_(statistics / self._local_steps)
        return torch.stack(losses).mean()

    def backward(self) -> None:
        # The last layer's change first, as a backward pass has it.
        with torch.no_grad():
            for slot, (own, common) in enumerate(zip(self._own, self._common, strict=True)):
                self._state.reducer.add(slot, common - own)


def loss_of(recipe: Recipe, logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """The mean loss of a batch, float32 [], from its logits, float32 [n, classes], and its targets, int64 [n]."""
    if batch.partners is None or batch.shares is None:
        return _loss(recipe, logits, targets, "mean")
    # If images are mixed, so is each target.
    device, mixed = logits.device, (batch.partners, batch.shares)
    partners, shares = (pinned(each, device).to(device, non_blocking=True) for each in mixed)
    # Both losses are linear in the target, so that mixed targets need no table of all classes.
    own, other = (_loss(recipe, logits, each, "none") for each in (targets, partners))
    return (shares * own + (1 - shares) * other).mean()


def _loss(recipe: Recipe, logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """The mean loss, float32 [], or with reduction "none" that of each image, float32 [n]."""
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(logits, targets, label_smoothing=recipe.label_smoothing, reduction=reduction)
    # Binary cross-entropy takes each class for itself and is summed over classes: a mean over them would be a
    # thousandth of it on ImageNet, and with it the gradient.
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


def one_pass(recipe: Recipe, classes: int, device: torch.device, images: int) -> Callable[[], None]:
    """A pass over so many images of the first stage, on a network drawn anew: what measurements of compute time."""
    precision, sides = Precision(recipe, device), recipe.training_sizes(recipe.stages[0]).sides
    with torch.random.fork_rng(devices=[]):  # anew, for a run's own network has hooks that send its gradients
        network = model_of(recipe, classes).to(device).train()
    pixels = torch.zeros(images, recipe.data.channels, *sides)
    pixels.view(images, -1)[:, ::3] = 1.0
    labels = torch.zeros(images, dtype=torch.int64, device=device)
    batch = Batch(pixels, labels, np.arange(images), 0)
    placed = place(batch, device, precision.memory_format)

    def one() -> None:
        with arithmetic_of(recipe):
            with precision.autocast():
                logits = network(placed)
            loss_of(recipe, logits.float(), labels, batch).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return one


def portable_price(recipe: Recipe, classes: int, device: torch.device) -> str:
    """What a pass by portable arithmetic costs here, on a network of its kind: the method of products, and the time."""
    height, width = recipe.training_sizes(recipe.stages[0]).sides
    count = min(recipe.stages[0].images_per_worker, max(2, _PIXELS // (height * width)))
    recipes = recipe.model_copy(update={"precision": "float32"}), recipe
    passes = [one_pass(each, classes, device, count) for each in recipes]
    with torch.random.fork_rng(devices=[]), _disable_current_modes():
        theirs, ours = (_seconds(each, device) for each in passes)
        with portable():
            method = fastest_method(device)
    times = f"{ours / theirs:.1f} times float32's ({1e3 * ours:.1f} ms for {1e3 * theirs:.1f})"
    if device.type == "cpu" and isinstance(why := compiled(), str):
        method += f", slower without C: {why}"
    return f"portable arithmetic: products by {method}; a pass of {count} images takes about {times}"


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """The shortest of a few times; the first one, which tries methods, is not among them."""
    # Processor time, so that other work on the machine counts less; a GPU's own time is that of the clock.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    return min(timeit.repeat(work, timer=clock, repeat=1 + _PASSES, number=1)[1:])

"""Local steps: each virtual worker trains a copy of the weights for a while, and the update takes the mean change.

A step of this form is a round (local SGD: Stich, arXiv 1805.09767; with an outer optimiser DiLoCo, arXiv 2311.08105):

    each virtual worker i    w_i = w; then H times w_i = w_i - SGD or LARS on the next part of its images
    all of them              d = mean over i of (w - w_i), an exact sum like that of gradients
    outer SGD                w = w - its step with d in the gradient's place

The messages of a round are those of one synchronous step, so a link carries them once in H updates. A virtual worker
begins every round with the common weights and without momentum ("reset" among the buffer strategies of SlowMo, Wang et
al., arXiv 1910.00643). DiLoCo keeps each worker's own state instead; here that would bind virtual workers to ranks,
while so the result is free of the number of ranks, one copy at a time is enough, and a checkpoint holds nothing of it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.pipeline import Batch
from ..optim import set_hyperparameters
from ..recipe.schedule import Step
from .batchnorm import BatchNormStatistics
from .forward_backward import WholeNetwork
from .membership import Membership


class LocalSteps:
    """A `ForwardBackward`: forward takes a virtual worker's local steps, backward hands over its change.

    Args:
        passes: On the copy.
        copy: A network like `source`, whose weights are this object's.
        source: The network that is trained; its weights stay as they are.
        optimizer: Over the copy; it takes rate and momentum from the schedule.
        local_steps: H; it divides the images of a virtual worker.
        copied: Batch norm of the copy.
        batch_norm: Of the source: its `batch` gets the mean over the local steps.
        slots: Names of the parameters in slot order.
        add: Takes the change of a slot, `Reducer.add`.
        wait_weights: Returns when the source has its new weights.
    """

    in_step = False
    control_follows = False
    is_added = False

    def __init__(
        self,
        passes: WholeNetwork,
        copy: nn.Module,
        source: nn.Module,
        optimizer: Optimizer,
        local_steps: int,
        copied: BatchNormStatistics,
        batch_norm: BatchNormStatistics,
        slots: Sequence[str],
        add: Callable[[int, Tensor], object],
        wait_weights: Callable[[], object],
    ) -> None:
        self._passes, self._optimizer, self._local_steps = passes, optimizer, local_steps
        self._copied, self._batch_norm = copied, batch_norm
        self._add, self._wait_weights = add, wait_weights
        own, common = dict(copy.named_parameters()), dict(source.named_parameters())
        self._own: list[Tensor] = [own[name] for name in slots]
        self._common: list[Tensor] = [common[name] for name in slots]

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """The mean loss of the local steps, float32 []."""
        self._wait_weights()
        with torch.no_grad():
            torch._foreach_copy_(self._own, self._common)
        self._optimizer.state.clear()
        set_hyperparameters(
            self._optimizer, lr=step.lr, momentum=step.momentum, weight_decay_factor=step.weight_decay_factor
        )
        losses, statistics = [], torch.zeros_like(self._batch_norm.batch)
        for part in range(self._local_steps):
            loss = self._passes.forward(step, worker, _part(batch, part, self._local_steps), membership, part)
            self._passes.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            losses.append(loss.detach())
            statistics += self._copied.batch
        self._batch_norm.batch.copy_(statistics / self._local_steps)
        return torch.stack(losses).mean()

    def backward(self) -> None:
        """Hands the change of each slot over, the last layer's first, as a backward pass does."""
        with torch.no_grad():
            for slot, (own, common) in enumerate(zip(self._own, self._common, strict=True)):
                self._add(slot, common - own)


def _part(batch: Batch, part: int, parts: int) -> Batch:
    images = len(batch.images) // parts
    own = slice(part * images, (part + 1) * images)
    return Batch(batch.images[own], batch.targets[own], batch.kept[own], replaced=0, table=batch.table)

"""A moving average of the weights and of batch norm's statistics: what is evaluated and saved as the result.

The average of the last steps' weights lies nearer to the middle of where they wander, and is the more accurate the
higher the rate still is (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992; as an exponential average in Tarvainen
and Valpola, arXiv 1703.01780). Training itself never sees it.

Every rank keeps the whole average and updates it from the same weights by the same operations, so it has the same bits
on all of them, and nothing travels but the weights that a sharded update would gather for the next step anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..recipe.schedule import Step
from ..recipe.schema import WeightAverage
from ..scalars import power


class MovingAverage:
    """The average of a model's weights and of its batch-norm statistics, which begins with those of now.

    Args:
        settings: The recipe's section.
        train_images: Images of an epoch.
        model: Its parameters are averaged.
        running: Batch norm's running statistics, float32 [n], which are averaged with them.

    Attributes:
        values: float32, all parameters in the model's order, then the statistics.
    """

    def __init__(self, settings: WeightAverage, train_images: int, model: nn.Module, running: Tensor) -> None:
        self._settings, self._train_images = settings, train_images
        self._sources = [*model.parameters(), running]
        self.values = torch.cat([source.detach().reshape(-1) for source in self._sources])
        parts = self.values.split([source.numel() for source in self._sources])
        self._parts = [part.view_as(source) for part, source in zip(parts, self._sources, strict=True)]

    @torch.no_grad()
    def begin(self) -> None:
        """Begins anew with the model's weights and statistics as they are."""
        for part, source in zip(self._parts, self._sources, strict=True):
            part.copy_(source)

    def is_due(self, step: Step) -> bool:
        """Whether the average takes what a step leaves."""
        return (step.index + 1) % self._settings.every == 0

    @torch.no_grad()
    def update(self, step: Step) -> None:
        """Takes the weights and statistics after a step; the model holds all of them."""
        remains = self.remains(step)
        for part, source in zip(self._parts, self._sources, strict=True):
            part.mul_(remains).add_(source, alpha=1 - remains)

    def remains(self, step: Step) -> float:
        """The fraction of the average that stays: a half to the power of the half-lives since the last update."""
        length, steps = self._settings.half_life, self._settings.every
        if length.unit == "st":
            return power(2.0, -(steps / length.value))
        images = length.value * (self._train_images if length.unit == "ep" else 1)
        return power(2.0, -(steps * step.batch / images))

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model holds the average; afterwards its own weights and statistics again."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for part, source in zip(self._parts, self._sources, strict=True):
            own = source.clone()
            source.copy_(part)
            part.copy_(own)

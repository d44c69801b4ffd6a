"""What one step leaves to the next: weights, the optimizer's state, statistics, scales, as tensors by name.

The same tensors, whole, go into a checkpoint, to ranks that are left or join, and back, whoever holds which part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..gradients.reducer import Reducer
from ..gradients.update import Update
from ..precision import Precision
from ..recipe.schedule import Step
from ..recipe.schema import WeightAverage
from ..scalars import power
from .batchnorm import BatchNormStatistics
from .watch import StepWatch


class MovingAverage:
    """A moving average of a model's weights and of its running statistics: what is evaluated and saved as the result.

    The average of the last steps' weights lies nearer to the middle of where they wander, and is the more accurate the
    higher the rate still is (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992; as an exponential average in
    Tarvainen and Valpola, arXiv 1703.01780). `values` is float32: all parameters in the model's order, the statistics.
    """

    # Every rank holds the whole average and updates it from the same weights by the same operations, so it has the same
    # bits on all of them, and nothing travels but the weights that a sharded update would gather for the next step.

    def __init__(self, settings: WeightAverage, train_images: int, model: nn.Module, running: Tensor) -> None:
        self._settings, self._train_images = settings, train_images
        sources = [*model.parameters(), running]
        self.values = torch.cat([source.detach().reshape(-1) for source in sources])
        parts = self.values.split([source.numel() for source in sources])
        self._pairs = [(part.view_as(source), source) for part, source in zip(parts, sources, strict=True)]

    @torch.no_grad()
    def begin(self) -> None:
        for part, source in self._pairs:
            part.copy_(source)

    def is_due(self, step: Step) -> bool:
        return (step.index + 1) % self._settings.every == 0

    @torch.no_grad()
    def update(self, step: Step) -> None:
        remains = self.remains(step)
        for part, source in self._pairs:
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
        for part, source in self._pairs:
            own = source.clone()
            source.copy_(part)
            part.copy_(own)


_MODEL, _OPTIMIZER, _AVERAGE, _BOUNDS = "model/", "optimizer/", "average", "gradient_bounds"
_MEAN, _RUNNING = "mean", "running"
WATCHERS = "watchers/"  # of tensors that watchers need, and no weight depends on


@dataclass(frozen=True)
class StepState:
    """The parts of a `TrainStep` that have a state; the same tensors go into a checkpoint and to ranks that join."""

    model: nn.Module
    reducer: Reducer
    update: Update
    batch_norm: BatchNormStatistics
    precision: Precision
    average: MovingAverage | None
    watchers: Sequence[StepWatch] = ()

    def write_to_model(self, steps: int) -> None:
        """Puts all updated weights and running statistics into the model, to be read; every rank calls it."""
        self.update.gather_all()
        self.batch_norm.write_to_model(steps)

    @contextmanager
    def result_in_model(self, steps: int) -> Iterator[None]:
        """The model holds what the run would leave now, the average if there is one; every rank calls it."""
        self.update.gather_all()
        with self.average.in_model() if self.average is not None else nullcontext():
            self.batch_norm.write_to_model(steps)
            yield

    def state_dict(self, steps: int, keep: bool) -> dict[str, Tensor]:
        """All tensors that the next step needs, whole, no copies; all ranks call it, those that `keep` get it."""
        self.write_to_model(steps)
        model = {f"{_MODEL}{name}": tensor for name, tensor in self.model.state_dict().items()}
        return model | self._beside_model(self.update.state(keep), has_bounds=not self.reducer.sum.needs_measure)

    def expected_state(self, is_updated: bool) -> dict[str, Tensor]:
        """Tensors shaped like those of `state_dict` beside the model's; the optimizer's once weights are updated."""
        return self._beside_model(self.update.expected_state() if is_updated else {}, has_bounds=True)

    def _beside_model(self, state: Mapping[str, Tensor], has_bounds: bool) -> dict[str, Tensor]:
        found = {f"{_OPTIMIZER}{name}": tensor for name, tensor in state.items()}
        found |= {_AVERAGE: self.average.values} if self.average is not None else {}
        found |= {_BOUNDS: self.reducer.sum.state()} if has_bounds else {}
        return found | self.precision.state_dict() | self._watched()

    def load_state_dict(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Takes this rank's part of what `state_dict` gave, a tensor at a time."""
        model, average, watched = self.model.state_dict(), None, dict[str, Tensor]()
        for name, tensor in tensors:
            if name.startswith(_MODEL):
                model[name.removeprefix(_MODEL)].copy_(tensor)
            elif name.startswith(_OPTIMIZER):
                self.update.load_state(name.removeprefix(_OPTIMIZER), tensor)
            elif name == _AVERAGE:
                average = tensor
            elif name == _BOUNDS:
                self.reducer.sum.load_state(tensor)
            elif name.startswith(WATCHERS):
                watched[name] = tensor
            else:
                self.precision.load_state(name, tensor)
        self.batch_norm.read_from_model()
        self._load_watched(watched)
        if self.average is not None:
            self.average.begin()
            if average is not None:
                self.average.values.copy_(average)

    def change(self, is_updated: bool) -> dict[str, Tensor]:
        """Copies of what another rank needs to take the step that was just taken here (`follow`)."""
        mean = torch.cat([each.reshape(-1) for each in self._means()]) if is_updated else torch.zeros(0)
        running, bounds = self.batch_norm.running.clone(), self.reducer.sum.state()
        return {_MEAN: mean, _RUNNING: running, _BOUNDS: bounds} | self.precision.state_dict() | self._watched()

    def follow(self, step: Step, change: Mapping[str, Tensor]) -> None:
        """Takes a step that others have taken, from their `change`; replicated updates only."""
        if change[_MEAN].numel():
            means = self._means()
            for mean, part in zip(means, change[_MEAN].split([each.numel() for each in means]), strict=True):
                mean.copy_(part.view_as(mean))
            self.reducer.show_means()
            self.update.set_rates(step)
            self.update.step()
        self.batch_norm.running.copy_(change[_RUNNING])
        if self.average is not None and self.average.is_due(step):
            self.average.update(step)
        self.reducer.sum.load_state(change[_BOUNDS])
        for name in self.precision.state_dict():
            self.precision.load_state(name, change[name])
        self._load_watched(change)

    def _watched(self) -> dict[str, Tensor]:
        states = {watcher.name: watcher.state() for watcher in self.watchers}
        # Copies, for a watcher may write its own in the next step.
        return {f"{WATCHERS}{name}/{key}": each.clone() for name, own in states.items() for key, each in own.items()}

    def _load_watched(self, tensors: Mapping[str, Tensor]) -> None:
        for watcher in self.watchers:
            begin = f"{WATCHERS}{watcher.name}/"
            own = {name.removeprefix(begin): each for name, each in tensors.items() if name.startswith(begin)}
            watcher.load_state(own)

    def _means(self) -> list[Tensor]:
        # In an order that all ranks have, however they cut their buckets.
        named = zip((slot.name for slot in self.reducer.layout.held), self.reducer.means, strict=True)
        return [mean for _, mean in sorted(named, key=lambda each: each[0])]

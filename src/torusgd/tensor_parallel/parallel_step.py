"""What a step does otherwise where the network's tail is computed in column blocks: passes, gradients, update."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..data.pipeline import Batch
from ..gradients.integer_sum import Bucket, SumStatus
from ..gradients.reducer import Reducer
from ..gradients.update import MOMENTUM
from ..precision import Precision
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..rng import DROPOUT, keyed_hash
from ..runtime import Ranks
from ..train.batchnorm import BatchNormStatistics
from .column_pass import ColumnPass
from .column_reducer import ColumnReducer
from .parallel_tail import HybridTail


class HybridReducer(Reducer):
    """The gradients of a network with a tail in column blocks: those before it as ever, the tail's beside them.

    Slots are numbered on: first those before the tail.
    """

    def __init__(self, columns: ColumnReducer, *front: Any) -> None:
        self.columns = columns
        super().__init__(*front)
        self.count = len(self.names)
        """slots before the tail"""
        self.names = [*self.names, *(slot.name for slot in columns.slots)]

    def _take_buckets(self, buckets: list[Bucket]) -> None:
        super()._take_buckets(buckets)
        self.pieces = [*self.pieces, *(slot.tensor for slot in self.columns.held)]

    @property
    def needs_measure(self) -> bool:
        """See `Reducer`."""
        return self.columns.needs_measure

    def begin(self, measuring: bool) -> None:
        """See `Reducer`."""
        super().begin(measuring)
        self.columns.begin(measuring)

    def begin_worker(self, last: bool) -> None:
        """See `Reducer`."""
        super().begin_worker(last)
        self.columns.begin_round(last)

    def end_worker(self) -> None:
        """See `Reducer`."""
        super().end_worker()
        self.first_ready = self.columns.first_ready
        self.last_ready = max(self.last_ready, self.columns.last_ready)

    def finish_measuring(self) -> None:
        """See `Reducer`."""
        super().finish_measuring()
        self.columns.finish_measuring()

    def finish(self) -> SumStatus:
        """See `Reducer`."""
        front, tail = super().finish(), self.columns.finish()
        return SumStatus(
            [*front.overflow, *(self.count + slot for slot in tail.overflow)],
            [*front.nonfinite, *(self.count + slot for slot in tail.nonfinite)],
        )

    def apply_mean(self) -> None:
        """See `Reducer`."""
        self.sum.mean(self._means)
        for parameter, mean in zip(self.parameters, self._means, strict=True):
            parameter.grad = mean
        self.columns.apply_mean()

    def state(self) -> Tensor:
        """See `Reducer`."""
        return torch.cat([super().state(), self.columns.state()])

    def load_state(self, state: Tensor) -> None:
        """See `Reducer`."""
        super().load_state(state[: self.count])
        self.columns.load_state(state[self.count :])


class HybridPass:
    """The front of the network for this rank's own virtual worker, the tail with its group.

    Args:
        model: Whole.
        hybrid: Its tail.
        sink: Takes the gradients of the tail, see `ColumnPass`.
        recipe: Its seed and label smoothing.
        precision: Of the pass.
        batch_norm: Of the model.
        ranks: This process among the others.
    """

    together = True

    def __init__(
        self,
        model: nn.Module,
        hybrid: HybridTail,
        reducer: ColumnReducer,
        recipe: Recipe,
        precision: Precision,
        batch_norm: BatchNormStatistics,
        ranks: Ranks,
    ) -> None:
        self._model, self._front, self._recipe, self._precision = model, hybrid.tail.front, recipe, precision
        self._batch_norm, self._ranks = batch_norm, ranks
        self._columns = ColumnPass(
            hybrid.tail,
            hybrid.parts,
            ranks.rank,
            hybrid.groups,
            precision,
            recipe.label_smoothing,
            recipe.seed,
            reducer.add,
        )

    def forward(self, step: Step, worker: int, batch: Batch) -> Tensor:
        """See `Passing`."""
        self._batch_norm.begin_pass()
        self._columns.begin(batch.targets.to(self._ranks.device, non_blocking=True))
        torch.manual_seed(int(keyed_hash(DROPOUT, self._recipe.seed, step.index, worker)) >> 1)
        images = self._precision.place(batch.images, self._ranks.device)
        self._model.train()
        with self._precision.autocast():
            features = self._front(images)
        each = self._recipe.virtual_workers // self._ranks.size
        # With layers on several ranks, each has as many virtual workers; without, only this rank's own is asked for.
        return self._columns.forward(features, step.index, lambda rank: worker + (rank - self._ranks.rank) * each)

    def backward(self) -> None:
        """See `Passing`."""
        self._columns.backward()


class Hybrid:
    """Every rank updates all that is before the tail, and its own column blocks of the tail.

    Args:
        optimizer: Over the reducer's `pieces`.
        reducer: Gives their gradients.
        hybrid: The tail.
    """

    def __init__(self, optimizer: Optimizer, reducer: HybridReducer, hybrid: HybridTail) -> None:
        self.optimizer, self._hybrid = optimizer, hybrid
        self._front = dict(zip(reducer.names[: reducer.count], reducer.parameters, strict=True))
        self._is_whole = True

    def step(self) -> None:
        """See `Update`."""
        self.optimizer.step()
        self._is_whole = False

    def settle(self) -> None:
        """See `Update`; a pass needs no more than this rank's own column blocks."""

    def complete(self) -> None:
        """See `Update`; the rows of the tail go round the groups."""
        if not self._is_whole:
            self._hybrid.gather()
            self._is_whole = True

    def momentum(self, keep: bool) -> dict[str, Tensor]:
        """See `Update`; the tail's rows go round the groups."""
        found = {name: self._own(parameter) for name, parameter in self._front.items()}
        whole = {name: own for name, own in found.items() if own is not None}
        if any(self._own(block) is not None for blocks in self._hybrid.held.values() for block in blocks):
            whole |= self._hybrid.whole(self._own)
        return whole if keep else {}

    def take_momentum(self, name: str, whole: Tensor) -> None:
        """See `Update`."""
        front = self._front.get(name)
        for piece, own in self._hybrid.own_rows(name, whole) if front is None else [(front, whole)]:
            self.optimizer.state[piece][MOMENTUM] = own.to(piece.device, copy=True)

    def _own(self, piece: Tensor) -> Tensor | None:
        buffer: Tensor | None = self.optimizer.state.get(piece, {}).get(MOMENTUM)
        return buffer

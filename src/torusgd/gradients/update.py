"""How the mean gradient becomes new weights: by every rank alike, or each rank a part of them."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.base import AllReduce
from ..comm.reduce_scatter import ShardCollectives
from ..optim.slices import SliceNorms, over_slices
from .reducer import Reducer
from .weight_gather import WeightGather

MOMENTUM = "momentum_buffer"


class Update(Protocol):
    """What a step and a checkpoint need of an update."""

    optimizer: Optimizer
    """over the reducer's `pieces`, whose `grad` holds the mean"""

    def step(self) -> None:
        """Updates the weights, or begins to."""

    def settle(self) -> None:
        """Returns when this rank has the new weights that its passes need; before each backward pass."""

    def complete(self) -> None:
        """Returns when the model holds all the updated weights, before they are read; every rank calls it."""

    def momentum(self, keep: bool) -> dict[str, Tensor]:
        """The momentum of each parameter, whole, by name; every rank calls it, and those that `keep` get it."""

    def take_momentum(self, name: str, whole: Tensor) -> None:
        """Takes back what `momentum` gave of a parameter."""


class Replicated:
    """Every rank updates all weights and gets the same bits; nothing travels."""

    def __init__(self, optimizer: Optimizer, reducer: Reducer) -> None:
        self.optimizer, self._reducer = optimizer, reducer

    def step(self) -> None:
        """See `Update`."""
        self.optimizer.step()

    def settle(self) -> None:
        """See `Update`."""

    def complete(self) -> None:
        """See `Update`."""

    def momentum(self, keep: bool) -> dict[str, Tensor]:
        """See `Update`; the optimizer's own tensors."""
        return _momenta(self.optimizer, self._reducer) if keep else {}

    def take_momentum(self, name: str, whole: Tensor) -> None:
        """See `Update`."""
        piece = self._reducer.pieces[self._reducer.names.index(name)]
        self.optimizer.state[piece][MOMENTUM] = whole.to(piece.device, copy=True)


class Sharded:
    """Each rank updates its shards of the weights, and keeps momentum for these only (Das et al., arXiv 1602.06709).

    The new weights travel during the next forward pass.

    Args:
        model: Of the reducer.
        optimizer: `Lars` or `Sgd` over whole parameters: its class, groups and values are taken.
        reducer: One with `shards`.
        shards: Those of the reducer.
        allreduce: Over the same ranks; sums block norms.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, reducer: Reducer, shards: ShardCollectives, allreduce: AllReduce
    ) -> None:
        assert reducer.spans is not None
        self._reducer, self._spans = reducer, reducer.spans
        self._weight_gather = WeightGather(model, reducer, shards)
        slices = [
            (piece, low, parameter.numel())
            for piece, (low, _), parameter in zip(reducer.pieces, reducer.spans, reducer.parameters, strict=True)
        ]
        norms = SliceNorms(slices, lambda table: allreduce.start(table).wait())
        self.optimizer = over_slices(optimizer, dict(zip(reducer.parameters, reducer.pieces, strict=True)), norms)

    def step(self) -> None:
        """See `Update`."""
        self.optimizer.step()
        self._weight_gather.start()

    def settle(self) -> None:
        """See `Update`."""
        self._weight_gather.wait()

    def complete(self) -> None:
        """See `Update`."""
        self.settle()

    def momentum(self, keep: bool) -> dict[str, Tensor]:
        """See `Update`; each rank sends its slices, as many bytes as the weights' gather."""
        own = _momenta(self.optimizer, self._reducer)
        if not own:
            return {}
        # All have momentum or none has: `Lars` and `Sgd` make a buffer for each tensor, be it empty.
        whole = self._weight_gather.collect([own[name] for name in self._reducer.names], keep)
        return dict(zip(self._reducer.names, whole, strict=True)) if keep else {}

    def take_momentum(self, name: str, whole: Tensor) -> None:
        """See `Update`."""
        slot = self._reducer.names.index(name)
        piece, (low, high) = self._reducer.pieces[slot], self._spans[slot]
        self.optimizer.state[piece][MOMENTUM] = whole.reshape(-1)[low:high].to(piece.device, copy=True)


@torch.no_grad()
def _momenta(optimizer: Optimizer, reducer: Reducer) -> dict[str, Tensor]:
    buffers = {
        name: optimizer.state.get(piece, {}).get(MOMENTUM)
        for name, piece in zip(reducer.names, reducer.pieces, strict=True)
    }
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}

"""How the mean gradient becomes new weights on every rank: each updates what it owns, and gathers the rest.

    replicated        every rank updates all weights and gets the same bits; nothing travels
    sharded           each rank updates its shards, and keeps momentum for these only (Das et al., arXiv 1602.06709,
                      as ZeRO stage 1 does); the new weights travel during the next forward pass
    column-parallel   each rank updates its column blocks; a pass needs no others, `gather_all` brings them

They combine: with shards, a column block is updated in shards by the ranks that hold it.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim import AdamW, Lamb, Lars, layer_norms, set_hyperparameters
from ..optim.lars import Norms
from ..recipe.schedule import Step
from .reducer import Reducer
from .sharding import BlockNorms, WeightGather

STEP = "step"
"""what AdamW and LAMB keep for each parameter, and here is the same for all: the number of updates"""


class ColumnGather(Protocol):
    """What an update needs of layers in column blocks."""

    def gather(self, rows: Mapping[int, Tensor]) -> None:
        """Fills the rows of all blocks (by slot number) on every rank from the ranks that hold them."""

    def complete_norms(self, table: Tensor) -> None:
        """Sums a table over ranks that together hold every column block."""


class Update:
    """Updates this rank's part of the weights by the mean gradient, and brings the others'.

    Args:
        model: Of the reducer.
        optimizer: Of `torusgd.optim`, over whole parameters, or column blocks: its class, groups and values are taken.
        reducer: Puts the mean into the `grad` of `owned`.
        sum_over_ranks: Sums a float32 tensor over all ranks, in place.
        columns: The layers in column blocks; None: there are none.
        take_step: Takes the optimizer's steps in its place; replicated updates only.
        follows_schedule: Whether the schedule's rates are for this optimizer; with local steps they are for that of the
            copies, and the outer rate stays.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        reducer: Reducer,
        sum_over_ranks: Callable[[Tensor], object],
        columns: ColumnGather | None = None,
        take_step: Callable[[], object] | None = None,
        follows_schedule: bool = True,
    ) -> None:
        self._reducer, self._columns, self._take_step = reducer, columns, take_step
        self._follows_schedule = follows_schedule
        self._gather = WeightGather(model, reducer) if reducer.is_sharded else None
        self._parameters = dict(model.named_parameters())
        self._is_whole = True
        self.optimizer = optimizer
        self._norms: Norms = layer_norms
        if self._gather is not None or columns is not None:
            complete = columns.complete_norms if self._gather is None and columns is not None else sum_over_ranks
            owned = dict(zip((slot.tensor for slot in reducer.layout.held), reducer.owned, strict=True))
            self._norms = BlockNorms(reducer, complete)
            self.optimizer = over_tensors(optimizer, owned, self._norms)

    @torch.no_grad()
    def clip(self, most: float) -> float:
        """Scales the mean gradient down to a norm of at most `most`; every rank calls it.

        Returns:
            The norm before.
        """
        norm = self.gradient_norm()
        if norm > most:
            for grad in self._reducer.means:
                grad.mul_(most / norm)
        return norm

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the mean gradient over all parameters; every rank calls it, since shards send block norms.

        It is the root of the sum, by the parameters' names, of the squares of `optim.norms`' layer norms, so that it
        has the same bits however the gradient is spread.
        """
        owned, grads = self._reducer.owned, self._reducer.means
        norms = self._norms([*owned, *grads])[len(owned) :].tolist()
        # Blocks of one parameter all have the whole parameter's norm.
        by_name = dict(zip((slot.parameter for slot in self._reducer.layout.held), norms, strict=True))
        return math.sqrt(sum(by_name[name] ** 2 for name in sorted(by_name)))

    def set_rates(self, step: Step) -> None:
        """Gives the optimizer the values that the schedule has for a step."""
        if self._follows_schedule:
            decay = step.weight_decay_factor
            set_hyperparameters(self.optimizer, lr=step.lr, momentum=step.momentum, weight_decay_factor=decay)

    def step(self) -> None:
        """Updates the weights that this rank owns, and begins to gather the others' shards."""
        # Gradient 9: the optimizer has the schedule's rates, and updates what this rank owns.
        (self._take_step or self.optimizer.step)()
        self._is_whole = False
        if self._gather is not None:
            self._gather.start()

    def wait_weights(self) -> None:
        """Returns when this rank has the new weights that its passes need; to be called before each backward pass."""
        if self._gather is not None:
            self._gather.wait()

    def gather_all(self) -> None:
        """Returns when the model holds all the updated weights, before they are read; every rank calls it."""
        self.wait_weights()
        if self._columns is not None and not self._is_whole:
            self._columns.gather({n: slot.tensor for n, slot in enumerate(self._reducer.layout.slots)})
        self._is_whole = True

    @torch.no_grad()
    def state(self, keep: bool) -> dict[str, Tensor]:
        """The optimizer's state, whole, as KEY/PARAMETER; every rank calls it, and those that `keep` get it."""
        states = [self.optimizer.state.get(tensor, {}) for tensor in self._reducer.owned]
        found: dict[str, Tensor] = {}
        for key in _element_state(self.optimizer):
            # All have a buffer or none has: the optimizers make one for each tensor, be it empty.
            own = [state[key] for state in states if key in state]
            if own:
                found |= {f"{key}/{name}": tensor for name, tensor in self._whole(own, keep).items()}
        if keep and states and STEP in states[0]:
            found[f"{STEP}/"] = states[0][STEP]
        return found

    def expected_state(self) -> dict[str, Tensor]:
        """Tensors shaped like those of `state` once there was an update."""
        updated = {slot.parameter for slot in self._reducer.layout.slots}
        keys = _element_state(self.optimizer)
        found = {f"{key}/{name}": self._parameters[name] for key in keys for name in updated}
        return found | ({f"{STEP}/": torch.zeros(())} if isinstance(self.optimizer, AdamW) else {})

    def _whole(self, own: list[Tensor], keep: bool) -> dict[str, Tensor]:
        """Of each parameter the whole tensor that `own` are this rank's elements of, one for each it owns."""
        layout, is_needed = self._reducer.layout, keep or self._columns is not None
        held = own if self._gather is None else self._gather.gather_state(own, is_needed)
        if self._columns is None:
            return {slot.parameter: buffer for slot, buffer in zip(layout.held, held, strict=True)} if keep else {}
        whole = {slot.parameter: torch.zeros_like(self._parameters[slot.parameter]) for slot in layout.slots}
        rows = {n: _rows(slot.tensor, self._parameters[slot.parameter], whole[slot.parameter])
                for n, slot in enumerate(layout.slots)}  # fmt: skip
        for place, buffer in zip(layout.places, held, strict=True):
            rows[place].copy_(buffer)
        self._columns.gather(rows)
        return whole if keep else {}

    def load_state(self, name: str, whole: Tensor) -> None:
        """Takes this rank's elements of what `state` gave under a name."""
        key, _, parameter = name.partition("/")
        reducer = self._reducer
        for number, (slot, tensor) in enumerate(zip(reducer.layout.held, reducer.owned, strict=True)):
            if key == STEP:
                self.optimizer.state[tensor][STEP] = whole.cpu().clone()
            elif slot.parameter == parameter:
                part = _rows(slot.tensor, self._parameters[parameter], whole)
                if reducer.spans is not None:
                    low, high = reducer.spans[number]
                    part = part.reshape(-1)[low:high]
                state = self.optimizer.state[tensor]
                if key in state:  # it may be a part of flat memory
                    state[key].copy_(part)
                else:
                    state[key] = part.to(tensor.device, copy=True)

    def close(self) -> None:
        """Takes the hooks off the model; every rank calls it."""
        if self._gather is not None:
            self._gather.close()


def over_tensors(optimizer: Optimizer, tensors: Mapping[Tensor, Tensor], norms: Norms) -> Optimizer:
    """An optimizer of the same class, with the same groups and values, and with no state, over other tensors.

    Args:
        optimizer: Left alone.
        tensors: For each tensor that it updates the one in its place, such as a shard, maybe an empty one, so that all
            ranks' groups are of one length.
        norms: For `Lars` and `Lamb`: of whole parameters.
    """
    other = copy.copy(optimizer)
    other.param_groups = [{**g, "params": [tensors[p] for p in g["params"]]} for g in optimizer.param_groups]
    other.state = defaultdict(dict)
    if isinstance(other, Lars | Lamb):
        other.norms = norms
    return other


def _element_state(optimizer: Optimizer) -> tuple[str, ...]:
    """What an optimizer keeps for each element, by torch's names."""
    return ("exp_avg", "exp_avg_sq") if isinstance(optimizer, AdamW) else ("momentum_buffer",)


def _rows(slot: Tensor, parameter: Tensor, whole: Tensor) -> Tensor:
    """The rows of `whole`, a tensor shaped like the parameter, that a slot of the parameter (a view) has."""
    if slot.shape == parameter.shape:
        return whole
    row = parameter.numel() // len(parameter)
    first = (slot.storage_offset() - parameter.storage_offset()) // row
    return whole[first : first + len(slot)]

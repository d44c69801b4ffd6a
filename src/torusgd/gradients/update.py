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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.base import Work
from ..optim import AdamW, Lamb, Lars, layer_norms, set_hyperparameters
from ..optim.lars import Norms
from ..optim.norms import BLOCK, block_norms, norms_from_blocks
from ..recipe.schedule import Step
from .reducer import Reducer

STEP = "step"  # what AdamW and LAMB keep for each parameter, and here is the same for all: the number of updates


class ColumnGather(Protocol):
    """What an update needs of layers in column blocks (`tensor_parallel.tail.ParallelTail`)."""

    def gather(self, rows: Mapping[int, Tensor]) -> None: ...

    def complete_norms(self, table: Tensor) -> None: ...


class Update:
    """Updates this rank's part of the weights by the mean gradient, and brings the others'.

    Args:
        optimizer: Of `torusgd.optim`, over whole parameters, or column blocks: its class, groups and values are taken.
        reducer: Puts the mean into the `grad` of `owned`.
        sum_over_ranks: Sums an int32 tensor over all ranks, in place.
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
    def clip(self, most: float) -> None:
        """Scales the mean gradient down to a norm of at most `most`. Every rank calls it."""
        norm = self.gradient_norm()
        if norm > most:
            for grad in self._reducer.means:
                grad.mul_(most / norm)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """The norm of the mean gradient over all parameters; every rank calls it, since shards send block norms."""
        # It is the root of the exact sum of the squares of `optim.norms`' layer norms, so that it has the same bits
        # however the gradient is spread.
        owned, grads = self._reducer.owned, self._reducer.means
        norms = self._reducer.to_host(self._norms([*owned, *grads])[len(owned) :]).tolist()
        # Blocks of one parameter all have the whole parameter's norm.
        by_name = dict(zip((slot.parameter for slot in self._reducer.layout.held), norms, strict=True))
        return math.sqrt(math.fsum(norm * norm for norm in by_name.values()))

    def set_rates(self, step: Step) -> None:
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
        """Returns when this rank has the new weights that its passes need, before each backward pass."""
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
        found = {f"{key}/{name}": self._parameters[name] for key in _element_state(self.optimizer) for name in updated}
        return found | ({f"{STEP}/": torch.zeros(())} if isinstance(self.optimizer, AdamW) else {})

    def _whole(self, own: list[Tensor], keep: bool) -> dict[str, Tensor]:
        # Of each parameter the whole tensor that `own` are this rank's elements of, one for each it owns.
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
        if self._gather is not None:
            self._gather.close()


def over_tensors(optimizer: Optimizer, tensors: Mapping[Tensor, Tensor], norms: Norms) -> Optimizer:
    """An optimizer of the same class, groups and values, without state, over other tensors, maybe empty shards."""
    other = copy.copy(optimizer)
    other.param_groups = [{**g, "params": [tensors[p] for p in g["params"]]} for g in optimizer.param_groups]
    other.state = defaultdict(dict)
    if isinstance(other, Lars | Lamb):
        other.norms = norms
    return other


def _element_state(optimizer: Optimizer) -> tuple[str, ...]:
    # What an optimizer keeps for each element, by torch's names.
    return ("exp_avg", "exp_avg_sq") if isinstance(optimizer, AdamW) else ("momentum_buffer",)


def _rows(slot: Tensor, parameter: Tensor, whole: Tensor) -> Tensor:
    # The rows of `whole`, a tensor shaped like the parameter, that a slot of the parameter (a view) has.
    if slot.shape == parameter.shape:
        return whole
    row = parameter.numel() // len(parameter)
    first = (slot.storage_offset() - parameter.storage_offset()) // row
    return whole[first : first + len(slot)]


class WeightGather:
    """Brings each rank's updated shards (`Reducer.owned`) to all ranks that hold the same slots, bucket by bucket.

    A hook before each module's forward pass waits for the buckets of the module's own parameters. Whoever reads
    parameters without calling their module calls `wait` first, such as the reader of column blocks.
    """

    # Das et al. hide this part-broadcast behind the next forward pass. Weights travel in the memory of the gradient
    # sums, which is free from the update until the next backward pass.

    def __init__(self, model: nn.Module, reducer: Reducer) -> None:
        self._reducer, self._layout = reducer, reducer.layout
        self._works: dict[int, Work] = {}
        bucket_of = {
            slot.tensor: bucket
            for slot, bucket in zip(self._layout.held, self._layout.bucket_of, strict=True)
            if slot.layer is None
        }
        self._needs = {
            module: {bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            for module in model.modules()
        }
        # A parameter may also be read by another module than its own, as multi-head attention does: until a module has
        # been called itself, every hook waits for its parameters.
        self._never_called = {module for module, needed in self._needs.items() if needed}
        self._hooks = [module.register_forward_pre_hook(self._before) for module in self._never_called]

    def start(self) -> None:
        """Sends this rank's shards."""
        # In the reverse of backward's order: the forward pass needs the last bucket first.
        for bucket in reversed(range(len(self._layout.buckets))):
            if self._reducer.shards(bucket).size > 1:
                self._works[bucket] = self._gather(bucket, self._reducer.owned)

    def wait(self) -> None:
        """Returns when every held slot has its new values; to be called before the next backward pass at the latest."""
        for bucket in sorted(self._works, reverse=True):
            self._receive(bucket)

    def gather_state(self, shards: Sequence[Tensor], is_receiver: bool) -> list[Tensor]:
        """Whole tensors, like the held slots, from every rank's shards; [] if not a receiver. Every rank calls it."""
        self.wait()
        whole = []
        for index in range(len(self._layout.buckets)):
            self._gather(index, shards).wait()
            whole += [run.view_as(slot).clone() for slot, run in self._runs(index) if is_receiver]
        return whole

    def close(self) -> None:
        self.wait()
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _before(self, module: nn.Module, _: object) -> None:
        if self._works:
            for needed in [self._needs[module], *(self._needs[other] for other in self._never_called)]:
                for bucket in needed & self._works.keys():
                    self._receive(bucket)
        self._never_called.discard(module)

    def _gather(self, index: int, shards: Sequence[Tensor]) -> Work:
        bucket, spans = self._layout.buckets[index], self._reducer.spans
        assert spans is not None
        for slot, (_, run) in enumerate(self._runs(index), bucket.first):
            low, high = spans[slot]
            run[low:high].copy_(shards[slot])
        return self._reducer.shards(index).start_all_gather(self._reducer.sum.scratch(index), bucket.cuts)

    def _receive(self, index: int) -> None:
        self._works.pop(index).wait()
        slots, runs = zip(*self._runs(index), strict=True)
        torch._foreach_copy_([slot.detach().view(-1) for slot in slots], list(runs))

    def _runs(self, index: int) -> Iterator[tuple[Tensor, Tensor]]:
        # Each slot of a bucket: its tensor, and its run of the memory in which it travels.
        bucket = self._layout.buckets[index]
        slots = self._layout.held[bucket.first : bucket.stop]
        return zip((s.tensor for s in slots), bucket.views(self._reducer.sum.scratch(index)), strict=True)


class _Run(NamedTuple):
    """The index of a tensor's first block among those of its parameter, and whether this rank reports its norms."""

    parameter: str
    first: int
    is_owner: bool


class BlockNorms:
    """Norms of whole parameters, for an optimizer over `Reducer.owned`; `complete` sums over all blocks' ranks."""

    # A layer norm is defined over blocks of 4,096 elements (`optim.norms`) of each slot of a parameter, in order.
    # Shards are cut at the edges of those blocks, so each block lies on one rank as a whole, and only block norms
    # travel: two values (of weights and of gradient) for 4,096 elements. Every rank writes what it owns into a table of
    # zeros, the table is summed, and each rank joins the same blocks in the same order: the bits of
    # `optim.norms.layer_norms`.

    def __init__(self, reducer: Reducer, complete: Callable[[Tensor], object]) -> None:
        layout, spans, self._complete = reducer.layout, reducer.spans, complete
        self._counts: dict[str, int] = defaultdict(int)
        self._owned: dict[int, _Run] = {}
        # The first of a slot's norm blocks among its parameter's, which may have several slots (column blocks).
        begins = []
        for slot in layout.slots:
            begins.append(self._counts[slot.parameter])
            self._counts[slot.parameter] += -(-slot.tensor.numel() // BLOCK)
        for number, (tensor, slot, index) in enumerate(zip(reducer.owned, layout.held, layout.places, strict=True)):
            if spans is not None:  # shards: every element lies on one rank
                self._owned[id(tensor)] = _Run(slot.parameter, begins[index] + spans[number][0] // BLOCK, True)
            elif slot.layer is not None:  # a column block that several ranks may update alike
                self._owned[id(tensor)] = _Run(slot.parameter, begins[index], slot.is_owner)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norms of parameters, then of their gradients: float64 [len(tensors)]. Every rank calls it alike."""
        params = tensors[: len(tensors) // 2]
        runs = [self._owned.get(id(param)) for param in params]
        norms = block_norms(tensors)
        shared = list(dict.fromkeys(run.parameter for run in runs if run is not None))
        if shared:
            counts = [self._counts[parameter] for parameter in shared]
            # Zeros for the blocks of other ranks, and the bits of the norms as integers: so the sum of the tables is a
            # copy of each owner's norms, whatever algorithm adds them.
            table = torch.zeros(2, sum(counts), device=norms[0].device)
            rows = [dict(zip(shared, row.split(counts), strict=True)) for row in table]
            for number, own in enumerate(norms):
                half, run = number // len(params), runs[number % len(params)]
                if run is not None and run.is_owner:
                    rows[half][run.parameter][run.first : run.first + len(own)].copy_(own)
            self._complete(table.view(-1).view(torch.int32))
            for number in range(len(norms)):
                run = runs[number % len(params)]
                if run is not None:
                    norms[number] = rows[number // len(params)][run.parameter]
        return norms_from_blocks(norms)

"""The sharded update in anyone's training loop: in place of DistributedDataParallel and of `optimizer.step()`."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..comm.allreduce import ShardCollectives, create
from ..comm.groups import group_of
from ..errors import UserError
from ..optim import AdamW, Lamb, Lars, Sgd
from .ddp_hook import Wire, check_wire
from .layout import USUAL_MIB
from .reducer import Channel, Reducer, parameter_slots
from .update import BlockNorms, WeightGather, over_tensors

# each element is updated by itself, so that a slice is updated as the whole would be
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
)  # fmt: skip
_OF_ALL = ("step", "eta", "mu", "mu_product")  # keys of torch's optimizers whose values are one number for all elements


class ShardedUpdate:
    """Sums gradients over ranks while backward runs, and updates on each rank a shard of the weights only.

    Each rank has the optimizer's state of its shard: 1/N of it. The new weights are gathered during the next forward
    pass. Every rank makes one with the same model, and calls `step` in place of `optimizer.step()`:

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> update = ShardedUpdate(model, optimizer)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> update.step()
    []

    The gradient is the mean over ranks, as with DistributedDataParallel (one that a pass doesn't reach is zero), and
    `step` clears it. Rates and other values that a schedule sets in the optimizer's groups hold from the next `step`
    on. Call `wait` before anything but a module's call reads parameters (saving them, a compiled model). Buffers, such
    as batch norm's, are each rank's own.

    Args:
        model: Not wrapped; float32 parameters on one device, of which rank 0's values are taken, buffers too.
        optimizer: Over its parameters: one of `torusgd.optim` or an elementwise one of torch.optim, with no state yet.
        allreduce: See `torusgd.comm.allreduce.create`, as for `grid` and `profile`.
        wire: None sends gradients as float32. `float16` and `bfloat16` halve the bytes, scaled by a power of two a
            bucket. `exact` sends 32-bit integers: the same bits for any algorithm and grid, with one number of ranks.
            All but None hold a rank's own gradients until `step`, for a sum that overflows and is repeated.
        bucket_mib: Size of a bucket in MiB of float32.

    Raises:
        UserError: The model or the optimizer doesn't fit, or the all-reduce doesn't, or ranks differ in arguments.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, allreduce: str = "auto", wire: Wire | None = None, *,
        grid: tuple[int, int] | None = None, profile: Path | None = None, bucket_mib: float = USUAL_MIB,
    ) -> None:  # fmt: skip
        _check(model, optimizer, wire)
        device = next(model.parameters()).device
        self._optimizer = optimizer
        self._allreduce = create(allreduce, grid=grid, profile=profile, device=device)
        self.explanation: str = self._allreduce.explanation  # one line: what runs, and why
        self.underflow = 0.0  # fraction of the last step's elements that the wire rounded to zero
        self._world = group_of(device=device)
        self._world.require_same("ShardedUpdate", {"wire": wire, "bucket_mib": bucket_mib})
        for tensor in (*model.parameters(), *model.buffers()):
            self._world.broadcast(tensor.detach())
        channels = {1: Channel(self._allreduce, ShardCollectives(self._allreduce))}
        slots, maximum = parameter_slots(model), partial(self._world.all_reduce, maximum=True)
        self._reducer = Reducer(slots, wire or "float32", self._world.size, channels, maximum, rule=bucket_mib)
        self._parameters = [slot.tensor for slot in slots]
        self._shards: dict[Tensor, Tensor] = dict(zip(self._parameters, self._reducer.owned, strict=True))
        norms = BlockNorms(self._reducer, lambda table: self._allreduce.start(table).wait())
        # The optimizer that updates this rank's shards, with their state.
        self.sharded = over_tensors(optimizer, self._shards, norms)
        self._gather = WeightGather(model, self._reducer)
        self._may_redo = wire is not None
        self._is_accumulating = False
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._take, slot)) for slot, p in enumerate(self._parameters)
        ]
        self._hooks.append(optimizer.register_step_pre_hook(_refuse_step))
        self._begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For backward passes whose gradients add to those of the next one outside, which sends them all."""
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    @torch.no_grad()
    def step(self) -> list[str]:
        """Updates this rank's shard by the mean gradient, starts the gather, and clears the gradients.

        Returns the names of parameters with a gradient that is not finite on some rank: then no rank updates anything.
        """
        report = self._reducer.reduce(self._add_gradients).report
        self.underflow = report.underflow
        if not report.nonfinite:  # the same on all ranks: the report comes with the sums
            self._reducer.apply_mean(self._world.size)
            for mine, theirs in zip(self.sharded.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
            self.sharded.step()
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules look for it, and warn
            self._gather.start()
        for parameter in self._parameters:
            parameter.grad = None
        self._begin()
        return [self._reducer.names[slot] for slot in report.nonfinite]

    def wait(self) -> None:
        """Returns when this rank holds all new weights."""
        self._gather.wait()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state with whole tensors, on rank 0 ({} on the others); every rank calls it.

        An optimizer of the same class loads it, with or without shards.
        """
        whole = copy.copy(self._optimizer)
        whole.state = defaultdict(dict)
        is_first = self._world.rank == 0
        states = [self.sharded.state.get(shard, {}) for shard in self._reducer.owned]
        zeros = [torch.zeros_like(shard) for shard in self._reducer.owned]
        for key in dict.fromkeys(key for state in states for key in state):
            # Of a group without momentum, say, zeros travel.
            values = [state.get(key, zero) for state, zero in zip(states, zeros, strict=True)]
            pairs = zip(values, zeros, strict=True)
            if all(isinstance(value, Tensor) and value.shape == zero.shape for value, zero in pairs):
                values = self._gather.gather_state(values, is_first)
            else:
                values = [value.clone() if isinstance(value, Tensor) else value for value in values]
            for parameter, state, value in zip(self._parameters, states, values, strict=False):
                if key in state:
                    whole.state[parameter][key] = value
        return whole.state_dict() if is_first else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, here or of an unsharded optimizer of the class; each rank its part."""
        whole = copy.copy(self._optimizer)
        whole.state = defaultdict(dict)
        whole.load_state_dict(copy.deepcopy(state))
        for group, loaded in zip(self._optimizer.param_groups, whole.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        for (parameter, shard), (low, high) in zip(self._shards.items(), self._reducer.spans or (), strict=True):
            self.sharded.state[shard] = {
                # By its name: of a parameter without dimensions each value looks like a count.
                key: value.reshape(-1)[low:high].clone()
                if isinstance(value, Tensor) and value.shape == parameter.shape and key not in _OF_ALL
                else value
                for key, value in whole.state.get(parameter, {}).items()
            }

    def close(self) -> None:
        """Takes the hooks off the model and ends the groups; every rank calls it."""
        self._gather.close()
        for hook in self._hooks:
            hook.remove()
        self._allreduce.close()

    def _begin(self) -> None:
        # Opens the next step's sums, to which hooks add while backward runs.
        self._reducer.begin()
        self._reducer.begin_worker(last=True)
        self._is_open = True
        self._sent = [False] * len(self._parameters)

    def _add_gradients(self) -> None:
        # Adds the gradients that no hook has added: of passes under `no_sync` alone, or all of them for a redo.
        self._gather.wait()
        if not self._is_open:
            self._reducer.begin_worker(last=True)
        for slot, parameter in enumerate(self._parameters):
            if parameter.grad is not None and not self._sent[slot]:
                self._reducer.add(slot, parameter.grad)
        self._reducer.end_worker()
        self._is_open, self._sent = False, [False] * len(self._parameters)

    def _take(self, slot: int, parameter: Tensor) -> None:
        # Without a scale yet nothing can be added: `reduce` measures the gradients and then calls `_add_gradients`.
        if self._is_accumulating or self._reducer.sum.needs_measure:
            return
        if self._sent[slot]:
            raise UserError(
                f"{self._reducer.names[slot]}: a second backward pass before step(): put all but the last under "
                "`with update.no_sync():`"
            )
        self._gather.wait()  # new weights travel in the memory of the sums
        assert parameter.grad is not None
        # On a GPU a gradient waits for its bucket, while the caller may change it in place, if it stays for a redo.
        gradient = parameter.grad.clone() if self._may_redo and parameter.is_cuda else parameter.grad
        self._reducer.add(slot, gradient)
        self._sent[slot] = True
        if not self._may_redo:
            parameter.grad = None


def _refuse_step(*_: Any) -> None:
    raise UserError("optimizer.step(): it would take this rank's gradients alone; call the step() of ShardedUpdate")


def _check(model: nn.Module, optimizer: Optimizer, wire: str | None) -> None:
    # UserError for what would fail later, or silently.
    if isinstance(model, DistributedDataParallel):
        raise UserError("ShardedUpdate: takes the model itself, not DistributedDataParallel around it")
    check_wire(wire)
    if not isinstance(optimizer, (AdamW, Lamb, Lars, Sgd)) and type(optimizer) not in _ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__}: only optimizers that update each element by itself can be sharded, Lars "
            f"and Lamb: torusgd's own, or torch.optim's {', '.join(kind.__name__ for kind in _ELEMENTWISE)}"
        )
    if optimizer.state:
        raise UserError("optimizer: has a state already; make ShardedUpdate first, then call its load_state_dict")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    left = next((name for p, name in trained.items() if p not in held), None)
    if left is not None:
        raise UserError(f"{left}: requires a gradient, but the optimizer doesn't update it; give it both or neither")
    if held - trained.keys():
        raise UserError("optimizer: holds parameters that the model doesn't train; leave them out of its groups")
    for parameter, name in trained.items():
        if parameter.dtype != torch.float32 or not parameter.is_contiguous() or not parameter.numel():
            raise UserError(f"{name}: must be float32, contiguous and not empty; for lower precision use autocast")
    if len({p.device for p in trained}) != 1:
        raise UserError("model: must lie on one device, with a parameter to train")

"""The sharded update in anyone's training loop: in place of DistributedDataParallel and of `optimizer.step()`."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..comm.allreduce import create
from ..comm.buckets import USUAL_MIB
from ..comm.reduce_scatter import ShardCollectives
from ..errors import UserError
from ..optim import Lars, Sgd
from ..optim.slices import SliceNorms, over_slices
from .integer_sum import Span, SumStatus
from .reducer import Reducer
from .weight_gather import WeightGather

Wire = Literal["exact", "float16", "bfloat16"]
_ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""each element is updated by itself, so that a slice is updated as the whole would be"""
_MAX_ATTEMPTS = 3


class ShardedUpdate:
    """Sums gradients over ranks while backward runs, and updates on each rank a shard of the weights only.

    Each rank keeps the optimizer's state for its shard: 1/N of it. The new weights are gathered during the next forward
    pass. Every rank makes one with the same model, and calls `step` in place of `optimizer.step()`:

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> update = ShardedUpdate(model, optimizer)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> update.step()
    []

    The gradient is the mean over ranks, as with DistributedDataParallel (one that a pass doesn't reach is zero), and
    `step` clears it. Rates and other values that a schedule sets in the optimizer's groups hold from the next `step`
    on. What reads parameters otherwise than by calling modules (saving them, a compiled model) calls `wait` first.
    Buffers, such as batch norm's, are each rank's own.

    Args:
        model: Not wrapped; float32 parameters on one device, of which rank 0's values are taken, buffers too.
        optimizer: Over its parameters: `Lars`, `Sgd` or an elementwise one of torch.optim, with no state yet.
        allreduce: See `torusgd.comm.allreduce.create`, as for `grid` and `profile`.
        wire: None sends gradients as float32. `float16` and `bfloat16` halve the bytes, scaled by a power of two a
            bucket. `exact` sends 32-bit integers: the same bits for any algorithm and grid, with one number of ranks.
            All but None keep a rank's own gradients until `step`, for a sum that overflows and is repeated.
        bucket_mib: Size of a bucket in MiB of float32.

    Raises:
        UserError: The model or the optimizer doesn't fit, or the all-reduce doesn't.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        allreduce: str = "auto",
        wire: Wire | None = None,
        *,
        grid: tuple[int, int] | None = None,
        profile: Path | None = None,
        bucket_mib: float = USUAL_MIB,
    ) -> None:
        _check(model, optimizer, wire)
        device = next(model.parameters()).device
        self._optimizer = optimizer
        self._allreduce = create(allreduce, grid=grid, profile=profile, device=device)
        self.explanation: str = self._allreduce.explanation
        """one line: what runs, and why"""
        self.underflow = 0.0
        """share of the last step's elements that a 16-bit wire rounded to zero"""
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self._ranks > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
        shards = ShardCollectives(self._allreduce)
        self._reducer = Reducer(model, wire or "float32", self._ranks, self._allreduce, bucket_mib, shards)
        self._reducer.close()  # its hooks: ours know of `no_sync`, and keep what a repetition needs
        self._keeps = wire is not None
        parameters, pieces, spans = self._reducer.parameters, self._reducer.pieces, self._reducer.spans
        assert spans is not None
        self._spans: dict[Tensor, Span] = dict(zip(parameters, spans, strict=True))
        self._slices: dict[Tensor, Tensor] = dict(zip(parameters, pieces, strict=True))
        norms = SliceNorms(
            [(self._slices[p], self._spans[p][0], p.numel()) for p in parameters],
            lambda table: self._allreduce.start(table).wait(),
        )
        self._sliced = over_slices(optimizer, self._slices, norms)
        self._weight_gather = WeightGather(model, self._reducer, shards)
        self._sent = [False] * len(parameters)
        self._is_accumulating = False
        self._hooks = [p.register_post_accumulate_grad_hook(self._make_hook(i)) for i, p in enumerate(parameters)]
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

        Returns:
            Names of parameters with a gradient that is not finite on some rank; then no rank has updated anything.
        """
        gradients = [parameter.grad for parameter in self._reducer.parameters]
        status = None if self._reducer.sum.needs_measure else self._finish(gradients)
        attempts = 0
        while status is None or (status.overflow and not status.nonfinite):
            attempts += 1
            assert attempts < _MAX_ATTEMPTS, "a sum leaves the range even at a fresh scale"
            self._measure(gradients)
            self._begin()
            status = self._finish(gradients)
        self.underflow = status.underflow
        if not status.nonfinite:
            self._reducer.apply_mean()
            for mine, theirs in zip(self._sliced.param_groups, self._optimizer.param_groups, strict=True):
                mine.update({key: value for key, value in theirs.items() if key != "params"})
            self._sliced.step()
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedules look for it, and warn
            self._weight_gather.start()
        for parameter in self._reducer.parameters:
            parameter.grad = None
        self._begin()
        return [self._reducer.names[slot] for slot in status.nonfinite]

    def wait(self) -> None:
        """Returns when this rank holds all new weights."""
        self._weight_gather.wait()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state with whole tensors, on rank 0 ({} on the others); every rank calls it.

        The given optimizer's class loads it, with or without shards.
        """
        whole = copy.copy(self._optimizer)
        whole.state = defaultdict(dict)
        is_first = self._ranks == 1 or dist.get_rank() == 0
        states = [self._sliced.state.get(piece, {}) for piece in self._reducer.pieces]
        for key in states[0]:
            values = [state[key] for state in states]
            if _are_sliced(values, self._reducer.pieces):
                values = self._weight_gather.collect(values, is_first)
            else:
                values = [value.clone() if isinstance(value, Tensor) else value for value in values]
            for parameter, value in zip(self._reducer.parameters, values, strict=False):
                whole.state[parameter][key] = value
        return whole.state_dict() if is_first else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, or that of an unsharded optimizer of the class; each rank its part."""
        whole = copy.copy(self._optimizer)
        whole.state = defaultdict(dict)
        whole.load_state_dict(copy.deepcopy(state))
        for group, loaded in zip(self._optimizer.param_groups, whole.param_groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
        for parameter, piece in self._slices.items():
            low, high = self._spans[parameter]
            self._sliced.state[piece] = {
                key: value.reshape(-1)[low:high].clone() if _is_whole(value, parameter) else value
                for key, value in whole.state.get(parameter, {}).items()
            }

    def close(self) -> None:
        """Takes the hooks off the model and ends the groups; every rank calls it."""
        self._weight_gather.close()
        for hook in self._hooks:
            hook.remove()
        self._allreduce.close()

    def _begin(self) -> None:
        self._reducer.begin(measuring=False)
        self._reducer.begin_worker(last=True)
        self._sent = [False] * len(self._sent)

    def _finish(self, gradients: Sequence[Tensor | None]) -> SumStatus:
        """Also sends what no hook has: of passes under `no_sync` alone, or all of a repetition."""
        self._weight_gather.wait()
        for slot, gradient in enumerate(gradients):
            if gradient is not None and not self._sent[slot]:
                self._reducer.take(slot, gradient)
        self._reducer.end_worker()
        return self._reducer.finish()

    def _measure(self, gradients: Sequence[Tensor | None]) -> None:
        self._reducer.begin(measuring=True)
        for slot, gradient in enumerate(gradients):
            if gradient is not None:
                self._reducer.take(slot, gradient)
        self._reducer.finish_measuring()

    def _make_hook(self, slot: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._is_accumulating or self._reducer.sum.needs_measure:
                return
            if self._sent[slot]:
                raise UserError(
                    f"{self._reducer.names[slot]}: a second backward pass before step(): put all but the last under "
                    "`with update.no_sync():`"
                )
            self._weight_gather.wait()
            assert parameter.grad is not None
            self._reducer.take(slot, parameter.grad)
            self._sent[slot] = True
            if not self._keeps:
                parameter.grad = None

        return hook


def _are_sliced(values: Sequence[Any], pieces: Sequence[Tensor]) -> bool:
    return all(isinstance(v, Tensor) and v.shape == piece.shape for v, piece in zip(values, pieces, strict=True))


def _is_whole(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _check(model: nn.Module, optimizer: Optimizer, wire: str | None) -> None:
    """UserError for what would fail later, or silently."""
    if isinstance(model, DistributedDataParallel):
        raise UserError("ShardedUpdate: takes the model itself, not DistributedDataParallel around it")
    if wire not in (None, "exact", "float16", "bfloat16"):
        raise UserError(f"wire {wire}: unknown; one of exact, float16, bfloat16, or None")
    if not isinstance(optimizer, (Lars, Sgd)) and type(optimizer) not in _ELEMENTWISE:
        raise UserError(
            f"{type(optimizer).__name__}: only optimizers that update each element by itself can be sharded, and Lars: "
            f"torusgd's Lars and Sgd, or torch.optim's {', '.join(kind.__name__ for kind in _ELEMENTWISE)}"
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
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            raise UserError(f"{name}: must be float32 and contiguous; for lower precision use autocast")
    if len({p.device for p in trained}) != 1:
        raise UserError("model: must lie on one device, with a parameter to train")

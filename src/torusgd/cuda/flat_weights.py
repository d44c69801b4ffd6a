"""Weights and momentum in one piece of memory each, and an update of all of them that the device may refuse.

The host launches an update before anybody knows whether the step's gradients may be used. So the update reads `going`,
a value on the device, and changes nothing if it is zero. One operator takes all tensors at once,
`torch.ops.torusgd.update`; its form here computes on copies by `momentum_step` or `lars`, and takes the result or
leaves it, with the bits of `Sgd` and `Lars` on the same device. `triton_kernels` has it as one kernel, or with LARS as
three, which round as torch's foreach operators do. The rate and the other numbers of each tensor stand in a table on
the device, which the host writes before each update.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..optim.lars import VARIANTS, Lars, denominator_decay, lars
from ..optim.sgd import Sgd, momentum_step
from .kernels import operators, register, write_table

# elements at whose multiples a tensor begins, 64 bytes: kernels read whole vectors
_ALIGNED = 16
# rules beside the variants of LARS
_SGD, _NESTEROV = "sgd", "nesterov"
# Of the table: rate, weight decay, trust coefficient (zero: the rate follows no norm), the factor on the weights' norm
# in LARS' denominator, and LARS' eps.
COLUMNS = 5


class FlatUpdate:
    """Lays an optimizer's tensors and their momentum in one piece of memory each, and updates them at once."""

    def __init__(self, optimizer: Sgd | Lars, tensors: Sequence[Tensor]) -> None:
        self._optimizer, self._tensors = optimizer, list(tensors)
        self._offsets = [*accumulate((-(-tensor.numel() // _ALIGNED) * _ALIGNED for tensor in tensors), initial=0)]
        first, length = tensors[0], self._offsets.pop()
        self.weights = torch.zeros(length, device=first.device)
        self.momenta = torch.zeros(length, device=first.device)
        self._kinds = {
            tensor: (number, bool(group["scaled"][index]) if "scaled" in group else False)
            for number, group in enumerate(optimizer.param_groups)
            for index, tensor in enumerate(group["params"])
        }
        self._always = torch.ones(1, device=first.device)
        self._values = torch.zeros(len(tensors), COLUMNS, dtype=torch.float64, device=first.device)
        self.is_begun = False  # whether there was an update
        for tensor, weights in zip(tensors, self._runs(self.weights), strict=True):
            weights.copy_(tensor.detach().view(-1))
            tensor.data = weights.view_as(tensor)

    def constants(self) -> tuple[float, str, float]:
        """Momentum, rule and LARS' peak rate: what is the same for all tensors."""
        first = self._optimizer.param_groups[0]
        rule = _NESTEROV if first.get("nesterov") else first.get("variant", _SGD)
        return first["momentum"], rule, first.get("peak_lr", 0.0)

    def _begin(self) -> None:
        # Only now, since before the first update a state has no momentum in either form. That of a checkpoint moves.
        self.is_begun = True
        for tensor, momenta in zip(self._tensors, self._runs(self.momenta), strict=True):
            state = self._optimizer.state[tensor]
            if "momentum_buffer" in state:
                momenta.copy_(state["momentum_buffer"].reshape(-1))
            state["momentum_buffer"] = momenta.view_as(tensor)

    def step(self) -> None:
        """Updates all tensors by their `grad`, in any case."""
        self.update(self._always)

    def write_values(self) -> None:
        """Writes the optimizer's values of this step into the table."""
        _, rule, peak = self.constants()
        groups, rows = self._optimizer.param_groups, []
        for tensor in self._tensors:
            number, is_scaled = self._kinds[tensor]
            group = groups[number]
            decay = denominator_decay(VARIANTS[rule], group["weight_decay"], peak) if rule in VARIANTS else 0.0
            trust = (group.get("trust") or 0.0) if is_scaled else 0.0
            rows.append((group["lr"], group["weight_decay"], trust, decay, group.get("eps", 0.0)))
        write_table(self._values, rows)

    def update(self, going: Tensor) -> None:
        """Updates all tensors by their `grad`, unless `going` (float32 [1]) is zero."""
        if not self.is_begun:
            self._begin()
        self.write_values()
        gradients = [tensor.grad for tensor in self._tensors if tensor.grad is not None]
        assert len(gradients) == len(self._tensors), "every tensor has its mean gradient"
        given = Update(self.weights, self.momenta, gradients, going, self._values, self._offsets, *self.constants())
        operators.update(*vars(given).values())

    def _runs(self, flat: Tensor) -> list[Tensor]:
        return [flat[at : at + tensor.numel()] for at, tensor in zip(self._offsets, self._tensors, strict=True)]


@dataclass(frozen=True)
class Update:
    """What `update` reads and writes, in the order of the operator's arguments; weights and momenta are flat."""

    weights: Tensor
    momenta: Tensor
    gradients: Sequence[Tensor]  # float32, of each tensor
    going: Tensor  # float32 [1]; zero: nothing changes
    values: Tensor  # float64 [tensors, COLUMNS]; a kernel may use it for its own ends afterwards
    offsets: Sequence[int]  # of the tensors in the flat memory
    momentum: float
    rule: str  # `sgd`, `nesterov`, or a variant of LARS
    peak: float  # highest rate of the schedule, for LARS


def update(u: Update) -> None:
    """One update of tensors in flat memory by torch's own operators, or none."""
    new_weights, new_momenta = u.weights.clone(), u.momenta.clone()
    alike: dict[tuple[float, ...], list[int]] = {}
    for number, row in enumerate(u.values.tolist()):
        alike.setdefault(tuple(row), []).append(number)
    for (lr, decay, trust, _, eps), mine in alike.items():
        runs = [slice(u.offsets[i], u.offsets[i] + u.gradients[i].numel()) for i in mine]
        params, buffers = [new_weights[run] for run in runs], [new_momenta[run] for run in runs]
        grads = [u.gradients[i].reshape(-1) for i in mine]
        how: dict[str, Any] = {"lr": lr, "momentum": u.momentum, "weight_decay": decay}
        if u.rule in VARIANTS:
            how |= {"trust": trust or None, "eps": eps, "variant": u.rule, "peak_lr": u.peak}
            lars(params, grads, buffers, **how)
        else:
            momentum_step(params, grads, buffers, **how, nesterov=u.rule == _NESTEROV)
    u.weights.copy_(torch.where(u.going > 0, new_weights, u.weights))
    u.momenta.copy_(torch.where(u.going > 0, new_momenta, u.momenta))


register(update, writes={"weights", "momenta", "values"})

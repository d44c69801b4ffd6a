"""Weights and momentum in one piece of memory each, and an update of all of them that the device may refuse.

On a GPU the host hands over an update before anybody knows whether the step's gradients may be used. So the update
asks `going`, a value on the device, and where that is zero everything stays as it is. One operator of torch takes all
tensors at once, `torch.ops.torusgd.update`; its form here computes aside by `momentum_step` or `lars`, and then takes
the result or leaves it, so that it has the bits of `Sgd` and `Lars` on the same device. `triton_update` has it in one
kernel, or with LARS in three, that round as torch's foreach operators do.

The numbers that change from step to step may come by a table on the device, for an update that is captured once in a
CUDA graph (`train.update_graph`): there the host writes them before each replay.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import has_kernels, register, write_table
from .lars import VARIANTS, Lars, denominator_decay, lars
from .sgd import Sgd, momentum_step

_ALIGNED = 16
"""elements at whose multiples a tensor begins, 64 bytes: kernels read whole vectors"""
_SGD, _NESTEROV = "sgd", "nesterov"
"""rules beside the variants of LARS"""
_COLUMNS = 5
"""of the table of a step's numbers, see `rows_of`"""


class FlatUpdate:
    """Lays the tensors of an optimizer, and their momentum, in one piece of memory each, and updates them at once.

    Args:
        optimizer: `Sgd` or `Lars`, over these tensors; its groups' values are read at each step, its state is kept.
        tensors: float32, contiguous; they keep their identity and their values.
    """

    def __init__(self, optimizer: Sgd | Lars, tensors: Sequence[Tensor]) -> None:
        self._optimizer, self._tensors = optimizer, list(tensors)
        self._offsets = offsets_of([tensor.numel() for tensor in tensors])
        first, length = tensors[0], self._offsets.pop()
        self.weights = torch.zeros(length, device=first.device)
        self.momenta = torch.zeros(length, device=first.device)
        kinds = {
            tensor: (number, bool(group["scaled"][place]) if "scaled" in group else False)
            for number, group in enumerate(optimizer.param_groups)
            for place, tensor in enumerate(group["params"])
        }
        self._groups = [kinds[tensor][0] for tensor in tensors]
        self._scaled = [kinds[tensor][1] for tensor in tensors]
        self._always = torch.ones(1, device=first.device)
        self._values = torch.zeros(len(tensors), _COLUMNS, dtype=torch.float64, device=first.device)
        for tensor, weights, momenta in zip(tensors, self._runs(self.weights), self._runs(self.momenta), strict=True):
            weights.copy_(tensor.detach().view(-1))
            tensor.data = weights.view_as(tensor)
            optimizer.state[tensor]["momentum_buffer"] = momenta.view_as(tensor)

    @property
    def can_be_captured(self) -> bool:
        """Whether an update reads `write_rates`: torch's own operators, which a GPU runs without Triton, can't."""
        return not self.weights.is_cuda or has_kernels(torch.cuda.get_device_capability())

    def constants(self) -> tuple[object, ...]:
        """The optimizer's numbers that a captured update keeps as they were; those of `write_rates` it reads."""
        *_, trusts, momentum, rule, eps, peak, foreach = self._numbers()
        return (tuple(trusts), momentum, rule, eps, peak, foreach)

    def write_rates(self) -> None:
        """Puts the optimizer's rates and weight decays where a captured update reads them."""
        groups, scaled, rates, decays, trusts, _, rule, eps, peak, _ = self._numbers()
        write_table(self._values, rows_of(groups, scaled, rates, decays, trusts, rule, eps, peak))

    def step(self, going: Tensor | None = None, written: bool = False) -> None:
        """Updates all tensors by their `grad`.

        Args:
            going: float32 [1]: nothing changes where it is zero; None: in any case.
            written: The rates and weight decays are those of `write_rates`.
        """
        gradients = [tensor.grad for tensor in self._tensors if tensor.grad is not None]
        assert len(gradients) == len(self._tensors), "every tensor has its mean gradient"
        torch.ops.torusgd.update(
            self.weights,
            self.momenta,
            gradients,
            self._always if going is None else going,
            self._offsets,
            *self._numbers(),
            self._values if written else None,
        )

    def _numbers(self) -> tuple[Any, ...]:
        """What `update` takes from `groups` to `foreach`."""
        groups, first = self._optimizer.param_groups, self._optimizer.param_groups[0]
        return (
            self._groups,
            self._scaled,
            [group["lr"] for group in groups],
            [group["weight_decay"] for group in groups],
            [group.get("trust") or 0.0 for group in groups],
            first["momentum"],
            _NESTEROV if first.get("nesterov") else first.get("variant", _SGD),
            first.get("eps", 0.0),
            first.get("peak_lr", 0.0),
            first.get("foreach"),
        )

    def _runs(self, flat: Tensor) -> list[Tensor]:
        return [flat[at : at + tensor.numel()] for at, tensor in zip(self._offsets, self._tensors, strict=True)]


def offsets_of(numels: Sequence[int]) -> list[int]:
    """Where tensors of so many elements begin in one piece of memory, and its length.

    >>> offsets_of([3, 16, 20])
    [0, 16, 32, 64]
    """
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + -(-numel // _ALIGNED) * _ALIGNED)
    return offsets


def rows_of(
    groups: Sequence[int],
    scaled: Sequence[bool],
    rates: Sequence[float],
    decays: Sequence[float],
    trusts: Sequence[float],
    rule: str,
    eps: float,
    peak: float,
) -> list[tuple[float, ...]]:
    """Of each tensor its rate, weight decay, trust coefficient (zero: its rate follows no norm), the factor on its norm
    in LARS' denominator, and LARS' eps. The arguments are those of `update`."""
    variant = VARIANTS.get(rule)
    return [
        (
            rates[group],
            decays[group],
            trusts[group] if is_scaled else 0.0,
            0.0 if variant is None else denominator_decay(variant, decays[group], peak),
            eps,
        )
        for group, is_scaled in zip(groups, scaled, strict=True)
    ]


def update(
    weights: Tensor,
    momenta: Tensor,
    gradients: Sequence[Tensor],
    going: Tensor,
    offsets: Sequence[int],
    groups: Sequence[int],
    scaled: Sequence[bool],
    rates: Sequence[float],
    decays: Sequence[float],
    trusts: Sequence[float],
    momentum: float,
    rule: str,
    eps: float,
    peak: float,
    foreach: bool | None,
    values: Tensor | None = None,
) -> None:
    """One update of tensors in flat memory by torch's own operators, or none.

    Args:
        weights: float32, flat.
        momenta: float32, flat, alike.
        gradients: float32, of each tensor.
        going: float32 [1]; zero: nothing changes.
        offsets: Of each tensor in the flat memory.
        groups: Of each tensor the number of its group.
        scaled: Whether its rate follows its norms (LARS).
        rates: Of each group.
        decays: Of each group its weight decay.
        trusts: Of each group its trust coefficient; zero: none of its tensors is scaled.
        momentum: Of all.
        rule: `sgd`, `nesterov`, or a variant of LARS.
        eps: Of LARS.
        peak: Of LARS.
        foreach: Of LARS.
        values: float64 [tensors, 5], `rows_of`, from which rates and decays are taken; None: those given.
    """
    aside, pushed = weights.clone(), momenta.clone()
    kinds = sorted(set(zip(groups, scaled, strict=True)))
    for group, is_scaled in kinds:
        mine = [i for i, kind in enumerate(zip(groups, scaled, strict=True)) if kind == (group, is_scaled)]
        runs = [slice(offsets[i], offsets[i] + gradients[i].numel()) for i in mine]
        params, buffers = [aside[run] for run in runs], [pushed[run] for run in runs]
        grads = [gradients[i].reshape(-1) for i in mine]
        lr, decay = (rates[group], decays[group]) if values is None else values[mine[0], :2].tolist()
        if rule in (_SGD, _NESTEROV):
            momentum_step(
                params, grads, buffers, lr=lr, momentum=momentum, weight_decay=decay, nesterov=rule == _NESTEROV
            )
            continue
        trust = trusts[group] if is_scaled and trusts[group] else None
        lars(
            params, grads, buffers, lr=lr, momentum=momentum, weight_decay=decay, trust=trust, eps=eps, variant=rule,
            peak_lr=peak, foreach=foreach,
        )  # fmt: skip
    weights.copy_(torch.where(going > 0, aside, weights))
    momenta.copy_(torch.where(going > 0, pushed, momenta))


register(
    "update(Tensor(a!) weights, Tensor(b!) momenta, Tensor[] gradients, Tensor going, int[] offsets, int[] groups, "
    "bool[] scaled, float[] rates, float[] decays, float[] trusts, float momentum, str rule, float eps, float peak, "
    "bool? foreach, Tensor? values=None) -> ()",
    update,
    "torusgd.cuda.triton_update",
)

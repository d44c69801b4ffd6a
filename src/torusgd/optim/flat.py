"""Weights and momentum in one piece of memory each, and an update of all of them that the device may refuse.

On a GPU the host hands over an update before anybody knows whether the step's gradients may be used. So the update
asks `going`, a value on the device, and where that is zero everything stays as it is. One operator of torch takes all
tensors at once, `torch.ops.torusgd.update`; its form here computes aside by `momentum_step` or `lars`, and then takes
the result or leaves it, so that it has the bits of `Sgd` and `Lars` on the same device. `triton_update` has it in one
kernel, or with LARS in three, that round as torch's foreach operators do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import register
from .lars import Lars, lars
from .sgd import Sgd, momentum_step

_ALIGNED = 16
"""elements at whose multiples a tensor begins, 64 bytes: kernels read whole vectors"""
_SGD, _NESTEROV = "sgd", "nesterov"
"""rules beside the variants of LARS"""


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
        for tensor, weights, momenta in zip(tensors, self._runs(self.weights), self._runs(self.momenta), strict=True):
            weights.copy_(tensor.detach().view(-1))
            tensor.data = weights.view_as(tensor)
            optimizer.state[tensor]["momentum_buffer"] = momenta.view_as(tensor)

    def step(self, going: Tensor | None = None) -> None:
        """Updates all tensors by their `grad`, unless `going` (float32 [1]) is zero; None: in any case."""
        groups, first = self._optimizer.param_groups, self._optimizer.param_groups[0]
        gradients = [tensor.grad for tensor in self._tensors if tensor.grad is not None]
        assert len(gradients) == len(self._tensors), "every tensor has its mean gradient"
        rule = _NESTEROV if first.get("nesterov") else first.get("variant", _SGD)
        torch.ops.torusgd.update(
            self.weights,
            self.momenta,
            gradients,
            self._always if going is None else going,
            self._offsets,
            self._groups,
            self._scaled,
            [group["lr"] for group in groups],
            [group["weight_decay"] for group in groups],
            [group.get("trust") or 0.0 for group in groups],
            first["momentum"],
            rule,
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
    """
    aside, pushed = weights.clone(), momenta.clone()
    kinds = sorted(set(zip(groups, scaled, strict=True)))
    for group, is_scaled in kinds:
        mine = [i for i, kind in enumerate(zip(groups, scaled, strict=True)) if kind == (group, is_scaled)]
        runs = [slice(offsets[i], offsets[i] + gradients[i].numel()) for i in mine]
        params, buffers = [aside[run] for run in runs], [pushed[run] for run in runs]
        grads = [gradients[i].reshape(-1) for i in mine]
        lr, decay = rates[group], decays[group]
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
    "bool? foreach) -> ()",
    update,
    "torusgd.optim.triton_update",
)

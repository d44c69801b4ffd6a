"""AdamW and LAMB, whose updates are bit for bit the same when a tensor is cut at block edges.

    m <- beta1 * m + (1 - beta1) * g                      v <- beta2 * v + (1 - beta2) * g * g
    u = (m / (1 - beta1 ** t)) / (sqrt(v / (1 - beta2 ** t)) + eps)
    AdamW:  w <- w - lr * weight_decay * w - lr * u                          (Loshchilov and Hutter, arXiv 1711.05101)
    LAMB:   r = u + weight_decay * w;  w <- w - lr * (|w| / |r|) * r         (You et al., arXiv 1904.00962, algorithm 2)

They are made of additions, multiplications, divisions and square roots of whole tensors, each rounded once. torch's
fused kernel, and its `lerp`, `addcmul` and `add(alpha)`, multiply and add in one rounding if a vector is full and in
two at a tensor's end, so that a slice would not be updated as the whole is.

If an exact sum rounds a gradient to zero, m and v of the element decay; if v is zero, so is the update.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ..errors import UserError
from ..scalars import power
from .lars import Norms
from .norms import layer_norms
from .sgd import add_param_group, has_gradient, in_own_groups, value_of


class AdamW(Optimizer):
    """Adam with decoupled weight decay; the groups' values are read at each step, so a schedule just sets them.

    The state is that of torch.optim.AdamW (`exp_avg`, `exp_avg_sq`, `step`), and either loads the other's state_dict.
    `momentum` is beta1, under the name that a schedule sets for every optimizer. UserError for a value out of range.
    """

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, dict(lr=lr, momentum=momentum, beta2=beta2, eps=eps, weight_decay=weight_decay))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        for key in ("lr", "weight_decay"):
            if not 0 <= group[key] < float("inf"):
                raise UserError(f"{key} = {group[key]}: must be a number of at least 0")
        for key in ("momentum", "beta2"):
            if not 0 <= group[key] < 1:
                raise UserError(f"{key} = {group[key]}: must be at least 0 and below 1")
        if not 0 < (eps := group["eps"]) < float("inf"):
            raise UserError(f"eps = {eps}: must be above 0, or an element without a gradient is divided by zero")
        add_param_group(self, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = value_of(closure)
        for group in self.param_groups:
            params = [param for param in group["params"] if has_gradient(param)]
            if params:
                self._apply(group, params, [self._direction(param, group) for param in params])
        return loss

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for group in found["param_groups"]:
            group["betas"] = (group["momentum"], group["beta2"])  # where torch's looks
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(in_own_groups(self, state_dict))
        for group in self.param_groups:
            group["momentum"], group["beta2"] = group.pop("betas", (group["momentum"], group["beta2"]))

    def _direction(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        """u of one parameter, after its moments have taken in the gradient."""
        assert param.grad is not None
        state = self.state[param]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        beta1, beta2, number = group["momentum"], group["beta2"], int(state["step"])
        gradient = param.grad
        # The product in a tensor of its own, and then the sum: `add_(gradient, alpha=...)` may round only once.
        state["exp_avg"].mul_(beta1).add_(gradient * (1 - beta1))
        state["exp_avg_sq"].mul_(beta2).add_(gradient.square().mul_(1 - beta2))
        # The bias corrections are Python floats, so that the step's number never waits for a device.
        denominator = state["exp_avg_sq"].div(1 - power(beta2, number)).sqrt_().add_(group["eps"])
        return state["exp_avg"].div(1 - power(beta1, number)).div_(denominator)

    def _apply(self, group: dict[str, Any], params: list[Tensor], directions: list[Tensor]) -> None:
        for param, direction in zip(params, directions, strict=True):
            param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction.mul_(group["lr"]))


class Lamb(AdamW):
    """LAMB: AdamW's direction with decay, each layer's length made that of its weights times the rate.

    A group with `trust` False takes the plain rate: batch norm and biases, as in the published codes. The ratio is 1 if
    either norm is zero, as there. `norms` is called as by `Lars`, at most once a group, with its parameters and then
    their directions. UserError for a value out of range.
    """

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, beta2: float = 0.999, eps: float = 1e-6,
        weight_decay: float = 0.0, norms: Norms = layer_norms,
    ) -> None:  # fmt: skip
        self.norms = norms
        super().__init__(params, lr, momentum, beta2, eps, weight_decay)

    def __getstate__(self) -> dict[str, Any]:  # for copies; torch's leaves out what it doesn't know
        return super().__getstate__() | {"norms": self.norms}

    def _apply(self, group: dict[str, Any], params: list[Tensor], directions: list[Tensor]) -> None:
        for param, direction in zip(params, directions, strict=True):
            direction.add_(param * group["weight_decay"])
        # One call for weights and directions: a sharded run exchanges both kinds of norms in one message.
        rates = [group["lr"]] * len(params)
        if group.get("trust", True):
            weights, steps = self.norms([*params, *directions]).tensor_split(2)
            rates = (group["lr"] * torch.where((weights == 0) | (steps == 0), 1.0, weights / steps)).tolist()
        for param, direction, rate in zip(params, directions, rates, strict=True):
            param.sub_(direction.mul_(rate))

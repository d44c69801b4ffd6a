"""LARS: each layer's rate follows the ratio of its weights' norm to its gradient's (You et al., arXiv 1708.03888).

    ratio = trust * |w| / (|g| + weight_decay * |w|)
    v <- momentum * v + lr * ratio * (g + weight_decay * w)
    w <- w - v

Published codes differ from the paper and from each other in small ways that change the numbers; `VARIANTS` holds those
differences as data. They agree in leaving batch norm and biases out: a bias begins at zero, where a ratio of norms says
nothing, and all of them together are a thousandth of a network.

Norms are taken by blocks (`torusgd.optim.norms`) and the update is elementwise, so a run that shards its parameters at
block edges ends with the same bits.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ..arithmetic import is_portable
from ..errors import UserError
from .norms import layer_norms
from .sgd import add_param_group, has_gradient, in_own_groups, momentum_buffer, momentum_step, value_of

Norms = Callable[[Sequence[Tensor]], Tensor]


class Variant(NamedTuple):
    """The choices in which published codes differ; the defaults are the paper's."""

    # The factor on |w| in the denominator; `premultiplied` is weight_decay * peak_lr.
    decay: Literal["weight_decay", "none", "premultiplied"] = "weight_decay"
    eps: bool = True  # whether the denominator takes an epsilon
    # Whether epsilon is added only to a denominator below it, and the ratio is 1 if |w| is below it.
    eps_is_threshold: bool = False
    decayed_gradient: bool = False  # whether |g| is the norm of g + weight_decay * w
    zero_gradient_is_plain: bool = True  # whether the ratio is 1 if |g| = 0, and not only if |w| = 0
    clip: bool = False  # whether the layer's rate is min(lr, ratio) instead of lr * ratio
    rate_in_buffer: bool = True  # True: v <- m v + rate * g; w <- w - v. False: v <- m v + g; w <- w - rate * v


VARIANTS: Mapping[str, Variant] = {
    # You et al., arXiv 1708.03888; epsilon (0 by default) is ours.
    "paper": Variant(),
    # Intel Caffe and early nvcaffe: no epsilon. The one family that scales batch norm and biases as well.
    "caffe": Variant(eps=False),
    # nvcaffe since it calls this "LARC", policies `scale` and `clip`: no weight decay in the denominator.
    "larc": Variant(decay="none", eps=False),
    "larc-clip": Variant(decay="none", eps=False, clip=True),
    # tf.contrib.opt.LARSOptimizer: its gradient already holds the weight decay; rate outside the momentum.
    "tensorflow": Variant(decayed_gradient=True, rate_in_buffer=False),
    # MXNet multi_lars with its SGD: the paper's form with an epsilon.
    "mxnet": Variant(),
    # Fujitsu's MLPerf v0.6 code keeps weight decay multiplied by the peak rate, and only a zero |w| turns scaling off.
    "fujitsu": Variant(decay="premultiplied", zero_gradient_is_plain=False),
    # Sony's Neural Network Libraries (sony/nnabla, src/nbla/solver/generic/lars.cpp; trust 0.001 and eps 1e-6 there).
    "nnabla": Variant(eps_is_threshold=True, zero_gradient_is_plain=False),
}

# The values of a group that are arguments of `lars`.
_HYPER = ("lr", "momentum", "weight_decay", "trust", "eps", "variant", "peak_lr", "foreach")


class Lars(Optimizer):
    """LARS with momentum; the groups' values are read at each step, so a schedule just sets them.

    Parameters of one dimension or none (batch norm, biases) are updated with the plain rate, as in the published codes.
    If a group names its own `trust`, that holds for all of its parameters instead: a number scales each of them, None
    scales none (`torusgd.optim.build_optimizer` makes such groups). Weight decay is the group's for every parameter.

    The state is one `momentum_buffer` a parameter as in torch.optim.SGD, and SGD's state_dict can be loaded; with a
    variant that has the rate in the buffer (all but `tensorflow`) the buffer is in units of weight, not of gradient.

    Args:
        lr: Rate of the whole model, before the trust ratio.
        trust: Trust coefficient, or None for the plain rate.
        trust_one_dimensional: True scales one-dimensional parameters like all others.
        eps: Term of the trust ratio's denominator; variant `nnabla` adds it to a smaller denominator only.
        variant: Key of `VARIANTS`.
        peak_lr: Highest rate of the schedule, a factor in the denominator of variant `fujitsu` alone. None: `lr`.
        foreach: None is the fastest way of the device: torch's fused kernel a layer on CPU, foreach elsewhere (no
            host sync). True is foreach, False the plain loop.
        norms: Function from a list of tensors to their norms, float64 [n]: called at most once a group and step, with
            its scaled parameters and then their gradients. A sharded run exchanges block norms here.

    UserError for an unknown variant, a value out of range, or an epsilon for a variant that has none.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = Lars(layer.parameters(), lr=1.0, weight_decay=1e-4)
    >>> optimizer.param_groups[0]["scaled"]  # the weight, and not the bias
    [True, False]
    """

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
        trust: float | None = 0.001, trust_one_dimensional: bool = False, eps: float = 0.0, variant: str = "paper",
        peak_lr: float | None = None, foreach: bool | None = None, norms: Norms = layer_norms,
    ) -> None:  # fmt: skip
        self.norms = norms
        self.trust_one_dimensional = trust_one_dimensional
        given = (lr, momentum, weight_decay, trust, eps, variant, peak_lr, foreach)
        super().__init__(params, dict(zip(_HYPER, given, strict=True)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        variant = group["variant"]
        if variant not in VARIANTS:
            raise UserError(f"variant = {variant!r}: no LARS variant; one of {', '.join(VARIANTS)}")
        for key in ("lr", "momentum", "weight_decay", "eps"):
            if not 0 <= group[key] < float("inf"):
                raise UserError(f"{key} = {group[key]}: must be a number of at least 0")
        if group["momentum"] >= 1:
            raise UserError(f"momentum = {group['momentum']}: must be below 1")
        if group["trust"] is not None and not 0 < group["trust"] < float("inf"):
            raise UserError(f"trust = {group['trust']}: must be above 0, or None for the plain rate")
        if group["eps"] > 0 and not VARIANTS[variant].eps:
            raise UserError(f"eps = {group['eps']}: variant {variant} has no epsilon; give 0 or another variant")
        if group["peak_lr"] is None:
            group["peak_lr"] = group["lr"]
        add_param_group(self, group)
        # By position, because a sharded update replaces the parameters by one-dimensional slices.
        scale_all = "trust" in param_group or self.trust_one_dimensional
        group["scaled"] = [scale_all or param.dim() > 1 for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = value_of(closure)
        # Gradient 10: the new weight; each layer's rate follows the norms of its weights and of its gradient.
        for group in self.param_groups:
            hyper = {key: group[key] for key in _HYPER}
            with_grad = [(p, s) for p, s in zip(group["params"], group["scaled"], strict=True) if has_gradient(p)]
            # Scaled and plain layers apart: one call each, so that a sharded run exchanges norms once a group.
            for scaled, trust in ((True, group["trust"]), (False, None)):
                params = [param for param, is_scaled in with_grad if is_scaled == scaled]
                buffers = [momentum_buffer(self, p) for p in params]
                lars(params, [p.grad for p in params], buffers, norms=self.norms, **hyper | {"trust": trust})
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; keys that its groups lack (as those of torch.optim.SGD do) stay as they are."""
        super().load_state_dict(in_own_groups(self, state_dict))

    def __getstate__(self) -> dict[str, Any]:  # for copies; torch's leaves out what it doesn't know
        own = {"norms": self.norms, "trust_one_dimensional": self.trust_one_dimensional}
        return super().__getstate__() | own


def lars(
    params: Sequence[Tensor], grads: Sequence[Tensor], momentum_buffers: Sequence[Tensor], *, lr: float,
    momentum: float = 0.9, weight_decay: float = 0.0, trust: float | None = 0.001, eps: float = 0.0,
    variant: str = "paper", peak_lr: float | None = None, foreach: bool | None = None, norms: Norms = layer_norms,
) -> None:  # fmt: skip
    """One LARS step in place, on tensors of one device; arguments as of `Lars`, and buffers, at first zeros."""
    if not params:
        return
    params, grads, momentum_buffers = list(params), list(grads), list(momentum_buffers)  # as torch's foreach needs
    row = VARIANTS[variant]
    on_cpu = params[0].device.type == "cpu"
    rates: Tensor | None = None
    if trust is not None:
        # One call for weights and gradients: a sharded run exchanges the norms of both in one message.
        measured = list(torch._foreach_add(grads, params, alpha=weight_decay)) if row.decayed_gradient else grads
        weights, gradients = norms([*params, *measured]).tensor_split(2)
        values = {"lr": lr, "weight_decay": weight_decay, "trust": trust, "eps": eps}
        rates = layer_rates(weights, gradients, variant=variant, peak_lr=peak_lr, **values)
    # Without momentum torch's fused kernel ignores the buffer, and the dampening with it.
    is_fused = foreach is None and on_cpu and momentum > 0
    update = partial(_fused if is_fused else _foreach, momentum, weight_decay, row.rate_in_buffer)
    if foreach is False:  # a layer at a time
        for i, (param, grad, buffer) in enumerate(zip(params, grads, momentum_buffers, strict=True)):
            update(float(lr) if rates is None else rates[i : i + 1], [param], [grad], [buffer])
    else:
        update(float(lr) if rates is None else rates, params, grads, momentum_buffers)


def layer_rates(
    weight_norms: Tensor, grad_norms: Tensor, *, lr: float, weight_decay: float = 0.0, trust: float = 0.001,
    eps: float = 0.0, variant: str = "paper", peak_lr: float | None = None,
) -> Tensor:  # fmt: skip
    """Each layer's rate, lr * ratio, float64 [layers]: NaN by a NaN norm, 0 by an infinite norm of the gradient."""
    row = VARIANTS[variant]
    denominator = grad_norms + denominator_decay(row, weight_decay, lr if peak_lr is None else peak_lr) * weight_norms
    # `plain` collects the layers whose ratio is 1: their norms say nothing.
    plain = weight_norms == 0
    if row.eps_is_threshold:
        denominator = torch.where(denominator < eps, denominator + eps, denominator)
        plain = plain | (weight_norms < eps)
    else:
        denominator = denominator + eps
    ratio = trust * weight_norms / denominator
    plain = plain | (denominator == 0)
    if row.zero_gradient_is_plain:
        plain = plain | (grad_norms == 0)
    # After the division, whose nan or inf it replaces: a branch for each layer would wait for the device.
    ratio = torch.where(plain, 1.0, ratio)
    return ratio.clamp(max=lr) if row.clip else lr * ratio


def denominator_decay(row: Variant, weight_decay: float, peak_lr: float) -> float:
    return {"weight_decay": weight_decay, "none": 0.0, "premultiplied": weight_decay * peak_lr}[row.decay]


def _foreach(momentum: float, decay: float, rate_in_buffer: bool, rates: Tensor | float, *layers: list[Tensor]) -> None:
    # The formula in few kernel launches; the rates stay on the device, so that the host needn't wait for them.
    params, grads, buffers = layers
    if rate_in_buffer and momentum > 0 and is_portable():
        rates = 1.0 - (1.0 - rates)  # rounded as by `_fused`, which takes 1 - rate: the same factor on every device
    by_layer: Any = list(rates.to(params[0].dtype).unbind()) if isinstance(rates, Tensor) else rates
    steps = list(torch._foreach_add(grads, params, alpha=decay))
    if rate_in_buffer:
        torch._foreach_mul_(steps, by_layer)
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, steps)
    torch._foreach_sub_(params, buffers if rate_in_buffer else list(torch._foreach_mul(buffers, by_layer)))


def _fused(momentum: float, decay: float, rate_in_buffer: bool, rates: Tensor | float, *layers: list[Tensor]) -> None:
    # SGD's fused kernel, a layer at a time if each has a rate of its own.
    # The kernel computes v <- momentum * v + (1 - dampening) * step; w <- w - lr * v. With the layer's rate as `lr` it
    # is the form with the rate outside; with it as 1 - dampening, and lr = 1, that with the rate in the buffer.
    each = [(slice(i, i + 1), rate) for i, rate in enumerate(rates.tolist())] if isinstance(rates, Tensor) else None
    for run, rate in each or [(slice(None), rates)]:
        lr, dampening = (1.0, 1.0 - rate) if rate_in_buffer else (rate, 0.0)
        part = [tensors[run] for tensors in layers]
        momentum_step(*part, lr=lr, momentum=momentum, dampening=dampening, weight_decay=decay)

"""SGD with momentum whose update is bit for bit the same when a tensor is cut at block edges.

On CPU this is torch's fused kernel, four times as fast as its foreach path. Three of its properties matter here: it
walks memory and ignores strides, so a gradient that lies in memory otherwise than its parameter would be applied to the
wrong elements; it rounds the last elements (less than one vector) otherwise than the rest; and to weights of 16 bits it
does something else (torch 2.13.0). `momentum_step` handles all three, so that the result is a function of the logical
order alone.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.sgd import sgd

from ..errors import UserError

# Elements of the kernel's widest vectors, 64 bytes: it rounds a rest of fewer elements otherwise.
_VECTOR = 16
_FUSED = (torch.float32, torch.float64)

# torch's own, without the wrapper that imports torch._dynamo only to disable it: 2 s in every process.
add_param_group = inspect.unwrap(Optimizer.add_param_group)


def value_of(closure: Callable[[], Any] | None) -> Any:
    """The value of an optimizer's closure, which computes the gradients anew."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def has_gradient(param: Tensor) -> bool:
    """Whether there is a gradient to take; UserError if it, or the parameter, is sparse or complex."""
    if param.grad is None:
        return False
    if param.layout is not torch.strided or param.grad.layout is not torch.strided or param.is_complex():
        raise UserError(
            f"a {'complex' if param.is_complex() else 'sparse'} parameter or gradient of shape {tuple(param.shape)}: "
            "the update takes dense real ones; give its layer sparse=False, or another optimizer such as SparseAdam"
        )
    return True


def in_own_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict, maybe of torch's optimizer with this one's state, whose groups have all that this one's have."""
    own, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(own) != len(saved):
        return state_dict  # which torch refuses
    return {**state_dict, "param_groups": [{**mine, **theirs} for mine, theirs in zip(own, saved, strict=True)]}


class Sgd(SGD):
    """torch.optim.SGD (same arguments, same state) with the sliceable update on CPU.

    The momentum buffers start at zero instead of at the first gradient, which is the same for `dampening=0`.
    """

    add_param_group = add_param_group
    # A gradient scaler would leave its scale in the gradients, for a `step` that knows of it, if `fused` is given.
    _step_supports_amp_scaling = property(lambda self: False, lambda self, value: None)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns the closure's value, if any."""
        loss = value_of(closure)
        # Gradient 10: the new weight, by elementwise operations that may be cut anywhere.
        for group in self.param_groups:
            params = [p for p in group["params"] if has_gradient(p)]
            keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
            values = {key: group[key] for key in keys}
            momentum_step(params, [p.grad for p in params], [momentum_buffer(self, p) for p in params], **values)
        return loss


def momentum_buffer(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """The parameter's momentum in the optimizer's state, zeros when there is none yet."""
    state = optimizer.state[param]
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
    buffer = state["momentum_buffer"]
    if buffer.shape != param.shape:  # the fused kernel doesn't look, and would write beyond the shorter one
        raise UserError(
            f"optimizer: has a momentum of shape {tuple(buffer.shape)} for a parameter of shape {tuple(param.shape)}; "
            "load the state_dict of an optimizer of the same model, its parameters in the same order"
        )
    return buffer


def momentum_step(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], *, lr: float, momentum: float,
    dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False,
) -> None:  # fmt: skip
    """buffer <- momentum * buffer + (1 - dampening) * (grad + weight_decay * param); param <- param - lr * buffer.

    With `nesterov`, param <- param - lr * (gradient + momentum * buffer). `maximize` takes -grad.
    """
    is_fused = all(param.device.type == "cpu" and param.dtype in _FUSED for param in params)
    step = partial(
        sgd, has_sparse_grad=False, foreach=not is_fused, fused=is_fused, grad_scale=None, found_inf=None, lr=lr,
        momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize,
    )  # fmt: skip
    layers = list(zip(params, grads, buffers, strict=True))
    direct = [not is_fused or _walk_alike(layer) for layer in layers]
    if any(direct):
        step(list(compress(params, direct)), list(compress(grads, direct)), list(compress(buffers, direct)))
    for layer, is_direct in zip(layers, direct, strict=True):
        if not is_direct:  # by copies in logical order
            param, grad, buffer = (tensor.contiguous() for tensor in layer)
            step([param], [grad], [buffer])
            layer[0].copy_(param)
            layer[2].copy_(buffer)


def _walk_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether a walk through the memory of all tensors gives the result of one in logical order."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    return tensors[0].numel() % _VECTOR == 0 and all(
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors
    )


def set_hyperparameters(optimizer: Optimizer, *, lr: float, momentum: float, weight_decay_factor: float = 1.0) -> None:
    """Sets in every group the values of the coming step, times its own `rate_factor` and `base_weight_decay`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate_factor", 1.0)
        group["momentum"] = momentum
        group["weight_decay"] = group["base_weight_decay"] * weight_decay_factor

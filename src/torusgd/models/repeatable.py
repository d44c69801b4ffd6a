"""Finds the layer whose gradient a GPU computes in no fixed order, before any rank trains.

Exact sums need gradients with the same bits on every run. Under `torch.use_deterministic_algorithms` torch refuses an
operation that can't give them, and nearly always in the backward pass: adaptive average pooling to more than one value
a channel, pooling in three dimensions, fractional pooling, some padding and interpolation. Which ones depends on torch
and the device, so that a list would be wrong soon: one backward pass of two images finds them.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..recipe.schema import Recipe
from ..recipe.section import sides


def check_repeatable(network: nn.Module, recipe: Recipe) -> None:
    """One pass forward and back, of a copy, on the network's device; UserError names a layer that torch refuses."""
    # A copy: the pass changes batch norm's statistics, and hooks would stay.
    trial, device = copy.deepcopy(network).train(), next(network.parameters()).device
    last = ["the input"]
    for name, module in trial.named_modules():
        if not any(module.children()):
            module.register_forward_hook(_note(name or "the network", module, last))
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            images = torch.randn(2, recipe.data.channels, *sides(recipe.data.image_size), device=device)
            trial(images).sum().backward()
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        operation = str(error).split()[0]
        raise UserError(
            f"model.name: {recipe.model.name}, layer {last[0]}: no gradient with the same bits on every run "
            f"({operation}) on {device.type}; take another layer, or reduction: float32, whose bits are not promised"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)


def _note(name: str, module: nn.Module, last: list[str]) -> Callable[..., None]:
    """A forward hook that writes into `last` the layer whose forward, or later backward, pass began last."""

    def forward(_: nn.Module, inputs: object, output: object) -> None:
        last[0] = f"{name} ({type(module).__name__})"
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(backward)

    def backward(_: Tensor) -> None:
        last[0] = f"{name} ({type(module).__name__})"

    return forward

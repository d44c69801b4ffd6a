"""Precision, memory format and loss scaling of the passes, as the recipe says."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .arithmetic import is_portable, portable
from .errors import DivergedError, RunError, UserError
from .recipe.schema import Recipe

_DTYPES = {"float32": None, "portable": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# As in NVIDIA's Apex: with gradients that are all zero nothing else would stop the growth of the loss scale.
MOST_SCALE = 2.0**24
_MOST_STATE = 2.0**64
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def arithmetic_of(recipe: Recipe) -> AbstractContextManager[object]:
    """The context of every thread that computes something of a recipe: portable rules, or torch's own operators."""
    return portable() if recipe.precision == "portable" else nullcontext()


class Precision:
    """Autocast and dynamic loss scaling; the scale is a power of two and part of a checkpoint.

    With float16 the loss is scaled up, a step with a non-finite gradient is skipped and halves the scale, and
    `growth_interval` accepted steps in a row double it, up to 2^24 (as in Apex).
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self._dtype = _DTYPES[recipe.precision]
        self.memory_format = _FORMATS[recipe.memory_format]
        self._device = device
        self.is_scaling = recipe.precision == "float16"
        self._recipe = recipe
        self.loss_scale = recipe.loss_scale.initial if self.is_scaling else 1.0
        self.accepted_in_a_row = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return self._dtype or torch.float32

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass, in a thread that is inside of `arithmetic_of` the recipe."""
        if self._recipe.precision == "portable" and not is_portable():
            raise RunError(
                "precision = portable: a pass outside of portable arithmetic; its bits would be the machine's"
            )
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def accept(self, parameters: Sequence[Tensor]) -> None:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], 1.0 / self.loss_scale)
        self.grow()

    def grow(self) -> None:
        """Counts a good step; the loss scale doubles after enough of them."""
        if not self.is_scaling:
            return
        self.accepted_in_a_row += 1
        if self.accepted_in_a_row == self._recipe.loss_scale.growth_interval:
            self.loss_scale = max(self.loss_scale, min(2.0 * self.loss_scale, MOST_SCALE))
            self.accepted_in_a_row = 0

    def skip(self, step: int, names: Sequence[str]) -> None:
        """Halves the loss scale after a non-finite gradient; RunError if no scale is to blame."""
        if not self.is_scaling or self.loss_scale < 2.0**-14:
            raise DivergedError(f"step {step}: the gradient of {names[0]} is not finite ({len(names)} parameters)")
        self.loss_scale /= 2.0
        self.accepted_in_a_row = 0

    def state_dict(self) -> dict[str, Tensor]:
        """The state that the next step needs: float64 [], the loss scale and the accepted steps in a row."""
        values = {"loss_scale": self.loss_scale, "accepted_in_a_row": float(self.accepted_in_a_row)}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state(self, name: str, value: Tensor) -> None:
        """Loads one value of `state_dict`; UserError if it is out of range."""
        number = float(value)
        # A loss scale grows to at most 2^24, and begins where the recipe has it begin.
        if not 0 <= number <= max(_MOST_STATE, self._recipe.loss_scale.initial):
            raise UserError(f"the checkpoint's {name} is {number}; it is damaged: remove it, or give --fresh")
        if name == "loss_scale":
            self.loss_scale = number
        else:
            assert name == "accepted_in_a_row", name
            self.accepted_in_a_row = int(number)

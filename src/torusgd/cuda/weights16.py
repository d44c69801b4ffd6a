"""16-bit copies of the weights, with which the passes compute in place of autocast's casts.

Autocast rounds each weight of a convolution or linear layer to 16 bits in every pass, and a channels-last network
reorders each filter in every pass: some hundred launches and 0.3 GB for a ResNet-50. The copies here are made once a
step, in the layout in which they are used. The network gets them in the parameters' stead, and their gradients, 16 bits
wide, are what autocast would have widened: the sums take them as they are, so the integers are the same.

All copies are made by one operator, `torch.ops.torusgd.copy_weights`, on a GPU by one kernel. Torch's own foreach copy
falls back to a launch for each tensor as soon as one has another layout than its parameter.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .kernels import operators, register

_CAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""layers whose weights autocast casts, and that do nothing else with them"""


class Weights16:
    """A model that computes with copies of the parameters that autocast would cast.

    Args:
        model: Its own parameters stay as they are.
        dtype: Of the copies.
        memory_format: Of filters with four dims.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
        self._model = model
        owners: dict[Tensor, set[type[nn.Module]]] = defaultdict(set)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners[parameter].add(type(module))
        named = {name: p for name, p in model.named_parameters() if owners[p].issubset(_CAST)}
        self._copies: dict[str, Tensor] = {}
        for name, parameter in named.items():
            layout = memory_format if parameter.dim() == 4 else torch.preserve_format
            copy = parameter.detach().to(dtype, memory_format=layout, copy=True)
            self._copies[name] = copy.requires_grad_(parameter.requires_grad)
        self._leaves: dict[Tensor, Tensor] = {parameter: self._copies[name] for name, parameter in named.items()}
        self._is_new = True

    def leaf(self, parameter: Tensor) -> Tensor:
        """What the passes compute with in a parameter's stead: its copy, or itself."""
        return self._leaves.get(parameter, parameter)

    @torch.no_grad()
    def copy(self) -> None:
        """Makes the copies those of the weights as they are, after each update; may be captured."""
        operators.copy_weights(list(self._leaves), list(self._copies.values()))
        self._is_new = False

    def __call__(self, images: Tensor) -> Tensor:
        """The logits, as the model gives them, with the copies."""
        # A run loads its weights after its parts are made. Its first pass is never captured, and runs on the stream of
        # the update, so the copies are there before any other stream reads them.
        if self._is_new:
            self.copy()
        return functional_call(self._model, self._copies, (images,))


def copy_weights(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Rounds weights to 16 bits.

    Args:
        weights: float32, contiguous, in memory that never moves.
        copies: float16 or bfloat16, of the same shapes, contiguous or channels-last; likewise.
    """
    torch._foreach_copy_(list(copies), list(weights))


register("copy_weights(Tensor[] weights, Tensor(a!)[] copies) -> ()", copy_weights, "triton_weights")

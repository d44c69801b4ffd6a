"""Parameters that a recipe leaves as they are, and the batch norms that stay with them."""

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UserError, suggest

BODY = "body"
"""the word of `model.freeze` for all parameters but the head's"""


def freeze(model: nn.Module, patterns: Sequence[str], head: Collection[str]) -> None:
    """Turns off the gradient of the parameters that a recipe names, in place.

    Patterns are names of parameters or of modules that hold them, or globs of either; `body` is every parameter whose
    name is not in `head`. UserError if a pattern matches nothing, or nothing is left to train.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> freeze(net, ["0"], head=[])
    >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    ['1.weight', '1.bias']
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if pattern == BODY:
            named = [name for name in parameters if name not in head]
        else:
            named = [name for name in parameters if any(fnmatchcase(each, pattern) for each in _and_owners(name))]
        # A pattern that matches nothing is a typing error, and would train what the user wanted to freeze.
        if not named:
            modules = [name for name, _ in model.named_modules() if name]
            raise UserError(f"model.freeze: no parameter or module {pattern!r}{suggest(pattern, modules)}")
        for name in named:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"model.freeze: {', '.join(patterns)} leave nothing to train")


def is_frozen(layer: _BatchNorm) -> bool:
    """Whether a batch norm's running statistics stay as they are and normalise, in training too."""
    # Frozen weights were trained with those statistics: with others they would mean something else. A batch norm
    # without weights of its own goes on learning.
    return isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad


def _and_owners(name: str) -> Iterator[str]:
    """`a.b.weight`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]

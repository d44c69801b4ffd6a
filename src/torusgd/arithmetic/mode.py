"""The context in which torch's operators run by portable rules."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UserError
from .methods import only_methods
from .rules import RULES
from .table import PASSING

VERSION = 1
"""of the arithmetic: a change of bits is another one"""


@contextmanager
def portable(methods: Sequence[str] | None = None) -> Iterator[None]:
    """Runs torch's operators inside so that their results are the same bits on any hardware.

    The construction of a network, its passes, losses and updates belong inside, in every thread that computes: the
    context is its thread's own. Products run by the fastest method that is exact on this machine.

    Args:
        methods: Names of `methods.METHODS` to use, in this order; None: all, the fastest first. It decides the time
            alone.

    Raises:
        UserError: Inside, for an operator that has no rule, or for floating-point numbers other than float32.

    >>> with portable():
    ...     torch.manual_seed(1)
    ...     layer = nn.Linear(2, 2)
    ...     layer(torch.ones(1, 2)).sum().backward()
    """
    torch.set_flush_denormal(False)
    with only_methods(methods), PortableMode():
        yield


class PortableMode(TorchDispatchMode):
    """Sends each ATen operator to its rule."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operator; torch calls this."""
        found = RULES.get(func)
        if found is not None:
            return found(*args, **kwargs) if kwargs else found(*args)
        if func in PASSING:
            return func(*args, **kwargs) if kwargs else func(*args)
        result = func(*args, **(kwargs or {}))
        if any(_floats(value) for value in (*args, *(kwargs or {}).values(), result)):
            raise UserError(_refusal(func))
        return result


def _floats(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, list | tuple) and any(_floats(item) for item in value)


def _refusal(func: Any) -> str:
    where = _module()
    place = f" in {type(where).__name__}" if where is not None else ""
    return (
        f"portable arithmetic: {func}{place} has no rule, so its bits would depend on the machine; "
        "use another layer, or precision: float32"
    )


def _module() -> nn.Module | None:
    """The innermost module whose method is being called."""
    frame = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            return found
        frame = frame.f_back  # type: ignore[assignment]  # None at the end, which ends the loop
    return None

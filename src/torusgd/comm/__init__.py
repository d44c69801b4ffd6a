"""All-reduce over ranks: sums free of order, schedules of messages as data, engines that run them, and their cost.

Knows no recipe, model or optimizer: `from torusgd.comm import create, exact_all_reduce` works in any script.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "CommError": "base", "CommTimeout": "base", "ConnectionLost": "base", "Group": "groups", "create": "allreduce",
    "exact_all_reduce": "fixed_point",
}  # fmt: skip
__all__ = sorted(_HOMES)  # noqa: PLE0605 - the names are looked up below


def __getattr__(name: str) -> Any:
    # On first use: `torusgd --help` asks for the algorithms' names and needs no torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)

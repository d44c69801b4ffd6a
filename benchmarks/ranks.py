"""Ranks of this machine for a benchmark that needs no network."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torusgd.comm.groups import Group
from torusgd.ranks.liveness import Limits
from torusgd.ranks.supervisor import Supervisor


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments, world)` returns on the first of so many ranks, a JSON value."""
    with Supervisor(ranks, "cpu", Limits()) as supervisor:
        return supervisor.run(partial(_in_world, function, arguments))[0]


def _in_world(function: Callable[..., Any], arguments: tuple[Any, ...], world: Group, *rank: Any) -> Any:
    return function(*arguments, world)

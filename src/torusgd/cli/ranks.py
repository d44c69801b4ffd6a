"""Ranks for a command that measures: those of somebody's launcher, or some of its own on this machine."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch

from ..comm.base import Liveness
from ..comm.groups import Group
from ..errors import UserError
from ..launch.torchrun import run_joined
from ..ranks.liveness import Limits
from ..ranks.supervisor import RankFailed, Supervisor
from ..recipe.runtime_options import RuntimeOptions
from ..runtime import ranks_are_given, resolve_device
from ..signals import StopFlag, end_on_stop

TIMEOUT = 60.0


def on_ranks(options: RuntimeOptions, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function(*arguments, world)` on rank 0, run on every rank.

    None on the other ranks of somebody else's launcher.

    Args:
        options: The device, and the number of ranks to start here unless a launcher has started them.
        function: Of a module's top level, for it travels to the ranks by name; it returns a JSON value.
        arguments: Pickled between our own processes.

    Raises:
        UserError: A rank found a user's mistake, or the device is not there.
        RunError: A rank was lost, or the function can't go on.
    """
    target = resolve_device(options)
    on_rank = partial(_on_rank, function, arguments)
    # Measurements report no progress: only a rank without heartbeats is given up.
    limits = Limits(beat=TIMEOUT, start=TIMEOUT, stuck=inf)
    if ranks_are_given():
        result = run_joined(on_rank, target, limits)
        return result if os.environ["RANK"] == "0" else None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.workers_range is not None:
        raise UserError("--workers: a measurement takes one number of ranks")
    available = torch.cuda.device_count() if target == "cuda" else len(os.sched_getaffinity(0))
    with Supervisor(options.workers or available, target, limits) as supervisor:
        try:
            return supervisor.run(on_rank)[0]
        except RankFailed as error:
            error.failure.throw()


def _on_rank(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    world: Group,
    stop: StopFlag,
    restarts: int,
    liveness: Liveness,
) -> Any:
    """A measurement on one rank, without a search for late ranks; a stop ends it as it is."""
    torch.set_num_threads(1)
    end_on_stop()
    return function(*arguments, world)

"""Ranks for a command that measures: those of somebody's launcher, or some of its own on this machine."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..errors import RunError, UserError
from ..launch.processes import quiet, run_ranks
from ..recipe.load import validate
from ..recipe.runtime_options import RuntimeOptions
from ..runtime import join, ranks_are_given, resolve_device

TIMEOUT = 60.0


def on_ranks(workers: int | None, device: str | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function(*arguments, device)` on rank 0, run on every rank.

    None on the other ranks of somebody else's launcher.

    Args:
        workers: Ranks to start here, where nobody's launcher did; None: as many as GPUs, else as cores.
        device: `cpu`, `cuda`, or None: cuda where there is a GPU.
        function: Of a module's top level, for it travels to the ranks by name.

    Raises:
        UserError: A rank found a user's mistake, or the device is not there.
        RunError: A rank was lost, or the function can't go on.
    """
    target = resolve_device(validate(RuntimeOptions, {"device": device}, "flags"))
    if ranks_are_given():
        ranks = join(target, TIMEOUT)
        result = function(*arguments, ranks.device)
        return result if ranks.rank == 0 else None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()
    available = torch.cuda.device_count() if target == "cuda" else len(os.sched_getaffinity(0))
    try:
        kind, value = run_ranks(workers or available, _rank, target, function, arguments)[0]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RunError(f"rank {rank} ended with exit code {failure.exitcode}") from None
    if kind == "result":
        return value
    raise (UserError if kind == "user" else RunError)(value)


def _rank(device: str, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[str, Any]:
    """One rank of ours; a mistake that all ranks see is handed back as its line."""
    torch.set_num_threads(1)
    try:
        ranks = join(device, TIMEOUT)
        result = function(*arguments, ranks.device)
    except UserError as error:
        return "user", str(error)
    except RunError as error:
        return "run", str(error)
    if dist.is_initialized():
        dist.barrier()
    return "result", result

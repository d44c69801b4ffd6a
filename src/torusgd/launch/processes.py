"""Ranks of our own on this machine, by torch's elastic agent, for a run and for measurements alike."""

import logging
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def quiet() -> None:
    """Silences the agent's loggers (what matters of it we tell), and keeps Gloo on the loopback of this machine."""
    for name in [*logging.root.manager.loggerDict, "torch.multiprocessing"]:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def run_ranks(workers: int, function: Callable[..., Any], *arguments: Any, **config: Any) -> dict[int, Any]:
    """What `function(*arguments)` returns on each of so many ranks, none of which is started again.

    Args:
        workers: Ranks.
        function: Found by its name in a module; arguments and results are pickled between our own processes.
        config: More fields of torch's LaunchConfig.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: A rank failed.
    """
    described = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        **config,
    )
    return elastic_launch(described, function)(*arguments)

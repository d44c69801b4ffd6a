"""Runs a function on several ranks: processes forked from one that has torch imported, joined over Gloo on loopback."""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import queue
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from functools import wraps
from importlib import import_module
from io import StringIO
from pathlib import Path
from runpy import run_path
from traceback import TracebackException
from typing import Any

from tests.plan.measured import link, network, timing

from torusgd.ranks.forkserver import PRELOAD
from torusgd.ranks.rank import serve_store

TIMEOUT = timedelta(seconds=180)
"""of the default group: shorter than a test may take, so that a lost rank is told by the ranks themselves"""
_CONTEXT = multiprocessing.get_context("forkserver")
_STARTED: dict[str, int] = {}
"""the process that ranks of tests are forked from"""


def start_forkserver() -> None:
    """Starts what ranks are forked from, in the place of what a test of the launcher has; they print to nowhere."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None and server._forkserver_pid == _STARTED.get("here"):
        return
    with suppress(FileNotFoundError):  # the launcher's removes its socket itself, and the folder that held it
        server._stop()
    os.makedirs(multiprocessing.util.get_temp_dir(), exist_ok=True)
    # An optimizer's first step imports torch._dynamo, which takes seconds, and a rank this module.
    of_tests = ["torch._dynamo", "pytest", "hypothesis", "torusgd.gradients.ddp_hook", __name__]
    multiprocessing.set_forkserver_preload([*of_tests, *PRELOAD])
    output, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    multiprocessing.forkserver.ensure_running()
    _STARTED["here"] = server._forkserver_pid
    os.dup2(output, 1)
    os.close(output)
    os.close(nothing)


def _rank(rank: int, size: int, port: int, answers: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function with the variables that torchrun would set; the test holds the store."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    try:
        answers.put((rank, function(*arguments), None))
    except BaseException as error:
        # With the values of local variables: pytest shows none of an assertion on a rank.
        shown = TracebackException.from_exception(error, capture_locals=True).format()
        answers.put((rank, None, "".join(shown)))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _in_group(function: Callable[..., Any], *arguments: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    dist.barrier()  # who ends before another has connected fails that one's init_process_group
    return function(*arguments)


def _printed(path: str, *words: str) -> str:
    multiprocessing.set_start_method("fork", force=True)  # a script's own; here it would be that of this process
    sys.argv = [path, *words]
    with redirect_stdout(StringIO()) as printed:
        run_path(path, run_name="__main__")
    return printed.getvalue()


def _run_test(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(**arguments)


def on_ranks(size: int, **how: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test that runs on each rank of a world of `size`, with its parameters; `how` is for `run_ranks`."""

    def make(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def call(**arguments: Any) -> None:
            run_ranks(size, _run_test, test.__module__, test.__name__, arguments, **how)

        return call

    return make


def alike(value: Any) -> Any:
    """A value that this rank has and, by what they send, all others too."""
    import torch.distributed as dist

    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, value)
    assert of_all == [value] * len(of_all)
    return value


def run_ranks(
    size: int, function: Callable[..., Any], *arguments: Any, expected: int = 0, timeout: float = 240
) -> list[Any]:
    """What `function(*arguments)` returns on each of `size` ranks, or of `expected` ones; fails if one does."""
    return _run(size, (_in_group, function, *arguments), expected or size, timeout)


def run_script(size: int, path: Path, *words: object) -> list[str]:
    """What each rank prints of a script that joins ranks as under torchrun, and without its start of each of them."""
    return _run(size, (_printed, str(path), *map(str, words)), size, 240)


def _run(size: int, call: tuple[Any, ...], expected: int, timeout: float) -> Any:
    start_forkserver()
    store = serve_store()
    answers = _CONTEXT.Queue()
    processes = [_CONTEXT.Process(target=_rank, args=(rank, size, store.port, answers, *call)) for rank in range(size)]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < expected:
            rank, result, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            assert error is None, f"rank {rank}: {error}"
            results[rank] = result
    except queue.Empty:
        raise AssertionError(f"after {timeout} s only ranks {sorted(results)} of {size} had ended") from None
    finally:
        for process in processes:
            process.join(5 if len(results) == size else 0)
            process.kill()
    return [results[rank] for rank in sorted(results)]


def error_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The sentence of the error that a call ends with, which ranks compare; of none an empty one."""
    try:
        function(*arguments, **keywords)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def write_profile(folder: Path, ranks: int) -> Path:
    """The file of a profile by which `auto` chooses on these ranks, each of which would else measure for seconds."""
    timings = (timing(4096, "native", 2e-3), timing(4096, "doubling", 1e-3))
    profile = network((0,) * ranks, message=0.0, inside=link(1e-4, 1e-9), timings=timings)
    (folder / "profile.json").write_text(profile.dump())
    return folder / "profile.json"

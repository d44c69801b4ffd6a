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

from torusgd.comm.tuning.profile import Link, Profile, Timing
from torusgd.ranks.forkserver import PRELOAD
from torusgd.ranks.rank import serve_store

TIMEOUT = timedelta(seconds=240)
"""of the default group: shorter than a test may take, so that a lost rank is told by the ranks themselves"""
_CONTEXT = multiprocessing.get_context("forkserver")
_STARTED: dict[str, int] = {}
"""the process that ranks of tests are forked from"""


def start_forkserver() -> None:
    """Starts the process that ranks are forked from, in the place of one that a test of the launcher has started.

    An optimizer's first step imports torch._dynamo, which takes seconds. What ranks print goes nowhere.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None and server._forkserver_pid == _STARTED.get("here"):
        return
    with suppress(FileNotFoundError):  # the launcher's removes its socket itself, and the folder that held it
        server._stop()
    os.makedirs(multiprocessing.util.get_temp_dir(), exist_ok=True)
    of_tests = ["torch._dynamo", "pytest", "hypothesis", "torusgd.gradients.ddp_hook"]
    multiprocessing.set_forkserver_preload([*of_tests, *PRELOAD])
    output, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    multiprocessing.forkserver.ensure_running()
    _STARTED["here"] = server._forkserver_pid
    os.dup2(output, 1)
    os.close(output)
    os.close(nothing)


def _find_others(rank: int, size: int, port: int) -> None:
    """Sets what torchrun would; the test holds the store."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")


def _rank(rank: int, size: int, port: int, answers: Any, function: Callable[..., Any], *arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _find_others(rank, size, port)
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        dist.barrier()  # who ends before another has connected fails that one's init_process_group
        answers.put((rank, function(*arguments), None))
    except BaseException as error:
        answers.put((rank, None, _shown(error)))
    answers.close()
    answers.join_thread()
    os._exit(0)


def _script(rank: int, size: int, port: int, answers: Any, path: str, *words: str) -> None:
    _find_others(rank, size, port)
    multiprocessing.set_start_method("fork", force=True)  # a script's own; here it would be that of this process
    sys.argv = [path, *words]
    try:
        with redirect_stdout(StringIO()) as printed:
            run_path(path, run_name="__main__")
        answers.put((rank, printed.getvalue(), None))
    except BaseException as error:
        answers.put((rank, None, _shown(error)))


def _shown(error: BaseException) -> str:
    """A traceback with the values of local variables: pytest shows none of an assertion on a rank."""
    return "".join(TracebackException.from_exception(error, capture_locals=True).format())


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
    """What `function(*arguments)` returns on each rank of a world of `size`, in rank order; fails if a rank does.

    With `expected`, only so many ranks answer (the test loses the others on purpose).
    """
    return _run(_rank, size, (function, *arguments), expected or size, timeout)


def run_script(size: int, path: Path, *words: object) -> list[str]:
    """What each rank prints of a script that joins ranks as under torchrun, and without its start of each of them."""
    return _run(_script, size, (str(path), *map(str, words)), size, 240)


def _run(target: Callable[..., None], size: int, arguments: tuple[Any, ...], expected: int, timeout: float) -> Any:
    start_forkserver()
    store = serve_store()
    answers = _CONTEXT.Queue()
    processes = [
        _CONTEXT.Process(target=target, args=(rank, size, store.port, answers, *arguments)) for rank in range(size)
    ]
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
    link = Link(latency=1e-4, latency_error=0.0, per_byte=1e-9, per_byte_error=0.0)
    rows = (("native", 2e-3), ("doubling", 1e-3))
    timings = tuple(Timing(size=4096, algorithm=name, grid=None, chunks=1, median=t) for name, t in rows)
    profile = Profile(backend="gloo", hosts=(0,) * ranks, message=0.0, inside=link, between=None, timings=timings)
    (folder / "profile.json").write_text(profile.dump())
    return folder / "profile.json"

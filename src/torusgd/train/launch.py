"""Starting the ranks on this machine through torch's elastic agent, and starting them again when one is lost.

All ranks start again from the last checkpoint when one dies or no longer answers. A user's mistake, a defect, or a
run that can't go on ends them all with one line.
"""

import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import RunError
from ..runtime import join, resolve_workers
from .checkpoint import list_checkpoints
from .folder import RunFolder
from .problems import Notes, Problem, problem_of
from .run import Job, Run, steps_asked
from .signals import EXIT_BASE, StopFlag, Stopped, die_with_launcher, end_on_stop, held_back, raise_on_stop
from .telemetry import warn

MAX_RESTARTS = 20
STOP_SECONDS = 120
"""for a step, a checkpoint and the exit after a signal; then ranks are killed"""


@dataclass(frozen=True)
class Ending:
    """How a job ended: the summary of a finished run, or the exit code of another end."""

    code: int
    summary: dict[str, Any]


def launch(job: Job, fresh: bool) -> Ending:
    """Runs a job to its end on ranks of its own.

    Raises:
        UserError: The job can't be run as given.
        RunError: The run can't go on.
    """
    folder = RunFolder(job.out)
    workers = resolve_workers(job.options, job.device, job.recipe)
    with folder.lock():
        folder.claim(job.recipe, fresh)
        summary = folder.finished(steps_asked(job))
        return Ending(0, summary) if summary is not None else _supervise(job, workers, folder)


def _supervise(job: Job, workers: int, folder: RunFolder) -> Ending:
    """Runs the ranks until they end well or for good."""
    _prepare_ranks()
    for restarts in range(MAX_RESTARTS + 1):
        with tempfile.TemporaryDirectory(prefix="torusgd-") as name, _stoppable(Notes(Path(name))) as notes:
            try:
                results = _run_ranks(job, workers, restarts, name)
            except ChildFailedError as error:
                _raise_told(notes)
                lost = _describe_loss(error.get_first_failure(), notes, workers, job.options.timeout)
            except (Stopped, SignalException) as stop:
                number = stop.number if isinstance(stop, Stopped) else int(stop.sigval)
                return _stopped(number, folder)
            else:
                number = next((result["signal"] for result in results.values() if result["signal"]), 0)
                return _stopped(number, folder) if number else Ending(0, results[0]["summary"])
        again = f"restart {restarts + 1} of {MAX_RESTARTS}"
        warn(f"{lost}; all ranks start again from {_last_checkpoint(folder)} ({again})")
    raise RunError(f"{lost}, after {MAX_RESTARTS} restarts; {_last_checkpoint(folder)} is good")


def _run_ranks(job: Job, workers: int, restarts: int, notes: str) -> dict[int, Any]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        start_method="forkserver",
        max_restarts=0,  # the loop of `_supervise` can tell why
        monitor_interval=0.1,
        shutdown_timeout=STOP_SECONDS,
        signals_to_handle="SIGQUIT",  # the others are ours
    )
    return elastic_launch(config, launched_rank)(job, restarts, notes)


def _prepare_ranks() -> None:
    """Starts the process that ranks are forked from: it imports torch once for all of them, and for each restart.

    It holds no state and starts no thread. Stop signals are held back in it, and in each rank until it takes them,
    so that a Ctrl-C, which reaches all processes of a terminal, ends none of them half-way.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.set_forkserver_preload([__name__])
    multiprocessing.resource_tracker.ensure_running()  # would end the holding back if it were started within
    with held_back():
        multiprocessing.forkserver.ensure_running()


def launched_rank(job: Job, restarts: int, notes_folder: str) -> dict[str, Any]:
    """One rank under our own launcher. It returns only when all is well: else it tells why and exits."""
    notes, rank = Notes(Path(notes_folder)), int(os.environ["RANK"])
    die_with_launcher()
    end_on_stop()
    _leave_if_stopping(notes)
    stop = StopFlag()
    try:
        ranks = join(job.device, job.options.timeout)
        stop.install()
        outcome = Run(job, ranks, stop, restarts).run()
        dist.barrier()
    except Exception as error:
        notes.write(rank, problem_of(error, rank))
        _leave()
    # From here on the agent waits for the result, or, if it is stopping, for the exit.
    end_on_stop()
    _leave_if_stopping(notes)
    return {"summary": outcome.summary, "signal": outcome.signal}


def _leave_if_stopping(notes: Notes) -> None:
    if notes.is_stopping():
        _leave()


def _leave() -> None:
    """Closes all connections, so that the other ranks notice at once."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(1)


@contextmanager
def _stoppable(notes: Notes) -> Iterator[Notes]:
    """Stop signals reach ranks in every state of their life; the terminal's cursor comes back."""
    raise_on_stop(before=notes.stop)
    try:
        yield notes
    finally:
        raise_on_stop()
        console = Console()
        if console.is_terminal:
            console.show_cursor()


def _raise_told(notes: Notes) -> None:
    """Raises the problem that a rank has told, if any; the rank that can say most about it is heard."""
    told = [problem for problem in notes.read().values() if not problem.is_loss]
    if told:
        first = max(told, key=lambda problem: (bool(problem.trace), len(problem.text)))
        print(first.trace, end="", file=sys.stderr)
        raise first.error()


def _describe_loss(first: tuple[int, ProcessFailure], notes: Notes, workers: int, timeout: float) -> str:
    rank, failure = first
    survivors: dict[int, Problem] = notes.read()
    silent = [str(rank) for rank in range(workers) if rank not in survivors]
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}"
    if not silent:
        return f"the ranks lost each other ({survivors[rank].text})"
    return f"rank {', '.join(silent)} gave no answer within {timeout:g} s"


def _stopped(number: int, folder: RunFolder) -> Ending:
    name = signal.Signals(number).name
    warn(f"stopped by {name}; the same command goes on from {_last_checkpoint(folder)}")
    return Ending(EXIT_BASE + number, {})


def _last_checkpoint(folder: RunFolder) -> str:
    last = next(iter(list_checkpoints(folder.checkpoints)), None)
    return f"the checkpoint of step {int(last.name.removeprefix('step-'))}" if last else "the beginning"

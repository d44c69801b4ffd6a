"""Starting the ranks on this machine through torch's elastic agent, and starting them again when one is lost.

All ranks start again from the last checkpoint when one dies or no longer answers. A user's mistake, a defect, or a
run that can't go on ends them all with one line.
"""

import gc
import os
import re
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ..errors import RunError
from ..runtime import join, resolve_workers
from ..signals import EXIT_BASE, StopFlag, Stopped, asking_to_stop, die_with_launcher
from ..train.build import Job, steps_asked
from ..train.checkpoint import list_checkpoints
from ..train.events import warn
from ..train.run import Run
from ..train.run_dir import RunDir
from .failures import Notes, Problem, problem_of
from .forkserver import start_forkserver
from .processes import quiet, run_ranks

MAX_RESTARTS = 20
STOP_SECONDS = 120
"""for a step and a checkpoint after a signal; then the ranks are ended as they are"""
KILL_SECONDS = 5
"""between SIGTERM and SIGKILL, when the agent ends ranks that are not wanted any more"""


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
    folder = RunDir(job.out)
    workers = resolve_workers(job.options, job.device, job.recipe)
    with folder.lock():
        folder.claim(job.recipe, fresh)
        summary = folder.finished(steps_asked(job))
        return Ending(0, summary) if summary is not None else _supervise(job, workers, folder)


def _supervise(job: Job, workers: int, folder: RunDir) -> Ending:
    """Runs the ranks until they end well or for good."""
    quiet()
    gc.freeze()  # what is imported by now is no garbage; the exit is 1 s faster without a look through it
    start_forkserver()
    lost = ""
    for restarts in range(MAX_RESTARTS + 1):
        if lost:
            warn(f"{lost}; all ranks start again from {last_checkpoint(folder)} (restart {restarts} of {MAX_RESTARTS})")
        with tempfile.TemporaryDirectory(prefix="torusgd-") as name:
            notes = Notes(Path(name))
            try:
                with asking_to_stop(notes.stop, STOP_SECONDS) as stop:
                    results = _run_ranks(job, workers, restarts, name)
                number = next((result["signal"] for result in results.values() if result["signal"]), 0)
                if not number:
                    return Ending(0, results[0]["summary"])
                return _stopped(stop.signal or number, folder)
            except ChildFailedError as error:
                _raise_told(notes)
                lost = _describe_loss(error.get_first_failure(), notes, workers, job.options.start_timeout)
                if stop():
                    return _stopped(stop.signal, folder)
            except (Stopped, SignalException) as broken:
                return _stopped(broken.number if isinstance(broken, Stopped) else int(broken.sigval), folder)
            finally:
                _show_cursor()
    raise RunError(f"{lost}, after {MAX_RESTARTS} restarts; {last_checkpoint(folder)} is good")


def _run_ranks(job: Job, workers: int, restarts: int, notes: str) -> dict[int, Any]:
    return run_ranks(
        workers, launched_rank, job, restarts, notes,
        start_method="forkserver",
        monitor_interval=0.1,
        shutdown_timeout=KILL_SECONDS,
        signals_to_handle="SIGQUIT",  # the others are ours
    )  # fmt: skip


def launched_rank(job: Job, restarts: int, notes_folder: str) -> dict[str, Any]:
    """One rank under our own launcher. It returns only when all is well: else it tells why and exits."""
    notes, rank = Notes(Path(notes_folder)), int(os.environ["RANK"])
    die_with_launcher()
    stop = StopFlag(also=notes.is_stopping)
    stop.install()
    try:
        ranks = join(job.device, job.options.start_timeout)
        outcome = Run(job, ranks, stop, restarts).run()
        dist.barrier()
    except (Exception, SystemExit) as error:
        notes.write(rank, problem_of(error, rank))
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(1)  # closes all connections, so that the other ranks notice at once
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the agent ends those that have only to be collected
    return {"summary": outcome.summary, "signal": outcome.signal}


def _raise_told(notes: Notes) -> None:
    """Raises the problem that a rank has told, if any; the rank that can say most about it is heard."""
    told = [problem for problem in notes.read().values() if not problem.is_loss]
    if told:
        first = max(told, key=lambda problem: (bool(problem.trace), len(problem.text)))
        print(first.trace, end="", file=sys.stderr)
        raise first.error()


def _describe_loss(first: tuple[int, ProcessFailure], notes: Notes, workers: int, start_timeout: float) -> str:
    rank, failure = first
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}"
    survivors: dict[int, Problem] = notes.read()
    silent = ", ".join(str(rank) for rank in range(workers) if rank not in survivors)
    if not silent:
        return f"the ranks lost each other ({survivors[rank].text})"
    texts = [problem.text for problem in survivors.values()]
    told = next((text for text in texts if text.startswith("no answer")), "")
    # Gloo tells it of the wait that ended, or of the connection that it closed for it.
    if not told and any(re.search("timed out|timeout", text, re.IGNORECASE) for text in texts):
        told = f"no answer within {start_timeout:g} s"
    return f"rank {silent} gave {told}" if told else f"rank {silent} was lost"


def _stopped(number: int, folder: RunDir) -> Ending:
    warn(f"stopped by {signal.Signals(number).name}; the same command goes on from {last_checkpoint(folder)}")
    return Ending(EXIT_BASE + number, {})


def _show_cursor() -> None:
    """A killed rank 0 leaves the terminal without it."""
    console = Console()
    if console.is_terminal:
        console.show_cursor()


def last_checkpoint(folder: RunDir) -> str:
    """From where the same command goes on."""
    last = next(iter(list_checkpoints(folder.checkpoints)), None)
    return f"the checkpoint of step {int(last.name.removeprefix('step-'))}" if last else "the beginning"

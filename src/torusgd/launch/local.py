"""A run on ranks of this machine, started again from the last checkpoint when a rank is lost.

All ranks start again when one dies, freezes or hangs. A user's mistake, a defect, or a run that can't go on ends them
all with one line.
"""

import gc
import signal
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console

from ..comm.groups import Group
from ..comm.liveness import Liveness
from ..errors import RunError
from ..runtime import resolve_workers
from ..signals import StopFlag, Stopped, asking_to_stop
from ..train.build import Job
from ..train.checkpoint import list_checkpoints
from ..train.events import warn
from ..train.run import RunResult, finished, train
from ..train.run_dir import RunDir
from .heartbeat import Limits
from .processes import RankFailed, Supervisor

MAX_RESTARTS = 20
STOP_SECONDS = 120
"""for a step and a checkpoint after a signal; then the ranks are ended as they are"""


def launch(job: Job, fresh: bool) -> RunResult:
    """Runs a job to its end on ranks of its own.

    Raises:
        UserError: The job can't be run as given.
        RunError: The run can't go on.
    """
    folder = RunDir(job.out)
    workers = resolve_workers(job.options, job.device, job.recipe)
    with folder.lock():
        folder.claim(job.recipe, fresh)
        summary = finished(job)
        return RunResult(summary) if summary is not None else _supervise(job, workers, folder)


def limits_of(job: Job) -> Limits:
    """What the job's options say of ranks that are late."""
    return Limits(beat=job.options.timeout, start=job.options.start_timeout)


def last_checkpoint(folder: RunDir) -> str:
    """From where the same command goes on."""
    last = next(iter(list_checkpoints(folder.checkpoints)), None)
    return f"the checkpoint of step {int(last.name.removeprefix('step-'))}" if last else "the beginning"


def _supervise(job: Job, workers: int, folder: RunDir) -> RunResult:
    """Runs the ranks until they end well or for good."""
    gc.freeze()  # what is imported by now is no garbage; the exit is 1 s faster without a look through it
    lost = ""
    with Supervisor(workers, job.device, limits_of(job), job.options.ranks_per_gpu) as supervisor:
        for restarts in range(MAX_RESTARTS + 1):
            if lost:
                goes_on = f"all ranks start again from {last_checkpoint(folder)}"
                warn(f"{lost}; {goes_on} (restart {restarts} of {MAX_RESTARTS})")
            try:
                with asking_to_stop(supervisor.ask_to_stop, STOP_SECONDS) as stop:
                    results = [RunResult(**tree) for tree in supervisor.run(partial(_train_rank, job), restarts)]
            except RankFailed as error:
                if not error.failure.is_loss:
                    error.failure.throw()
                if stop():
                    return _stopped(stop.signal, folder)
                lost = error.failure.text
            except Stopped as broken:
                return _stopped(broken.number, folder)
            else:
                number = next((result.signal for result in results if result.signal), 0)
                return _stopped(stop.signal or number, folder) if number else results[0]
            finally:
                _show_cursor()
    raise RunError(f"{lost}, after {MAX_RESTARTS} restarts; {last_checkpoint(folder)} is good")


def _train_rank(job: Job, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> dict[str, Any]:
    return asdict(train(job, world, stop, restarts, liveness))


def _stopped(number: int, folder: RunDir) -> RunResult:
    warn(f"stopped by {signal.Signals(number).name}; the same command goes on from {last_checkpoint(folder)}")
    return RunResult(signal=number)


def _show_cursor() -> None:
    """A killed rank 0 leaves the terminal without it."""
    console = Console()
    if console.is_terminal:
        console.show_cursor()

"""A run on ranks of this machine: when some are lost, the others go on, or all start again from the last checkpoint.

Ranks that are left go on in their processes if each holds the whole state (`run/survival.py`). Otherwise, or if a disk
can't be read, all start again. A user's mistake, a defect, or a run that can't go on ends them all with one line.
"""

import gc
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from ..comm.tuning.profile import Profile
from ..errors import RunError, UserError, warn
from ..ranks.failures import Failure, FailureKind
from ..ranks.join import Listener, make_token
from ..ranks.liveness import Limits
from ..ranks.supervisor import Quorum, RankFailed, Supervisor
from ..recipe.compatibility import LISTENS, RANGE, check, fixed_ranks
from ..run.job import Job, setup_of
from ..run.open_data import LauncherArrays
from ..run.saving import RunResult, finished
from ..run.survival import TrainRank
from ..rundir.checkpoint import step_on_disk
from ..rundir.run_dir import RunDir
from ..rundir.run_view import RunRequests, forget_requests, is_asked_to_stop
from ..runtime import resolve_workers
from ..signals import Stopped, asking_to_stop

# Restarts without a new checkpoint, each after a longer pause; a new checkpoint makes it as many again.
MAX_RESTARTS, LONGEST_PAUSE = 10, 60.0
# The file in the run's folder of which machines that join need a copy.
TOKEN = ".join-token"
# Seconds for a step and a checkpoint after a signal; then the ranks are ended as they are.
STOP_SECONDS = 120


def launch(job: Job, fresh: bool, entrance: "Entrance | None" = None) -> RunResult:
    """Runs a job to its end on ranks of its own, and on those of other machines if there is an `entrance`."""
    folder = RunDir(job.out)
    check(setup_of(job, listens=entrance is not None), {RANGE, LISTENS})
    workers = resolve_workers(job.options, job.device, job.recipe, begins_alone=entrance is None)
    if job.options.profile is not None:
        Profile.load(Path(job.options.profile))  # a mistake in it is found before ranks are started
    with folder.lock():
        folder.claim(job.recipe, fresh)
        # The launcher lists the images, which outlives its ranks, so that none of them has to walk through them again.
        lists = LauncherArrays()
        if (summary := finished(job, lists)) is not None:
            return RunResult(summary)
        job = replace(job, lists=tuple(lists.paths))
        check(setup_of(job, None if entrance is not None else workers))
        result = _supervise(job, workers, folder, entrance)
        with suppress(OSError):
            forget_requests(folder.path)  # that came too late
        return result


@dataclass(frozen=True)
class Entrance:
    """Where other machines join a run."""

    address: tuple[str, int]  # of this machine, and a port; 0: any that is free
    token_file: Path | None = None  # what the others need a copy of; None: in the run's folder


def limits_of(job: Job) -> Limits:
    return Limits(beat=job.options.timeout, start=job.options.start_timeout)


def last_checkpoint(folder: RunDir) -> str:
    step = step_on_disk(folder.checkpoints, unread=-1)
    return "the last checkpoint" if step < 0 else f"the checkpoint of step {step}" if step else "the beginning"


class Restarts:
    """How often ranks are started again, and after what pause: as long as new checkpoints come, for ever."""

    def __init__(self) -> None:
        self.total = self.in_vain = 0  # all, and those since the last new checkpoint
        self._reached = ""
        self._last_kind: FailureKind | None = None

    def pause(self, failure: Failure, reached: str) -> float | None:
        """Seconds to wait before the next start; None: the run ends with this failure. `reached`: `last_checkpoint`."""
        # A new checkpoint proves that the last start was worth it, and refills the budget.
        if reached != self._reached:
            self.in_vain, self._reached, self._last_kind = 0, reached, None
        # What a disk could not read twice it will not read the third time; a lost rank is another one each time.
        is_again, self._last_kind = failure.kind is self._last_kind, failure.kind
        is_worth = failure.is_loss or (failure.kind is FailureKind.DISK_ERROR and not is_again)
        if self.in_vain == MAX_RESTARTS or not is_worth:
            return None
        self.total, self.in_vain = self.total + 1, self.in_vain + 1
        return 0.0 if self.in_vain == 1 else min(2.0 ** (self.in_vain - 2), LONGEST_PAUSE)


def _supervise(job: Job, workers: int, folder: RunDir, entrance: Entrance | None) -> RunResult:
    gc.freeze()  # what is imported by now is no garbage; the exit is 1 s faster without a look through it
    with Supervisor(workers, job.device, limits_of(job), job.options.ranks_per_gpu, warn) as supervisor:
        if entrance is None:
            return _run_attempts(job, folder, supervisor)
        path = entrance.token_file or folder.path / TOKEN
        silent = limits_of(job).beat
        listener = Listener(entrance.address, make_token(path), supervisor.port, job.as_dict(), silent, warn)
        supervisor.listener, (host, port) = listener, listener.address
        warn(f"other machines join by torusgd join {host}:{port} --token-file FILE, where FILE is a copy of {path}")
        try:
            result = _run_attempts(job, folder, supervisor)
        except (UserError, RunError) as error:
            listener.close(1, str(error))
            raise
        listener.close(result.code, "was stopped" if result.signal else "is finished")
        return result


def _run_attempts(job: Job, folder: RunDir, supervisor: Supervisor) -> RunResult:
    restarts, pause, requests = Restarts(), 0.0, RunRequests(folder.path)
    wanted, most = job.options.workers_range or (1, job.recipe.virtual_workers)
    # When others are lost a run goes on with so many, or all start again; one rank has no other to audit it.
    is_fixed = bool(fixed_ranks(setup_of(job)))
    fewest = supervisor.size if is_fixed else 2 if job.options.audit else 1
    quorum = Quorum(fewest, wanted, most)

    def requested() -> int | None:  # by `torusgd resize`, within what the run allows; None: no other number of ranks
        workers = None if is_fixed else requests.workers()
        return None if workers is None else max(fewest, wanted, min(workers, most))

    while True:
        try:
            time.sleep(pause)
            with asking_to_stop(supervisor.ask_to_stop, STOP_SECONDS) as stop:
                trees = supervisor.run(TrainRank(job, supervisor.size), restarts.total, quorum, requested)
                results = [RunResult(**tree) for tree in trees]
        except RankFailed as error:
            failure, in_vain = error.failure, restarts.in_vain
            if failure.is_loss and stop():  # ranks end at their own pace after a stop, and lose each other
                return _stopped(stop.signal, job)
            last = last_checkpoint(folder)
            again = restarts.pause(failure, last)
            if again is None and failure.is_loss:
                since = f"after {in_vain} restarts without a new checkpoint"
                raise RunError(f"{failure.text}, {since}; {last} is good") from None
            if again is None:
                failure.throw()
            pause, after = again, f" in {again:g} s" if again else ""
            goes_on = f"all ranks start again{after} from {last}"
            warn(f"{failure.text}; {goes_on} (restart {restarts.in_vain} of {MAX_RESTARTS})")
        except Stopped as broken:
            return _stopped(broken.number, job)
        else:
            number = next((result.signal for result in results if result.signal), 0)
            return _stopped(stop.signal or number, job) if number else results[0]
        finally:
            console = Console()
            if console.is_terminal:  # which a killed rank 0 leaves without its cursor
                console.show_cursor()


def _stopped(number: int, job: Job) -> RunResult:
    is_asked = is_asked_to_stop(job.out)
    who = "torusgd stop" if is_asked else signal.Signals(number).name
    if job.expected is None:  # steps that are verified begin anew in another folder
        warn(f"stopped by {who}; the same command goes on from {last_checkpoint(RunDir(job.out))}")
    # Meant as an end, like Ctrl-C: a scheduler would start a run again that SIGTERM stopped.
    return RunResult(signal=signal.SIGINT if is_asked else number)

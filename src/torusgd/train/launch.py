"""Starting the ranks: through torch's elastic agent on this machine, or as the rank that a launcher started.

A rank that dies is started again, with all others, from the last checkpoint. A user's mistake, or a run that can't go
on, ends all ranks at once with one line.
"""

import json
import logging
import os
import socket
import sys
import tempfile
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import RunError, UserError
from ..runtime import join, ranks_are_given, resolve_workers
from ..schedule import Schedule
from .folder import RunFolder
from .run import Job, Run
from .signals import StopFlag, die_with_parent
from .state import broadcast_text
from .telemetry import warn

MAX_RESTARTS = 20
STOP_SECONDS = 120
"""for a step, a checkpoint and the exit after a signal; then ranks are killed"""


@dataclass(frozen=True)
class Ending:
    """How a job ended: the summary of a finished run, or the exit code of another end."""

    code: int
    summary: dict[str, Any]


def train(job: Job, fresh: bool) -> Ending:
    """Runs a job to its end, on ranks of its own or as one of the ranks that the environment describes.

    Raises:
        UserError: The job can't be run as given.
        RunError: The run can't go on.
    """
    return _join(job, fresh) if ranks_are_given() else _launch(job, fresh)


def _launch(job: Job, fresh: bool) -> Ending:
    folder = RunFolder(job.out)
    workers = resolve_workers(job.options, job.device, job.recipe)
    with folder.lock():
        folder.claim(job.recipe, fresh)
        summary = folder.finished(_steps_asked(job))
        if summary is not None:
            return Ending(0, summary)
        with tempfile.TemporaryDirectory(prefix="torusgd-") as notes:
            return _agent(job, workers, Path(notes))


def _agent(job: Job, workers: int, notes: Path) -> Ending:
    """Runs torch's elastic agent in this process until all ranks have ended."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=MAX_RESTARTS,
        shutdown_timeout=STOP_SECONDS,
    )
    try:
        results = elastic_launch(config, launched_rank)(job, os.getpid(), str(notes))
    except SignalException as error:
        warn(f"stopped by {error.sigval.name}; give the same command again to go on")
        return Ending(128 + int(error.sigval), {})
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        raise RunError(
            f"rank {rank} died again and again ({how}, {MAX_RESTARTS} restarts); the last checkpoint is in {job.out}"
        ) from None
    problem = _read_problem(notes)
    if problem is not None:
        raise (UserError if problem["code"] == 2 else RunError)(problem["text"])
    signals = [result["signal"] for result in results.values() if result.get("signal")]
    if signals:
        warn(f"stopped by signal {signals[0]}; give the same command again to go on")
        return Ending(128 + signals[0], {})
    return Ending(0, results[0]["summary"])


def launched_rank(job: Job, launcher: int, notes: str) -> dict[str, Any]:
    """One rank under our own launcher: its result, or nothing when the run has ended with a problem."""
    die_with_parent(launcher)
    stop = StopFlag()
    stop.install()
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    folder = Path(notes)
    if _read_problem(folder) is not None:
        return {}
    if restarts and os.environ["RANK"] == "0":
        warn(f"a rank was lost; all ranks start again from the last checkpoint (restart {restarts} of {MAX_RESTARTS})")
    try:
        ranks = join(job.device, job.options.timeout)
        outcome = Run(job, ranks, stop, restarts).run()
        dist.barrier()
    except Exception as error:
        if isinstance(error, UserError | RunError):
            _note_problem(folder, str(error), 2 if isinstance(error, UserError) else 1)
        elif _is_lost_peer(error):
            # The peer may have ended for a reason that it has told; else it was lost, and the agent starts us again.
            time.sleep(0.5)
            if _read_problem(folder) is None:
                os._exit(1)
        else:
            traceback.print_exc()
            _note_problem(folder, f"{type(error).__name__} on rank {os.environ['RANK']} (see above)", 1)
        return {}
    return {"summary": outcome.summary, "signal": outcome.signal}


def _join(job: Job, fresh: bool) -> Ending:
    """This process is a rank that torchrun or another launcher started."""
    die_with_parent(os.getppid())
    stop = StopFlag()
    stop.install()
    ranks = join(job.device, job.options.timeout)
    folder = RunFolder(job.out)
    lock = folder.lock()
    answer: dict[str, Any] = {}
    if ranks.is_first:
        try:
            lock.__enter__()
            folder.claim(job.recipe, fresh)
            answer = {"summary": folder.finished(_steps_asked(job))}
        except UserError as error:
            answer = {"problem": str(error)}
    answer = json.loads(broadcast_text(json.dumps(answer), ranks.device))
    if "problem" in answer:
        raise UserError(answer["problem"])
    if answer["summary"] is not None:
        return Ending(0, answer["summary"])
    try:
        outcome = Run(job, ranks, stop, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))).run()
        if dist.is_initialized():
            dist.barrier()
    except RuntimeError as error:
        if isinstance(error, RunError) or not _is_lost_peer(error):
            raise
        raise RunError(
            f"rank {ranks.rank} on {socket.gethostname()}: lost another rank ({str(error).splitlines()[0]}); "
            "the last checkpoint is good"
        ) from None
    finally:
        if ranks.is_first:
            lock.__exit__(None, None, None)
    return Ending(128 + outcome.signal if outcome.signal else 0, outcome.summary if ranks.is_first else {})


def _steps_asked(job: Job) -> int:
    """Steps of the whole job; opening the data also finds a wrong path before any rank is started."""
    from ..data.sources import open_sources

    train_source, _ = open_sources(job.recipe.data, job.data, job.recipe.seed)
    steps = len(Schedule(job.recipe, len(train_source)))
    return min(steps, job.max_steps or steps)


def _is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone; Gloo tells it as a plain RuntimeError."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in text for word in ("gloo", "Gloo", "Connection", "NCCL", "Timed out"))
    )


def _note_problem(folder: Path, text: str, code: int) -> None:
    note = folder / f"problem-{os.environ['RANK']}.json"
    temporary = note.with_suffix(".partial")
    temporary.write_text(json.dumps({"text": text, "code": code}))
    temporary.rename(note)


def _read_problem(folder: Path) -> dict[str, Any] | None:
    """The first problem that a rank has told; a rank's own reason before another's word of it."""
    notes = sorted(folder.glob("problem-*.json"))
    return json.loads(notes[0].read_text()) if notes else None

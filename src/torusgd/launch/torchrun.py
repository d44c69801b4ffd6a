"""A rank that torchrun or another launcher started: it joins the others, and rank 0 alone prints and writes."""

import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from typing import Any, NoReturn

import torch.distributed as dist

from ..comm.groups import Group
from ..errors import RunError, UserError
from ..runtime import check_world_size, join
from ..signals import EXIT_BASE, StopFlag, die_with_agent, end_on_stop
from ..train.build import Job, steps_asked
from ..train.events import warn
from ..train.run import Run
from ..train.run_dir import RunDir
from .failures import Problem, problem_of
from .liveness import STORE_SECONDS, RollCall, within
from .local import Ending, last_checkpoint

TELL_SECONDS = 1.0
"""that a rank stays after telling its problem, so that the others learn that it was told"""

_PROBLEM = "torusgd/problem"
"""in the ranks' common store: the rank that tells why the run ends, and the exit code"""


def join_and_train(job: Job, fresh: bool) -> Ending:
    """Runs this rank's part of a job to its end. Of a problem one rank tells; the others end with its code.

    Raises:
        UserError: The job can't be run as given.
        RunError: The run can't go on.
    """
    ranks = _connect(job)
    roll_call = RollCall(ranks) if dist.is_initialized() else None
    try:
        check_world_size(ranks.size, job.recipe)
        with ExitStack() as held:
            return _train(job, fresh, ranks, held)
    except (Exception, SystemExit) as error:
        problem = problem_of(error, ranks.rank)
        if problem.is_loss:
            assert roll_call is not None
            time.sleep(TELL_SECONDS / 2)  # the rank that is gone may have told why
            code = within(STORE_SECONDS, _code_told)
            if code is not None:
                return Ending(code, {})
            _end_by_loss(ranks, problem, roll_call.missing(), RunDir(job.out))
        code = _claim_telling(ranks, problem)
        if code is not None:
            return Ending(code, {})
        print(problem.trace, end="", file=sys.stderr)
        time.sleep(TELL_SECONDS)
        raise problem.error() from None
    finally:
        if roll_call is not None:
            roll_call.close()


def _end_by_loss(ranks: Group, problem: Problem, missing: list[int] | None, folder: RunDir) -> NoReturn:
    """Tells who is lost, unless another rank has told why the run ends, and ends this process at once.

    An ordinary end would wait for the messages that are still on their way.
    """
    teller = f"rank {ranks.rank} on {socket.gethostname()}"
    code: int | None = None
    if missing is None:
        text = f"{teller} can't reach the others, or rank 0 is lost: {problem.text}"
    else:
        names = ", ".join(map(str, missing))
        lost = f"rank {names} gave {problem.text}" if problem.text.startswith("no answer") else f"rank {names} was lost"
        text = f"{lost if missing else 'the ranks lost each other: ' + problem.text}, says {teller}"
        code = _claim_telling(ranks, Problem(text, 1))
    if code is None:
        warn(f"{text}; the same command goes on from {last_checkpoint(folder)}")
        time.sleep(0 if missing is None else TELL_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if code is None else code)


def _connect(job: Job) -> Group:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_agent()
    end_on_stop()  # nothing to save yet, and no handler could run while this rank waits for the others
    try:
        return join(job.device, job.options.start_timeout)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise RunError(
            f"rank {os.environ['RANK']} on {socket.gethostname()}: the ranks did not meet at {where} within "
            f"{job.options.start_timeout:g} s: {str(error).splitlines()[0]}"
        ) from None
    except ValueError as error:
        raise UserError(f"the environment of this rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT): {error}") from None


def _train(job: Job, fresh: bool, ranks: Group, held: ExitStack) -> Ending:
    stop = StopFlag()
    stop.install()
    folder = RunDir(job.out)
    answer: dict[str, Any] = {}
    if ranks.rank == 0:
        try:
            held.enter_context(folder.lock())
            folder.claim(job.recipe, fresh and _is_first_start())
            answer = {"summary": folder.finished(steps_asked(job))}
        except (UserError, RunError) as error:
            answer = {"problem": str(error), "code": 2 if isinstance(error, UserError) else 1}
    answer = json.loads(ranks.broadcast_text(json.dumps(answer)))
    if "problem" in answer:
        raise Problem(answer["problem"], answer["code"]).error()
    if answer["summary"] is None:
        outcome = Run(job, ranks, stop, _restarts()).run()
        dist.barrier()
        answer = {"summary": outcome.summary, "signal": outcome.signal}
    dist.destroy_process_group()
    number = answer.get("signal", 0)
    return Ending(EXIT_BASE + number if number else 0, answer["summary"] if ranks.rank == 0 else {})


def _code_told() -> int | None:
    """The exit code of the rank that has told a problem; None without one."""
    store = dist.distributed_c10d._get_default_store()
    return int(store.get(_PROBLEM).split()[1]) if store.check([_PROBLEM]) else None


def _claim_telling(ranks: Group, problem: Problem) -> int | None:
    """The exit code of the rank that has told a problem already; None when it is this rank's to tell."""
    try:
        store = dist.distributed_c10d._get_default_store()
        word = store.compare_set(_PROBLEM, "", f"{ranks.rank} {problem.code}").decode()
    except Exception:  # the store is gone with the process that held it
        return None
    teller, code = map(int, word.split())
    return None if teller == ranks.rank else code


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _is_first_start() -> bool:
    """Whether torchrun has not started the ranks again: `--fresh` must not delete what they had done."""
    return _restarts() == 0

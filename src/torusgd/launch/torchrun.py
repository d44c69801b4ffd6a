"""A rank that torchrun or another launcher has started: it joins the others through env:// rendezvous.

Ranks meet in the store that MASTER_ADDR and MASTER_PORT name: torchrun's agent holds it, or rank 0 if a script has set
the variables. If a rank fails, one rank prints why; the others end in silence with the same exit code.
"""

import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ..comm import store_keys as keys
from ..comm.base import CommError, LateRank, Liveness
from ..comm.groups import Group
from ..errors import RunError, UserError, warn, write_exit
from ..ranks.failures import Failure, FailureChannel, FailureKind, cause_of
from ..ranks.generations import GROUP_SECONDS, meet_within
from ..ranks.liveness import SILENT_SECONDS, Heartbeat, Limits
from ..ranks.rank import RankFunction
from ..recipe.compatibility import WORKERS, check
from ..run.job import Job, images_at, setup_of
from ..run.node_memory import torchrun_agent
from ..run.run import train
from ..run.saving import RunResult, finished
from ..rundir.run_dir import RunDir
from ..runtime import ranks_are_given
from ..signals import StopFlag, die_with_parent, end_on_stop, leave_within
from .local import last_checkpoint, limits_of

# Seconds after which the store counts as out of reach.
STORE_SECONDS = 5.0
_POLL_SECONDS, _WORD_SECONDS = 0.2, 0.02

T = TypeVar("T")


def join_and_train(job: Job, fresh: bool) -> RunResult:
    """Runs this rank of a job to its end, as `run_joined`; the summary on rank 0 alone."""

    def remedy() -> str:
        return f"; the same command goes on from {last_checkpoint(RunDir(job.out))}"

    return run_joined(partial(_train, job, fresh), job.device, limits_of(job), remedy, job.options.ranks_per_gpu)


def run_joined(
    function: RankFunction, device: str, limits: Limits, remedy: Callable[[], str] = str, ranks_per_gpu: int = 1
) -> Any:
    """The result of `function` with the other ranks, which all call it; if it fails, this process ends.

    `remedy`: what is added to the line about a lost rank. UserError for wrong variables, RunError if ranks do not meet.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())  # its agent, without which torchrun's ranks would go on
    end_on_stop()  # nothing to save yet, and no handler could run while this rank waits for the others
    store, rank, size = _rendezvous(limits.start)
    member = _Member(store, rank, size, limits, remedy)
    try:
        world = _meet(store, rank, size, device, ranks_per_gpu, limits.start, GROUP_SECONDS)
    except RunError:
        member.heartbeat.close()
        raise
    except UserError as error:
        member.end(Failure.of(error, rank))
    stop = StopFlag()
    stop.install()  # from here on there may be something to save
    try:
        result = function(world, stop, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), member.heartbeat)
        world.barrier()
    except (Exception, SystemExit) as error:
        member.end(Failure.of(error, rank))
    late = leave_within(limits.beat)
    member.heartbeat.close()
    world.close()
    late.cancel()
    return result


def join(device: str, timeout: float) -> Group:
    """The ranks that the environment describes, for a short collective job without heartbeats; else this rank alone."""
    store, rank, size = _rendezvous(timeout) if ranks_are_given() else (HashStore(), 0, 1)
    return _meet(store, rank, size, device, 1, timeout, timeout)


class _Member:
    """This rank among the others that somebody else's launcher has started: its heartbeat, and its end by a failure."""

    def __init__(self, store: Store, rank: int, size: int, limits: Limits, remedy: Callable[[], str]) -> None:
        self._rank, self._remedy, self._is_ending = rank, remedy, threading.Lock()
        self._name = f"rank {rank} on {socket.gethostname()}"
        watched, follows = (range(size), None) if rank == 0 else ((), 0)
        self.heartbeat = Heartbeat(store, rank, limits, watched, self._end_in_a_thread, _print, follows)
        # Not by the store's first connection: the main thread may be blocked in it, waiting for ranks to meet.
        self._failures = FailureChannel(self.heartbeat.store, size)

    def end(self, failure: Failure) -> NoReturn:
        """Ends this process by a failure, which one of the ranks prints."""
        if not self._is_ending.acquire(blocking=False):
            threading.Event().wait()  # the other thread ends the process
        is_reported, code = _within(STORE_SECONDS, lambda: self._failures.report(failure)), failure.kind.exit_code
        self.heartbeat.fail(failure.text)  # after the report, by which the others know a cause from a loss
        if is_reported:
            code = self._agree(failure)
        else:  # it can't agree with anybody on who speaks
            _print(f"{self._name} can't reach the others, or rank 0 is lost: {failure.text}{self._remedy()}")
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # an ordinary end of the interpreter would wait for the messages that are still on their way

    def _agree(self, failure: Failure) -> int:
        """One rank prints the line; the exit code is the same on all."""
        cause, lost = failure, list[int]()
        if failure.is_loss:
            cause, lost = _within(3 * SILENT_SECONDS, lambda: self._find_cause(failure)) or (failure, [])
        else:
            # Of ranks that end for the same reason, such as images that one of them can't read, one knows most of it.
            time.sleep(2 * _POLL_SECONDS)
            cause = cause_of(_within(STORE_SECONDS, self._failures.causes) or []) or failure
        # Without an answer of the store this rank speaks too: two lines are better than none.
        if _within(STORE_SECONDS, lambda: self._failures.claim(self._rank)) is not False:
            write_exit(cause.kind.exit_code, cause.text)
            print(cause.trace, end="", file=sys.stderr)
            _print(f"{cause.text}, says {self._name}{self._remedy()}" if cause.is_loss else cause.text)
        # With it the store would go, in which the others are about to agree; torchrun's agent has one that stays.
        if self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            while {*self.heartbeat.watch.present(3 * SILENT_SECONDS)} - {self._rank, *lost}:
                time.sleep(_POLL_SECONDS)
        self.heartbeat.close()
        return cause.kind.exit_code

    def _find_cause(self, failure: Failure) -> tuple[Failure, list[int]]:
        """Why this rank lost others: what another rank reported, or else which ranks are gone."""
        end = time.monotonic() + 2 * SILENT_SECONDS
        while time.monotonic() < end:
            if cause := cause_of(self._failures.causes()):
                return cause, []
            # A rank that has reported a loss is a victim like this one, and not its cause.
            late = self.heartbeat.late()
            if late := [each for each in late if each.rank is None or not self._failures.has_reported(each.rank)]:
                return replace(failure, text="; ".join(map(str, late))), [each.rank or 0 for each in late]
            if lost := self.heartbeat.watch.silent(SILENT_SECONDS):
                return replace(failure, text=f"rank {', '.join(map(str, lost))} was lost"), lost
            time.sleep(_POLL_SECONDS)
        return replace(failure, text=f"the ranks lost each other: {failure.text}"), []

    def _end_in_a_thread(self, late: list[LateRank]) -> None:
        failure = Failure(FailureKind.RANK_LOST, self._rank, socket.gethostname(), "; ".join(map(str, late)))
        threading.Thread(target=self.end, args=(failure,), daemon=True).start()


def _rendezvous(seconds: float) -> tuple[Store, int, int]:
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except dist.DistError as error:
        raise _did_not_meet(seconds, error) from None
    except ValueError as error:
        raise UserError(f"the environment of this rank (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT): {error}") from None
    return agree_on_prefix(store, rank, size, seconds), rank, size


def agree_on_prefix(store: Store, rank: int, size: int, seconds: float) -> Store:
    """A part of a store that the ranks of this attempt alone use; every rank calls it. RunError if some are late."""
    # torchrun's store may outlive its workers, and addresses of dead ranks would be found in it. Nothing that a worker
    # learns from torchrun is the same on all nodes and another one in each attempt: its count of restarts is of one
    # node, and stays when a node joins. So each rank writes a word that nobody else has under its number. Rank 0
    # answers with all the words that it finds, again whenever one has changed, until every rank has found its own in
    # the answer.
    word, end = secrets.token_hex(8), time.monotonic() + seconds
    answer, others = dict[str, Any](), range(1, size)

    def attempt() -> Store:
        return PrefixStore(keys.ATTEMPT.format(attempt=answer["prefix"]), store)

    store.set(keys.WORD.format(rank=rank), word)
    while time.monotonic() < end:
        if rank == 0:
            if size == 1 or store.check([keys.WORD.format(rank=other) for other in others]):
                words = [word, *(store.get(keys.WORD.format(rank=other)).decode() for other in others)]
                # A word that has changed is that of a rank of this attempt, which had found one of the last there.
                if words != answer.get("words"):
                    answer = {"prefix": secrets.token_hex(8), "words": words}
                    store.set(keys.ANSWER, json.dumps(answer))
                own = attempt()
                if all(own.check([keys.HEARD.format(rank=other)]) for other in others):
                    own.set(keys.ALL_HEARD, "")
                    return own
        elif store.check([keys.ANSWER]):
            answer = json.loads(store.get(keys.ANSWER))
            if rank < len(answer["words"]) and answer["words"][rank] == word:
                own = attempt()
                own.set(keys.HEARD.format(rank=rank), "")
                if own.check([keys.ALL_HEARD]):
                    return own
        time.sleep(_WORD_SECONDS)
    raise _did_not_meet(seconds, TimeoutError("not all of them have come"))


def _meet(store: Store, rank: int, size: int, device: str, ranks_per_gpu: int, seconds: float, timeout: float) -> Group:
    try:
        return meet_within(store, rank, size, device, ranks_per_gpu, seconds, timeout)
    except (dist.DistError, CommError) as error:
        raise _did_not_meet(seconds, error) from None


def _did_not_meet(seconds: float, error: Exception) -> RunError:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
    how = f"within {seconds:g} s: {str(error).splitlines()[0]}"
    return RunError(f"rank {os.environ['RANK']} on {socket.gethostname()}: the ranks did not meet at {where} {how}")


def _train(job: Job, fresh: bool, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> RunResult:
    """A run on this rank; rank 0 alone locks the run's folder, and returns the summary."""
    check(setup_of(job, world.size), {WORKERS})
    folder, answer, agents = RunDir(job.out), dict[str, Any](), _agents(world)
    liveness.outside("the list of images", images_at(job))  # on all ranks, which wait for rank 0's disk
    with ExitStack() as held:
        if world.rank == 0:
            try:
                held.enter_context(folder.lock())
                folder.claim(job.recipe, fresh, agents)
                answer = {"summary": finished(job)}
            except (UserError, RunError) as error:
                answer = {"failure": Failure.of(error, 0).dump()}
        answer = world.broadcast_json(answer)
        if "failure" in answer:
            Failure.parse(answer["failure"]).throw()
        summary = answer["summary"]
        result = train(job, world, stop, restarts, liveness) if summary is None else RunResult(summary)
    return result if world.rank == 0 else RunResult(signal=result.signal)


def _agents(world: Group) -> set[int]:
    """The agents of torchrun that have started the ranks, by numbers that no others have; every rank calls it."""
    agent = torchrun_agent()
    digest = hashlib.sha256(f"{socket.gethostname()} {agent}".encode()).digest()
    number = int.from_bytes(digest[:7], "big") if agent else 0
    return {int(each) for each in world.all_gather(torch.tensor([number], device=world.small_device))} - {0}


def _print(line: str) -> None:
    with suppress(OSError):
        warn(line)


def _within(seconds: float, function: Callable[[], T]) -> T | None:
    """The result of `function`, which may hang with the store; None if it fails or takes too long."""
    found: list[T] = []

    def call() -> None:
        with suppress(RuntimeError):
            found.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None

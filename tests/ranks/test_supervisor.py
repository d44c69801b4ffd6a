"""Ranks of our own: results, failures by kind, ranks that die, freeze, hang or are slow, and new attempts."""

import errno
import itertools
import multiprocessing.forkserver
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.commands import ran
from tests.messages import assert_sentence, refuses
from tests.polling import until
from tests.run.processes import LOOPBACK, listening
from tests.step.trainers import job_of, take, trainer_of
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from torusgd import signals
from torusgd.comm import store_keys as keys
from torusgd.comm.base import ConnectionLost, LateRank, Liveness
from torusgd.comm.groups import Group
from torusgd.errors import UserError
from torusgd.ranks.failures import Failure, FailureKind
from torusgd.ranks.forkserver import forkserver_has_ended, forkserver_process, start_forkserver
from torusgd.ranks.generations import Generations
from torusgd.ranks.liveness import Heartbeat, Limits
from torusgd.ranks.rank import LastingFunction, serve_store
from torusgd.ranks.supervisor import FOR_MEMORY, Quorum, RankEntry, RankFailed, Supervisor
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.signals import StopFlag

SIZE = 2
BEAT = 3.0
STUCK = 4.0


class Attempts:
    """Attempts of one supervisor, each with another function."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor, self.number = supervisor, 0

    def results(self, action: Callable[..., Any]) -> list[Any]:
        self.number += 1
        return self.supervisor.run(partial(_act, action), self.number)

    def failure(self, action: Callable[..., Any]) -> Failure:
        with pytest.raises(RankFailed) as caught:
            self.results(action)
        return caught.value.failure


@pytest.fixture(scope="module")
def attempts() -> Iterator[Attempts]:
    with Supervisor(SIZE, "cpu", Limits(beat=BEAT, start=60, stuck=STUCK)) as supervisor:
        yield Attempts(supervisor)


def _act(action: Callable[..., Any], world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> Any:
    """Two units of work on each rank, then the action on rank 1, for which rank 0 waits."""
    for unit in range(2):
        liveness.progress("train", 3, unit)
    result = action(liveness) if world.rank == 1 else None
    total = torch.ones(1)
    world.all_reduce(total)
    return [os.environ["RANK"], os.environ["WORLD_SIZE"], world.rank, total.item(), restarts, stop(), result]


def be_well(liveness: Liveness) -> str:
    return "well"


def fail(error: Exception, liveness: Liveness) -> None:
    raise error


def allocate_too_much(liveness: Liveness) -> None:
    torch.empty(1 << 60)


def fail_to_compile(is_stopped: bool, liveness: Liveness) -> None:
    if is_stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    raise type("BackendCompilerFailed", (RuntimeError,), {"__module__": "torch._dynamo.exc"})("C++ compile error")


def be_killed(*_: Liveness) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(liveness: Liveness) -> None:
    os._exit(0)


def end_the_fork_server(liveness: Liveness) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    sleep_for_ever(liveness)  # a rank that ended before the supervisor looked would have done its work well


def freeze(liveness: Liveness) -> None:
    assert isinstance(liveness, Heartbeat)
    beats, mine = PrefixStore(keys.BEATS, liveness.store), keys.BEAT.format(rank=1)
    until(lambda: '"unit": 1' in beats.get(mine).decode(), "a beat says where it is")
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_for_ever(liveness: Liveness) -> None:
    while True:
        time.sleep(0.1)


def work_for_long(liveness: Liveness) -> None:
    for unit in range(60):  # twice as long as without a beat, half as long again as without progress
        time.sleep(2 * BEAT / 60)
        liveness.progress("train", 3, unit)


def test_a_compiler_that_was_stopped_with_its_rank_is_no_defect(attempts: Attempts) -> None:
    """The launcher, which has the signal too, says that the run was stopped."""
    assert attempts.failure(partial(fail_to_compile, True)).is_loss
    assert attempts.failure(partial(fail_to_compile, False)).kind is FailureKind.DEFECT


def test_a_machine_without_loopback_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a network namespace of one's own, whose interface is down until somebody sets it up."""

    def connect(probe: socket.socket, address: tuple[str, int]) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket.socket, "connect", connect)
    refuses("no loopback", serve_store, about="127.0.0.1")


def test_every_rank_runs_the_function_also_anew_and_a_slow_one_is_waited_for(attempts: Attempts) -> None:
    for _ in range(2):
        results = attempts.results(be_well)
        number = attempts.number
        assert results == [["0", "2", 0, 2.0, number, False, None], ["1", "2", 1, 2.0, number, False, "well"]]
    assert [result[3] for result in attempts.results(work_for_long)] == [2.0, 2.0]


STACK = r"sleep_for_ever \(test_supervisor.py:.*"
AT, UNREAD = (
    r"rank 1 on \S+ in train of step 3:",
    "nobody reads the output any more; the last checkpoint, if there is one, is good",
)


@pytest.mark.parametrize(("action", "kind", "text"), [
    (partial(fail, UserError("data = 0: give 1 or more")), FailureKind.USER_ERROR, "data = 0: give 1 or more"),
    (partial(fail, KeyError("a defect")), FailureKind.DEFECT, r"rank 1: KeyError: 'a defect' \(traceback above\)"),
    (partial(fail, OSError(28, "No space left")), FailureKind.RUN_ERROR, r"rank 1: \[Errno 28\] No space left"),
    (allocate_too_much, FailureKind.RUN_ERROR, "rank 1: .* can't allocate memory.*; use smaller stages.N.images_per.*"),
    (partial(fail, BrokenPipeError()), FailureKind.OUTPUT_CLOSED, UNREAD),
    (be_killed, FailureKind.RANK_LOST, "rank 1 was ended by SIGKILL"),
    (leave, FailureKind.RUN_ERROR, "rank 1 ended with exit code 0 and no result"),
    (freeze, FailureKind.RANK_LOST, rf"{AT} no heartbeat for 3 s, frozen or lost"),
    (sleep_for_ever, FailureKind.RANK_LOST, rf"{AT} no progress for \d+ s, at .*{STACK}"),
])  # fmt: skip
def test_a_failure_has_a_kind(attempts: Attempts, action: Callable[..., Any], kind: FailureKind, text: str) -> None:
    failure = attempts.failure(action)
    assert failure.kind is kind
    assert failure.rank == 1 or action in (freeze, sleep_for_ever), "of which another rank may tell"
    assert re.search(f"(^|; ){text}$", failure.text)
    assert failure.kind.exit_code == 1 + (kind is FailureKind.USER_ERROR)
    assert ("Traceback" in failure.trace) == (kind is FailureKind.DEFECT)


def test_a_fork_server_that_is_ended_is_named_and_the_next_attempt_starts_another(attempts: Attempts) -> None:
    failure = attempts.failure(end_the_fork_server)
    assert failure.kind is FailureKind.RANK_LOST
    assert "rank 1 ended with the fork server" in failure.text
    # Also once another has taken its place, as when a rank is started between the ends of two others.
    server = forkserver_process()
    start_forkserver()
    assert forkserver_process() != server
    assert forkserver_has_ended(server)
    assert not forkserver_has_ended(forkserver_process())
    assert [result[3] for result in attempts.results(be_well)] == [2.0, 2.0]


def leave_a_thread(liveness: Liveness) -> str:
    threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()
    return "done"


def test_a_rank_whose_process_does_not_end_after_its_result_is_killed(attempts: Attempts, monkeypatch: Any) -> None:
    lines: list[str] = []
    monkeypatch.setattr(attempts.supervisor, "_report", lines.append)
    assert [result[-1] for result in attempts.results(leave_a_thread)] == [None, "done"]
    assert lines == [f"rank 1 ends only now, killed {BEAT:g} s after the result was there"]


def train_with_every_group(world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> list[str]:
    """Where this rank listens when its run has groups of all kinds: rows and columns, column blocks, shards, links."""
    options = RuntimeOptions(allreduce="torus", grid="2x2", update="sharded", model_parallel=2)
    trainer = trainer_of(job_of("column_blocks=2", "model={name: digits-net}", options=options), world)
    take(trainer, 0)
    found = listening([os.getpid()])
    trainer.close()
    return found


def test_nothing_of_a_run_with_groups_of_all_kinds_listens_beyond_loopback() -> None:
    with Supervisor(4, "cpu", Limits(start=60)) as supervisor:
        own = listening([os.getpid()])  # the launcher's store
        ranks = supervisor.run(train_with_every_group)
    assert own
    assert all(ranks), "each rank listens for others"
    assert {*own, *itertools.chain(*ranks)} <= LOOPBACK


FORK = """
import sys
from multiprocessing import get_context
from torusgd.ranks.forkserver import start_forkserver

start_forkserver()
code = "import sys; sys.exit('torusgd.run.run' in sys.modules)"
process = get_context("forkserver").Process(target=exec, args=(code,))
process.start()
process.join()
print(process.exitcode)
"""


def test_ranks_are_forked_from_a_process_that_has_imported_all_that_they_need() -> None:
    """Each would take seconds for it otherwise."""
    done = ran([sys.executable, "-c", FORK])
    assert done.stdout.strip() == "1", done.stderr


def test_a_limit_on_threads_is_named_before_any_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [12]

    def limited(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", limited)
    refuses("too few threads", start_forkserver, 2, about="ulimit -u")
    assert threading.active_count() == before


def test_a_limit_on_threads_that_a_rank_meets_at_work_is_one_line() -> None:
    found = Failure.of(RuntimeError("can't start new thread"), rank=1)
    assert (found.kind, found.trace) == (FailureKind.RUN_ERROR, "")
    assert_sentence("a limit on threads that a rank meets", "rank 1: can't start", found.text)


def test_a_tensor_beyond_any_memory_is_one_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, 9)
    found = Failure.of(caught.value, rank=1)
    assert (found.kind, found.trace) == (FailureKind.RUN_ERROR, "")
    assert_sentence("a tensor beyond any memory", "rank 1: a tensor can't", found.text)
    assert Failure.of(RuntimeError("a defect"), rank=1).kind is FailureKind.DEFECT


def test_a_umask_that_forbids_its_own_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the temporary folder."""
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", Mock(side_effect=PermissionError))
    before = os.umask(0o777)
    try:
        refuses("a umask of 777", start_forkserver, about="umask")
    finally:
        os.umask(before)


def test_threads_that_can_be_started_are_found_where_a_stack_needs_more_room() -> None:
    """As on ARM, whose least stack is 128 KiB, and where static TLS was enlarged for a library that needs it."""
    room = os.environ | {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=100000"}
    code = "from torusgd.ranks.forkserver import check_threads; check_threads(2, 'here')"
    ran([sys.executable, "-c", code], env=room)


ELSEWHERE = 1
"""the rank that is said to be on another machine; rank 0 is lost, and later ones join"""


class Lasting(LastingFunction):
    """Holds nothing."""

    def prepare(self, heartbeat: Heartbeat) -> None:
        return None

    def close(self) -> None:
        return None


class Losing(Lasting):
    """Ranks at work, of which rank 0 is lost as soon as the file `cue` is there; a rank that joins makes it, before it
    asks for the state, which nobody sends it, and after what else it `prepares`.
    """

    def __init__(self, cue: Path, prepares: Callable[[], object] = tuple) -> None:
        self._cue, self._prepares = cue, prepares

    def prepare(self, heartbeat: Heartbeat) -> None:
        self._prepares()
        self._cue.touch()

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        raise AssertionError("nobody sends the state")

    def __call__(self, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> list[int]:
        me = world.ranks[world.rank]
        if me == 0:
            until(self._cue.exists, "the cue")
            be_killed()
        world.all_reduce(torch.ones(1))
        return [me, os.getpid(), *world.ranks]


class Handing(Lasting):
    """Rank 0 sends the state to one that joins, and is lost as soon as that one could take part."""

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        source.broadcast_text("")
        caught_up()

    def __call__(self, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> list[int]:
        if world.ranks == (0,):
            assert isinstance(liveness, Heartbeat)
            generations = liveness.generations
            until(lambda: (stop(), 1 in generations.joiners)[1], "rank 1 wants the state")
            liveness.generations.meet_joiner(1, lambda: False).broadcast_text("the state")
            until(lambda: liveness.store.check([keys.READY.format(rank=1)]), "it is ready")
            be_killed()
        return [*world.ranks]


class Dying(Lasting):
    """Rank 0 works until the file `cue` is there; one that would join is killed before it takes part."""

    def __init__(self, cue: Path) -> None:
        self._cue = cue

    def prepare(self, heartbeat: Heartbeat) -> None:
        be_killed()

    def follow(self, source: Group, caught_up: Callable[[], object]) -> None:
        raise AssertionError("nobody sends the state")

    def __call__(self, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> list[int]:
        until(self._cue.exists, "the cue")
        return [*world.ranks]


def refuse() -> None:
    raise UserError("--data nowhere: there is nothing")


def test_a_launcher_with_too_few_files_says_so_before_its_store_waits_for_itself(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (18, 18))
    monkeypatch.setattr(os, "listdir", lambda path: [""] * 10)
    refuses("too few files of a launcher", supervise, 1, [], about="ulimit -n")


def supervise(ranks: int, lines: list[str]) -> Supervisor:
    return Supervisor(ranks, "cpu", Limits(beat=60, start=60, stuck=60), report=lines.append)


def test_a_rank_that_the_kernel_may_have_ended_for_lack_of_memory_is_named_so(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(signals, "_COUNTS", counts := tmp_path / "vmstat")
    counts.write_text("pgfault 7\noom_kill 3\n")
    action: Any = be_killed
    with supervise(1, []) as supervisor:
        for count, more in ((3, ""), (4, f", {FOR_MEMORY}")):
            counts.write_text(f"pgfault 8\noom_kill {count}\n")
            with pytest.raises(RankFailed, match=f"^rank 0 was ended by SIGKILL{more}$"):
                supervisor.run(action, attempt=count)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankEntry, "is_remote", property(lambda self: self.number == ELSEWHERE))


@pytest.mark.parametrize("requested", [3, None], ids=["about to join, and not ready", "new"])
def test_another_rank_takes_the_place(requested: int | None, tmp_path: Path, elsewhere: None) -> None:
    lines, cue = list[str](), tmp_path / "cue"
    if requested is None:
        cue.touch()
    with supervise(2, lines) as supervisor:
        results = supervisor.run(Losing(cue), quorum=Quorum(fewest=1), requested=lambda: requested)
    assert [[me, *ranks] for me, _, *ranks in results] == [[1, 2, 1], [2, 2, 1]]
    assert lines == ["rank 0 was ended by SIGKILL; rank 2 takes its place on this machine; ranks 2, 1 go on"]


def test_a_rank_that_has_been_sent_the_state_goes_on_where_no_other_is_left() -> None:
    lines: list[str] = []
    with supervise(1, lines) as supervisor:
        assert supervisor.run(Handing(), quorum=Quorum(fewest=1, most=2), requested=lambda: 2) == [[1]]
    assert lines[-1].startswith("rank 0 was ended by SIGKILL; ")
    assert lines[-1].endswith("rank 1 goes on")


def test_a_line_names_the_rank_that_was_lost_before_it_took_part(tmp_path: Path) -> None:
    lines, requests = list[str](), iter([2])

    def report(line: str) -> None:
        lines.append(line)
        (tmp_path / "cue").touch()

    with Supervisor(1, "cpu", Limits(beat=60, start=60, stuck=60), report=report) as supervisor:
        quorum = Quorum(fewest=1, most=2)
        results = supervisor.run(Dying(tmp_path / "cue"), quorum=quorum, requested=lambda: next(requests, None))
    assert results == [[0]]
    assert lines == ["rank 1 does not join: rank 1 was ended by SIGKILL; rank 0 goes on"]


@pytest.mark.parametrize(("prepares", "kind", "text"), [
    (be_killed, FailureKind.RANK_LOST, "rank 2 was ended by SIGKILL"),
    (refuse, FailureKind.USER_ERROR, "--data nowhere: there is nothing"),
])  # fmt: skip
def test_no_rank_after_another_is_started_in_vain(tmp_path: Path, elsewhere: None, prepares, kind, text) -> None:
    (tmp_path / "cue").touch()
    with supervise(2, []) as supervisor, pytest.raises(RankFailed) as caught:
        supervisor.run(Losing(tmp_path / "cue", prepares), quorum=Quorum(fewest=1))
    assert (caught.value.failure.kind, caught.value.failure.text) == (kind, text)


def test_a_rank_late_just_as_the_launcher_announces_its_loss_is_left_behind() -> None:
    store = HashStore()
    launcher = Generations(store)
    launcher.announce([0, 1])

    class Late(Liveness):
        def late(self) -> list[LateRank]:
            if launcher.number:
                return []
            launcher.announce([0], lost=[1])
            return [LateRank("no heartbeat", 1)]

    assert Generations(store).join(0, torch.device("cpu"), 1, Late()).ranks == (0,)


@pytest.mark.parametrize("change", [[0], [0, 1, 3]])
def test_a_loss_is_no_smaller_for_a_change_that_is_planned_before_a_rank_has_looked(change: list[int]) -> None:
    store = HashStore()
    launcher, rank = Generations(store), Generations(store)
    launcher.announce([0, 1, 2])
    rank.number = launcher.number
    launcher.announce([0, 1], lost=[2])
    launcher.announce(change, planned=True)
    assert rank.has_lost_ranks(store)
    with pytest.raises(ConnectionLost, match="lost ranks"):
        rank.check()
    assert not rank.is_planned
    rank.number = 1  # which has followed the loss
    rank._looked = 0.0
    assert (rank.has_lost_ranks(store), rank.check(), rank.is_planned) == (False, True, True)

"""The first machine has lost all ranks that take part: another one of it does, and those of other machines go on.

Which rank is on another machine is only said here; all of them are on this one.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.polling import until

from torusgd.comm import store_keys as keys
from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group
from torusgd.errors import UserError
from torusgd.ranks.failures import FailureKind
from torusgd.ranks.liveness import Heartbeat, Limits
from torusgd.ranks.rank import LastingFunction
from torusgd.ranks.supervisor import Quorum, RankEntry, RankFailed, Supervisor
from torusgd.signals import StopFlag

ELSEWHERE = 1
"""the rank on the other machine; rank 0 is lost, and later ones join"""


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
            os.kill(os.getpid(), signal.SIGKILL)
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
            assert liveness.generations is not None
            generations = liveness.generations
            until(lambda: (stop(), 1 in generations.joiners)[1], "rank 1 wants the state")
            liveness.generations.meet_joiner(1, lambda: False).broadcast_text("the state")
            until(lambda: liveness.store.check([keys.READY.format(rank=1)]), "it is ready")
            die()
        return [*world.ranks]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise UserError("--data nowhere: there is nothing")


def supervise(ranks: int, lines: list[str]) -> Supervisor:
    return Supervisor(ranks, "cpu", Limits(beat=60, start=60, stuck=60), report=lines.append)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankEntry, "is_remote", property(lambda self: self.number == ELSEWHERE))


@pytest.mark.parametrize("requested", [3, None], ids=["about to join, and not ready", "new"])
def test_another_rank_takes_the_place(requested: int | None, tmp_path: Path, elsewhere: None) -> None:
    lines: list[str] = []
    if requested is None:
        (tmp_path / "cue").touch()
    with supervise(2, lines) as supervisor:
        results = supervisor.run(Losing(tmp_path / "cue"), quorum=Quorum(fewest=1), requested=lambda: requested)
    assert [[me, *ranks] for me, _, *ranks in results] == [[1, 2, 1], [2, 2, 1]]
    assert lines == ["rank 0 was ended by SIGKILL; rank 2 takes its place on this machine; ranks 2, 1 go on"]


def test_a_rank_that_has_been_sent_the_state_goes_on_where_no_other_is_left() -> None:
    lines: list[str] = []
    with supervise(1, lines) as supervisor:
        assert supervisor.run(Handing(), quorum=Quorum(fewest=1, most=2), requested=lambda: 2) == [[1]]
    assert lines[-1].startswith("rank 0 was ended by SIGKILL; ")
    assert lines[-1].endswith("rank 1 goes on")


@pytest.mark.parametrize(
    ("prepares", "kind", "text"),
    [
        (die, FailureKind.RANK_LOST, "rank 2 was ended by SIGKILL"),
        (refuse, FailureKind.USER_ERROR, "--data nowhere: there is nothing"),
    ],
)
def test_no_rank_after_another_is_started_in_vain(
    tmp_path: Path, elsewhere: None, prepares: Callable[[], None], kind: FailureKind, text: str
) -> None:
    (tmp_path / "cue").touch()
    with supervise(2, []) as supervisor, pytest.raises(RankFailed) as caught:
        supervisor.run(Losing(tmp_path / "cue", prepares), quorum=Quorum(fewest=1))
    assert (caught.value.failure.kind, caught.value.failure.text) == (kind, text)

"""A rank that joins is sent the state beside the steps: it gets the same bits, and the steps of the others go on."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.step.trainers import job_of, take, trainer_of
from torusgd.comm import groups
from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run import state_feed
from torusgd.run.components import draw_network
from torusgd.run.newest_state import Retained, nothing_yet
from torusgd.run.saving import RunState
from torusgd.run.state_feed import StateFeeds, StateFollower, _Feed

STEPS = 16
LONG = f"stages=[{{until: {STEPS}st, images_per_worker: 2}}]"
JOINER = 5
SECONDS = 240


class Sender:
    """A rank at work, in the thread of the test."""

    def __init__(self, store: HashStore, *overrides: str) -> None:
        self.trainer = trainer_of(job_of(LONG, *overrides))
        self.state = RunState(self.trainer.fingerprint)
        self.joiners: tuple[int, ...] = ()
        self._store = store
        self.feeds = StateFeeds(self)  # type: ignore[arg-type] # of `Generations` it has all that a feed needs

    def meet_joiner(self, rank: int, is_given_up: object) -> Group:
        return pair(self._store, 0)

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            stats = take(self.trainer, self.state.step)
            self.state.count(stats)
            event: dict[str, Any] = {"step": self.state.step}
            self.feeds.after_step(self.trainer.step.state, self.state, not stats.skipped, event.copy)


class Follower:
    """A rank that joins, in a thread that begins to read once it is let go."""

    def __init__(self, store: HashStore, *overrides: str) -> None:
        job = job_of(LONG, *overrides, options=RuntimeOptions(allreduce="torus", grid="2x2"))  # of the ranks at work
        retained = nothing_yet(job, groups.alone(), Liveness(), (0,))
        network = draw_network(job, retained.data, torch.device("cpu"))
        with torch.no_grad():
            for parameter in network.model.parameters():
                parameter.fill_(float("nan"))  # nothing of its own may be left
        self._follower, self._store = StateFollower(job, replace(retained, network=network), Liveness()), store
        self.connected, self.go, self.caught_up = threading.Event(), threading.Event(), threading.Event()
        self.group: Group | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        self.group = pair(self._store, JOINER)
        self.connected.set()
        self.go.wait(SECONDS)
        self._follower.follow(self.group, self.caught_up.set)

    def end(self) -> Retained:
        """What it has when nothing more is sent."""
        self.go.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self._follower.keep()


def pair(store: HashStore, rank: int) -> Group:
    return groups.build(store, (0, JOINER), rank, device=torch.device("cpu"), timeout=SECONDS)


def begin(*overrides: str) -> tuple[Sender, Follower]:
    """Two steps done, the third sends the state."""
    store = HashStore()
    sender, follower = Sender(store, *overrides), Follower(store, *overrides)
    sender.take_steps(2)
    sender.joiners = (JOINER,)
    sender.take_steps(1)
    assert follower.connected.wait(SECONDS)
    return sender, follower


def assert_same(retained: Retained, sender: Sender) -> None:
    assert retained.state == sender.state
    assert retained.last_event is not None
    assert retained.last_event() == {"step": sender.state.step}
    tensors = sender.trainer.step.state.state_dict(sender.state.step, keep=True)
    assert retained.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(retained.tensors[name], tensor), name


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-3, nesterov: true}", "average={half_life: 2st}"),
        ("clip_grad_norm=0.05",),  # LARS
        ("optimizer={name: adamw, weight_decay: 0.1}", "rate.lr=0.001"),
        ("optimizer={name: lamb, weight_decay: 0.1}", "rate.lr=0.001"),
    ],
    ids=["sgd and average", "lars and clip", "adamw", "lamb"],
)
def test_steps_go_on_while_the_state_is_under_way_and_it_has_the_same_bits(overrides: tuple[str, ...]) -> None:
    sender, follower = begin(*overrides)
    sender.take_steps(4)  # nothing was read at the other end by now
    assert not follower.caught_up.is_set()
    follower.go.set()
    assert follower.caught_up.wait(SECONDS)
    sender.take_steps(2)
    sender.feeds.end()
    assert_same(follower.end(), sender)


def test_a_step_that_is_skipped_is_skipped_by_who_follows() -> None:
    sender, follower = begin("precision=float16", "loss_scale={initial: 1048576.0}")
    skipped = sender.state.totals.skipped
    assert skipped
    sender.take_steps(STEPS - 4)
    assert skipped < sender.state.totals.skipped < STEPS - 1, "some were, and some not"
    sender.feeds.end()
    assert_same(follower.end(), sender)


def test_where_either_rank_is_lost_or_slow_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, follower = begin()
    assert follower.group is not None
    follower.group.abort()
    sender.take_steps(4)
    sender.feeds.end()
    assert follower.end().state is None
    sender, follower = begin()
    follower.go.set()
    assert follower.caught_up.wait(SECONDS)
    sender.feeds.close()
    sender.joiners = ()
    sender.take_steps(1)
    assert getattr(follower.end().state, "step", None) == 3
    monkeypatch.setattr(state_feed, "LEAST_WAITING", 0)
    sender, follower = begin()
    sender.joiners = ()
    sender.take_steps(STEPS - 3)
    assert sender.state.step == STEPS
    assert follower.end().state is None


def test_a_feed_that_is_closed_as_it_connects_leaves_nobody_waiting() -> None:
    store, connects, closed = HashStore(), threading.Event(), threading.Event()

    class Connecting:
        def meet_joiner(self, rank: int, is_given_up: object) -> Group:
            group = pair(store, 0)
            connects.set()
            closed.wait(SECONDS)
            return group

    joiner = Follower(store)
    feed = _Feed(JOINER, Connecting())  # type: ignore[arg-type]
    joiner.go.set()
    assert connects.wait(SECONDS)
    feed.close()
    closed.set()
    joiner.end()

"""Shares that follow the ranks' speed: the best split, what moves and what stays, and weights that do not change."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.comm.gloo_world import on_ranks, run_ranks
from tests.run.runs import events, run_here
from tests.step.trainers import job_of, run_of, trainer_of, weights_of

from torusgd.comm.groups import Group, group_of
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import best_counts
from torusgd.rng import keyed_uniform
from torusgd.step.journal import synchronous
from torusgd.step.membership import Membership, even_shares, with_counts
from torusgd.step.rank_times import Balance, Move, SpeedWatch, balance

STAGES = "stages=[{until: 42st, images_per_worker: 2}]"
LONG = (STAGES, "virtual_workers=6", "evaluate.every=42st", "memory_format=contiguous")


@pytest.mark.parametrize(
    ("workers", "seconds", "counts"),
    [(12, [1, 1, 2], (5, 5, 2)), (32, [1, 1, 1, 2], (10, 9, 9, 4)), (64, [1] * 7 + [4], (9, 9, 9, 9, 9, 9, 8, 2)),
     (3, [1, 50, 1], (1, 1, 1)), (4, [1, 50, 1], (2, 1, 1)), (8, [2, 2, 2], (3, 3, 2))],
)  # fmt: skip
def test_the_next_worker_goes_to_who_is_done_first(workers: int, seconds: list[float], counts: tuple[int, ...]) -> None:
    assert best_counts(workers, seconds) == counts


def test_work_moves_only_for_what_lasts_and_is_clear_and_only_what_must_changes_its_rank() -> None:
    membership = even_shares(range(4), me=1, virtual_workers=64)
    for counts in ([20, 20, 20, 4], [1, 1, 1, 61], [16, 16, 16, 16]):
        new = with_counts(membership, counts)
        assert list(new.counts) == counts
        assert sorted(each for share in new.shares for each in share) == list(range(64))
        stayed = sum(len(set(a) & set(b)) for a, b in zip(membership.shares, new.shares, strict=True))
        assert stayed == sum(map(min, zip(membership.counts, new.counts, strict=True)))
        membership = new
    membership = even_shares(range(3), me=0, virtual_workers=12)
    even, slow, little = [1.0, 1.0, 1.0], [1.0, 1.0, 2.0], [1.0, 1.0, 1.04]
    for earlier, later in ((even, even), (even, slow), (slow, even), (little, little)):
        assert balance(membership, earlier, later, steps=10).move is None
    found = balance(membership, slow, slow, steps=10)
    assert found.move is not None
    moved = found.move.membership
    assert (moved.counts, found.move.moved, found.slow, found.saved) == ((5, 5, 2), 2, {2: 2.0}, 0)
    after, back = balance(moved, slow, slow, steps=10), balance(moved, even, even, steps=10).move
    assert (after.move, after.saved) == (None, 30.0)
    assert back is not None
    assert back.membership.counts == (4, 4, 4)


def test_noise_of_a_few_percent_moves_little_and_costs_nothing() -> None:
    """200 comparisons of 8 equal ranks whose times scatter by 3 %: no true step is 5 % longer than the even one."""
    membership, moves = even_shares(range(8), me=0, virtual_workers=256), 0
    for turn in range(200):
        earlier, later = 1 + 0.03 * torch.from_numpy(keyed_uniform(turn, np.arange(16)) - 0.5).view(2, 8) * 12**0.5
        move = balance(membership, earlier.tolist(), later.tolist(), steps=10).move
        if move is not None:
            moves, membership = moves + 1, move.membership
        assert max(membership.counts) <= 33
    assert moves <= 4


def compared(watch: SpeedWatch, membership: Membership, seconds: list[float], stage: int = 0) -> Move | None:
    """The move after ten steps in which a virtual worker took each rank so long."""
    step = SimpleNamespace(index=10, stage=stage)
    words = torch.tensor([[int(1e6 * each)] * 2 for each in seconds]).reshape(-1)
    control = SimpleNamespace(section=lambda name: words)
    view: Any = SimpleNamespace(step=step, membership=membership)
    found: Balance = watch.after(view, control)["balance"]  # type: ignore[arg-type]
    return found.move


def test_where_images_come_slowly_work_does_not_go_to_and_fro() -> None:
    """A rank waits for its images as long as they take, and finds them there if it has fewer than the other."""
    watch, membership, moves = SpeedWatch(0, 2, lambda: lambda: 0.0), even_shares(range(2), 0, 4), list[str]()
    for _ in range(200):
        most = max(membership.counts)
        seconds = [1.0 * count / most if count == most else 0.01 for count in membership.counts]
        if most == 2:  # alike; chance makes one of them seem slow
            seconds = [1.0, 0.3]
        if (move := compared(watch, membership, seconds)) is not None:
            membership = move.membership
            moves.append(str(move))
    assert len(moves) == 10  # five times there and back, after 8, 16, 32 ... comparisons of rest
    assert moves[1] == "shares go back to 2/2 virtual workers: the others made no step shorter"
    assert membership.counts == (2, 2)


def test_a_move_that_made_steps_shorter_stays_and_another_stage_judges_none() -> None:
    for stage, seconds, counts in ((0, [1.0, 1.0, 2.0], (5, 5, 2)), (1, [2.0, 2.0, 4.0], (5, 5, 2))):
        watch, membership = SpeedWatch(0, 3, lambda: lambda: 0.0), even_shares(range(3), 0, 12)
        move = compared(watch, membership, [1.0, 1.0, 2.0])
        assert move is not None
        assert compared(watch, move.membership, seconds, stage) is None
        assert move.membership.counts == counts


def test_where_sums_depend_on_who_computes_the_shares_are_even() -> None:
    def follows_speed(reduction: str, **options: Any) -> bool:
        trainer = trainer_of(job_of(f"reduction={reduction}", options=RuntimeOptions(**options)))
        return any(isinstance(each, SpeedWatch) for each in trainer.step.watchers)

    assert [follows_speed("float32"), follows_speed("exact", shares="even"), follows_speed("exact")] == [0, 0, 1]


def shuffled(membership: Membership, step: int) -> Membership:
    """Any split of the virtual workers, another one in each step; each rank has at least one."""
    size, workers = len(membership.ranks), sum(membership.counts)
    order = np.argsort(keyed_uniform(7, step, np.arange(workers))).tolist()
    owners = [*range(size), *(int(size * u) for u in keyed_uniform(8, step, np.arange(workers - size)))]
    shares = tuple(tuple(w for w, o in zip(order, owners, strict=True) if o == rank) for rank in range(size))
    return replace(membership, shares=shares)


def hash_of_shuffled_steps(world: Group, options: RuntimeOptions) -> str:
    lars = "optimizer={name: lars, momentum: 0.9, weight_decay: 1.0e-4, trust: 0.01}"
    trainer = trainer_of(job_of("virtual_workers=8", lars, options=options), world)
    for index in range(len(trainer.step.schedule)):
        trainer.step.run(shuffled(trainer.membership, index), synchronous(index, 8))
    found = weights_of(trainer)
    trainer.close()
    return found


@on_ranks(3)
def test_any_split_in_any_step_gives_the_same_weights() -> None:
    """On all ranks, replicated or in shards, and on two of them beside one that is alone."""
    world, plain, sharded = group_of(), RuntimeOptions(), RuntimeOptions(update="sharded")
    parts = world.partition([[0, 1], [2]])
    (found,) = {hash_of_shuffled_steps(*each) for each in ((parts, plain), (world, plain), (world, sharded))}
    assert world.broadcast_text(found) == found


def train_at_other_speeds(out: str) -> dict[str, Any]:
    """42 steps on 3 ranks; a virtual worker takes rank 2 twice as long, from step 23 on rank 0 three times."""
    world = group_of()
    run = run_of(job_of(*LONG, out=Path(out)), world)
    (speeds,) = (watcher for watcher in run.trainer.step.watchers if isinstance(watcher, SpeedWatch))
    measured, steps = speeds._speed, count()

    def fixed() -> Callable[[], float]:
        """In place of this machine's times, which depend on what else it does; step 0's passes are run twice."""
        speed, step = measured(), max(0, next(steps) - 1)
        seconds = ({2: 2.0} if step < 23 else {0: 3.0}).get(world.rank, 1.0)
        return lambda: seconds if speed() > 0 else 0.0

    speeds._speed = fixed
    return run.run().summary


def test_a_run_moves_work_away_from_a_slow_rank_and_back_and_says_so(tmp_path: Path) -> None:
    summary = run_ranks(3, train_at_other_speeds, str(tmp_path / "out"))[0]
    shares = {e["step"]: e["shares"] for e in events(tmp_path / "out") if "shares" in e}
    # The message of the 31st step has other speeds in its later half only.
    assert shares == {
        11: {"counts": {"0": 3, "1": 2, "2": 1}, "moved": 1, "gain": 0.25, "slow": {"2": 2.0}},
        41: {"counts": {"0": 1, "1": 3, "2": 2}, "moved": 2, "gain": 0.6667, "slow": {"0": 3.0}},
    }
    assert summary["slow_ranks"] == {"0": 3.0, "2": 2.0}
    assert (summary["moved_workers"], summary["shares"]) == (3, {"0": 1, "1": 3, "2": 2})
    assert summary["saved_seconds"] == 10 * (4 - 3) + 20 * (6 - 9)
    alone, _ = run_here(tmp_path / "alone", *LONG)
    assert summary["weights_sha256"] == alone["weights_sha256"]

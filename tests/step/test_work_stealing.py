"""Idle ranks take over what a late one has not begun: each virtual worker once, the same weights, in the events."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.launch.driven import Driven, kill
from tests.launch.driven import job_of as job_of_run
from tests.polling import until
from tests.run.processes import assert_told_once, results, run_alone
from tests.run.runs import events, run_here
from tests.step.trainers import job_of, run_of
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from torusgd.comm.base import ConnectionLost
from torusgd.comm.groups import Group, group_of
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.rng import keyed_uniform
from torusgd.step.work_stealing import Claims, TakenOver, work_stealing

STAGES = "stages=[{until: 8st, images_per_worker: 2}]"
LONG = ("memory_format=contiguous", STAGES, "virtual_workers=12", "evaluate.every=8st")
LATE_STEPS = (0, 2, 5)
"""in which rank 2 computes its first virtual worker for as long as it has others; step 0's passes are run twice"""


def train_with_a_late_rank(out: str) -> dict[str, Any]:
    world = group_of()
    options = RuntimeOptions(work_stealing=True, shares="even", drift_every=1)
    run = run_of(job_of(*LONG, options=options, out=Path(out)), world)
    passes: Any = run.trainer.step.forward_backward
    stealing = run.trainer.step.stealing
    assert stealing is not None
    claims, forward = stealing.keywords["claims"], passes.forward

    def late(step: Any, worker: int, *more: Any) -> Tensor:
        if world.rank == 2 and worker == 8 and step.index in LATE_STEPS:
            row = claims._name(2)
            until(lambda: claims._add(row, 0) >> 32 >= 3, "others have taken the rest", timeout=240)
        return forward(step, worker, *more)

    passes.forward = late
    return run.run().summary


def test_a_late_ranks_work_is_done_by_others_with_the_same_weights(tmp_path: Path) -> None:
    summary = run_ranks(3, train_with_a_late_rank, str(tmp_path / "out"))[0]
    alone, _ = run_here(tmp_path / "alone", *LONG)
    assert summary["weights_sha256"] == alone["weights_sha256"]
    assert alone["taken_over_workers"] == 0
    taken_over = {each["step"] - 1: each["taken_over"] for each in events(tmp_path / "out") if "taken_over" in each}
    # On a busy machine more may be taken over, also from the other ranks.
    for step in LATE_STEPS:
        assert taken_over[step]["late"]["2"] == 3
        assert sum(taken_over[step]["helpers"].values()) == sum(taken_over[step]["late"].values())
    assert summary["late_ranks"]["2"] >= 9
    assert summary["taken_over_workers"] == sum(summary["late_ranks"].values())
    assert summary["taken_over_saved_seconds"] >= 0


def test_a_helper_is_lost_and_the_step_redone(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, short = tmp_path / "out", ("virtual_workers=12", "stages=[{until: 12st, images_per_worker: 3}]")
    undisturbed = results(run_alone(tmp_path / "alone", recipe, *short))

    def drive(run: Driven) -> None:
        run.reach(6)
        kill(run.pid(0))  # it has most often just taken something over

    slow = (*short, "data.options={pause: 0.02, rank: 1}")
    job = job_of_run(out, recipe, *slow, workers=3, work_stealing=True, shares="even", checkpoint_every="4st")
    told = Driven(job, drive, monkeypatch).result.summary
    assert results(told) == undisturbed
    assert (told["lost_ranks"], told["restarts"]) == ([0], 0)
    assert told["late_ranks"]["1"] > 0
    assert_told_once(out, told["steps"])


def test_what_was_saved_is_until_the_late_rank_would_have_been_ready_and_nobody_helps_a_rank_alone_or_unasked() -> None:
    # Lost, taken, microseconds until ready, microseconds of the quickest own virtual worker.
    rows = [[0, 1, 4_400_000, 500_000], [2, 0, 4_000_000, 500_000], [0, 1, 4_500_000, 500_000], [0, 0, 4_100_000, 1]]
    taken = TakenOver(late={1: 2}, helpers={0: 1, 2: 1}, saved=0.5)
    assert TakenOver.read(torch.tensor(rows).reshape(-1), [0, 1, 2, 4]) == taken
    rows[1][2] = 3_000_000  # it would have been ready earlier than its helpers were
    assert TakenOver.read(torch.tensor(rows).reshape(-1), [0, 1, 2, 4]) == replace(taken, saved=0)
    rows[1][0] = 0
    assert TakenOver.read(torch.tensor(rows).reshape(-1), [0, 1, 2, 4]) is None
    assert TakenOver.read(torch.zeros(0, dtype=torch.int64), [0, 1]) is None
    for is_on in (True, False):
        assert work_stealing(RuntimeOptions(work_stealing=is_on), group_of()) is None


def members(size: int) -> list[Claims]:
    """Claims of all members of a group, in this process."""
    group = {"size": size, "store": HashStore(), "barrier": lambda: None, "broadcast_text": lambda text: "1"}
    return [Claims(cast(Group, SimpleNamespace(rank=rank, **group))) for rank in range(size)]


def take_all(claims: list[Claims], counts: list[int], seed: int) -> Counter[tuple[int, int]]:
    """The pieces, as (row, index in it), that all members take in a round, in an order drawn from the seed."""
    taken: Counter[tuple[int, int]] = Counter()
    for each in claims:
        each.begin(counts)
    busy, turn = set(range(len(claims))), 0
    while busy:
        me = sorted(busy)[int(len(busy) * keyed_uniform(seed, turn, np.arange(1))[0])]
        turn += 1
        own = claims[me].claim_own()
        if own is not None:
            taken[me, own] += 1
            continue
        looks = claims[me].looks()
        row = max(looks, key=lambda member: looks[member])
        if not looks[row]:
            busy.remove(me)
        elif (piece := claims[me].claim_of(row)) is not None:
            taken[row, piece] += 1
    return taken


@pytest.mark.parametrize("counts", [[8, 8, 8, 8], [1, 1, 1], [1, 40, 3], [5, 5, 2], [2, 64]])
def test_each_piece_is_taken_once_in_whatever_order_members_claim(counts: list[int]) -> None:
    claims = members(len(counts))
    for seed in range(20):
        expected = Counter((row, piece) for row, count in enumerate(counts) for piece in range(count))
        assert take_all(claims, counts, seed) == expected
        counts = counts[1:] + counts[:1]


def test_who_is_late_loses_from_the_back_what_it_has_not_claimed_and_who_leaves_takes_all_along() -> None:
    late, idle, other = members(3)
    for each in (late, idle, other):
        each.begin([8, 1, 1])
    assert [late.claim_own() for _ in range(3)] == [0, 1, 2]  # a quarter without a claim, and one claim
    assert idle.looks() == {2: 0, 0: 5}
    assert [idle.claim_of(0), other.claim_of(0), idle.claim_of(0)] == [7, 6, 5]
    assert late.may_have_own
    assert [late.claim_own(), late.claim_own(), late.claim_own()] == [3, 4, None]
    assert not late.may_have_own
    assert idle.claim_of(0) is None
    assert idle.looks() == {2: 0, 0: 0}
    leaving, idle = members(2)
    for each in (leaving, idle):
        each.begin([8, 2])
    assert leaving.claim_own() == 0
    leaving.claim_rest()
    assert (leaving.claim_own(), idle.looks(), idle.claim_of(0)) == (None, {0: 0}, None)


def test_a_round_of_many_pieces_takes_few_queries_and_a_store_out_of_reach_is_a_lost_connection() -> None:
    claims, queries = members(1)[0], dict[int, int]()
    for pieces in (8, 64, 512):
        with patch.object(claims._store, "query", wraps=claims._store.query) as query:
            claims.begin([pieces])
            assert [claims.claim_own() for _ in range(pieces + 1)] == [*range(pieces), None]
        queries[pieces] = query.call_count
    assert queries == {8: 7, 64: 15, 512: 23}
    claims = members(2)[0]
    claims.begin([1, 1])
    claims._store._store = Mock(**{"multi_get.side_effect": RuntimeError("gone")})
    with pytest.raises(ConnectionLost):
        claims.looks()

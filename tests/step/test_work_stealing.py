"""Idle ranks take over what a late one has not begun: the same weights, each virtual worker once, in the events."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.launch.driven import Driven, kill
from tests.launch.driven import job_of as job_of_run
from tests.polling import until
from tests.run.processes import assert_told_once, results, run_alone
from tests.run.runs import TINY, events, run_here
from tests.step.trainers import job_of, run_of
from torch import Tensor

from torusgd.comm.groups import group_of
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.runtime import resolve_auto
from torusgd.step.work_stealing import TakenOver, work_stealing

LONG = ("stages=[{until: 8st, images_per_worker: 2}]", "virtual_workers=12", "evaluate.every=8st")
LATE_STEPS = (0, 2, 5)
"""in which rank 2 computes its first virtual worker for as long as it has others; step 0's passes are run twice"""


def train_with_a_late_rank(out: str) -> dict[str, Any]:
    world = group_of()
    recipe = resolve_auto(load_recipe("digits", [*TINY, *LONG]).recipe, "cpu")
    options = RuntimeOptions(work_stealing=True, shares="even", drift_every=1)
    run = run_of(job_of(recipe=recipe, options=options, out=Path(out)), world)
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


def test_a_helper_is_lost_with_what_it_had_taken_over_and_the_step_is_done_again(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_was_saved_is_until_the_late_rank_would_have_been_ready() -> None:
    # Lost, taken, microseconds until ready, microseconds of the quickest own virtual worker.
    rows = [[0, 1, 4_400_000, 500_000], [2, 0, 4_000_000, 500_000], [0, 1, 4_500_000, 500_000], [0, 0, 4_100_000, 1]]
    told = TakenOver.read(torch.tensor(rows).reshape(-1), [0, 1, 2, 4])
    assert told == TakenOver(late={1: 2}, helpers={0: 1, 2: 1}, saved=0.5)
    rows[1][2] = 3_000_000  # it would have been ready earlier than its helpers were
    told = TakenOver.read(torch.tensor(rows).reshape(-1), [0, 1, 2, 4])
    assert told is not None
    assert told.saved == 0
    rows[1][0] = 0
    assert TakenOver.read(torch.tensor(rows).reshape(-1), [0, 1, 2, 4]) is None
    assert TakenOver.read(torch.zeros(0, dtype=torch.int64), [0, 1]) is None


def test_nobody_helps_a_rank_alone_or_unasked() -> None:
    assert work_stealing(RuntimeOptions(work_stealing=True), group_of()) is None
    assert work_stealing(RuntimeOptions(), group_of()) is None

"""Ranks that are lost, and the others, which go on in their processes: to the same weights, with nothing told twice."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.commands import command
from tests.data.pictures import write_folder
from tests.launch.driven import Driven, job_of, kill
from tests.polling import until
from tests.run.processes import STEPS, Process, ended_well, last_step, pauses, results, summary, torusgd, wait_for_step
from tests.run.runs import events, sets
from tests.step.trainers import job_of as job_for_steps
from tests.step.trainers import run_of

from torusgd.comm import groups
from torusgd.comm.base import ConnectionLost, Liveness
from torusgd.comm.groups import Group, group_of
from torusgd.observe.events import Telemetry
from torusgd.observe.trackers import Trackers
from torusgd.ranks.liveness import Limits
from torusgd.ranks.supervisor import Quorum, Supervisor
from torusgd.recipe.compatibility import Setup, refusals
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schedule import Schedule
from torusgd.recipe.section import Duration
from torusgd.run.run import Run
from torusgd.run.survival import fitting
from torusgd.signals import StopFlag
from torusgd.step import records
from torusgd.step.model_state import StepState
from torusgd.step.records import Line, RecordFile, parse_records, state_digests


def assert_went_on(out: Path, undisturbed: dict[str, Any], lost: int) -> dict[str, Any]:
    """The run has ended as if nothing had happened; its summary."""
    told = ended_well(out, undisturbed)
    assert (told["restarts"], told["resumed_from"], len(told["lost_ranks"])) == (0, 0, lost)
    steps = sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir())
    assert steps[-1] == STEPS  # and nothing half-written beside them, which would have no number
    return told


def held_run(folder: Path, out: Path, recipe: Path, pause: float, *flags: str) -> tuple[Process, Path]:
    """A run whose images take so many seconds each as long as there is the file that is returned."""
    held = out.with_name("held")
    held.touch()
    slow = sets("data.source=tests.run.slow:Held", f"data.options.pause={pause}")
    return torusgd(folder, out, recipe, *slow, *flags, TORUSGD_HELD=str(held)), held


def assert_verified(folder: Path, out: Path) -> None:
    """Two ranks compute all steps of the run anew, and find its records, whoever wrote them."""
    names = sets("data.source=tests.run.slow:Held", "model.name=tests.run.sources:small_net")
    words = command("verify", out, "--all", "--workers", "2", *names)
    process = Process(folder, *words, environment={"TORUSGD_HELD": str(out.with_name("held"))})
    assert process.end() == 0, process.output
    assert f"equal: {summary(out)['steps']} of" in process.out


def test_ranks_are_lost_one_by_one_till_the_last_is_alone(tmp_path: Path, recipe, undisturbed, monkeypatch) -> None:
    def drive(run: Driven) -> None:
        run.reach(3)
        kill(run.pid(0))
        run.reach(10)
        run.until(lambda: run.status().get("phase") == "evaluate")
        kill(run.pid(2))
        run.reach(12)
        assert run.ranks() == [run.pid(1), run.pid(3)]
        kill(run.pid(3))
        run.reach(14)
        assert run.ranks() == [run.pid(1)]

    slow = "data.options={pause: 0.01, eval_pause: 0.04}"
    run = Driven(job_of(tmp_path, recipe, slow, workers=4, checkpoint_every="4st"), drive, monkeypatch)
    told = assert_went_on(tmp_path, undisturbed, lost=3)
    assert (told["lost_ranks"], told["world_size"], len(run.started)) == ([0, 2, 3], 1, 4)
    assert [line.rpartition("; ")[2].split()[0] for line in run.lines] == ["ranks", "ranks", "rank"]


def test_ranks_join_and_leave_as_asked_and_one_is_lost_between(tmp_path: Path, recipe, undisturbed, run_cli) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "out"
    process, held = held_run(tmp_path, out, recipe, 0.1, "--workers", "1", "--track", "tensorboard")

    def status() -> dict[str, Any]:
        code, told, _ = run_cli("status", out, "--json")
        assert code == 0
        return json.loads(told)

    def wait_for(**expected: Any) -> None:
        until(lambda: expected.items() <= status().items(), f"{expected}", process, pause=0.1)

    wait_for_step(out, 1, process)
    wait_for(state="running", shares={"0": 4})
    began = process.ranks()
    (tracked,) = (out / "tensorboard").iterdir()
    assert run_cli("resize", out, "--workers", "3")[0] == 0
    wait_for(shares={"0": 1, "1": 1, "2": 2})
    assert len(process.ranks()) == 3
    kill(process.rank(out, 1))
    # Who is asked to leave before its loss was seen has left, and is not lost.
    until(lambda: len(status().get("shares", {})) == 2, "the loss of a rank", process, pause=0.1)
    assert run_cli("resize", out, "--workers", "1")[0] == 0
    wait_for(shares={"0": 4})
    assert process.ranks() == began
    held.unlink()
    assert process.end() == 0, process.output
    told = assert_went_on(out, undisturbed, lost=1)
    assert (told["world_size"], told["shares"]) == (1, {"0": 4})
    assert "ranks 1, 2 join; ranks 0, 1, 2 go on" in process.err
    assert " leaves; rank 0 goes on" in process.err
    assert "all waited" not in process.out, "they were sent the state beside the steps"
    assert list((out / "tensorboard").iterdir()) == [tracked], "opened once for all three changes"
    losses = accumulator.EventAccumulator(str(tracked)).Reload().Scalars("train/loss")
    assert [loss.step for loss in losses] == [*range(1, STEPS + 1)]
    assert_verified(tmp_path / "verify", out)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_that_leaves_out_loses_and_gets_a_rank(tmp_path: Path, recipe: Path, run_cli: Any, victim: int) -> None:
    """Its journal gives the same bits on another number of ranks."""
    late = tmp_path / "late.yaml"
    longer = recipe.read_text().replace("until: 12st", "until: 20st").replace(f"until: {STEPS}st", "until: 60st")
    late.write_text(longer + "synchrony: {form: cutoff, count: 3, warmup: 2}\n")
    out = tmp_path / "out"
    process, held = held_run(tmp_path / "1", out, late, 0.15, "--workers", "3", "--delays", "exponential@0.02")
    wait_for_step(out, 8, process)
    kill(process.rank(out, victim))
    wait_for_step(out, 20, process)
    assert run_cli("resize", out, "--workers", "3")[0] == 0
    until(lambda: "rank 3 joins" in process.err, "another rank", process)
    held.unlink()
    told = ended_well(out, None, process)
    assert (told["lost_ranks"], told["world_size"], told["restarts"]) == ([victim], 3, 0)
    assert told["left_out_workers"] > 40
    again = Process(tmp_path / "2", *command("replay", out, "--workers", "2"), environment={"TORUSGD_HELD": str(held)})
    assert again.end() == 0, again.output
    assert results(summary(out.with_name("out-replay"))) == results(told)
    assert_verified(tmp_path / "verify", out)


@pytest.mark.slow
def test_a_rank_joins_a_run_on_a_folder_of_pictures(tmp_path: Path, recipe: Path, run_cli: Any) -> None:
    """What it must know of the files it finds without the others, who are at work."""
    pictures = write_folder(tmp_path / "pictures", train=12)
    own = tmp_path / "own.yaml"
    source, options = "source: tests.run.slow:Slow", "augment: {crop: shift, shift: 1, flip: 0.5}"
    text = recipe.read_text()
    assert text.count(source) == text.count(options) == 1
    own.write_text(text.replace(source, "source: folder\n  resize: 8").replace("until: 12st", "until: 150st").replace(
        f"until: {STEPS}st", "until: 300st").replace("channels: 1", "channels: 3").replace(
        "mean: [0.5]", "mean: [0.5, 0.5, 0.5]").replace("std: [0.25]", "std: [0.25, 0.25, 0.25]"))  # fmt: skip
    out = tmp_path / "out"
    process = torusgd(tmp_path / "1", out, own, "--workers", "1", "--data", pictures)
    wait_for_step(out, 1, process)
    assert run_cli("resize", out, "--workers", "3")[0] == 0
    told = ended_well(out, None, process)
    assert "ranks 1, 2 join; ranks 0, 1, 2 go on" in process.err
    assert (told["world_size"], told["restarts"], told["lost_ranks"]) == (3, 0, [])
    alone = torusgd(tmp_path / "2", tmp_path / "alone", own, "--workers", "1", "--data", pictures)
    ended_well(tmp_path / "alone", results(told), alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_10_seeded_changes(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any], run_cli: Any, seed: int) -> None:
    """Losses, joins, leaves, and losses while ranks join, at random moments."""
    draw, out = random.Random(seed), tmp_path / "out"
    process, held = held_run(tmp_path, out, recipe, 0.5, "--workers", "2")
    until((out / "events.jsonl").exists, "it has begun", process)
    for _ in range(10):
        kind = draw.choice(("loss", "scale", "scale and loss", "scale and loss"))
        if "scale" in kind:
            assert run_cli("resize", out, "--workers", draw.randrange(1, 5))[0] == 0
            time.sleep(draw.uniform(0, 4))
        ranks = process.ranks()
        if "loss" in kind:
            kill(*draw.sample(ranks, min(draw.choice((1, 1, 2)), max(0, len(ranks) - 1))))
        time.sleep(draw.uniform(0, 3))
    held.unlink()
    told = ended_well(out, undisturbed, process)
    print(f"seed {seed}: {told['lost_ranks']} lost, {told['restarts']} restarts; {process.err}")


@pytest.mark.slow
def test_20_seeded_kills_at_random_moments(tmp_path: Path, recipe: Path, undisturbed: dict[str, Any]) -> None:
    draw, kills = random.Random(20261122), 0
    while kills < 20:
        out = tmp_path / f"out-{kills}"
        process = torusgd(tmp_path / str(kills), out, recipe, "--workers", "4", *pauses(0.01, 0.02))
        lost = 0
        for moment in sorted(draw.sample(range(1, 27), 3)):
            until(lambda: last_step(out) >= moment, f"step {moment}", process)  # noqa: B023
            time.sleep(draw.uniform(0, 0.15))
            ranks = process.ranks()
            victims = draw.sample(ranks, min(draw.choice((1, 1, 2)), len(ranks) - 1))
            kill(*victims)
            kills, lost = kills + 1, lost + len(victims)
        assert process.end() == 0, process.output
        assert_went_on(out, undisturbed, lost)


class Dying:
    """Called on 4 ranks: 1 dies, then 2 while groups are formed anew, and 0 and 3 go on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, world: Group, stop: StopFlag, restarts: int, liveness: Liveness) -> list[int]:
        self.calls += 1
        me = world.ranks[world.rank]
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if me == 2:  # when all have come and begin to connect
            patch.object(groups, "build", lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL)).start()
        total = torch.ones(1)
        world.duplicate().all_reduce(total)
        return [me, self.calls, int(total)]


@pytest.mark.slow
def test_a_rank_that_is_lost_while_groups_are_formed_anew_makes_another_generation() -> None:
    lines: list[str] = []
    with Supervisor(4, "cpu", Limits(beat=60, start=60, stuck=60), report=lines.append) as supervisor:
        assert supervisor.run(Dying(), quorum=Quorum(fewest=1)) == [[0, 2, 2], [3, 2, 2]]
    # On a busy machine the launcher may see both ends at once, in either order.
    assert lines[-1].endswith("; ranks 0, 3 go on")
    told = "; ".join(lines).split("; ")
    assert {line[:6] for line in told if " was ended by SIGKILL" in line} == {"rank 1", "rank 2"}


@pytest.mark.parametrize(("name", "given", "ranks", "taken", "line"), [
    ("native", {}, 3, "native", ""), ("ring", {}, 3, "ring", ""), ("halving-doubling", {}, 3, "halving-doubling", ""),
    ("auto", {}, 1, "auto", ""), ("auto", {"streams": 2}, 3, "native", "allreduce auto gives way to native"),
    ("torus", {"grid": "2x2"}, 1, "torus", ""),
    ("torus", {"grid": "2x2"}, 3, "torus", "grid 2x2 does not fit 3 ranks"),
])  # fmt: skip
def test_options_that_do_not_fit_fewer_ranks_give_way_with_a_line(name, given, ranks: int, taken: str, line: str):
    options, told = fitting(RuntimeOptions(allreduce=name, **given), ranks)
    assert (options.allreduce, options.grid) == (taken, None)
    assert not refusals(Setup(load_recipe("digits").recipe, options, ranks=ranks))
    assert told.partition(":")[0] == line


def test_a_new_rank_0_writes_what_is_missing_and_drops_what_is_done_again(tmp_path: Path) -> None:
    schedule = Schedule(load_recipe("digits", ["stages=[{until: 9st, images_per_worker: 3}]"]).recipe, 96)
    step, evaluation = {"step": 3}, {"step": 3, "event": "evaluation"}

    def left(evaluated: int, *, complete: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        telemetry = Telemetry(tmp_path, schedule, len(schedule), 3, evaluated, {}, Trackers())
        if complete is not None:
            telemetry.complete(complete)
        telemetry.close()
        return events(tmp_path)

    ahead: list[dict[str, Any]] = [{"step": 2}, step, evaluation, {"step": 4}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in ahead) + '{"step')
    assert left(3) == [{"step": 2}, step, evaluation]
    assert left(0) == [{"step": 2}, step]
    for _ in range(2):
        assert left(3, complete=evaluation) == [{"step": 2}, step, evaluation]


def made(state: StepState, step: int, world: Group) -> dict[str, str]:
    """In place of `records.state_digests`: a rank is lost as the ranks make the record of the last step."""
    if step == 4:
        raise ConnectionLost("rank 1 is gone")
    return state_digests(state, step, world)


WRITTEN = [("state", 0), ("state", 1), ("evaluation", 2), ("state", 4), ("evaluation", 4)]


@pytest.mark.parametrize("missing", [*WRITTEN, ("made", 4)])
def test_no_record_is_missing_that_a_lost_rank_was_to_make_or_write(tmp_path: Path, missing: tuple[str, int]) -> None:
    def kinds(out: Path) -> list[tuple[str, int]]:
        lines, _, problem = parse_records((out / "records.jsonl").read_text())
        assert not problem
        return [(line.record, line.step) for line in lines if line.record != "conditions"]

    def written(file: RecordFile, line: Line) -> None:
        if (line.record, line.step) == missing:
            raise ConnectionLost("rank 0 is gone")
        add(file, line)

    add, every = RecordFile.add, RuntimeOptions(verify_every=Duration(1, "st"))
    whole, job = (job_for_steps(options=every, out=tmp_path / name) for name in ("whole", "lost"))
    run_of(whole).run()
    first = run_of(job)
    names = (records, "state_digests", made) if missing[0] == "made" else (RecordFile, "add", written)
    with patch.object(*names), pytest.raises(ConnectionLost):
        first.run()
    assert len(kinds(job.out)) < len(kinds(whole.out))
    Run(job, group_of(), StopFlag(), restarts=0, retained=first.keep()).run()
    assert kinds(job.out) == kinds(whole.out)

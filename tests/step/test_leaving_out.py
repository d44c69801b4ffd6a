"""Runs on real ranks with real clocks that leave out late work: the journal says what, and gives it again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks
from tests.polling import until
from tests.run.processes import last_step
from tests.run.runs import TINY, events
from torch import Tensor

from torusgd.comm.base import NoLiveness
from torusgd.comm.groups import group_of
from torusgd.errors import UserError
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.run.run import Run
from torusgd.rundir.run_dir import RunDir
from torusgd.signals import StopFlag
from torusgd.step.closing import closing_of
from torusgd.step.journal import JournalEntry, entry_of, read_journal, synchronous
from torusgd.step.pass_thread import PassThread

BASE = (
    "virtual_workers=8",
    "stages=[{until: 8st, images_per_worker: 3}]",
    "rate={lr: 4.0, warmup: {length: 2st}}",
    "data.eval_images=70",
    "evaluate={every: 4st, images_per_chunk: 50}",
    "polish={images: 250, images_per_batch: 100}",
)
SYNCHRONOUS = "{form: synchronous}"
ALL = "{form: cutoff, count: 8, warmup: 2}"
FOREVER = "{form: cutoff, threshold: 1.0e+9, warmup: 2}"
LIVE = {
    "count": "{form: cutoff, count: 5, warmup: 2}",
    "predicted": "{form: cutoff, count: predicted, warmup: 3}",
    "threshold": "{form: cutoff, threshold: 0.02, warmup: 2}",
    "measured": "{form: cutoff, threshold: measured, warmup: 3}",
    "backup": "{form: backup, backups: 3, warmup: 2}",
}
VIRTUAL = "{form: cutoff, count: predicted, warmup: 2, delays: 'lognormal+slow:0.3x4'}"
DELAYS = "exponential@0.01"
COMPARED = ("weights_sha256", "top1", "loss", "train_loss", "left_out_workers", "samples")


def train(out: Path, synchrony: str, replay: Path | None = None, delays: str = "", **job: Any) -> None:
    """What each rank does."""
    ranks = group_of()
    recipe = load_recipe("digits", [*BASE, f"synchrony={synchrony}"]).recipe
    recipe = recipe.resolve(precision="float32", memory_format="channels_last")
    if ranks.rank == 0:
        out.mkdir(exist_ok=True)
        RunDir(out).claim(recipe, fresh=False)
    if ranks.size > 1:
        dist.barrier()
    journaled = None
    if replay is not None:
        told = json.loads((replay / "summary.json").read_text())["journal"]
        journaled = read_journal(replay / "journal.txt", recipe.sha256(), recipe.virtual_workers, told)
    options = job.pop("options", RuntimeOptions(drift_every=1))
    Run(Job(recipe, options, "cpu", out, replay=journaled, delays=delays, **job), ranks, StopFlag(), restarts=0).run()


def train_all(out: Path, jobs: dict[str, dict[str, Any]]) -> None:
    for name, job in jobs.items():
        train(out / name, **job)


def run_world(size: int, out: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    run_ranks(size, train_all, out, jobs, timeout=200)
    return {name: results(out / name) for name in jobs}


def results(out: Path) -> dict[str, Any]:
    told = json.loads((out / "summary.json").read_text())
    return {key: told[key] for key in COMPARED} | {"journal": told.get("journal")}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each form once on three ranks, with delays."""
    out = tmp_path_factory.mktemp("live")
    jobs = {name: {"synchrony": form, "delays": DELAYS} for name, form in LIVE.items()}
    jobs |= {"synchronous": {"synchrony": SYNCHRONOUS}, "all": {"synchrony": ALL}, "forever": {"synchrony": FOREVER}}
    run_world(3, out, jobs | {"virtual": {"synchrony": VIRTUAL}})
    return out


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 5))])
def test_a_replay_has_the_bits_of_the_live_run_on_any_number_of_ranks(size: int, live: Path, tmp_path: Path) -> None:
    names = LIVE if size == 2 else ("count", "threshold")
    jobs = {name: {"synchrony": LIVE[name], "replay": live / name} for name in names}
    assert run_world(size, tmp_path, jobs) == {name: results(live / name) for name in names}
    for name in names:
        assert (tmp_path / name / "journal.txt").read_bytes() == (live / name / "journal.txt").read_bytes()


def test_live_runs_leave_out_what_they_say(live: Path) -> None:
    left_out = {name: [event.get("left_out", 0) for event in events(live / name) if "lr" in event] for name in LIVE}
    for name, form in LIVE.items():
        warm = 3 if "warmup: 3" in form else 2
        assert not any(left_out[name][:warm]), name
    assert left_out["count"][2:] == left_out["backup"][2:] == 6 * [3]
    for name in LIVE:
        assert results(live / name)["left_out_workers"] == sum(left_out[name])
        assert results(live / name)["journal"]["bytes"] == (live / name / "journal.txt").stat().st_size


def test_limits_that_leave_nothing_out_are_the_synchronous_run(live: Path) -> None:
    synchronous = results(live / "synchronous")
    assert synchronous.pop("journal") is None
    assert not (live / "synchronous" / "journal.txt").exists()
    for name in ("all", "forever"):
        told = results(live / name)
        assert told.pop("journal")["bytes_per_update"] < 32
        assert told == synchronous


def after_second_step(workers: list[int]) -> dict[str, Tensor]:
    """Weights and batch-norm statistics, float64, after a step that takes all and one that takes these."""
    sgd = ("optimizer={name: sgd, momentum: 0.0}", "rate={lr: 0.2}", "model.batch_norm_momentum=1.0")
    recipe = load_recipe("digits", [*TINY, *sgd, f"synchrony={VIRTUAL}"]).recipe
    recipe = recipe.resolve(precision="float32", memory_format="contiguous")
    job, world, liveness = Job(recipe, RuntimeOptions(), "cpu", Path("nowhere")), group_of(), NoLiveness()
    trainer = build(job, open_data(job, world.device, liveness), world, liveness)
    for entry in (synchronous(0, 4), entry_of(1, workers)):
        trainer.step.run(trainer.membership, entry)
    trainer.step.state.write_to_model(2)
    return {name: tensor.double() for name, tensor in trainer.step.state.model.state_dict().items()}


def test_the_mean_is_over_what_arrived() -> None:
    """By plain SGD the step of two virtual workers is the mean of the steps that each takes alone."""
    both, one, other = (after_second_step(workers) for workers in ([0, 2], [0], [2]))
    assert any(not torch.equal(one[name], other[name]) for name in one)
    for name, found in both.items():
        torch.testing.assert_close(found, (one[name] + other[name]) / 2, rtol=1e-5, atol=1e-6, msg=name)


def test_virtual_time_makes_the_run_a_function_of_the_recipe(live: Path, tmp_path: Path) -> None:
    train(tmp_path / "virtual", VIRTUAL)
    assert results(tmp_path / "virtual") == results(live / "virtual")
    assert results(live / "virtual")["left_out_workers"] > 0


def test_in_virtual_time_a_run_that_goes_on_decides_as_if_it_had_not_stopped() -> None:
    recipe = load_recipe("digits", [*BASE, f"synchrony={VIRTUAL}"]).recipe
    through, again = (closing_of(recipe, None, [range(8)], first) for first in (0, 6))
    entries = [through.next(step) for step in range(8)]
    assert [again.next(6), again.next(7)] == entries[6:]
    assert len({len(entry.workers) for entry in entries if isinstance(entry, JournalEntry)}) > 1


def test_a_rank_asleep_in_a_pass_holds_up_nobody(tmp_path: Path) -> None:
    """Rank 1 sleeps in a pass until the events tell of two later steps: they are taken without it."""
    run_ranks(2, asleep, tmp_path / "run", timeout=240)
    began = int((tmp_path / "run-asleep").read_text())
    lines = (tmp_path / "run" / "journal.txt").read_text().splitlines()[1:]
    assert [lines[step].split()[1] for step in range(began, began + 3)] == 3 * ["4-7"]
    train(tmp_path / "replay", "{form: cutoff, count: 4, warmup: 2}", replay=tmp_path / "run")
    assert results(tmp_path / "replay") == results(tmp_path / "run")


def asleep(out: Path) -> None:
    begin, note = PassThread.begin, out.with_name("run-asleep")

    def struck(self: PassThread, step: Any, worker: int, membership: Any, take: Any) -> None:
        def late() -> Any:
            until(lambda: last_step(out) >= step.index + 3, "the others have taken two more steps", timeout=240)
            return take()

        is_struck = worker >= 4 and step.index >= 2 and not note.exists()
        if is_struck:
            note.write_text(str(step.index))
        begin(self, step, worker, membership, late if is_struck else take)

    PassThread.begin = struck  # type: ignore[method-assign]
    train(out, "{form: cutoff, count: 4, warmup: 2}")


def test_a_run_that_is_resumed_goes_on_from_journal_and_checkpoint(tmp_path: Path) -> None:
    form = {"synchrony": "{form: cutoff, count: 4, warmup: 2}", "delays": DELAYS}
    train(tmp_path / "run", **form, max_steps=5)
    (tmp_path / "run" / "summary.json").unlink()
    journal = tmp_path / "run" / "journal.txt"
    before = journal.read_bytes()
    journal.write_bytes(before + b"5 0 12345678\n")  # of a step that came after the last checkpoint
    train(tmp_path / "run", **form)
    assert journal.read_bytes().startswith(before)
    assert len(journal.read_text().splitlines()) == 9
    train(tmp_path / "replay", form["synchrony"], replay=tmp_path / "run")
    assert results(tmp_path / "replay") == results(tmp_path / "run")
    journal.write_text(journal.read_text().replace("\n6 ", "\n6 0,"))
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"line 8, of step 6"):
        train(tmp_path / "run", **form)


def test_a_threshold_that_nobody_keeps_takes_all(tmp_path: Path) -> None:
    train(tmp_path / "none", "{form: cutoff, threshold: 1.0e-9, warmup: 2}")
    train(tmp_path / "all", FOREVER)
    assert results(tmp_path / "none")["left_out_workers"] == 0
    assert results(tmp_path / "none")["weights_sha256"] == results(tmp_path / "all")["weights_sha256"]


def test_the_command_compares_a_replay_with_its_run(
    live: Path, tmp_path: Path, run_cli: Callable[..., tuple[int, str, str]]
) -> None:
    """A replay that is done already, so that the command starts no ranks."""
    run, out = tmp_path / "run", tmp_path / "replay"
    shutil.copytree(live / "count", run)
    train(out, LIVE["count"], replay=run)
    words = ("replay", run, "--out", out, "--workers", "1")
    code, told, _ = run_cli(*words)
    assert code == 0
    assert "the same weights, bit for bit" in told
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"weights_sha256": "0" * 64}))
    code, _, error = run_cli(*words)
    assert code == 1
    assert "not those of the replay; the same data under the same conditions" in error
    lines = (run / "journal.txt").read_text().splitlines(keepends=True)
    (run / "journal.txt").write_text("".join(lines[:-1]))
    code, _, error = run_cli(*words)
    assert code == 2
    assert "journal.txt: ends after 7 updates, otherwise than the run left it" in error
    code, _, error = run_cli("replay", tmp_path / "none")
    assert (code, error) == (2, f"torusgd: {tmp_path}/none: holds no run; give the folder that torusgd train wrote\n")
    assert "is the run itself" in run_cli("replay", run, "--out", run)[2]


@pytest.mark.parametrize(
    ("synchrony", "more", "line"),
    [
        ("{form: cutoff, count: 9}", (), "there are 8 virtual workers"),
        ("{form: backup, backups: 8}", (), "there are 8 virtual workers"),
        ("{form: backup}", (), "backups: is missing"),
        ("{form: cutoff}", (), "needs one of them"),
        ("{form: cutoff, count: 4, threshold: 1.0}", (), "needs one of them"),
        ("{form: cutoff, count: 4}", ("reduction=float32",), "set reduction: exact"),
        ("{form: cutoff, count: 4}", ("column_blocks=2",), "set column_blocks: 1"),
        ("{form: local, local_steps: 2}", (), "must be a multiple of synchrony.local_steps, 2"),
        ("{form: local}", (), "local_steps: is missing"),
        ("{count: 4}", (), "has a meaning with form: cutoff only"),
        ("{outer: {lr: 0.5}}", (), "has a meaning with form: local only"),
        ("{delays: lognormal}", (), "has a meaning with form: backup or cutoff or sampled"),
        ("{form: backup, backups: 1, staleness: 2}", (), "has a meaning with form: sampled or stale only"),
        ("{form: gossip}", (), "probability: is missing"),
        ("{form: local, local_steps: 3, outer: {momentum: 0.0}}", (), "give nesterov: false"),
        ("{form: cutof}", (), "synchrony.form"),
    ],
)  # fmt: skip
def test_a_block_that_makes_no_sense_is_refused_in_one_line(synchrony: str, more: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        load_recipe("digits", [*BASE, f"synchrony={synchrony}", *more])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("synchrony", "job", "line"),
    [
        (LIVE["count"], {"options": RuntimeOptions(audit=0.5)}, "audit = 0.5"),
        (LIVE["count"], {"delays": "sometimes"}, "no model 'sometimes'"),
        ("{form: gossip, probability: 1.0}", {}, "form = gossip: is simulated only; give the recipe to torusgd simul"),
        (SYNCHRONOUS, {"delays": DELAYS}, "--delays = exponential@0.01"),
        ("{form: cutoff, count: 4, delays: never}", {}, "no model 'never'"),
        ("{form: local, local_steps: 3}", {"delays": DELAYS}, "--delays = exponential@0.01"),
    ],
)
def test_what_a_run_cannot_do_is_refused_in_one_line(
    synchrony: str, job: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=line) as error:
        train(tmp_path / "run", synchrony, **job)
    assert "\n" not in str(error.value)

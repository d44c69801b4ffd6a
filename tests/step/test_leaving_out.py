"""Runs on real ranks with real clocks that leave out late work: the journal says what, and gives it again."""

import json
import shutil
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.comm.gloo_world import run_ranks
from tests.messages import refused, refuses
from tests.polling import until
from tests.run.processes import last_step, summary
from tests.run.runs import SMALL, events
from tests.rundir.test_status import Phases
from tests.step.trainers import job_of, run_of, trainer_of
from torch import Tensor

from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.step.deadlines import PassThread, deadlines_of
from torusgd.step.journal import JournalEntry, read_journal, synchronous

BASE = (
    SMALL, "virtual_workers=8", "stages=[{until: 8st, images_per_worker: 3}]", "rate={lr: 4.0, warmup: {length: 2st}}",
    "data.eval_images=70", "evaluate={every: 4st, images_per_chunk: 50}", "polish={images: 50, images_per_batch: 25}",
)  # fmt: skip
SYNCHRONOUS = "{form: synchronous}"
IDLE = {"all": "{form: cutoff, count: 8, warmup: 2}", "forever": "{form: cutoff, threshold: 1.0e+9, warmup: 2}"}
LIVE = {
    "count": "{form: cutoff, count: 5, warmup: 2}", "predicted": "{form: cutoff, count: predicted, warmup: 3}",
    "threshold": "{form: cutoff, threshold: 0.02, warmup: 2}",
    "measured": "{form: cutoff, threshold: measured, warmup: 3}", "backup": "{form: backup, backups: 3, warmup: 2}",
}  # fmt: skip
VIRTUAL = "{form: cutoff, count: predicted, warmup: 2, delays: 'lognormal+slow:0.3x4'}"
DELAYS = "exponential@0.01"
COMPARED = ("weights_sha256", "top1", "loss", "train_loss", "left_out_workers", "samples", "journal")


def train(out: Path, synchrony: str, replay: Path | None = None, delays: str = "", **job: Any) -> None:
    """What each rank does."""
    recipe = load_recipe("digits", [*BASE, f"synchrony={synchrony}"]).recipe
    recipe = recipe.resolve(precision="float32", memory_format="channels_last")
    journaled = None
    if replay is not None:
        head = summary(replay)["journal"]
        journaled = read_journal(replay / "journal.txt", recipe.sha256(), recipe.virtual_workers, head)
    given = {"options": RuntimeOptions(drift_every=1), "replay": journaled, "delays": delays} | job
    run_of(job_of(recipe=recipe, out=out, **given)).run()


def train_all(out: Path, jobs: dict[str, dict[str, Any]]) -> None:
    for name, job in jobs.items():
        train(out / name, **job)


def run_world(size: int, out: Path, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    run_ranks(size, train_all, out, jobs, timeout=200)
    return {name: results(out / name) for name in jobs}


def results(out: Path) -> dict[str, Any]:
    found = summary(out)
    return {key: found.get(key) if key == "journal" else found[key] for key in COMPARED}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each form once on three ranks, with delays."""
    out = tmp_path_factory.mktemp("live")
    jobs = {name: {"synchrony": form, "delays": DELAYS} for name, form in LIVE.items()}
    for name, form in {"synchronous": SYNCHRONOUS, "virtual": VIRTUAL, **IDLE}.items():
        jobs[name] = {"synchrony": form}
    run_world(3, out, jobs)
    return out


@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 5))])
def test_a_replay_has_the_bits_of_the_live_run_on_any_number_of_ranks(size: int, live: Path, tmp_path: Path) -> None:
    names = LIVE if size == 2 else ("count", "threshold")
    jobs = {name: {"synchrony": LIVE[name], "replay": live / name} for name in names}
    assert run_world(size, tmp_path, jobs) == {name: results(live / name) for name in names}
    for name in names:
        assert (tmp_path / name / "journal.txt").read_bytes() == (live / name / "journal.txt").read_bytes()


def test_live_runs_leave_out_what_they_say_and_idle_limits_are_the_synchronous_run(live: Path) -> None:
    left_out = {name: [event.get("left_out", 0) for event in events(live / name) if "lr" in event] for name in LIVE}
    for name, form in LIVE.items():
        assert not any(left_out[name][: 3 if "warmup: 3" in form else 2]), name
        assert results(live / name)["left_out_workers"] == sum(left_out[name])
        assert results(live / name)["journal"]["bytes"] == (live / name / "journal.txt").stat().st_size
    assert left_out["count"][2:] == left_out["backup"][2:] == 6 * [3]
    synchronous = results(live / "synchronous")
    assert synchronous.pop("journal") is None
    assert not (live / "synchronous" / "journal.txt").exists()
    for name in IDLE:
        found = results(live / name)
        assert found.pop("journal")["bytes_per_update"] < 32
        assert found == synchronous


def after_second_step(workers: list[int]) -> dict[str, Tensor]:
    """Weights and batch-norm statistics, float64, after a step that takes all and one that takes these."""
    sgd = ("optimizer={name: sgd, momentum: 0.0}", "rate={lr: 0.2}", "model.batch_norm_momentum=1.0")
    trainer = trainer_of(job_of(*sgd, f"synchrony={VIRTUAL}"))
    for entry in (synchronous(0, 4), JournalEntry(1, workers)):
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
    recipe = load_recipe("digits", [*BASE, f"synchrony={VIRTUAL}"]).recipe
    through, again = (deadlines_of(recipe, None, [range(8)], first) for first in (0, 6))
    entries = [through.next(step) for step in range(8)]
    assert [again.next(6), again.next(7)] == entries[6:]
    assert len({len(entry.workers) for entry in entries if isinstance(entry, JournalEntry)}) > 1


def test_steps_that_are_decided_anew_are_progress(tmp_path: Path) -> None:
    """Before the first step after a loss all are, with a learned model's training; nobody shall be taken for stuck."""
    train(tmp_path, VIRTUAL, max_steps=5)
    recipe = load_recipe("digits", [*BASE, f"synchrony={VIRTUAL}"]).recipe
    recipe = recipe.resolve(precision="float32", memory_format="channels_last")
    run_of(job_of(recipe=recipe, out=tmp_path, max_steps=6), liveness=(noted := Phases())).run()
    assert noted.phases[: noted.phases.index("train")].count("delays") == 6


def test_a_look_at_a_pass_that_hangs_is_no_progress() -> None:
    """Or nobody would ever learn what its rank waits for."""
    recipe = load_recipe("digits", [*BASE, f"synchrony={IDLE['all']}"]).recipe
    job = job_of(recipe=recipe.resolve(precision="float32", memory_format="channels_last"))
    trainer = trainer_of(job, liveness=(noted := Phases()))
    real = trainer.step.images.take

    def slow(step: Any, worker: int, membership: Any) -> Any:
        time.sleep(0.5 if worker == 3 else 0.0)
        return real(step, worker, membership)

    deadlines = deadlines_of(recipe, None, trainer.membership.shares, 0)
    with patch.object(trainer.step.images, "take", slow):
        for step in range(3):
            noted.phases.clear()
            stats = trainer.step.run(trainer.membership, deadlines.next(step))
            assert stats is not None
            deadlines.observe(stats.finished, stats.times.seconds)
    trainer.close()
    assert "images" in noted.phases
    assert noted.phases.count("train") <= 3 * 8


def test_a_rank_asleep_in_a_pass_holds_up_nobody(tmp_path: Path) -> None:
    """Rank 1 sleeps in a pass until two later steps are in the events: they are taken without it."""
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

    with patch.object(PassThread, "begin", struck):
        train(out, "{form: cutoff, count: 4, warmup: 2}")


def test_a_run_that_is_resumed_goes_on_from_journal_and_checkpoint(tmp_path: Path) -> None:
    form: dict[str, Any] = {"synchrony": "{form: cutoff, count: 4, warmup: 2}", "delays": DELAYS}
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
    with refused("a journal that was edited", "FOLDER/run/journal.txt: line 8", FOLDER=tmp_path):
        train(tmp_path / "run", **form)


def test_a_threshold_that_nobody_keeps_takes_all(live: Path, tmp_path: Path) -> None:
    train(tmp_path / "none", "{form: cutoff, threshold: 1.0e-9, warmup: 2}")
    assert results(tmp_path / "none")["left_out_workers"] == 0
    assert results(tmp_path / "none")["weights_sha256"] == results(live / "forever")["weights_sha256"]


def test_the_command_compares_a_replay_with_its_run(
    live: Path, tmp_path: Path, run_cli: Any, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay that is done already, so that the command starts no ranks."""
    run, out = tmp_path / "run", tmp_path / "run-replay"
    shutil.copytree(live / "count", run)
    train(out, LIVE["count"], replay=run)
    words = ("replay", run, "--out", out, "--workers", "1")
    assert run_cli(*words)[0] == 0
    monkeypatch.chdir(run)
    assert run_cli("replay", ".", "--workers", "1")[0] == 0, "beside the folder, whose name `.` has not"
    (run / "summary.json").write_text(json.dumps(summary(run) | {"weights_sha256": "0" * 64}))
    assert run_cli(*words)[0] == 1
    lines = (run / "journal.txt").read_text().splitlines(keepends=True)
    (run / "journal.txt").write_text("".join(lines[:-1]))
    for wrong in (words, ("replay", tmp_path / "none"), ("replay", run, "--out", run)):
        mistake(*wrong, FOLDER=tmp_path)
    for text in ("{", '{"steps": "4"}', '{"journal": 1}'):  # else it would seem a run that is not finished
        (run / "summary.json").write_text(text)
        code, _, errors = run_cli(*words)
        assert (code, "summary.json: can't be read" in errors) == (2, True)


@pytest.mark.parametrize(
    "words",
    ["{form: cutoff, count: 9}", "{form: backup, backups: 8}", "{form: backup}", "{form: cutoff}", "{form: cutof}",
     "{form: cutoff, count: 4, threshold: 1.0}", "{form: local, local_steps: 2}", "{form: local}", "{count: 4}",
     "{outer: {lr: 0.5}}", "{delays: lognormal}", "{form: backup, backups: 1, staleness: 2}", "{form: gossip}",
     "{form: local, local_steps: 3, outer: {momentum: 0.0}}"],
)  # fmt: skip
def test_a_block_that_makes_no_sense_is_refused_in_one_line(words: str) -> None:
    refuses(f"synchrony={words}", load_recipe, "digits", [*BASE, f"synchrony={words}"])


@pytest.mark.parametrize(("name", "synchrony", "job"), [
    ("delays that are none", LIVE["count"], {"delays": "sometimes"}),
    ("gossip on ranks", "{form: gossip, probability: 1.0}", {}),
    ("a recipe with delays that are none", "{form: cutoff, count: 4, delays: never}", {}),
])  # fmt: skip
def test_what_a_run_cannot_do_is_refused(name: str, synchrony: str, job: dict[str, Any], tmp_path: Path) -> None:
    with refused(name):
        train(tmp_path / "run", synchrony, **job)

"""The proof's claims, verdicts, plan, and ledger of looks at the held-out images."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.accuracy import proof, quartets, runs
from benchmarks.accuracy.claims import CLAIMS, Claim, Criterion, Side, equal, rates, resolved
from benchmarks.accuracy.runs import KEY, LEDGER, RUNS, Arm, key_of, read

from torusgd.data.arrays import Images
from torusgd.recipe.load import load_recipe

from .polling import until

TINY = Arm(
    "fashion-large",
    ("data.source=digits", "data.options={}", "data.image_size=8", "data.augment={}", "model.name=digits-net",
     "rate.warmup=null", "data.validation_images=50", "evaluate.every=null",
     "stages=[{until: 2st, images_per_worker: 4}]"),
)  # fmt: skip


def test_every_look_at_the_held_out_images_is_of_a_result_and_the_only_one_of_it() -> None:
    looks, results = read(LEDGER), {key_of(line): line for line in read(RUNS)}
    assert len({key_of(line) for line in looks}) == len(looks)
    assert len(results) == len(read(RUNS))
    for line in looks:
        result = results[key_of(line)]
        assert line["weights"] == result["weights"]
        assert line["date"] >= result["date"]
    known = proof.Known()
    needed = {(arm.sha256, seed) for _, arm, seed, is_final in proof.needed(known) if is_final}
    chosen = [(known.chosen(side), claim.seeds) for claim in CLAIMS for side in (claim.on, claim.off)]
    counted = {(arm.sha256, seed) for arm, seeds in chosen if arm is not None for seed in range(seeds)}
    assert {(line["recipe"], line["seed"]) for line in looks} <= needed | counted, "not of a trial that was not taken"


def test_what_a_claim_compares_differs_and_leaves_the_held_out_images_alone() -> None:
    for claim in CLAIMS:
        arms = [*claim.on.arms, *claim.off.arms]
        assert len({arm.sha256 for arm in claim.on.arms} & {arm.sha256 for arm in claim.off.arms}) == 0, claim.technique
        for arm in arms:
            data = load_recipe(arm.recipe, arm.changes).recipe.data
            assert data.train_images is None, "full size"
            of_training = data.validation_images == 5000
            assert of_training if data.source == "mnist" else data.options.get("of", "validation") == "validation"


def test_the_harder_set_is_the_same_everywhere_and_no_picture_is_in_two_parts() -> None:
    found = quartets.parts(60_000)
    assert not set(found["train"].tolist()) & set(found["validation"].tolist())
    members = quartets.drawn("train", found["train"], 15_000)
    assert hashlib.sha256(members.astype("<i8").tobytes()).hexdigest()[:16] == "c64c38da65182efa"
    pictures = Images(np.arange(3 * 4, dtype=np.uint8).reshape(3, 2, 2, 1), np.array([0, 1, 1]), ("a", "b"))
    made = quartets.Quartets(pictures, np.array([[0, 1, 2, 1]]))
    assert made.labels.tolist() == [1]
    assert made.read(0)[..., 0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 4, 5], [10, 11, 6, 7]]


def test_a_key_is_of_what_is_computed() -> None:
    assert TINY.sha256 == TINY.but("name=other", "description=other").sha256
    assert TINY.sha256 != TINY.but("rate.lr=0.7").sha256
    assert TINY.key(0) != TINY.key(1)
    assert TINY.key(0) != TINY.but("precision=bfloat16").key(0)


def test_verdicts_are_by_the_interval() -> None:
    assert resolved([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * 2.5**0.5 / 5**0.5)
    found = [Criterion(0.5).verdict(each) for each in ([1.0, 1.1, 0.9], [0.0, 0.1, -0.1], [0.0, 1.0, 2.0], [9.0])]
    assert found == ["held", "refuted", "not resolved", "not resolved"], "one pair has no interval"
    found = [equal(0.4).verdict(each) for each in ([0.1, -0.1, 0.0], [1.1, 0.9, 1.0], [-1.0, 0.9, 0.0])]
    assert found == ["held", "refuted", "not resolved"]
    assert [Criterion().verdict(each) for each in ([0.1, 0.11, 0.12], [-0.1, 0.1])] == ["reported", "not resolved"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (proof, runs):
        monkeypatch.setattr(module, "RUNS", tmp_path / "runs.jsonl")
        monkeypatch.setattr(module, "LEDGER", tmp_path / "looks.jsonl")
    return tmp_path


def lines(*entries: tuple[Arm, int, str, dict[str, Any]]) -> str:
    return "".join(
        json.dumps(dict(zip(KEY, (arm.sha256, seed, machine, "t", "p"), strict=True)) | more) + "\n"
        for arm, seed, machine, more in entries
    )


def test_pairs_are_of_one_seed_and_machine_choices_by_validation(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = rates(TINY, 0.5, 1.0)
    claim = Claim("x", Side("on", (TINY,)), Side("off", (slow, fast)), Criterion(0.5), "nobody", seeds=2)
    monkeypatch.setattr(proof, "CLAIMS", (claim,))
    assert proof.Known().chosen(claim.off) is None
    played = ((arm, 0, "a", {"validation": top1, "core_seconds": 1800.0}) for arm, top1 in ((slow, 0.8), (fast, 0.9)))
    (files / "runs.jsonl").write_text(lines(*played))
    known = proof.Known()
    assert (known.chosen(claim.off), known.core_hours()) == (fast, 1.0)
    assert {arm for _, arm, _, _ in proof.left(known)} == {TINY, fast}, "a choice holds on other machines too"
    looked = ((TINY, 0, "a", 0.9), (fast, 0, "a", 0.88), (TINY, 1, "a", 0.9), (fast, 1, "b", 0.5))
    looks = [(arm, seed, machine, {"top1": top1}) for arm, seed, machine, top1 in looked]
    (files / "looks.jsonl").write_text(lines(*looks))
    assert proof.Known().pairs(TINY, fast) == {(("a", "t"), 0): (90.0, 88.0)}
    (row,) = proof.rows(proof.Known())
    assert [*map(str, row)][4:] == ["+2.00", "", "at least +0.5", "1", "a", "not resolved: 1 of 2 pairs"]
    assert "| off | 1 | 90.00 | taken |" in proof.choices()


def test_the_smallest_batchs_noise_scale_predicts_images_of_all(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, large = TINY.but("rate.lr=0.5"), TINY.but("rate.lr=0.7")
    claims = [
        Claim("x", Side("LARS", (on,)), Side("SGD", (other,)), Criterion(), "nobody", batch=batch)
        for batch, on in ((100, TINY), (400, large))
    ]
    monkeypatch.setattr(proof, "CLAIMS", claims)
    told = [(arm, 0, "a", {"validation": 0.9, "core_seconds": 1.0, "noise_scale": 200.0}) for arm in (TINY, large)]
    (files / "runs.jsonl").write_text(lines(*told))
    (files / "looks.jsonl").write_text(lines((TINY, 0, "a", {"top1": 0.9}), (large, 0, "a", {"top1": 0.8})))
    expected = ["| 100 | 90.00 | 200 | 1.50 |  |  |  |", "| 400 | 80.00 | 200 | 3.00 |  |  |  |"]
    assert proof.noise().splitlines()[2:] == expected


def test_jobs_take_different_trainings_and_wait_for_a_choice(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = rates(TINY, 0.5, 1.0)
    claim = Claim("x", Side("on", (TINY,)), Side("off", (slow, fast)), Criterion(), "nobody", seeds=2)
    monkeypatch.setattr(proof, "CLAIMS", (claim,))
    at: set[tuple[Arm, int]] = set()
    while task := proof.next_task(proof.Known(), at):
        at.add(task[1:3])
    assert at == {(slow, 0), (fast, 0), (TINY, 0), (TINY, 1)}, "not yet the other seed of a choice"
    told = [{"validation": top1, "core_seconds": 1.0} | dict(zip(KEY, arm.key(0), strict=True))
            for arm, top1 in ((slow, 0.8), (fast, 0.9))]  # fmt: skip
    (files / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in told))
    assert proof.next_task(proof.Known(), {(TINY, 0), (TINY, 1)}) == (claim, fast, 0, True)
    assert proof.next_task(proof.Known(), {(TINY, 0), (TINY, 1), (fast, 0)}) == (claim, fast, 1, True)
    monkeypatch.setattr(proof, "BUDGET", 0.0)
    assert proof.next_task(proof.Known(), set()) is None


@pytest.mark.timeout(60)
def test_processor_time_is_that_of_all_processes_also_of_those_that_outlive_the_command() -> None:
    """A process whose child computes for half a second of processor time after its parent has ended."""
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    words = [sys.executable, "-c", f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"]
    code, errors, seconds = runs.ended(words, minutes=1)
    assert (code, errors) == (0, "")
    assert 0.5 <= seconds < 30


@pytest.mark.timeout(60)
def test_a_job_that_is_ended_ends_its_training_and_counts_its_time(tmp_path: Path) -> None:
    started = tmp_path / "started"
    burn = (
        f"import pathlib, time\nwhile time.process_time() < 0.5: pass\n"
        f"pathlib.Path({str(started)!r}).touch()\ntime.sleep(50)"
    )
    job = (
        f"from benchmarks.accuracy import runs; import sys; "
        f"code, _, seconds = runs.ended([sys.executable, '-c', {burn!r}], 1); print(code, seconds >= 0.5)"
    )
    root = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", job], stdout=subprocess.PIPE, text=True, cwd=root) as process:
        until(started.exists, "the training")
        process.terminate()
        assert process.communicate()[0].split() == ["-15", "True"]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_plan_goes_on_where_it_was_ended(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One training, stopped before it began, then trained to its end and looked at."""
    claim = Claim("x", Side("on", (TINY,)), Side("off", (TINY.but("rate.lr=0.5"),)), Criterion(), "nobody", seeds=1)
    monkeypatch.setattr(proof, "CLAIMS", (claim,))
    assert not runs.go_on(TINY, 0, files, files / "out", minutes=0.001)
    assert len(proof.left(proof.Known())) == 2
    assert runs.go_on(TINY, 0, files, files / "out", minutes=2)
    runs.look(TINY, 0, files, files / "out")
    (result,), (look,) = read(files / "runs.jsonl"), read(files / "looks.jsonl")
    assert (result["images"], look["images"]) == (50, 360)
    assert result["core_seconds"] > 0
    assert [arm for _, arm, _, _ in proof.left(proof.Known())] == list(claim.off.arms)

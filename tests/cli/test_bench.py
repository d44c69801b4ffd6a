"""`torusgd bench allreduce`, `bench scaling` and `torusgd tune`."""

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.commands import command, ran
from tests.plan.measured import link, measured_run, network

from torusgd.cli.bench import compare
from torusgd.comm.tuning.profile import Profile
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions


@pytest.mark.slow
def test_tune_writes_a_profile_and_bench_measures_auto_by_it_and_names_what_it_does_not_know(tmp_path: Path) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "records.json"
    ran(command("tune", "digits", "--workers", "2", "--seconds", "1", "--out", profile))
    measured = Profile.load(profile)
    assert ([crowd.ranks for crowd in measured.crowding], measured.hosts) == ([2], (0, 0))
    assert [point.size >> 10 for point in measured.in_steps] in ([16, 256], [16, 256, 4096])
    done = ran(command(
        "bench", "allreduce", "--workers", "2", "--sizes", "4KiB,64KiB", "--algorithms", "native,ring,auto", "-n", "2",
        "--profile", profile, "--json", file,
    ))  # fmt: skip
    records, names = json.loads(file.read_text()), ("native", "ring", "auto")
    assert [(r["bytes"], r["algorithm"]) for r in records] == [(size, name) for size in (4096, 65536) for name in names]
    for record in records:
        assert {"algorithm", "bytes", "ranks", "grid", "median_s", "min_s", "max_s", "n"} <= record.keys()
        assert 0 < record["min_s"] <= record["median_s"] <= record["max_s"]
        assert (record["ranks"], record["n"]) == (2, 2)
    assert "64 KiB" in done.stdout
    wrong = ran(command("bench", "allreduce", "--workers", "2", "--algorithms", "torrus"), code=2)  # ranks find it
    assert ("torrus" in wrong.stderr, wrong.stderr.count("\n")) == (True, 1)


def test_mistakes_are_one_line_and_exit_code_2(mistake: Callable[..., None]) -> None:
    for words in (
        "bench allreduce --sizes 4q", "bench allreduce --grid 2by2", "bench allreduce --json /nowhere/x.json",
        "bench allreduce --workers 1", "bench allreduce --workers 99999", "tune --out /nowhere/x.json",
        "tune --set seed=1", "tune --seconds inf", "bench scaling digits --workers 1",
        "bench scaling digits --workers 1:2", "bench scaling digits --workers 2 --grid 2x2",
        "bench scaling digits --workers 3 --set column_blocks=4 --model-parallel 2",
    ):  # fmt: skip
        mistake(*words.split(), MOST=re.compile(r"(?<=at most )\d+"))


def test_scaling_puts_runs_beside_the_plan_from_the_first_of_them(tmp_path: Path) -> None:
    recipe = load_recipe("digits", ["virtual_workers=12", "stages=[{until: 20ep, images_per_worker: 8}]"]).recipe
    measured = network((0, 0), message=0.0, inside=link(1e-4, 1e-9))
    runs = {n: measured_run(tmp_path / str(n), time, update=0.01, ranks=n) for n, time in ((1, 0.4), (2, 0.25))}
    alone, two = compare(recipe, {n: RuntimeOptions(workers=n) for n in runs}, runs, measured, None)
    assert alone.planned_step_seconds == pytest.approx(alone.step_seconds) == 0.4
    assert (alone.efficiency, two.efficiency) == pytest.approx((1.0, 0.4 / 0.25 / 2))
    assert two.images_per_second == pytest.approx(96 / 0.25)
    # Half the passes, all of the update, and some messages.
    assert 0.5 * 0.39 + 0.01 < two.planned_step_seconds < 0.25
    assert two.planned_efficiency == pytest.approx(alone.step_seconds / two.planned_step_seconds / 2)
    assert two.error == pytest.approx(two.planned_step_seconds / 0.25 - 1)


@pytest.mark.slow
def test_scaling_runs_on_one_rank_and_on_two(tmp_path: Path) -> None:
    file, temporary = tmp_path / "points.json", Path(tempfile.mkdtemp())  # a short name, for the sockets there
    words = command(
        "bench", "scaling", "digits", "--workers", "2", "--steps", "4", "--seconds", "1", "--json", file,
        "--set", "column_blocks=2", "--model-parallel", "2",
    )  # fmt: skip
    assert "run 2 of 2: ranks 2, steps 4" in ran(words, env=os.environ | {"TMPDIR": str(temporary)}).stdout
    temporary.rmdir()  # nothing is left in it
    alone, two = json.loads(file.read_text())
    assert (alone["ranks"], two["ranks"], alone["efficiency"]) == (1, 2, 1.0)
    assert abs(alone["error"]) < 1e-6
    assert two["planned_step_seconds"] > 0

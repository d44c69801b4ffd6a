"""`torusgd bench allreduce` and `torusgd tune` on real ranks."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.train.runs import command

from torusgd.cli.bench import parse_size, show_size
from torusgd.comm.profile import Profile
from torusgd.errors import UserError


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_tune_writes_a_profile_and_bench_measures_auto_by_it(tmp_path: Path) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "records.json"
    done = run("tune", "--workers", "2", "--seconds", "1", "--out", profile)
    assert done.returncode == 0, done.stderr
    measured = Profile.load(profile)
    assert [crowd.ranks for crowd in measured.crowding] == [2]
    assert [point.size for point in measured.in_steps] == [16 << 10, 256 << 10]
    assert measured.hosts == (0, 0)

    done = run(
        "bench", "allreduce", "--workers", "2", "--sizes", "4KiB,64KiB", "--algorithms", "native,ring,auto", "-n", "2",
        "--profile", profile, "--json", file,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())
    assert [(r["bytes"], r["algorithm"]) for r in records] == [
        (size, name) for size in (4096, 65536) for name in ("native", "ring", "auto")
    ]
    for record in records:
        assert {"algorithm", "bytes", "ranks", "grid", "median_s", "min_s", "max_s", "n"} <= record.keys()
        assert 0 < record["min_s"] <= record["median_s"] <= record["max_s"]
        assert (record["ranks"], record["n"]) == (2, 2)
    assert "64 KiB" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "allreduce", "--sizes", "4q"), "'4q'"),
        (("bench", "allreduce", "--workers", "1"), "several"),
        (("bench", "allreduce", "--json", "/nowhere/x.json"), "can't be written"),
        (("tune", "--out", "/nowhere/x.json"), "can't be written"),
        (("bench", "allreduce", "--grid", "2by2"), "grid"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], words: str, run_cli: Callable[..., Any]
) -> None:
    code, _, err = run_cli(*arguments)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_mistake_that_ranks_find_is_one_line_and_exit_code_2() -> None:
    done = run("bench", "allreduce", "--workers", "2", "--algorithms", "torrus")
    assert done.returncode == 2
    assert "torrus" in done.stderr
    assert done.stderr.count("\n") == 1


def test_sizes_are_read_and_shown() -> None:
    assert [parse_size(text) for text in ("4KiB", "1 MiB", "512", "2MB")] == [4096, 1 << 20, 512, 2_000_000]
    assert [show_size(size) for size in (4096, 1 << 20, 100)] == ["4 KiB", "1 MiB", "100 B"]
    with pytest.raises(UserError, match="4 furlongs"):
        parse_size("4 furlongs")

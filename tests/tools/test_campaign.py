"""The campaign of combinations draws every option and key, and its verdicts tell right weights from wrong ones."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.campaign import __main__ as campaign
from tools.campaign import draw
from tools.campaign.draw import AXES, BASE, NO_KEY, NO_OPTION, PLAIN, RECIPE, RUNTIME, Draw, refused

from torusgd.recipe.reference import _rows
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.recipe.schema import Recipe


def test_every_runtime_option_and_group_of_keys_is_drawn_or_has_a_reason() -> None:
    assert not RUNTIME.keys() & NO_OPTION.keys()
    assert RUNTIME.keys() | NO_OPTION.keys() == RuntimeOptions.model_fields.keys()
    changed = [*BASE, *(change for values in RECIPE.values() for value in values for change in value.split(";"))]
    heads = {change.partition("=")[0].split(".")[0] for change in changed if change}
    assert {key.split(".")[0] for key, *_ in _rows(Recipe)} <= heads | NO_KEY.keys()


@pytest.mark.parametrize(("change", "words"), [
    ({}, ""), ({"model_parallel": 2}, "model_parallel = 2"), ({"streams": 2}, "streams"), ({"grid": "2x2"}, ""),
    ({"grid": "2x2", "workers": 4}, "grid"), ({"streams": 2, "allreduce": "ring"}, ""),
])  # fmt: skip
def test_the_table_says_which_runs_are_refused(change: dict[str, Any], words: str) -> None:
    lines = refused(PLAIN | change)
    assert bool(lines) == bool(words)
    assert all(words in line for line in lines[:1])


def test_each_pair_of_values_is_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {axis: AXES[axis] for axis in ("workers", "allreduce", "streams", "audit", "reduction", "mixed")}
    monkeypatch.setattr(draw, "AXES", axes)
    drawn = draw.draws(3, 1)
    run = set().union(*(draw.pairs({axis: each.row[axis] for axis in axes}) for each in drawn if not each.refusal))
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    # Whatever goes together in any row at all is tried in one that runs, streams with another all-reduce among them.
    together = set().union(*(draw.pairs(row) for row in rows if not refused(PLAIN | row)))
    assert run == together
    assert any(("streams", 2) in pair for pair in together)
    refusals = set().union(*(draw.pairs({axis: each.row[axis] for axis in axes}) for each in drawn if each.refusal))
    assert len(together | refusals) == sum(len(axes[a]) * len(axes[b]) for a, b in itertools.combinations(axes, 2))
    assert len(drawn) < len(together) / 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_played_once_and_other_weights_are_found(tmp_path: Path) -> None:
    results = tmp_path / "r.jsonl"
    row = PLAIN | {"audit": 1.0}
    runs = [Draw(0, row, "loader"), Draw(1, row | {"model_parallel": 2}, "none"), Draw(2, row, "kill")]
    drawn = results.with_suffix(".draws-0-3")
    drawn.write_text("".join(json.dumps(each) + "\n" for each in runs[:2]))
    words = [sys.executable, "-m", "tools.campaign", str(results), "--runs", "3"]
    assert subprocess.run(words, timeout=120, check=False).returncode == 0
    played = campaign.read(results)
    assert [row["verdict"] for row in played] == ["same", "refused"]
    # A second call plays what is new alone, and compares with the weights that are known.
    other = [row | {"plain": "0" * 64} if "plain" in row else row for row in played]
    results.write_text("".join(json.dumps(row) + "\n" for row in other))
    drawn.write_text("".join(json.dumps(each) + "\n" for each in runs))
    assert subprocess.run(words, timeout=120, check=False).returncode == 1
    assert [row["verdict"][:5] for row in campaign.read(results)] == ["same", "refus", "WRONG"]


def test_the_table_is_that_of_the_runs_that_were_played() -> None:
    root = Path(__file__).parents[2]
    played = campaign.read(root / "benchmarks" / "results" / "campaign.jsonl.gz")
    assert campaign.table(played) in (root / "notes" / "reliability.md").read_text()
    assert all(row["verdict"] in campaign.GOOD for row in played)
    ends = {verdict: sum(row["verdict"] == verdict for row in played) for verdict in campaign.GOOD}
    told = (
        f"{len(played)} were played on 2026-11-25, {sum(row['event'] != 'none' for row in played)} of them struck",
        f"{ends['refused']} combinations were refused with the documented message, as they should be; {ends['same']} "
        f"had the same weights, and {ends['ends well']} ended without error but could not be compared",
    )
    text = (root / "docs" / "reliability.md").read_text()
    assert all(each in text for each in told), told

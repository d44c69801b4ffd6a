"""--trace: what the ranks did in some steps, on one clock, in Chrome's format."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.comm.gloo_world import run_ranks
from tests.run.runs import TINY, run_here, train

from torusgd.errors import UserError
from torusgd.observe.trace import TRACKS, TracedSteps, merged


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:2:3", "1:", "-1", "1" * 12])
def test_what_is_no_span_of_steps_is_one_line(text: str) -> None:
    with pytest.raises(UserError, match="such as 10:12"):
        TracedSteps.parse(text)


def test_hosts_are_put_on_one_clock_and_ranks_of_a_host_keep_theirs() -> None:
    def span(begin: float) -> dict[str, Any]:
        return {"track": "steps", "name": "step", "begin": begin, "end": begin + 1.0}

    parts = {
        "0": {"host": "a", "left_barrier": 100.0, "spans": [span(90.0)]},
        "1": {"host": "b", "left_barrier": 5100.0, "spans": [span(5090.5)]},
        "2": {"host": "b", "left_barrier": 5100.75, "spans": [span(5091.0)]},
    }
    events = [event for event in merged(parts)["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in events] == [0.0, 0.5e6, 1.0e6]
    assert {event["dur"] for event in events} == {1e6}


def check(trace: dict[str, Any], ranks: int, steps: int, workers: int) -> None:
    """A whole trace: spans of a thread are nested or apart, messages end after they begin, all within the steps."""
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    names, begun = defaultdict[int, list[str]](list), dict[tuple[int, str], float]()
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            names[event["pid"]].append(event["name"])
        elif event["ph"] == "b":
            begun[event["pid"], event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= begun.pop((event["pid"], event["id"]))
        else:
            assert event["ph"] == "M"
    assert not begun
    assert {rank for rank, _ in spans} == set(range(ranks))
    assert sum(name.startswith("forward") for each in names.values() for name in each) == steps * workers
    assert sum(name.startswith("backward") for each in names.values() for name in each) == steps * workers
    for (rank, track), found in spans.items():
        for (_, end), (begin, _) in pairwise(sorted(found)):
            assert end <= begin + 0.01, TRACKS[track]
        own = spans[rank, 0]
        assert len(own) == steps
        if track < TRACKS.index("waits for messages"):  # evaluations between two steps wait for messages too
            assert all(any(first - 0.01 <= begin <= end <= last + 0.01 for first, last in own) for begin, end in found)
    # One clock: a step ends with messages that need all ranks, so no rank is a step ahead.
    for place in range(steps - 1):
        latest_begin = max(sorted(spans[rank, 0])[place][0] for rank in range(ranks))
        assert all(sorted(spans[rank, 0])[place + 1][1] > latest_begin for rank in range(ranks))


def traced_here(out: str, steps: TracedSteps = TracedSteps(2, 3)) -> None:  # noqa: B008 - it is frozen
    """One rank of a traced run."""
    from torusgd.comm.groups import group_of
    from torusgd.recipe.load import load_recipe
    from torusgd.recipe.runtime_options import RuntimeOptions
    from torusgd.run.job import Job
    from torusgd.run.run import Run
    from torusgd.runtime import resolve_auto
    from torusgd.signals import StopFlag

    recipe = resolve_auto(load_recipe("digits", list(TINY)).recipe, "cpu")
    job = Job(recipe, RuntimeOptions(), "cpu", Path(out), trace=steps)
    Run(job, group_of(), StopFlag(), restarts=0).run()


def test_a_trace_has_the_steps_and_changes_no_bit(tmp_path: Path) -> None:
    alone, _ = run_here(tmp_path / "alone")
    (tmp_path / "run").mkdir()
    traced_here(str(tmp_path / "run"))
    check(json.loads((tmp_path / "run" / "trace.json").read_text()), ranks=1, steps=2, workers=4)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["weights_sha256"] == alone["weights_sha256"]


def test_steps_beyond_the_run_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--trace 3:5: the run has 4 steps"):
        traced_here(str(tmp_path), TracedSteps(3, 5))


@pytest.mark.slow
def test_a_trace_has_the_steps_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run_ranks(2, traced_here, str(tmp_path / "run"))
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    check(trace, ranks=2, steps=2, workers=4)
    assert any(event["ph"] == "b" and event["args"]["bytes"] > 0 for event in trace["traceEvents"])


@pytest.mark.slow
def test_the_command_writes_a_trace(tmp_path: Path) -> None:
    train(tmp_path / "run", "--workers", "3", "--max-steps", "12", "--trace", "10:12")
    check(json.loads((tmp_path / "run" / "trace.json").read_text()), ranks=3, steps=3, workers=12)

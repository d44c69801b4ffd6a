"""--trace: what the ranks did in some steps, on one clock, in Chrome's format."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.messages import refused, refuses
from tests.run.processes import summary
from tests.run.runs import train
from tests.step.trainers import job_of, run_of

from torusgd.comm.groups import alone
from torusgd.observe.trace import StepTrace, TracedSteps, merged
from torusgd.recipe.runtime_options import RuntimeOptions


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:2:3", "1:", "-1", "1" * 12])
def test_what_is_no_span_of_steps_is_one_line(text: str) -> None:
    refuses("a span of steps that is none", TracedSteps.parse, text, about="TEXT", TEXT=f"--trace {text}:")


def test_ranks_are_put_on_one_clock_and_a_device_of_a_rank_is_a_process_of_its_own() -> None:
    def part(base: float, begin: float) -> dict[str, Any]:
        """A rank that began a step so many seconds after what its times count from."""
        event = {"ph": "X", "name": "step", "pid": 77, "tid": 1, "ts": begin * 1e6, "dur": 1e6}
        return {"host": "a", "process": 77, "base": int(base * 1e9), "events": [event]}

    parts = {0: part(100.0, 90.0), 1: part(-4900.0, 5090.5), 2: part(-4900.0, 5091.0)}
    events = [event for event in merged(parts)["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] - events[0]["ts"] for event in events] == pytest.approx([0.0, 0.5e6, 1.0e6])
    assert [event["pid"] for event in events] == [0, 1, 2]
    events = [{"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 1.0}, {"ph": "X", "name": "x", "pid": "Spans"}]
    parts = {rank: {"host": "a", "process": 9, "base": 0, "events": events} for rank in (0, 1)}
    kernels = [event["pid"] for event in merged(parts)["traceEvents"] if event["ph"] == "X"]
    assert len(set(kernels)) == 2
    assert not set(kernels) & {0, 1}


def check(trace: dict[str, Any], ranks: int, steps: int, workers: int) -> None:
    """A whole trace: of each rank all steps, with its passes in them, on one clock."""
    spans: dict[int, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and "ts" in event:
            spans[event["pid"]][event["name"].split()[0]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(range(ranks)) <= set(spans)
    for name in ("forward", "backward"):
        assert sum(len(spans[rank][name]) for rank in range(ranks)) == steps * workers
    for rank in range(ranks):
        own = sorted(spans[rank]["step"])
        assert len(own) == steps == len(spans[rank]["update"])
        assert spans[rank]["aten::mul"], "torch's operators are in it"
        for name in ("forward", "backward", "update"):
            for begin, end in spans[rank][name]:
                assert any(first - 1 <= begin <= end <= last + 1 for first, last in own)
    # One clock: a step ends with messages that need all ranks, so no rank is a step ahead.
    for number in range(steps - 1):
        latest_begin = max(sorted(spans[rank]["step"])[number][0] for rank in range(ranks))
        assert all(sorted(spans[rank]["step"])[number + 1][1] > latest_begin for rank in range(ranks))


def test_a_trace_has_the_steps_and_changes_no_bit_and_steps_beyond_the_run_are_one_line(tmp_path: Path) -> None:
    run_of(job_of(out=tmp_path / "alone")).run()
    for name, graphs in (("run", False), ("ahead", True)):  # traced steps are taken one by one
        options = RuntimeOptions(cuda_graphs=graphs)
        run_of(job_of(out=tmp_path / name, trace=TracedSteps(2, 3), options=options)).run()
        check(json.loads((tmp_path / name / "trace.json").read_text()), ranks=1, steps=2, workers=4)
        assert summary(tmp_path / name)["weights_sha256"] == summary(tmp_path / "alone")["weights_sha256"]
    for _ in range(2):  # the ranks change within the traced steps
        trace = StepTrace(TracedSteps(1, 3), alone(), tmp_path)
        trace.between_steps(0)
        trace.close()
    with refused("a trace of steps beyond the run", "--trace 3:5"):
        run_of(job_of(out=tmp_path / "beyond", trace=TracedSteps(3, 5)))


@pytest.mark.slow
def test_the_command_writes_a_trace_of_all_ranks(tmp_path: Path) -> None:
    train(tmp_path / "run", "--workers", "3", "--max-steps", "12", "--trace", "10:12")
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    check(trace, ranks=3, steps=3, workers=12)
    assert any(event.get("name") == "wait for messages" for event in trace["traceEvents"])

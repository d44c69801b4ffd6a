"""A plan beside the run that it predicted, and the events of steps that a run takes again, which it drops."""

import json
from pathlib import Path

import pytest
from tests.messages import refused, refuses
from tests.run.runs import events, run_here

from torusgd.cli.train import show_result
from torusgd.observe import events as module
from torusgd.observe.events import PlanComparison


def plan(path: Path, **changes: object) -> Path:
    stages = [{"batch": 96, "seconds": seconds} for seconds in (0.1, 0.2)]
    path.write_text(json.dumps({"recipe": "digits", "devices": 1, "stages": stages, **changes}))
    return path


def test_steps_are_weighed_by_their_stage(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    steps = [(0, 9.0), (0, 0.11), (0, 0.09), (0, 0.5), (1, 0.4)]  # of one batch, as of larger images
    lines = [{"step": n, "stage": stage, "step_seconds": seconds} for n, (stage, seconds) in enumerate(steps, 1)]
    events.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"event": "evaluation", "step": 5}]))
    predicted, measured, images = 3 * 0.1 + 0.2, 3 * 0.11 + 0.4, 4 * 96
    figures = {"step_seconds": predicted / 4, "images_per_second": images / predicted}
    figures |= {"measured_step_seconds": measured / 4, "measured_images_per_second": images / measured}
    figures |= {"step_seconds_error": predicted / measured - 1, "images_per_second_error": measured / predicted - 1}
    assert PlanComparison.load(plan(tmp_path / "plan.json")).beside(events) == pytest.approx(figures)


def test_a_plan_of_something_else_is_refused(tmp_path: Path) -> None:
    planned = PlanComparison.load(plan(tmp_path / "plan.json"))
    job = "digits", [96, 96], 1
    planned.check(*job)
    wrong = {"recipe": ("fashion", *job[1:]), "batch": ("digits", [96, 100], 1), "number of ranks": (*job[:2], 2)}
    for what, job in wrong.items():
        refuses(f"a plan of another {what}", planned.check, *job, about="--plan FOLDER/plan.json", FOLDER=tmp_path)
    for text in ("{}", "no", "[1]"):
        (tmp_path / "other.json").write_text(text)
        with refused("a file that is no plan", "--plan FOLDER/other.json", FOLDER=tmp_path):
            PlanComparison.load(tmp_path / "other.json")
    with refused("a plan that is missing", "--plan FOLDER/none.json", FOLDER=tmp_path):
        PlanComparison.load(tmp_path / "none.json")


def test_the_summary_holds_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    stages = [{"batch": 12, "seconds": 0.1}, {"batch": 20, "seconds": 0.1}]
    summary, _ = run_here(out, plan=PlanComparison.load(plan(tmp_path / "plan.json", stages=stages)))
    assert json.loads((out / "summary.json").read_text()) == summary
    beside = summary["predicted"]
    assert beside["step_seconds"] == pytest.approx(0.1)
    assert beside["step_seconds_error"] == pytest.approx(0.1 / beside["measured_step_seconds"] - 1)
    show_result(summary, str(out))
    assert "the plan said 100.0 ms" in capsys.readouterr().out
    steps = [each for each in events(out) if "event" not in each]
    assert [0 < each["update_seconds"] < each["step_seconds"] - each["data_seconds"] for each in steps] == [True] * 4


STEPS: list[dict[str, object]] = [{"step": step} for step in range(1, 10)]
LINES = [*STEPS[:7], {"step": 7, "event": "evaluation"}, {"step": 7, "event": "polished"}, *STEPS[7:]]


@pytest.mark.parametrize("block", [1, 7, 4096])
@pytest.mark.parametrize(("step", "count"), [(0, 0), (3, 3), (7, 8), (9, 11), (99, 11)])
@pytest.mark.parametrize("cut", ["", '{"step": 10, "lo', "\n"])
def test_later_events_are_dropped_from_the_end(tmp_path, monkeypatch, step: int, count: int, cut: str, block: int):
    monkeypatch.setattr(module, "_BLOCK", block)
    path, lines = tmp_path / "events.jsonl", [json.dumps(line) + "\n" for line in LINES]
    path.write_text("".join(lines) + cut)
    module._drop_later_events(path, step, evaluated=step)
    assert path.read_text() == "".join(lines[:count])
    module._drop_later_events(tmp_path / "none", step, evaluated=step)

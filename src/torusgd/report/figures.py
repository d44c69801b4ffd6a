"""Which charts a page has, and from which events their points come."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..text import is_number
from .charts import Chart, Series, line_chart
from .read_run import RunRecord
from .tables import time_shares

COLOURS = 8
"""colours of the page; further runs take them again, dashed"""
_SMOOTH = 25
"""steps over which images a second are averaged"""


def run_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Loss, accuracy, rate, batch and speed over epochs; those without a point are left out."""
    epochs = "epochs"
    charts = [
        line_chart("loss (log scale)", epochs, [*_lines(runs, "loss"), *_dots(runs, "loss")], log_y=True),
        line_chart(
            "top-1 in %", epochs, [*_dots(runs, "top1", joined=True), *_dots(runs, "top1")], percent=True, floor=True
        ),
        line_chart("learning rate", epochs, _lines(runs, "lr"), floor=True),
        line_chart("images a step", epochs, _lines(runs, "batch"), floor=True),
        line_chart("images a second", epochs, _speeds(runs), floor=True),
        line_chart("time waiting for messages, % of a step", epochs, _waits(runs), percent=True, floor=True),
    ]
    return [chart for chart in charts if chart is not None]


def time_bars(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Of each run the parts of its time as a stacked bar: begin and width in percent."""
    bars = []
    for run in runs:
        at, segments = 0.0, []
        for colour, part in enumerate(time_shares(run)):
            width = 100 * part.share
            segments.append({"name": part.name, "colour": colour, "begin": round(at, 3), "width": round(width, 3)})
            at += width
        bars.append({"name": run.name, "segments": segments})
    return bars


def sweep_charts(forecasts: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Images a second, efficiency and time over numbers of devices; of what `torusgd plan --json` has under `sweep`."""

    def points(key: str) -> list[tuple[float, float]]:
        return [(f["devices"], f[key]) for f in forecasts if is_number(f.get("devices")) and is_number(f.get(key))]

    rates, hours = points("images_per_second"), [(x, y / 60) for x, y in points("seconds")]
    linear = [(x, rates[0][1] * x / rates[0][0]) for x, _ in rates] if rates else []
    bounds = [[(x, y / 60) for x, y in points(key)] for key in ("low", "high")]
    charts = [
        line_chart(
            "images a second", "devices", [Series("predicted", rates, 0), Series("linear", linear, 1, dashed=True)],
            log_x=True, log_y=True,
        ),
        line_chart(
            "efficiency in %", "devices", [Series("predicted", points("efficiency"), 2)],
            log_x=True, percent=True, floor=True,
        ),
        line_chart(
            "minutes", "devices",
            [Series("predicted", hours, 3), *(Series("band", each, 3, dashed=True) for each in bounds)],
            log_x=True, log_y=True,
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def _series(runs: Sequence[RunRecord], points: Sequence[Sequence[tuple[float, float]]], dots: bool) -> list[Series]:
    return [
        Series(run.name, each, place % COLOURS, dots=dots, dashed=place >= COLOURS)
        for place, (run, each) in enumerate(zip(runs, points, strict=True))
    ]


def _lines(runs: Sequence[RunRecord], key: str) -> list[Series]:
    points = [[(s["epoch"], s[key]) for s in run.steps if is_number(s.get(key))] for run in runs]
    return _series(runs, points, dots=False)


def _dots(runs: Sequence[RunRecord], key: str, joined: bool = False) -> list[Series]:
    """Evaluations of the weights in training, without the polished ones: the table of results has those."""
    points = []
    for run in runs:
        events = [e for e in run.evaluations if e["event"] == "evaluation" and is_number(e.get(key))]
        placed = [(run.epoch_of(event["step"]), event[key]) for event in events]
        points.append([(epoch, value) for epoch, value in placed if epoch is not None])
    return _series(runs, points, dots=not joined)


def _speeds(runs: Sequence[RunRecord]) -> list[Series]:
    """Images over seconds of some steps together: single steps jump by what else the machine does."""
    return _series(runs, [_ratios(run, "batch", "step_seconds") for run in runs], dots=False)


def _waits(runs: Sequence[RunRecord]) -> list[Series]:
    return _series(runs, [_ratios(run, "sync_seconds", "step_seconds") for run in runs], dots=False)


def _ratios(run: RunRecord, over: str, under: str) -> list[tuple[float, float]]:
    """By epoch, one sum over another of some steps together."""
    size = max(1, min(_SMOOTH, len(run.steps) // 10))
    groups = [run.steps[start : start + size] for start in range(0, len(run.steps) - size + 1, size)]
    sums = [(g[-1]["epoch"], sum(s[over] for s in g), sum(s[under] for s in g)) for g in groups]
    return [(epoch, above / below) for epoch, above, below in sums if below > 0]

"""Line charts and stacked bars as plain numbers, which a template writes down as SVG, and which of them a page has.

Coordinates are those of the SVG's view box, y downwards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ..text import is_number, short
from .read_run import Log, RunRecord

WIDTH, HEIGHT = 380, 230  # size of a chart's view box, of which the axes leave the inner part
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
COLUMNS = 500  # most points of a line
TICKS = 5  # marks of an axis, about
_LEAST = 1e-300  # smaller numbers count as 0: of parts of them float64 knows no power of ten
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart, and dots for what was measured now and then."""

    name: str
    points: Sequence[Point]
    colour: int  # number among the page's colours
    dots: bool = False
    dashed: bool = False

    @property
    def path(self) -> str:
        """The points as the data of an SVG path."""
        return "M" + "L".join(f"{x:g},{y:g}" for x, y in self.points)


class Tick(NamedTuple):
    at: float
    label: str


class Chart(NamedTuple):
    title: str
    x_label: str
    lines: tuple[Series, ...]  # in the view box
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str  # sentence for readers who do not see the chart


@dataclass(frozen=True)
class Axis:
    """One direction: which value lies where."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low)
        return round(self.start + share * (self.stop - self.start), 2)

    def ticks(self, count: int) -> tuple[Tick, ...]:
        values = _decades(self.low, self.high, count) if self.log else _round_values(self.low, self.high, count)
        return tuple(Tick(self.at(value), short(value)) for value in values)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def line_chart(
    title: str, x_label: str, series: Sequence[Series], *, log_x: bool = False, log_y: bool = False,
    percent: bool = False, floor: bool = False,
) -> Chart | None:  # fmt: skip
    """A chart of one or more series, whose x does not fall; None if no series has a point.

    The title says what the y axis shows. Values that can't be shown are left out. With `percent` values are fractions;
    with it or `floor` the y axis begins at 0.
    """
    scale = 100.0 if percent else 1.0
    found = ((s, [(x, y * scale) for x, y in s.points if _is_shown(x, log_x) and _is_shown(y, log_y)]) for s in series)
    shown = [(each, points) for each, points in found if points]
    if not shown:
        return None
    # Axes span what is shown of all series, so that their lines can be compared.
    xs, ys = zip(*(point for _, points in shown for point in points), strict=True)
    across = Axis(*_span(min(xs), max(xs), log_x), LEFT, WIDTH - RIGHT, log_x)
    low, high = _span(min([0.0, *ys] if (floor or percent) and not log_y else ys), max(ys), log_y)
    if not log_y:  # to the next round values, so that the axis ends where a number stands
        step = _step(low, high, TICKS)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    up = Axis(low, high, HEIGHT - BOTTOM, TOP, log_y)
    lines = [replace(each, points=[(across.at(x), up.at(y)) for x, y in _thinned(points)]) for each, points in shown]
    ends = ", ".join(f"{each.name} ends at {short(points[-1][1])}" for each, points in shown)
    return Chart(title, x_label, tuple(lines), across.ticks(TICKS), up.ticks(TICKS), f"{title} over {x_label}: {ends}.")


def _is_shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > _LEAST or not log)


def _span(low: float, high: float, log: bool) -> tuple[float, float]:
    if high - low > _LEAST:
        return low, high
    if log:
        return low / 2, high * 2
    return (low - 0.5 * abs(low), high + 0.5 * abs(high)) if abs(low) > _LEAST else (0.0, 1.0)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most COLUMNS points: of neighbours the mean, so a hundred thousand steps are as small as five hundred."""
    # Means of equal runs and not every n-th point, or a spike would come and go with the length of the run.
    size = math.ceil(len(points) / COLUMNS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in groups]


def _step(low: float, high: float, count: int) -> float:
    """1, 2, 2.5 or 5 times a power of ten, of which about `count` lie between the bounds."""
    # The least round step that leaves at most `count` of them; 0.999 for a quotient that rounding left below.
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _round_values(low: float, high: float, count: int) -> list[float]:
    step = _step(low, high, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _decades(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, with 2 and 5 times as much if they are few; round values if there is no room for those."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) < count else (1,)
    every = math.ceil(len(powers) / (2 * count))
    found = [factor * 10.0**power for power in powers[::every] for factor in factors]
    found = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return found if len(found) > 1 else _round_values(low, high, count)


MOST_CHARTS = 40
COLOURS = 8  # colours of the page; further runs take them again, dashed
_SMOOTH = 25  # steps over which images a second are averaged


def run_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    charts = [
        line_chart("loss (log scale)", "epochs", [*_lines(runs, "loss"), *_dots(runs, "loss")], log_y=True),
        line_chart("top-1 in %", "epochs", [*_dots(runs, "top1", joined=True), *_dots(runs, "top1")], percent=True),
        line_chart("learning rate", "epochs", _lines(runs, "lr"), floor=True),
        line_chart("images a step", "epochs", _lines(runs, "batch"), floor=True),
        line_chart("images a second", "epochs", _a_second(runs, "batch"), floor=True),
        line_chart("time waiting for messages, % of a step", "epochs", _a_second(runs, "sync_seconds"), percent=True),
    ]
    return [chart for chart in charts if chart is not None]


def stacked_bar(name: str, shares: Mapping[str, float]) -> dict[str, Any]:
    """The fractions of a whole, by name, as segments with begin and width in percent."""
    widths = [100 * share for share in shares.values()]
    begins = accumulate(widths, initial=0.0)
    segments = [
        {"name": part, "colour": colour, "begin": round(begin, 3), "width": round(width, 3)}
        for colour, (part, begin, width) in enumerate(zip(shares, begins, widths, strict=False))
    ]
    return {"name": name, "segments": segments}


def sweep_charts(forecasts: Sequence[Mapping[str, Any]], knee: object) -> list[Chart]:
    """Images a second, efficiency (with the knee) and time by devices, from `sweep` of `torusgd plan --json`."""

    def points(key: str) -> list[tuple[float, float]]:
        return [(f["devices"], f[key]) for f in forecasts if is_number(f.get("devices")) and is_number(f.get(key))]

    rates, hours = points("images_per_second"), [(x, y / 60) for x, y in points("seconds")]
    linear = [(x, rates[0][1] * x / rates[0][0]) for x, _ in rates] if rates else []
    bounds = [[(x, y / 60) for x, y in points(key)] for key in ("low", "high")]
    shares = points("efficiency")
    at_knee = [(knee, 0.0), (knee, max(y for _, y in shares))] if is_number(knee) and shares else []
    charts = [
        line_chart(
            "images a second", "devices", [Series("predicted", rates, 0), Series("linear", linear, 1, dashed=True)],
            log_x=True, log_y=True,
        ),
        line_chart(
            "efficiency in %", "devices",
            [Series("predicted", shares, 2), Series("knee", at_knee, 1, dashed=True)], log_x=True, percent=True,
        ),
        line_chart(
            "minutes", "devices",
            [Series("predicted", hours, 3), *(Series("band", each, 3, dashed=True) for each in bounds)],
            log_x=True, log_y=True,
        ),
    ]  # fmt: skip
    return [chart for chart in charts if chart is not None]


def log_charts(logs: Sequence[Log]) -> list[Chart]:
    """A chart a name, with a line for each file that has it; losses on an axis by decades where they can be."""
    names = list(dict.fromkeys(name for log in logs for name in log.columns))[:MOST_CHARTS]
    charts = []
    for name in names:
        found = [log.columns.get(name, []) for log in logs]
        log_y = "loss" in name and all(y > 0 for points in found for _, y in points)
        pairs = enumerate(zip(logs, found, strict=True))
        lines = [Series(log.name, points, at % COLOURS) for at, (log, points) in pairs]
        charts.append(line_chart(f"{name} (log scale)" if log_y else name, "steps", lines, log_y=log_y))
    return [chart for chart in charts if chart is not None]


def _series(runs: Sequence[RunRecord], points: Callable[[RunRecord], list[Point]], dots: bool = False) -> list[Series]:
    return [
        Series(run.name, points(run), place % COLOURS, dots=dots, dashed=place >= COLOURS)
        for place, run in enumerate(runs)
    ]


def _lines(runs: Sequence[RunRecord], key: str) -> list[Series]:
    return _series(runs, lambda run: [(s["epoch"], s[key]) for s in run.steps if is_number(s.get(key))])


def _dots(runs: Sequence[RunRecord], key: str, joined: bool = False) -> list[Series]:
    """Evaluations of the weights in training, without the polished ones: the table of results has those."""

    def points(run: RunRecord) -> list[Point]:
        events = [e for e in run.evaluations if e["event"] == "evaluation" and is_number(e.get(key))]
        return [(run.epochs[event["step"]], event[key]) for event in events if event["step"] in run.epochs]

    return _series(runs, points, dots=not joined)


def _a_second(runs: Sequence[RunRecord], key: str) -> list[Series]:
    def points(run: RunRecord) -> list[Point]:
        # Of some steps together: single steps jump by what else the machine does.
        size = max(1, min(_SMOOTH, len(run.steps) // 10))
        groups = [run.steps[start : start + size] for start in range(0, len(run.steps) - size + 1, size)]
        sums = [(g[-1]["epoch"], sum(s[key] for s in g), sum(s["step_seconds"] for s in g)) for g in groups]
        return [(epoch, above / seconds) for epoch, above, seconds in sums if seconds > 0]

    return _series(runs, points)

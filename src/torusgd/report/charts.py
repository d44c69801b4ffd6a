"""Line charts and stacked bars as plain numbers: a template needs only to write them down as SVG.

Coordinates are those of the SVG's view box, y downwards. A chart of a hundred thousand steps is as small as one of
five hundred: the points that fall on one column of pixels are replaced by their mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..text import short

WIDTH, HEIGHT = 380, 230
"""size of a chart's view box, of which the axes leave the inner part"""
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
COLUMNS = 500
"""most points of a line"""
TICKS = 5
"""marks of an axis, about"""
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart, and dots for what was measured now and then."""

    name: str
    points: Sequence[Point]
    colour: int
    """number among the page's colours"""
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where it is, and its number."""

    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """A series in coordinates of the view box."""

    name: str
    colour: int
    path: str
    """data of an SVG path"""
    dots: tuple[Point, ...]
    dashed: bool


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be written down."""

    title: str
    x_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    summary: str
    """sentence for readers who do not see the chart"""


@dataclass(frozen=True)
class Axis:
    """One direction: which value lies where.

    >>> Axis(0.0, 10.0, 52, 368).at(5.0)
    210.0
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """The coordinate of a value."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        share = (self._scaled(value) - low) / (high - low)
        return round(self.start + share * (self.stop - self.start), 2)

    def ticks(self, count: int) -> tuple[Tick, ...]:
        """About so many round values."""
        values = _decades(self.low, self.high, count) if self.log else _round_values(self.low, self.high, count)
        return tuple(Tick(self.at(value), short(value)) for value in values)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def line_chart(
    title: str,
    x_label: str,
    series: Sequence[Series],
    *,
    log_x: bool = False,
    log_y: bool = False,
    percent: bool = False,
    floor: bool = False,
) -> Chart | None:
    """A chart of one or more series; None if no series has a point.

    Args:
        title: What the y axis shows, and its unit.
        x_label: What the x axis shows.
        series: Points whose x does not fall; values that are not finite are left out.
        log_x: The x axis by decades; points that are not positive on it are left out.
        log_y: The same of the y axis.
        percent: Values are fractions, and are shown as percentages.
        floor: The y axis begins at 0.
    """
    scale = 100.0 if percent else 1.0
    shown = [
        (each, [(x, y * scale) for x, y in each.points if _is_shown(x, log_x) and _is_shown(y, log_y)])
        for each in series
    ]
    shown = [(each, points) for each, points in shown if points]
    if not shown:
        return None
    # Axes span what is shown of all series, so that their lines can be compared.
    xs = [x for _, points in shown for x, _ in points]
    ys = [y for _, points in shown for _, y in points]
    across = Axis(*_span(min(xs), max(xs), log_x), LEFT, WIDTH - RIGHT, log_x)
    low, high = _span(min([0.0, *ys] if floor and not log_y else ys), max(ys), log_y)
    up = Axis(*((low, high) if log_y else _widened(low, high, TICKS)), HEIGHT - BOTTOM, TOP, log_y)
    lines = []
    for each, points in shown:
        placed = [(across.at(x), up.at(y)) for x, y in _thinned(points)]
        path = "" if each.dots else "M" + "L".join(f"{x:g},{y:g}" for x, y in placed)
        lines.append(Line(each.name, each.colour, path, tuple(placed) if each.dots else (), each.dashed))
    ends = ", ".join(f"{each.name} ends at {short(points[-1][1])}" for each, points in shown)
    return Chart(title, x_label, tuple(lines), across.ticks(TICKS), up.ticks(TICKS), f"{title} over {x_label}: {ends}.")


def _is_shown(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _span(low: float, high: float, log: bool) -> tuple[float, float]:
    """Widened if all values are the same."""
    if low < high:
        return low, high
    if log:
        return low / 2, high * 2
    return (low - 0.5 * abs(low), high + 0.5 * abs(high)) if low else (0.0, 1.0)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most COLUMNS points: of neighbours the mean."""
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


def _widened(low: float, high: float, count: int) -> tuple[float, float]:
    """To the next round values, so that an axis ends where a number stands."""
    step = _step(low, high, count)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _decades(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, with 2 and 5 times as much if they are few; round values if there is no room for those."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) < count else (1,)
    every = math.ceil(len(powers) / (2 * count))
    found = [factor * 10.0**power for power in powers[::every] for factor in factors]
    found = [value for value in found if low * 0.999 <= value <= high * 1.001]
    return found if len(found) > 1 else _round_values(low, high, count)

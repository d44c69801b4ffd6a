"""Points, ticks and paths of charts."""

import math
from collections.abc import Sequence

import pytest

from torusgd.report.charts import BOTTOM, COLUMNS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Series, line_chart


def test_a_line_fills_the_box_between_the_axes() -> None:
    chart = line_chart("loss", "epochs", [Series("run", [(0, 0), (5, 1), (10, 4)], 0)])
    assert chart is not None
    assert chart.lines[0].points == [
        (LEFT, HEIGHT - BOTTOM),
        ((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) / 4),
        (WIDTH - RIGHT, TOP),
    ]
    assert [tick.label for tick in chart.y_ticks] == ["0", "1", "2", "3", "4"]
    assert chart.y_ticks[0].at == HEIGHT - BOTTOM
    assert chart.lines[0].path.startswith(f"M{LEFT},{HEIGHT - BOTTOM}L")


@pytest.mark.parametrize("low", [0.0, -3.0, 1e-9, 7.0, 12345.0])
@pytest.mark.parametrize("width", [0.0, 1e-6, 1.0, 1e7])
@pytest.mark.parametrize("log", [False, True])
def test_axes_have_a_few_ticks_within_their_bounds_whatever_the_values(low: float, width: float, log: bool) -> None:
    chart = line_chart("y", "x", [Series("a", [(low, low), (low + width, low + width)], 0)], log_x=log, log_y=log)
    if chart is None:
        assert log
        assert low + width <= 0
        return
    for tick in chart.x_ticks:
        assert LEFT - 0.1 <= tick.at <= WIDTH - RIGHT + 0.1
    for tick in chart.y_ticks:
        assert TOP - 0.1 <= tick.at <= HEIGHT - BOTTOM + 0.1
    assert 1 <= len(chart.y_ticks) <= 12


def points_of(*points: tuple[float, float]) -> Sequence[tuple[float, float]]:
    chart = line_chart("y", "x", [Series("a", points, 0)])
    assert chart is not None
    return chart.lines[0].points


def test_values_that_are_not_finite_are_left_out_and_long_lines_thinned_to_means() -> None:
    assert len(points_of((0, 1), (1, math.nan), (2, math.inf), (3, 2))) == 2
    assert line_chart("y", "x", [Series("a", [(0, math.nan)], 0)]) is None
    assert line_chart("y", "x", []) is None
    placed = points_of(*((step, step % 2) for step in range(100 * COLUMNS)))
    assert len(placed) == COLUMNS
    assert len({y for _, y in placed}) == 1, "each is the mean of as many zeros as ones"


def test_a_logarithmic_axis_gives_each_decade_the_same_room() -> None:
    axis = Axis(1.0, 1000.0, 0, 300, log=True)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert [tick.label for tick in axis.ticks(5)] == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1000"]

"""Figures as people read them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.messages import refuses
from torusgd import text


@pytest.mark.parametrize(("show", "values", "shown"), [
    (text.duration, (1.5, 599.9, 900, 7200, 1e5), ["1.5 s", "599.9 s", "15.0 min", "2.0 h", "27.8 h"]),
    (text.milliseconds, (0.0123,), ["12.3 ms"]), (text.count, (81920,), ["81,920"]),
    (text.byte_size, (4096, 1 << 20, 100, 5 << 29), ["4 KiB", "1 MiB", "100 B", "2.5 GiB"]),
    (text.plain, (0.123456,), ["0.1235"]), (text.number, (0.123456, 81920), ["0.1235", "81,920"]),
    (text.short, (0.0, 0.25, 12000.0, 2_500_000.0, 3e9, 1e-6), ["0", "0.25", "12k", "2.5M", "3G", "1e-06"]),
    (text.percent, (0.7591,), ["75.91%"]), (text.change, (-0.031, None), ["-3.1 %", ""]),
    (lambda number: text.plural(number, "rank"), (1, 2000), ["1 rank", "2,000 ranks"]),
    (lambda ranks: text.named("rank", ranks), ([3], [3, 5]), ["rank 3", "ranks 3, 5"]),
])  # fmt: skip
def test_figures_as_people_read_them(show: Callable[[Any], str], values: Sequence[Any], shown: list[str]) -> None:
    assert [show(value) for value in values] == shown


def test_sizes_are_read() -> None:
    assert [text.parse_size("--sizes", size) for size in ("4KiB", "1 MiB", "512", "2MB")] == [4096, 1 << 20, 512, 2e6]
    refuses("a size in furlongs", text.parse_size, "--sizes", "4 furlongs", about="--sizes")
    long = "9" * 5000
    refuses("a size of more digits than Python reads", text.parse_size, "--sizes", long, about="--sizes", N=long)


@given(st.integers(0, 2**40))
def test_a_size_that_is_shown_is_read_again_to_four_digits(count: int) -> None:
    assert text.parse_size("", f"{count}") == count
    value, unit = text.byte_size(count).split()
    assert float(value) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(count, rel=1e-3)


@pytest.mark.parametrize("show", [text.duration, text.milliseconds, text.count, text.plain, text.percent])
@pytest.mark.parametrize("value", [None, "1", True, [1], 1e16, float("nan")])
def test_what_is_no_number_is_no_figure(show: Callable[[object], str], value: object) -> None:
    assert show(value) == text.NONE

"""Figures as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.messages import refused
from torusgd import text


def test_durations() -> None:
    shown = [text.duration(seconds) for seconds in (1.5, 599.9, 900, 7200, 1e5)]
    assert shown == ["1.5 s", "599.9 s", "15.0 min", "2.0 h", "27.8 h"]


def test_sizes_are_read_and_shown() -> None:
    assert [text.parse_size("--sizes", size) for size in ("4KiB", "1 MiB", "512", "2MB")] == [4096, 1 << 20, 512, 2e6]
    assert [text.byte_size(count) for count in (4096, 1 << 20, 100, 5 << 29)] == ["4 KiB", "1 MiB", "100 B", "2.5 GiB"]
    with refused("a size in furlongs", "--sizes"):
        text.parse_size("--sizes", "4 furlongs")


@given(st.integers(0, 2**40))
def test_a_size_that_is_shown_is_read_again_to_four_digits(count: int) -> None:
    assert text.parse_size("", f"{count}") == count
    value, unit = text.byte_size(count).split()
    assert float(value) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(count, rel=1e-3)


@pytest.mark.parametrize("show", [text.duration, text.milliseconds, text.count, text.plain, text.percent])
@pytest.mark.parametrize("value", [None, "1", True, [1], 1e16, float("nan")])
def test_what_is_no_number_is_no_figure(show: object, value: object) -> None:
    assert callable(show)
    assert show(value) == text.NONE

"""How figures are written for people: durations, sizes, counts, fractions, plurals and lists of names; and as JSON.

What is no number, such as a value of a stranger's JSON, is written as NONE.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeGuard

from .errors import UserError

NONE = "-"
NOT_INSTALLED = "from a tree of sources"
_MOST_FIGURE = 1e15  # no figure of a run is larger; sums of so many stay finite
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def version_of(package: str = "torusgd") -> str:
    """As its installation says; empty: it is not installed, as torusgd in a tree of sources on PYTHONPATH."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a stranger's JSON is a number, no truth value, of at most 1e15."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST_FIGURE


def duration(seconds: object) -> str:
    """Seconds, minutes or hours: 92.1 s, 50.0 min, 25.0 h."""
    if not is_number(seconds):
        return NONE
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def milliseconds(seconds: object) -> str:
    return f"{1e3 * seconds:.1f} ms" if is_number(seconds) else NONE


def byte_size(count: float) -> str:
    for name in ("GiB", "MiB", "KiB"):
        if count >= _UNITS[name.upper()]:
            return f"{count / _UNITS[name.upper()]:.4g} {name}"
    return f"{count:g} B"


def parse_size(flag: str, text: str) -> int:
    """`4KiB`, `1MB` or `4096` in bytes; UserError, which names the flag, for anything else."""
    match = re.fullmatch(r"\s*([0-9]{1,18})\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(f"{flag} {text!r}: write sizes as 4KiB,1MiB or in bytes")
    return int(match[1]) * _UNITS[match[2].upper()]


def count(value: object) -> str:
    """A number without decimals: 81,920."""
    return f"{value:,.0f}" if is_number(value) else NONE


def plain(value: object) -> str:
    """A number with four digits: 0.1235."""
    return f"{value:.4g}" if is_number(value) else NONE


def number(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"


def short(value: float) -> str:
    """A number of an axis, without an exponent if that is readable: 0.25, 12k, 2.5M, 1e-06."""
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"


def percent(fraction: object) -> str:
    """A fraction as a percentage: 75.91%."""
    return f"{fraction:.2%}" if is_number(fraction) else NONE


def change(error: float | None) -> str:
    """A relative error as a signed percentage, -3.1 %; nothing for None."""
    return "" if error is None else f"{100 * error:+.1f} %"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))


def named(noun: str, names: Iterable[object]) -> str:
    """Things by their names or numbers: rank 3; ranks 3, 5."""
    found = list(names)
    return f"{noun}{'s' * (len(found) != 1)} {listed(found)}"


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers that are not finite, for which JSON has no word, become null.

    >>> json_text({"loss": float("nan"), "steps": 3})
    '{"loss": null, "steps": 3}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

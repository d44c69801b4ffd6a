"""Logs of other trainers as a page: every number that a file holds, over its step."""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError, as_user_error
from ..text import is_number
from ..untrusted import check_regular, parse_json, read_text
from .charts import COLOURS, Chart, Point, Series, line_chart

MOST_CHARTS = 40
_STEPS = ("step", "global_step", "steps")


@dataclass(frozen=True)
class Log:
    """The numbers of one file by name, each with its steps."""

    name: str
    columns: dict[str, list[Point]]


def read_log(path: Path) -> Log:
    """Reads trainer_state.json (Hugging Face), metrics.csv (Lightning's CSVLogger), or JSON lines with a `step`.

    Raises:
        UserError: The file can't be read, or no row of it has a step and a number.
    """
    with as_user_error(f"{path}: can't be read as a log", of=(OSError, ValueError, csv.Error)):
        check_regular(path)
        rows = _rows(path, read_text(path))
    columns: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        step = next((row[key] for key in _STEPS if is_number(row.get(key))), None)
        for key, value in row.items() if step is not None else ():
            if key not in _STEPS and is_number(value):
                columns[str(key)].append((float(step or 0), float(value)))
    if not columns:
        raise UserError(
            f"{path}: no log with a step and a number in a row; give trainer_state.json, metrics.csv or .jsonl"
        )
    return Log(path.parent.name or path.name, {key: sorted(points) for key, points in columns.items()})


def log_charts(logs: Sequence[Log]) -> list[Chart]:
    """A chart a name, with a line for each file that has it; losses on an axis by decades where they can be."""
    names = list(dict.fromkeys(name for log in logs for name in log.columns))[:MOST_CHARTS]
    charts = []
    for name in names:
        found = [log.columns.get(name, []) for log in logs]
        log_y = "loss" in name and all(y > 0 for points in found for _, y in points)
        lines = [
            Series(log.name, points, at % COLOURS) for at, (log, points) in enumerate(zip(logs, found, strict=True))
        ]
        charts.append(line_chart(f"{name} (log scale)" if log_y else name, "steps", lines, log_y=log_y))
    return [chart for chart in charts if chart is not None]


def _rows(path: Path, text: str) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        return [{key: _number(cell) for key, cell in row.items() if key} for row in csv.DictReader(io.StringIO(text))]
    if path.suffix == ".jsonl":
        tree: Any = [parse_json(line) for line in text.splitlines() if line.strip()]
    else:
        tree = parse_json(text)
        tree = tree.get("log_history") if isinstance(tree, dict) else tree
    return [row for row in tree if isinstance(row, dict)] if isinstance(tree, list) else []


def _number(cell: str | None) -> float | None:
    with suppress(ValueError, TypeError):
        return float(json.loads(cell or "null"))
    return None

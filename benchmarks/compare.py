"""What has moved: the newest run of each benchmark beside the one before it with the same command.

    python -m benchmarks.compare [FOLDER]

A figure has moved if its median did by more than the larger interquartile range of the two runs. Runs with fewer than
five samples can't say; runs on different processors or of a loaded machine are marked, since they may differ by that.
"""

import os
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .record import RESULTS, runs

FEWEST = 5


def spread(values: list[float]) -> float:
    """The interquartile range."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low


def verdict(before: list[float], after: list[float]) -> str:
    """What became of a figure."""
    if min(len(before), len(after)) < FEWEST:
        return f"n {min(len(before), len(after))}"
    moved = abs(median(after) - median(before)) > max(spread(before), spread(after))
    return "MOVED" if moved else ""


def compared(found: list[dict[str, Any]]) -> list[str]:
    """A heading and a line for each figure of the newest run; nothing if no earlier run had its command."""
    after = found[-1]
    before = next((run for run in found[-2::-1] if run["command"] == after["command"]), None)
    if before is None:
        return []
    heading = f"{after['command']}: {before['commit']} of {before['date']}, {after['commit']} of {after['date']}"
    notes = [f"on {run['processor']}" for run in (before, after) if before["processor"] != after["processor"]]
    cores = os.cpu_count() or 1
    notes += [f"a load of {max(run['load']):.1f}" for run in (before, after) if max(run["load"], default=0) > cores]
    lines = [heading + "".join(f"; {note}" for note in notes)]
    for name, values in after["samples"].items():
        old = before["samples"].get(name)
        if old is None:
            lines.append(f"  {name}: {median(values):.4g}, new")
            continue
        change = median(values) / median(old) - 1 if median(old) else 0.0
        line = f"  {name}: {median(old):.4g} to {median(values):.4g} ({change:+.1%}) {verdict(old, values)}"
        lines.append(line.rstrip())
    return lines


def main(folder: Path = RESULTS) -> None:
    """Prints all comparisons."""
    for path in sorted(folder.glob("*.json")):
        found = runs(path)
        if isinstance(found, list) and found:
            print(*compared(found), sep="\n", end="\n" if len(found) > 1 else "")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))

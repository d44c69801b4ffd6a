"""Writes docs' tables from the newest run in each file of benchmarks/results.

    python -m benchmarks.tables

A table stands between `<!-- benchmarks.tables: NAME -->` and `<!-- end of NAME -->`, where NAME.json is the file.
"""

import re
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .record import RESULTS, runs

DOCS = Path(__file__).parents[1] / "docs"
_MARKED = re.compile(r"(<!-- benchmarks\.tables: (\S+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def table(run: dict[str, Any]) -> str:
    """Markdown: what ran where, and a line for each figure."""
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    low, high = sorted(run["load"])
    lines = [
        f"`{run['command']}`, {run['date'][:10]}, commit {run['commit']}, {run['processor']}, {versions},",
        f"load {low:.1f} to {high:.1f}:",
        "",
        "| figure | median | quartiles | n |",
        "| --- | --- | --- | --- |",
    ]
    for name, values in run["samples"].items():
        ends = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        lines.append(f"| {name} | {median(values):.4g} | {ends[0]:.4g} to {ends[2]:.4g} | {len(values)} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """A page with each of its tables as the newest run has it."""
    return _MARKED.sub(lambda found: f"{found[1]}\n{table(runs(RESULTS / f'{found[2]}.json')[-1])}\n\n{found[3]}", text)


def main() -> None:
    """Rewrites the pages."""
    for page in DOCS.rglob("*.md"):
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main()

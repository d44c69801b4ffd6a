"""Runs that something happens to: seeded faults, what found each one, and whether the weights are right in the end.

    sudo python -m benchmarks faults punish --out punish.jsonl     # every fault 7 times, then the blinded detectors
    python -m benchmarks faults punish --out punish.jsonl --table  # the table of what is in the file

A run of 30 steps on 2 to 4 ranks is struck at a drawn step. It must end with the weights of an undisturbed run, or end
early with the line that says why; then the same command must go on to these weights. Anything else is WRONG. Each row
is kept by its kind and seed, so that a campaign that was stopped goes on. Last, each detector is switched off once: its
row must then fail, or something else found the fault.

Needs: root.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from ..record import markdown, sample
from .faults import KINDS, Case, Row

DETECTED = {
    "SIGSTOP of a rank for ever": "heartbeats",
    "a flipped bit in a checkpoint": "checksums",
    "flipped bits in a rank's gradients": "the audit",
    "flipped bits in a rank's images": "the audit",
    "a flipped bit in a rank's weights": "drift",
    "a second launcher on the folder": "the lock",
    "a rank with another recipe": "the fingerprint, and drift",
}
"""Kinds whose detector can be switched off."""


def campaign(path: Path, kinds: list[str], times: int) -> None:
    """Adds a line of JSON to the file for each case that it does not hold yet."""
    done = {(row["kind"], row["seed"], row["blind"]) for row in read(path)}
    cases = [(kind, seed, False) for seed in range(times) for kind in kinds]
    cases += [(kind, 0, True) for kind in kinds if kind in DETECTED]
    for kind, seed, blind in cases:
        if (kind, seed, blind) in done:
            continue
        with tempfile.TemporaryDirectory(prefix="punish-") as folder:
            case = Case(kind, seed, Path(folder), blind)
            try:
                row = KINDS[kind](case)
            except AssertionError as error:
                row = Row(kind, seed, case.workers, f"WRONG: {str(error).splitlines()[0]}", blind=blind)
        print(json.dumps(asdict(row)), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line a kind, and one for each detector that was switched off."""
    heads = ["fault", "n", "same hash", "early end, then same hash", "wrong", "named right", "s until told", "redone"]
    lines, by_kind = [], defaultdict(list)
    for row in rows:
        if not row["blind"]:
            by_kind[row["kind"]].append(row)
    for kind, found in by_kind.items():
        verdicts = [row["verdict"] for row in found]
        named = [row["named"] for row in found if row["named"] is not None]
        columns = [
            kind, len(found), verdicts.count("same hash"), verdicts.count("early end, then same hash"),
            sum(verdict.startswith("WRONG") for verdict in verdicts), f"{sum(named)} of {len(named)}" if named else "-",
            spread([row["seconds"] for row in found]), spread([row["redone"] for row in found]),
        ]  # fmt: skip
        lines.append(columns)
    blind = [(DETECTED[row["kind"]], row["kind"], row["verdict"]) for row in rows if row["blind"]]
    return f"{markdown(heads, lines)}\n\n{markdown(('switched off', 'fault', 'what came of it'), blind)}"


def spread(values: list[float | None]) -> str:
    """Median (least to most)."""
    known = sorted(value for value in values if value is not None)
    return f"{statistics.median(known):.3g} ({known[0]:.3g} to {known[-1]:.3g})" if known else "-"


def main(
    out: Annotated[Path, Option(help="file of rows, gone on with where it is there")],
    times: Annotated[int, Option(help="cases of each kind")] = 7,
    kinds: Annotated[str, Option(help="separated by commas")] = ",".join(KINDS),
    only_table: Annotated[bool, Option("--table", help="only print the table")] = False,
) -> None:
    """The campaign, or its table."""
    if not only_table:
        campaign(out, kinds.split(","), times)
    rows = read(out)
    print(table(rows))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        sample(f"{kind}, s", [row["seconds"] for row in rows if row["kind"] == kind])
    sys.exit(any(row["verdict"].startswith("WRONG") != row["blind"] for row in rows))


if __name__ == "__main__":
    typer.run(main)

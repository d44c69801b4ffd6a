"""Runs of everything with everything, with events, each compared with the plain run of its recipe on one rank.

    python -m tools.campaign RESULTS.jsonl [--seed 0] [--runs 1500]  # goes on where it was stopped
    python -m tools.campaign RESULTS.jsonl --table                   # the table of docs/reliability.md

Each run is a line of JSON, by its seed and index. Processes that play runs are begun anew after a hang, and every 40.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .draw import EVENTS, Draw, draws, pairs, refused
from .play import LIMIT, Player

GOOD = ("same", "refused", "ends well")
RUNS_OF_A_PROCESS = 40


def main() -> int:
    """Plays what is left; exit code 1 if a run ended otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1500)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, nargs="*", help="play these runs alone, again")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.results)))
        return 0
    drawn = arguments.results.with_suffix(f".draws-{arguments.seed}-{arguments.runs}")
    if not drawn.exists():
        drawn.write_text("".join(json.dumps(draw) + "\n" for draw in draws(arguments.seed, arguments.runs)))
    runs = [Draw(*json.loads(line)) for line in drawn.read_text().splitlines()]
    if arguments.play is not None:
        play(arguments, runs)
        return 0
    while left(arguments, runs):
        with tempfile.TemporaryDirectory(prefix="c") as folder:
            code = subprocess.run(
                [sys.executable, "-m", "tools.campaign", *sys.argv[1:], "--play", folder], check=False
            ).returncode
            if code and (line := _lost(Path(folder), code)):
                add(arguments.results, line)
        if arguments.only is not None:
            break
    return 1 if any(row["verdict"] not in GOOD for row in read(arguments.results)) else 0


def left(arguments: argparse.Namespace, runs: list[Draw]) -> list[Draw]:
    """The runs that are not in the results yet."""
    if arguments.only is not None:
        return [runs[index] for index in arguments.only]
    done = {row["index"] for row in read(arguments.results) if row["seed"] == arguments.seed}
    return [draw for draw in runs if draw.index not in done]


def play(arguments: argparse.Namespace, runs: list[Draw]) -> None:
    """Plays some of the runs in this process."""
    plain = {row["recipe"]: row["plain"] for row in read(arguments.results) if "plain" in row}
    player = Player(arguments.play, dict(plain))
    for draw in left(arguments, runs)[:RUNS_OF_A_PROCESS]:
        (arguments.play / "now").write_text(json.dumps({"seed": arguments.seed, "index": draw.index, "row": draw.row,
                                                        "event": draw.event}))  # fmt: skip
        row = player.play(draw)
        found = set(player.plain) - set(plain)
        for recipe in found:
            plain[recipe] = player.plain[recipe]
            row |= {"recipe": recipe, "plain": plain[recipe]}
        add(arguments.results, {"seed": arguments.seed, **row})


def _lost(folder: Path, code: int) -> dict[str, Any]:
    """The row of the run in which the process that played it came to its end; empty: there was none."""
    now, hang = folder / "now", folder / "hang"
    if not now.exists():
        raise SystemExit(f"the campaign can't play: exit code {code}")
    text = hang.read_text() if hang.exists() else (folder / "log").read_text()[-6000:]
    verdict = "HANG" if hang.exists() else f"THE LAUNCHER ENDED with code {code}"
    return {**json.loads(now.read_text()), "struck": True, "verdict": verdict, "log": text, "seconds": LIMIT}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """The rows by event, and the pairs of values that they cover."""
    lines = ["| event | runs | struck in time | same weights | ended well | refused in one line | otherwise |",
             "| --- |" + " --- |" * 6]  # fmt: skip
    for event in EVENTS:
        mine = [row for row in rows if row["event"] == event]
        ends = Counter(row["verdict"] for row in mine)
        counts = [
            len(mine),
            sum(row["struck"] for row in mine),
            *(ends[each] for each in ("same", "ends well", "refused")),
        ]
        lines.append(f"| {event} | {' | '.join(map(str, counts))} | {len(mine) - sum(counts[2:])} |")
    covered = set().union(*(pairs(row["row"]) for row in rows if not refused(row["row"])))
    return "\n".join([*lines, f"{len(rows)} runs, {len(covered)} pairs of values in runs that were not refused"])


if __name__ == "__main__":
    sys.exit(main())

"""Runs of everything with everything, with events, each compared with the plain run of its recipe on one rank.

    python -m tools.campaign RESULTS.jsonl [--seed 0] [--runs 1500]  # goes on where it was stopped
    python -m tools.campaign RESULTS.jsonl --table                   # the table of notes/reliability.md

Each run is a line of JSON, by its seed and index; benchmarks/results/campaign.jsonl.gz has those that were played, and
goes on once it is unpacked. Processes that play runs are begun anew after a hang, and every 100. `--processes 2` plays
two at a time, and `--seconds 150` begins none after that: the same command goes on with the rest.
"""

import argparse
import gzip
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from .draw import EVENTS, PLAIN, Draw, draws, pairs, recipe_changes, refused
from .play import LIMIT, Player

GOOD = ("same", "refused", "ends well")
RUNS_OF_A_PROCESS = 100


def main() -> int:
    """Plays what is left; exit code 1 if a run ended otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1500)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", help="play these runs alone, again")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(read(arguments.results)))
        return 0
    if arguments.play is None:
        with ThreadPoolExecutor(arguments.processes) as pool:
            until = time.time() + arguments.seconds
            list(pool.map(partial(keep_playing, arguments, drawn(arguments), until), range(arguments.processes)))
    else:
        play(arguments, drawn(arguments))
        return 0
    return 1 if any(row["verdict"] not in GOOD for row in read(arguments.results)) else 0


def drawn(arguments: argparse.Namespace) -> list[Draw]:
    """The runs of a seed, from the file beside the results."""
    path = arguments.results.with_suffix(f".draws-{arguments.seed}-{arguments.runs}")
    if not path.exists():
        path.write_text("".join(json.dumps(draw) + "\n" for draw in draws(arguments.seed, arguments.runs)))
    return [Draw(*json.loads(line)) for line in path.read_text().splitlines()]


def keep_playing(arguments: argparse.Namespace, runs: list[Draw], until: float, part: int) -> None:
    """Plays what is left of a part of the runs, in one process after the other."""
    while time.time() < until and left(arguments, runs, part):
        with tempfile.TemporaryDirectory(prefix="c") as folder:
            words = ["--play", folder, "--part", str(part), "--until", str(until)]
            command = [sys.executable, "-m", "tools.campaign", *sys.argv[1:], *words]
            code = subprocess.run(command, check=False).returncode
            if code and (line := _lost(Path(folder), code)):
                add(arguments.results, line)
        if arguments.only is not None:
            break


def left(arguments: argparse.Namespace, runs: list[Draw], part: int) -> list[Draw]:
    """The runs of a part that are not in the results yet."""
    if arguments.only is not None:
        mine = [runs[index] for index in arguments.only]
        return mine[part :: arguments.processes]
    done = {row["index"] for row in read(arguments.results) if row["seed"] == arguments.seed}
    return [draw for draw in runs[part :: arguments.processes] if draw.index not in done]


def play(arguments: argparse.Namespace, runs: list[Draw]) -> None:
    """Plays some of the runs in this process."""
    plain = {json.dumps(recipe_changes(row["row"])): row["plain"] for row in read(arguments.results) if "plain" in row}
    player = Player(arguments.play, dict(plain))
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    for draw in left(arguments, runs, arguments.part)[:RUNS_OF_A_PROCESS]:
        if time.time() > arguments.until:
            break
        begun = {"seed": arguments.seed, "commit": commit, "index": draw.index, "row": draw.row, "event": draw.event}
        (arguments.play / "now").write_text(json.dumps(begun))
        row = begun | player.play(draw)
        for recipe in set(player.plain) - set(plain):
            plain[recipe] = player.plain[recipe]
            row["plain"] = plain[recipe]
        add(arguments.results, row)


def _lost(folder: Path, code: int) -> dict[str, Any]:
    """The row of the run in which the process that played it came to its end; empty: there was none."""
    now, hang = folder / "now", folder / "hang"
    if not now.exists():
        raise SystemExit(f"the campaign can't play: exit code {code}")
    text = hang.read_text() if hang.exists() else (folder / "log").read_text()[-6000:]
    verdict = "HANG" if hang.exists() else f"THE LAUNCHER ENDED with code {code}"
    return {**json.loads(now.read_text()), "struck": True, "verdict": verdict, "log": text, "seconds": LIMIT}


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of a file, which may be packed by gzip; a line has of its row what is not as in the plain run."""
    data = path.read_bytes() if path.exists() else b""
    found = [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]
    return [each | {"row": PLAIN | each["row"]} for each in found]


def add(path: Path, run: dict[str, Any]) -> None:
    changed = {axis: value for axis, value in run["row"].items() if value != PLAIN[axis]}
    with path.open("a") as file:
        file.write(json.dumps(run | {"row": changed}) + "\n")


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

"""Draws docs/pictures/kill.svg and curves.svg from runs of `digits`: 1, 2, 3 workers, and 4 of which two are killed.

python -m tools.pictures --runs runs/pictures    # needs the extra plot; a run that is there already is not repeated

report.png is the page of a run of `digits` on a quiet machine, photographed:
chromium --headless --hide-scrollbars --window-size=1100,770 --screenshot=docs/pictures/report.png FILE.html
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
RUNS = {"1 worker": ("1", 0), "2 workers": ("2", 0), "3 workers": ("3", 0), "4 workers, 2 killed": ("4", 2)}
"""by name the number of workers, and how many of them are killed"""
KILL_AFTER = 150
"""steps of 450"""


def train(folder: Path, workers: str, killed: int) -> None:
    """Trains, with the output beside the run, and kills the last ranks once `KILL_AFTER` steps are done."""
    command = [sys.executable, "-m", "torusgd", "train", "digits", "--workers", workers, "--out", str(folder)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".txt")
    log.unlink(missing_ok=True)
    with log.open("a") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as run:
        while killed and run.poll() is None:
            if step_of(folder) >= KILL_AFTER:
                server = children(run.pid)[-1]  # the newest child is the process that ranks fork from
                ranks = children(server)[-killed:]
                with log.open("a") as shown:
                    shown.write(f"$ kill -9 {' '.join(map(str, ranks))}\n")
                for rank in ranks:
                    os.kill(rank, signal.SIGKILL)
                break
            time.sleep(0.05)
    assert run.returncode == 0, log.read_text()


def step_of(folder: Path) -> int:
    try:
        return int(json.loads((folder / "status.json").read_text()).get("step") or 0)
    except (OSError, ValueError):
        return 0


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout
    return sorted(map(int, found.split()))


def terminal(runs: Path) -> None:
    """The run that lost half of its ranks, and the end of the one with one worker, as a terminal shows them."""
    console = Console(record=True, width=104, file=open(os.devnull, "w"))  # noqa: SIM115  # it is never read
    for name in ("4 workers, 2 killed", "1 worker"):
        workers = RUNS[name][0]
        console.print(Text(f"$ torusgd train digits --workers {workers}", style="bold"))
        for line in (runs / f"{workers}.txt").read_text().splitlines():
            if re.match(r"\$ |torusgd: |done: |weights_sha256 ", line):
                console.print(Text(line.replace(str(runs), "runs"), style="bold" if line[0] == "$" else ""))
        console.print()
    # A page of ours loads nothing from elsewhere, and so no fonts.
    picture = re.sub(
        r"@font-face \{.*?\}\s*", "", console.export_svg(title="torusgd", unique_id="kill"), flags=re.DOTALL
    )
    (PICTURES / "kill.svg").write_text(picture)


def curves(runs: Path) -> None:
    """Accuracy over epochs."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "torusgd"  # the same file each time
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (name, (workers, _)), width in zip(RUNS.items(), (9, 6, 3.5, 1.2), strict=True):
        events = [json.loads(line) for line in (runs / workers / "events.jsonl").read_text().splitlines()]
        epochs = {event["step"] + 1: event["epoch"] for event in events if "epoch" in event}
        points = [(epochs[each["step"]], 100 * each["top1"]) for each in events if each.get("event") == "evaluation"]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=width)
    axes.set(xlabel="epochs", ylabel="top-1 on 360 held-out digits, %", ylim=(80, 100))
    axes.legend(title="one curve lies on the other")
    axes.grid(alpha=0.3)
    figure.savefig(PICTURES / "curves.svg", metadata={"Date": None})


def main() -> None:
    """Runs what is missing, checks that all have one hash, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"))
    runs = parser.parse_args().runs
    for workers, killed in RUNS.values():
        if not (runs / workers / "summary.json").is_file():
            train(runs / workers, workers, killed)
    summaries = [json.loads((runs / workers / "summary.json").read_text()) for workers, _ in RUNS.values()]
    assert len({summary["weights_sha256"] for summary in summaries}) == 1
    assert summaries[-1]["lost_ranks"], "the kill came too late"
    terminal(runs)
    curves(runs)


if __name__ == "__main__":
    main()

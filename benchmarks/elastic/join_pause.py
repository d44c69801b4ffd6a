"""For how long a run pauses when a rank joins it, and what the same run's steps take.

    .venv/bin/python -m benchmarks elastic join-pause --recipe digits
    .venv/bin/python -m benchmarks elastic join-pause --recipe fashion --data data/fashion-mnist
    .venv/bin/python -m benchmarks elastic join-pause --joins 2 --gap 4 --set model.name=resnet50 --set model.options={}
        --set virtual_workers=4 --set "stages=[{until: 1ep, images_per_worker: 4}]" --set "rate={lr: 0.1}" --set "data={
        source: synthetic, train_images: 4000, eval_images: 16, image_size: 32, channels: 3, classes: 1000,
        mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}"    # 25.6 million weights, 102 MB; in one line

Ranks are asked for one after another by `torusgd resize`, from 2 on. In events.jsonl stand the run's seconds at each
step, which count on while ranks change, and what the step itself took: the rest is the pause. In it all ranks meet,
connect and build the network anew, the newcomer is sent weights and momentum, and a checkpoint is written where the
newest is of another step. What happens while the others train on (the process, imports, images) is not in it.

Needs: nothing, or Fashion-MNIST.
"""

import json
import statistics
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from tests.commands import command
from tests.polling import until
from tests.run.processes import Process, last_step, torusgd, wait_for_step
from typer import Option

from ..record import sample

AFTER = 4
"""steps after the last join"""


def main(
    recipe: str = "digits",
    data: str | None = None,
    overrides: Annotated[list[str] | None, Option("--set")] = None,
    joins: int = 2,
    gap: Annotated[int, Option(help="steps from one join to the next at least")] = 10,
) -> None:
    """Prints the pauses of one run."""
    sets = [word for each in overrides or [] for word in ("--set", each)]
    source = ["--data", data] if data else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        process = torusgd(Path(folder), out, Path(recipe), *source, *sets, "--workers", "2")
        for number in range(1, joins + 1):
            wait_for_step(out, gap * number, process)
            scale(process, out, number)
        wait_for_step(out, last_step(out) + AFTER, process)
        subprocess.run(command("stop", out), check=True, stdout=subprocess.DEVNULL)
        process.end()
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    gaps = [
        after["seconds"] - before["seconds"] - after["step_seconds"]
        for before, after in pairwise(events)
        if "event" not in before and "event" not in after  # no evaluation between the two
    ]
    pauses = sorted(gaps)[-joins:]
    step = statistics.median(event["step_seconds"] for event in events if "event" not in event)
    sample(f"{recipe}, pause, s", pauses)
    print(
        f"{recipe}: pause {statistics.median(pauses):.2f} s ({pauses[0]:.2f} to {pauses[-1]:.2f}), "
        f"n {len(pauses)}; the next longest gap between two steps {sorted(gaps)[-joins - 1]:.2f} s; "
        f"a step takes {step:.3f} s (median)"
    )


def scale(process: Process, out: Path, joins: int) -> None:
    """Asks for one more rank, so that so many have joined, and waits until it takes part."""
    subprocess.run(command("resize", out, "--workers", str(2 + joins)), check=True, stdout=subprocess.DEVNULL)
    until(lambda: process.err.count(" joins; ") == joins, "the rank joins", process, timeout=300)


if __name__ == "__main__":
    typer.run(main)

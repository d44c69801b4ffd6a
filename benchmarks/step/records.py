"""What records of a run cost: the time of one beside a step's, and what it takes to verify a part of a run.

    python -m benchmarks step records --rounds 5

One rank takes steps of three networks and hashes the state and the images of a step as a record does. Then each network
is trained by the command line: with records as they are by default, of which the share of the time is printed (at most
`run.recording.FRACTION`, unless the first and the last record alone are more); and with a light checkpoint after each
step, after which 1, 5 and 100 % of the steps are verified.

Needs: nothing.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

import typer
from typer import Option

from torusgd.comm.groups import Group
from torusgd.launch.verification import Range, drawn
from torusgd.run.recording import FRACTION
from torusgd.step.journal import synchronous
from torusgd.step.records import batch_sha256, state_digests

from ..ranks import on_ranks
from ..record import sample
from .trainers import synthetic, trainer_of

CASES = {"digits-net": (8, 1, 64), "fashion-net": (28, 1, 64), "resnet50": (64, 3, 8)}
"""by network: pixels a side, channels, images of a step"""
SEED = "benchmark"


def overrides_of(name: str, steps: int) -> list[str]:
    """What makes the recipe of a case out of `digits`."""
    return synthetic(name, *CASES[name], workers=1, steps=steps)


def run_case(name: str, rounds: int, world: Group) -> list[tuple[float, float]]:
    """Processor seconds of a step and of a record, in each round."""
    trainer, found = trainer_of(overrides_of(name, 1000), world), []
    for index in range(rounds + 1):
        begin = time.process_time()
        trainer.step.run(trainer.membership, synchronous(index, 1))
        middle = time.process_time()
        batch = trainer.step.images.take(trainer.step.schedule[index], 0, trainer.membership)
        read = time.process_time()
        batch_sha256(batch)
        state_digests(trainer.step.state, index + 1, world)
        found.append((middle - begin, time.process_time() - read))
    trainer.close()
    return found[1:]  # the first warms up, and measures the scales


def timed(what: str, *words: str) -> dict[str, float]:
    """Seconds that a command takes, by what they are for."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "torusgd", *words, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return {f"{what}, s": time.perf_counter() - begin}


def training(name: str, steps: int) -> list[str]:
    return ["train", "digits", *(word for each in overrides_of(name, steps) for word in ("--set", each))]


def recorded(name: str, steps: int, folder: Path) -> dict[str, float]:
    """How many records a run of so many steps writes by default, and what share of its time they take."""
    timed("training", *training(name, steps), "--out", str(folder))
    summary = json.loads((folder / "summary.json").read_text())
    records = summary["records"]
    return {"records": records["states"], "records, % of the time": 100 * records["seconds"] / summary["seconds"]}


def verified(name: str, steps: int, folder: Path) -> dict[str, float]:
    """The seconds to verify parts of a run of so many steps."""
    parts = {1: max(1, steps // 100), 5: max(1, steps // 20)}
    needed = {each.first for count in parts.values() for each in drawn(singles(steps), count, SEED)}
    over = Event()
    # Those from which nothing will begin go at once: a hundred of ResNet-50 are 20 GB.
    sweeper = Thread(target=sweep, args=(folder / "run" / "verify", needed, over))
    sweeper.start()
    try:
        found = timed("training", *training(name, steps), "--verify-every", "1st", "--out", f"{folder}/run")
    finally:
        over.set()
        sweeper.join()
    for part, count in parts.items():
        found |= timed(f"verifying {part} %", "verify", f"{folder}/run", "--sample", str(count), "--seed", SEED)
    return found | timed("verifying 100 %", "verify", f"{folder}/run", "--all")


def singles(steps: int) -> list[Range]:
    return [Range(step, step + 1) for step in range(steps)]


def sweep(folder: Path, needed: set[int], over: Event) -> None:
    while not over.wait(0.5):
        for path in folder.glob("step-*"):
            if int(path.stem.removeprefix("step-")) not in needed:
                path.unlink()


def main(
    rounds: int = 5,
    steps: Annotated[int, Option(help="of the runs that are verified; 0: none")] = 100,
    long: Annotated[int, Option(help="steps of the runs with records as by default; 0: none")] = 500,
    case: Annotated[list[str] | None, Option(help="networks; default: all three")] = None,
) -> None:
    """Starts the rank."""
    for name in case or CASES:
        pixels, _, images = CASES[name]
        found = on_ranks(1, run_case, name, rounds)
        step, record = (statistics.median(seconds) for seconds in zip(*found, strict=True))
        sample(f"{name}, {pixels} px, {images} images: a record, % of a step", [100 * b / a for a, b in found])
        print(
            f"{name:12} {pixels} px, {images} images: step {1e3 * step:8.2f} ms, record {1e3 * record:7.2f} ms "
            f"({record / step:.1%} of a step), {FRACTION:.1%} if one in {record / step / FRACTION:,.0f} steps has one",
            flush=True,
        )
        with tempfile.TemporaryDirectory() as folder:
            for count, measure in ((long, recorded), (steps, verified)):
                for figure, value in measure(name, count, Path(folder, measure.__name__)).items() if count else ():
                    sample(f"{name}, {count} steps: {figure}", [value])
                    print(f"    {count} steps: {figure}: {value:.3g}", flush=True)


if __name__ == "__main__":
    typer.run(main)

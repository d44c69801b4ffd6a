"""What records of a run cost: the time of one beside a step's, and what it takes to verify a part of a run.

    python -m benchmarks step records --rounds 5

One rank takes steps of three networks and hashes the state and the images of a step as a record does. A run takes a
record at most so often that this is a thousandth of the time (`run.recording.FRACTION`); printed is after how many
steps that is. Then digits-portable is trained with a checkpoint after each step, and 1, 5 and 100 % of it verified.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from torusgd.comm.base import Liveness
from torusgd.comm.groups import Group
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.run.recording import FRACTION
from torusgd.runtime import resolve_auto
from torusgd.step.journal import synchronous
from torusgd.step.records import batch_sha256, state_digests

from ..ranks import on_ranks
from ..record import sample

CASES = (("digits-net", 8, 1, 64), ("fashion-net", 28, 1, 64), ("resnet50", 224, 3, 8))
"""network, pixels a side, channels, images of a step"""


def run_case(
    name: str, pixels: int, channels: int, images: int, rounds: int, world: Group
) -> list[tuple[float, float]]:
    """Processor seconds of a step and of a record, in each round."""
    many = ", ".join(["0.5"] * channels)
    overrides = [
        f"data={{source: synthetic, train_images: 256, eval_images: 16, image_size: {pixels}, channels: {channels}, "
        f"classes: 10, mean: [{many}], std: [{many}]}}",
        f"model={{name: {name}}}",
        "virtual_workers=1",
        f"stages=[{{until: 1000st, images_per_worker: {images}}}]",
        "rate={lr: 0.001}",
        "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
        "precision=float32",
        "polish=null",
    ]
    recipe = resolve_auto(load_recipe("digits", overrides).recipe, "cpu")
    job = Job(recipe, RuntimeOptions(), "cpu", Path())
    trainer, found = build(job, open_data(job, world.device, Liveness()), world, Liveness()), []
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


def verified(steps: int) -> list[tuple[str, float]]:
    """Seconds to train so many steps of digits-portable, and to verify parts of them."""
    with tempfile.TemporaryDirectory() as folder:
        out, found = f"{folder}/run", []
        few = ("--set", "data.eval_images=60", "--set", "polish.images=64", "--max-steps", str(steps))
        for name, words in (
            ("training", ("train", "digits-portable", *few, "--verify-every", "1st", "--out", out)),
            ("verifying 1 %", ("verify", out, "--sample", str(max(1, steps // 100)))),
            ("verifying 5 %", ("verify", out, "--sample", str(max(1, steps // 20)))),
            ("verifying 100 %", ("verify", out, "--all")),
        ):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "torusgd", *words, "--workers", "1"]
            subprocess.run(command, check=True, capture_output=True, timeout=600)
            found.append((name, time.perf_counter() - begin))
        return found


def main(
    rounds: int = 5,
    steps: Annotated[int, Option(help="of the run that is verified")] = 100,
) -> None:
    """Starts the rank."""
    for case in CASES:
        found = on_ranks(1, run_case, *case, rounds)
        step, record = (statistics.median(seconds) for seconds in zip(*found, strict=True))
        sample(f"{case[0]}, {case[1]} px, {case[3]} images: a record, % of a step", [100 * b / a for a, b in found])
        print(
            f"{case[0]:12} {case[1]} px, {case[3]} images: step {1e3 * step:8.2f} ms, record {1e3 * record:7.2f} ms "
            f"({record / step:.1%} of a step), {FRACTION:.1%} if one in {record / step / FRACTION:,.0f} steps has one",
            flush=True,
        )
    for name, seconds in verified(steps):
        sample(f"digits-portable, {steps} steps: {name}, s", [seconds])
        print(f"{name}: {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)

"""A run with one worker, and what the plan makes of it for 2 and 3 workers, in turn with runs on as many.

    python -m benchmarks plan workers --rounds 5
    python -m benchmarks plan workers --rounds 5 --only resnet18

Each round takes every model once: `torusgd bench scaling` measures the network of three ranks, trains for some steps on
one, two and three, and plans the latter two from the first. The aim is a median error of at most 5 % over the models.
It says something of a machine with three cores or more, or of how well a plan knows crowded ones, with fewer.

Needs: three cores, or two and patience.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from typer import Option

from ..record import sample

MODELS = {
    "digits-net": (8, 1, 64),
    "fashion-net": (28, 1, 64),
    "resnet18": (64, 3, 8),
    "resnet50": (64, 3, 8),
    "alexnet-bn": (227, 3, 4),
}
"""by network: pixels a side, channels, images of each of six virtual workers"""
AIM = 0.05


def scaling(name: str, steps: int, seconds: float) -> list[dict[str, float]]:
    """The points of a network: measured and planned seconds of a step by number of ranks."""
    pixels, channels, images = MODELS[name]
    many = ", ".join(["0.5"] * channels)
    data = f"source: synthetic, train_images: 1024, eval_images: 16, image_size: {pixels}, channels: {channels}"
    changes = (
        f"data={{{data}, classes: 10, mean: [{many}], std: [{many}]}}",
        f"model={{name: {name}}}",
        "virtual_workers=6",
        f"stages=[{{until: {steps}st, images_per_worker: {images}}}]",
        "rate={lr: 0.001}",
        "optimizer={name: sgd, momentum: 0.9}",
        "polish=null",
    )
    with tempfile.TemporaryDirectory() as folder:
        points = Path(folder) / "points.json"
        words = [sys.executable, "-m", "torusgd", "bench", "scaling", "digits", "--workers", "3"]
        words += ["--steps", str(steps), "--seconds", str(seconds), "--json", str(points)]
        words += [word for change in changes for word in ("--set", change)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return [point for point in json.loads(points.read_text()) if point["ranks"] > 1]


def main(
    rounds: int = 5,
    steps: int = 20,
    seconds: Annotated[float, Option(help="for which the network is measured")] = 8.0,
    only: Annotated[str, Option(help="of one network")] = "",
) -> None:
    """Measures in turn, and shows each network's errors."""
    errors = defaultdict(list)
    for _ in range(rounds):
        for name in [only] if only else MODELS:
            for point in scaling(name, steps, seconds):
                case = f"{name}, {point['ranks']} workers"
                errors[case].append(100 * point["error"])
                sample(f"{case}: error of the plan, %", [100 * point["error"]])
                sample(f"{case}: step, ms", [1e3 * point["step_seconds"]])
                sample(f"{case}: planned step, ms", [1e3 * point["planned_step_seconds"]])
    print("| network, workers | error of the plan, %: median (least to most) | n |\n|---|---|---|")
    for case, found in errors.items():
        print(f"| {case} | {median(found):+.1f} ({min(found):+.1f} to {max(found):+.1f}) | {len(found)} |")
    overall = median(abs(median(found)) for found in errors.values())
    print(f"\nmedian over all: {overall:.1f} %, aim {100 * AIM:g} %: {'held' if overall <= 100 * AIM else 'missed'}")


if __name__ == "__main__":
    typer.run(main)

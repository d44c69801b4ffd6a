"""Accuracy against the size of the batch, with LARS and without: You et al.'s comparison on a part of Fashion-MNIST.

    python -m benchmarks accuracy batch-sweep --data data/fashion-mnist --out runs/batch-sweep

Ten epochs of 8,192 images at every batch, so that a batch 16 times as large has a sixteenth of the updates: 320, 80
and 20. Without LARS the rate grows with the batch (Goyal et al., arXiv 1706.02677); with it, as its root, as in You et
al.'s records (arXiv 1709.05011). Both warm up over two epochs. The claim before the first run: from 256 to 4,096
images, LARS loses at most half of what SGD loses. The batch of 1,024 is that of the row LARS in `proof.py`; accuracies
are kept beside its own, so that the same command goes on where it was ended.
"""

import math
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from typer import Option

from ..record import sample
from .proof import LARGE, SGD, top1

VIRTUAL_WORKERS = 16
BATCHES = (256, 1024, 4096)


def overrides(batch: int, has_lars: bool, seed: int) -> list[str]:
    """What a run changes of the recipe `fashion-large`."""
    stage = f"stages=[{{until: 10ep, images_per_worker: {batch // VIRTUAL_WORKERS}}}]"
    changes = (f"rate.lr={2 * math.sqrt(batch / 1024)}",) if has_lars else (SGD, f"rate.lr={0.8 * batch / 1024}")
    return [*LARGE, stage, *changes, f"seed={seed}"]


def main(
    data: Annotated[Path, Option(help="folder of Fashion-MNIST")],
    out: Path = Path("runs/batch-sweep"),
    seeds: int = 3,
    workers: int = 2,
) -> None:
    """Runs what is not done yet and shows a line a batch."""
    print("| batch | with LARS: mean top-1, % (range) | without | difference |\n|---|---|---|---|")
    for batch in BATCHES:
        changes = [[overrides(batch, has_lars, seed) for seed in range(seeds)] for has_lars in (True, False)]
        found = [[100 * top1("fashion-large", each, data, out, workers) for each in side] for side in changes]
        for side, values in zip(("LARS", "SGD"), found, strict=True):
            sample(f"batch {batch}, {side}, % top-1", values)
        told = " | ".join(f"{mean(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in found)
        print(f"| {batch:,} | {told} | {mean(found[0]) - mean(found[1]):+.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)

"""What each technique brings here: on against off, all else equal, three seeds each, on a part of Fashion-MNIST.

    python -m benchmarks accuracy proof --data data/fashion-mnist --out runs/proof [--only EMA]

Each claim stands in CLAIMS before its first run, with the difference of the mean top-1 that it expects, and the table
says whether it held. A run is a proxy of at most 90 seconds on two cores. Its accuracy is kept in RESULTS under its
recipe's hash: a baseline that several claims share runs once, and the same command goes on where it was ended.

    python -m benchmarks accuracy proof --messages

prints You et al.'s table of messages and volume by the size of the batch, which is computed and takes no run.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from typer import Option

from torusgd.plan.model_cost import known_cost
from torusgd.recipe.load import load_recipe

from ..record import sample

RESULTS = Path(__file__).parents[1] / "results" / "proof.json"
"""top-1 by the first 12 digits of a recipe's hash"""
LARGE = (
    "data.train_images=8192",
    "stages=[{until: 10ep, images_per_worker: 64}]",
    "rate.lr=2.0",
    "rate.warmup.length=2ep",
    "evaluate.every=null",
    "polish=null",
)
"""`fashion-large` at a batch of 1,024: 80 steps"""
SMALL = ("data.train_images=8192", "stages=[{until: 8ep, images_per_worker: 64}]", "evaluate.every=null")
"""`fashion` at a batch of 256: 256 steps"""
FEW = (*LARGE, "stages=[{until: 5ep, images_per_worker: 64}]", "data.augment.shift=4")
"""40 steps and strong crops: batch norm's running averages lag"""
APART = (*FEW, "model.batch_norm_workers=each")
"""the same where each virtual worker has running averages of its own, and the first one's are evaluated"""
PLAIN_END = "stages=[{until: 4ep, images_per_worker: 64}, {until: 5ep, images_per_worker: 64, augment: false}]"
EXTRA_END = "stages=[{until: 4ep, images_per_worker: 64}, {until: 5ep, images_per_worker: 64, extra_pass: true}]"
SGD = "optimizer={name: sgd, momentum: 0.9, weight_decay: 5.0e-4}"
FREE = 0.0
"""no loss: the difference is not below this many points, with SLACK for chance"""
SLACK = 0.3
"""points, chosen: means of three seeds differ by chance by this much and more (docs/proof.md)"""


@dataclass(frozen=True)
class Claim:
    """What a technique is said to bring."""

    technique: str
    recipe: str
    shared: tuple[str, ...]
    on: tuple[str, ...]
    off: tuple[str, ...]
    expected: float
    """points of top-1 that it adds at least; FREE: it costs nothing"""
    source: str

    def holds(self, on: Sequence[float], off: Sequence[float]) -> bool:
        """Whether accuracies (fractions) with and without it bear it out."""
        least = self.expected - (SLACK if self.expected == FREE else 0.0)
        return 100 * (mean(on) - mean(off)) >= least


CLAIMS = (
    Claim("LARS", "fashion-large", LARGE, (), (SGD, "rate.lr=0.8"), 2.0, "arXiv 1708.03888, at large batches"),
    Claim("warm-up", "fashion-large", LARGE, (), ("rate.warmup=null",), 0.5, "arXiv 1706.02677, section 2.2"),
    Claim(
        "label smoothing", "fashion-large", LARGE, ("label_smoothing=0.1",), ("label_smoothing=0.0",), FREE,
        "arXiv 1512.00567",
    ),
    Claim(
        "batch-size control", "fashion-large", LARGE,
        ("stages=[{until: 5ep, images_per_worker: 64}, "
         "{until: 10ep, images_per_worker: 128, lr: sqrt, momentum: noise-scale}]",),
        (), FREE, "arXiv 1811.05233",
    ),
    Claim(
        "Final Polishing, last epochs without augmentation", "fashion-large", FEW,
        (PLAIN_END,), (), 0.3, "Fujitsu, HPDC 2020",
    ),
    Claim("Final Polishing, exact statistics", "fashion-large", FEW, ("polish={}",), (), 0.3, "ours"),
    Claim("Final Polishing, extra passes", "fashion-large", FEW, ("polish={steps: 30}",), (), 0.3, "Fujitsu's code"),
    Claim("Final Polishing, passes beside steps", "fashion-large", FEW, (EXTRA_END,), (), 0.3, "Fujitsu's code"),
    Claim(
        "averages of all workers", "fashion-large", FEW, (), ("model.batch_norm_workers=each",), FREE,
        "arXiv 1903.12650",
    ),
    Claim(
        "averages apart: last epochs without augmentation", "fashion-large", APART, (PLAIN_END,), (), 0.3,
        "Fujitsu, HPDC 2020",
    ),
    Claim("averages apart: exact statistics", "fashion-large", APART, ("polish={}",), (), 0.3, "ours"),
    Claim("averages apart: passes beside steps", "fashion-large", APART, (EXTRA_END,), (), 0.3, "Fujitsu's code"),
    Claim(
        "no decay on batch norm", "fashion-large", LARGE, ("optimizer.no_decay=[norm, bias]",),
        ("optimizer.no_decay=[]",), FREE, "arXiv 1706.02677, section 5.3",
    ),
    Claim("exact sums", "fashion-large", LARGE, (), ("reduction=float32",), FREE, "ours"),
    Claim("float16 wire", "fashion-large", LARGE, ("reduction=float16",), (), FREE, "arXiv 1811.05233"),
    Claim("averaged weights", "fashion", SMALL, ("average={half_life: 50st}",), (), FREE, "arXiv 1703.01780"),
    Claim(
        "alternating mirrors", "fashion", SMALL, ("data.augment.flip=alternating",), (), FREE, "arXiv 2404.00498",
    ),
    Claim("evaluation with mirrors", "fashion", SMALL, ("evaluate={every: null, flip: true}",), (), FREE, "FFCV"),
    Claim(
        "small images first", "fashion", SMALL,
        ("stages=[{until: 3ep, images_per_worker: 64, image_size: 20, resize: 20}, "
         "{until: 8ep, images_per_worker: 64}]",),
        (), FREE, "fast.ai and DIUx, 2018",
    ),
)  # fmt: skip


def overrides(claim: Claim, is_on: bool, seed: int) -> list[str]:
    """What a run changes of the claim's recipe."""
    return [*claim.shared, *(claim.on if is_on else claim.off), f"seed={seed}"]


def top1(recipe: str, changes: list[str], data: Path, out: Path, workers: int) -> float:
    """The accuracy of a run, from RESULTS where it has been done; 0 where training can't go on."""
    name = load_recipe(recipe, changes).recipe.sha256()[:12]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if name not in known:
        summary = out / name / "summary.json"
        words = [sys.executable, "-m", "torusgd", "train", recipe, "--data", str(data), "--out", str(out / name)]
        sets = [word for change in changes for word in ("--set", change)]
        done = subprocess.run([*words, "--workers", str(workers), *sets], capture_output=True, text=True, check=False)
        if done.returncode and not (done.returncode == 1 and "diverged" in done.stderr):
            raise SystemExit(done.stderr)
        known[name] = json.loads(summary.read_text())["top1"] if done.returncode == 0 else 0.0
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return float(known[name])


def line(claim: Claim, on: Sequence[float], off: Sequence[float]) -> str:
    """A row of the table."""
    told = [f"{100 * mean(each):.2f} ({100 * min(each):.2f} to {100 * max(each):.2f})" for each in (on, off)]
    expected = "no loss" if claim.expected == FREE else f"+{claim.expected}"
    verdict = "held" if claim.holds(on, off) else "did not hold"
    difference = f"{100 * (mean(on) - mean(off)):+.2f}"
    return f"| {claim.technique} | {told[0]} | {told[1]} | {difference} | {expected}, {claim.source} | {verdict} |"


def messages() -> None:
    """What a larger batch saves in 90 epochs of ImageNet: the cost model of You et al. (arXiv 1709.05011, section 4).

    A step's all-reduce over a tree of P ranks is log2(P) messages of |W| bytes, each of alpha + |W| beta seconds. The
    constants are theirs for FDR InfiniBand.
    """
    ranks, epochs, images, alpha, beta = 512, 90, 1_281_167, 0.7e-6, 0.2e-9
    size = 4 * known_cost("resnet50").parameters
    print("| batch | steps | messages of a rank | sent by a rank, GB | seconds |\n|---|---|---|---|---|")
    for batch in (2**power for power in range(9, 17)):
        steps = math.ceil(epochs * images / batch)
        count = int(math.log2(ranks)) * steps
        told = f"{count * size / 1e9:,.0f} | {count * (alpha + size * beta):,.0f}"
        print(f"| {batch:,} | {steps:,} | {count:,} | {told} |")


def main(
    data: Annotated[Path, Option(help="folder of Fashion-MNIST")] = Path("data/fashion-mnist"),
    messages_only: Annotated[bool, Option("--messages", help="only the table that is computed")] = False,
    out: Path = Path("runs/proof"),
    seeds: int = 3,
    workers: int = 2,
    only: Annotated[str, Option(help="techniques whose name holds this text")] = "",
) -> None:
    """Runs what is not done yet and shows a line a technique."""
    if messages_only:
        messages()
        return
    print("| technique | on: mean top-1, % (range) | off | difference | claim | |\n|---|---|---|---|---|---|")
    for claim in CLAIMS:
        if only.lower() not in claim.technique.lower():
            continue
        found = [
            [top1(claim.recipe, overrides(claim, is_on, seed), data, out, workers) for seed in range(seeds)]
            for is_on in (True, False)
        ]
        for side, values in zip(("on", "off"), found, strict=True):
            sample(f"{claim.technique}, {side}, % top-1", [100 * value for value in values])
        print(line(claim, *found), flush=True)


if __name__ == "__main__":
    typer.run(main)

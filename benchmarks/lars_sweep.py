"""Which products of rate and trust coefficient learn: LARS at 0.03, 0.1 and 0.3 on Fashion-MNIST, three seeds each.

    python benchmarks/lars_sweep.py --data data/fashion-mnist --out runs/lars-sweep

The rate is that of Sony's record, 29, which batch norm and biases get as it is; the trust coefficient is the product
over it: 0.001, the default of Sony's framework, makes 0.029, and 0.01 makes 0.29. Batch 1,024 of 16,384 images, warm-up
over the first of five epochs. The claim before the first run: 0.03 learns, 0.3 does
not. Each finished run leaves its summary, so that the same command goes on where it was ended.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from torusgd.recipe.load import load_recipe

PRODUCTS = (0.03, 0.1, 0.3)
SHORT = (
    "data.train_images=16384",
    "stages=[{until: 5ep, images_per_worker: 64}]",
    "rate.warmup.length=1ep",
    "optimizer.variant=nnabla",
    "evaluate.every=null",
    "polish=null",
)


def overrides(product: float, rate: float, seed: int) -> list[str]:
    """What a run changes of the recipe `fashion-large`."""
    return [*SHORT, f"seed={seed}", f"rate.lr={rate}", f"optimizer.trust={product / rate:.6g}"]


def top1(changes: list[str], data: Path, out: Path, workers: int) -> float | None:
    """The accuracy of a run, from its summary where it is done; None where training can't go on."""
    folder = out / load_recipe("fashion-large", changes).recipe.sha256()[:12]
    summary, diverged = folder / "summary.json", folder / "diverged.txt"
    if not summary.exists() and not diverged.exists():
        words = [sys.executable, "-m", "torusgd", "train", "fashion-large", "--data", str(data), "--out", str(folder)]
        sets = [word for change in changes for word in ("--set", change)]
        done = subprocess.run([*words, "--workers", str(workers), *sets], capture_output=True, text=True, check=False)
        if done.returncode == 1 and "diverged" in done.stderr:
            diverged.write_text(done.stderr)
        elif done.returncode:
            raise SystemExit(done.stderr)
    return float(json.loads(summary.read_text())["top1"]) if summary.exists() else None


def main() -> None:
    """Runs what is not done yet and shows a line a product."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST")
    parser.add_argument("--out", type=Path, default=Path("runs/lars-sweep"))
    parser.add_argument("--rate", type=float, default=29.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print("| rate x trust | top-1 of each seed, % | mean |\n|---|---|---|")
    for product in PRODUCTS:
        changes = [overrides(product, options.rate, seed) for seed in range(options.seeds)]
        found = [top1(each, options.data, options.out, options.workers) for each in changes]
        known = [value for value in found if value is not None]
        told = ", ".join("diverged" if value is None else f"{100 * value:.2f}" for value in found)
        mean = f"{100 * sum(known) / len(known):.2f}" if len(known) == len(found) else ""
        print(f"| {product} | {told} | {mean} |", flush=True)


if __name__ == "__main__":
    main()

"""Which products of rate and trust coefficient learn: LARS at 0.03, 0.1 and 0.3 on Fashion-MNIST, three seeds each.

    python benchmarks/lars_sweep.py --data data/fashion-mnist --out runs/lars-sweep

The rate is that of Sony's record, 29, which batch norm and biases get as it is; the trust coefficient is the product
over it: 0.001, the default of Sony's framework, makes 0.029, and 0.01 makes 0.29. Batch 1,024 of 16,384 images, warm-up
over the first of five epochs. The claim before the first run: 0.03 learns, 0.3 does not. Accuracies are kept beside
those of `proof.py`, so that the same command goes on where it was ended.
"""

import argparse
from pathlib import Path

from proof import top1

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
        found = [top1("fashion-large", each, options.data, options.out, options.workers) for each in changes]
        told = ", ".join(f"{100 * value:.2f}" if value else "diverged" for value in found)
        mean = f"{100 * sum(found) / len(found):.2f}" if all(found) else ""
        print(f"| {product} | {told} | {mean} |", flush=True)


if __name__ == "__main__":
    main()

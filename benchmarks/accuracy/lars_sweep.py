"""Which products of rate and trust coefficient learn: LARS at 0.03, 0.1 and 0.3 on Fashion-MNIST, three seeds each.

    python -m benchmarks accuracy lars-sweep --data data/fashion-mnist --out runs/lars-sweep

The rate is that of Sony's record, 29, which batch norm and biases get as it is; the trust coefficient is the product
over it: 0.001, the default of Sony's framework, makes 0.029, and 0.01 makes 0.29. Batch 1,024 of 16,384 images, warm-up
over the first of five epochs. The claim before the first run: 0.03 learns, 0.3 does not. Accuracies are kept beside
those of `proof.py`, so that the same command goes on where it was ended.
"""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ..record import sample
from .proof import top1

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


def main(
    data: Annotated[Path, Option(help="folder of Fashion-MNIST")],
    out: Path = Path("runs/lars-sweep"),
    rate: float = 29.0,
    seeds: int = 3,
    workers: int = 2,
) -> None:
    """Runs what is not done yet and shows a line a product."""
    print("| rate x trust | top-1 of each seed, % | mean |\n|---|---|---|")
    for product in PRODUCTS:
        changes = [overrides(product, rate, seed) for seed in range(seeds)]
        found = [top1("fashion-large", each, data, out, workers) for each in changes]
        sample(f"rate x trust {product}, % top-1", [100 * value for value in found])
        told = ", ".join(f"{100 * value:.2f}" if value else "diverged" for value in found)
        mean = f"{100 * sum(found) / len(found):.2f}" if all(found) else ""
        print(f"| {product} | {told} | {mean} |", flush=True)


if __name__ == "__main__":
    typer.run(main)

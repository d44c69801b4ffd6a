"""What the comparison of the ranks' weights costs by default: its share of the processor time of a step.

    python -m benchmarks step drift --rounds 5

Two ranks of this machine train networks from tiny to large, dense and convolutional, with few and with many images a
rank. Each round takes some steps without a comparison, then makes the fingerprints of the weights alone, so that a
thousandth of a step needn't be found in the noise of steps. Printed are both, the steps between two comparisons, and
the cost: the fingerprints' time over that of all these steps.

Needs: nothing.
"""

import statistics
import time
from typing import Annotated

import typer
from typer import Option

from torusgd.comm.groups import Group
from torusgd.gradients.integer_hash import IntegerHash
from torusgd.step.corruption import steps_between
from torusgd.step.journal import synchronous
from torusgd.step.watch import StepView

from ..ranks import on_ranks
from ..record import sample
from .trainers import synthetic, trainer_of

RANKS = 2
FINGERPRINTS = 20
CASES = (("digits-net", 8, 1, 1), ("digits-net", 8, 1, 64), ("fashion-net", 28, 1, 1), ("fashion-net", 28, 1, 64),
         ("alexnet-bn", 227, 3, 1), ("resnet50", 64, 3, 2), ("resnet50", 224, 3, 8))  # fmt: skip
"""network, pixels a side, channels, images a virtual worker, of which each rank has one"""


def run_case(
    name: str, pixels: int, channels: int, images: int, rounds: int, steps: int, world: Group
) -> tuple[str, list[float]]:
    """What was measured of one case, and the cost in each round."""
    trainer = trainer_of(synthetic(name, pixels, channels, images, workers=RANKS), world)
    view = StepView(trainer.step.schedule[0], trainer.membership, recompute=lambda worker: IntegerHash(world.device))
    every = steps_between(images)
    step_seconds, fingerprint_seconds = [], []
    for turn in range(rounds + 1):
        begin = time.process_time()
        for index in range(1 + turn * steps, 1 + (turn + 1) * steps):
            if index % every:
                trainer.step.run(trainer.membership, synchronous(index, RANKS))
        taken = sum(index % every > 0 for index in range(1 + turn * steps, 1 + (turn + 1) * steps))
        middle = time.process_time()
        for _ in range(FINGERPRINTS):
            trainer.drift.before_send(view)
        if turn:  # the first warms up, and measures the scales
            step_seconds.append((middle - begin) / taken)
            fingerprint_seconds.append((time.process_time() - middle) / FINGERPRINTS)
    costs = [b / (every * a) for a, b in zip(step_seconds, fingerprint_seconds, strict=True)]
    parameters = sum(p.numel() for p in trainer.step.state.model.parameters())
    step, fingerprint = (1e3 * statistics.median(seconds) for seconds in (step_seconds, fingerprint_seconds))
    trainer.close()
    words = f"{name:12} {parameters:>11,} weights, {images:3} images: step {step:8.2f} ms, "
    return words + f"fingerprint {fingerprint:7.3f} ms, every {every:3} steps", costs


def main(
    rounds: int = 5,
    steps: Annotated[int, Option(help="of a round")] = 4,
) -> None:
    """Starts the ranks."""
    for case in CASES:
        words, costs = on_ranks(RANKS, run_case, *case, rounds, steps)
        sample(f"{case[0]}, {case[1]} px, {case[3]} images, % of a step", [100 * cost for cost in costs])
        middle = statistics.median(costs)
        print(f"{words}: {middle:.3%} ({min(costs):.3%} to {max(costs):.3%})", flush=True)


if __name__ == "__main__":
    typer.run(main)

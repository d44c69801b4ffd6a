"""What `Replicas` costs in somebody's own loop: its share of the processor time of a step.

    python -m benchmarks step replicas --rounds 5

Two ranks train a network by SGD with momentum, on the same images and so without messages, which would make a step
longer. Each round takes some steps, then compares weights, buffers and momentum some times. Printed are both, and the
cost with one comparison every 100 steps, which is the default: the comparison's time over that of 100 steps.

Needs: nothing.
"""

import statistics
import time
from typing import Annotated

import torch
import typer
from torch import nn
from typer import Option

from torusgd import Replicas
from torusgd.comm.groups import Group
from torusgd.models.registry import build_model
from torusgd.recipe.schema import Model

from ..ranks import on_ranks
from ..record import sample

RANKS, COMPARISONS, EVERY = 2, 2, 100
CASES = (("digits-net", 8, 1, 64), ("fashion-net", 28, 1, 64), ("resnet50", 64, 3, 8))
"""network, pixels a side, channels, images a rank"""


def run_case(
    name: str, pixels: int, channels: int, images: int, rounds: int, steps: int, world: Group
) -> tuple[int, list[float], list[float]]:
    """Bytes compared, and in each round the milliseconds of a step and of a comparison."""
    torch.set_num_threads(1)
    model = build_model(Model(name=name), classes=10, channels=channels, image_size=(pixels, pixels), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    replicas = Replicas(model, optimizer, every=EVERY, group=world)
    inputs, labels = torch.randn(images, channels, pixels, pixels), torch.arange(images) % 10
    stepped, compared = [], []
    for turn in range(rounds + 1):
        begin = time.process_time()
        for _ in range(steps):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        middle = time.process_time()
        for _ in range(COMPARISONS):
            replicas.check()
        if turn:  # the first warms up
            stepped.append((middle - begin) / steps * 1e3)
            compared.append((time.process_time() - middle) / COMPARISONS * 1e3)
    held = [*model.parameters(), *(state["momentum_buffer"] for state in optimizer.state.values())]
    return sum(tensor.nbytes for tensor in held), stepped, compared


def main(rounds: int = 5, steps: Annotated[int, Option(help="of a round")] = 10) -> None:
    """Starts the ranks."""
    for case in CASES:
        size, stepped, compared = on_ranks(RANKS, run_case, *case, rounds, steps)
        costs = [100 * b / (EVERY * a) for a, b in zip(stepped, compared, strict=True)]
        sample(f"{case[0]}, {case[1]} px, {case[3]} images: a comparison every {EVERY} steps, % of them", costs)
        step, comparison = statistics.median(stepped), statistics.median(compared)
        print(
            f"{case[0]:12} {size / 1e6:8.2f} MB: step {step:8.2f} ms, comparison {comparison:7.3f} ms: "
            f"{statistics.median(costs):.3f} % ({min(costs):.3f} to {max(costs):.3f} %)",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)

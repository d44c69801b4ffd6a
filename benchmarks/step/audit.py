"""What `--audit SHARE` costs: steps of two ranks without it and with several shares, in turn in one run.

    python -m benchmarks step audit --rounds 5

Two ranks of this machine train fashion-net on synthetic images, 8 virtual workers of 16 images. Each round takes the
same steps with every share. Printed are the median seconds of a step and of both ranks' processor time for it, the
spread of each, and the cost over no audit: the median of the ratios within a round. Which share is audited is drawn;
in few steps it is more or less than was asked for, so what was computed twice is printed too.

Needs: nothing.
"""

import statistics
import time
from typing import Annotated

import torch
import typer
from typer import Option

from torusgd.comm.groups import Group
from torusgd.step.journal import synchronous

from ..ranks import on_ranks
from ..record import sample
from .trainers import trainer_of

SHARES = (0.0, 0.1, 0.5, 1.0)
RANKS, WORKERS = 2, 8
RECIPE = (
    "data={source: synthetic, train_images: 8192, eval_images: 16, image_size: 28, channels: 1, classes: 10, "
    "mean: [0.5], std: [0.25]}",
    "model={name: fashion-net}",
    f"virtual_workers={WORKERS}",
    "stages=[{until: 1000st, images_per_worker: 16}]",
    "rate={lr: 0.01}",
    "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
    "precision=float32",
    "polish=null",
)


def be_rank(rounds: int, steps: int, world: Group) -> list[list[list[float]]]:
    """Takes the steps; of each share seconds and processor seconds of a step, and what was computed twice."""
    trainers = [trainer_of(RECIPE, world, audit=share) for share in SHARES]
    wall: list[list[float]] = [[] for _ in SHARES]
    work: list[list[float]] = [[] for _ in SHARES]
    audited: list[list[float]] = [[] for _ in SHARES]
    for turn in range(rounds + 1):
        for trainer, seconds, busy, drawn in zip(trainers, wall, work, audited, strict=True):
            world.barrier()
            begin, used = time.perf_counter(), time.process_time()
            twice = 0
            for index in range(turn * steps, (turn + 1) * steps):
                stats = trainer.step.run(trainer.membership, synchronous(index, WORKERS))
                assert stats is not None
                twice += stats.audited
            spent = torch.tensor([time.process_time() - used], dtype=torch.float64)
            world.all_reduce(spent)
            if turn:  # the first warms up, and measures the scales
                seconds.append((time.perf_counter() - begin) / steps)
                busy.append(float(spent) / steps)
                drawn.append(twice / (steps * WORKERS))
    for trainer in trainers:
        trainer.close()
    world.barrier()
    return [wall, work, audited]


def told(seconds: list[float], without: list[float]) -> str:
    """The median of a step, its spread, and the cost."""
    cost = statistics.median(one / other for one, other in zip(seconds, without, strict=True)) - 1
    return (
        f"{1e3 * statistics.median(seconds):6.1f} ms ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}) {cost:+.1%}"
    )


def main(
    rounds: int = 5,
    steps: Annotated[int, Option(help="of a round, with each share")] = 10,
) -> None:
    wall, work, audited = on_ranks(RANKS, be_rank, rounds, steps)
    for share, seconds, busy, drawn in zip(SHARES, wall, work, audited, strict=True):
        sample(f"audit {share:g}, processors, ms a step", [1e3 * each for each in busy])
        print(
            f"audit {share:<4g} computed twice {statistics.mean(drawn):.1%}   wall {told(seconds, wall[0])}   "
            f"processors {told(busy, work[0])}"
        )


if __name__ == "__main__":
    typer.run(main)

"""What `--audit SHARE` costs: steps of two ranks without it and with several shares, in turn in one run.

    python benchmarks/audit.py --rounds 5

Two ranks of this machine train fashion-net on synthetic images, 8 virtual workers of 16 images. Each round takes the
same steps with every share. Printed are the median seconds of a step and of both ranks' processor time for it, the
spread of each, and the cost over no audit: the median of the ratios within a round. Which share is audited is drawn;
in few steps it is more or less than was asked for, so what was computed twice is printed too.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import torch

from torusgd.comm.base import Liveness
from torusgd.ranks.generations import meet_within
from torusgd.ranks.rank import serve_store
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.run.build import build
from torusgd.run.job import Job
from torusgd.run.open_data import open_data
from torusgd.runtime import resolve_auto
from torusgd.step.journal import synchronous

SHARES = (0.0, 0.1, 0.5, 1.0)
RANKS = 2
RECIPE = (
    "data={source: synthetic, train_images: 8192, eval_images: 16, image_size: 28, channels: 1, classes: 10, "
    "mean: [0.5], std: [0.25]}",
    "model={name: fashion-net}",
    "virtual_workers=8",
    "stages=[{until: 1000st, images_per_worker: 16}]",
    "rate={lr: 0.01}",
    "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
    "precision=float32",
    "polish=null",
)


def be_rank(rank: int, port: int, rounds: int, steps: int) -> None:
    """Takes the steps; rank 0 prints."""
    from torch._C._distributed_c10d import TCPStore

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    world = meet_within(TCPStore("127.0.0.1", port, None, False), rank, RANKS, "cpu", seconds=60)
    recipe = resolve_auto(load_recipe("digits", RECIPE).recipe, "cpu")
    jobs = [Job(recipe, RuntimeOptions(audit=share), "cpu", Path()) for share in SHARES]
    trainers = [build(job, open_data(job, world.device, Liveness()), world, Liveness()) for job in jobs]
    wall: list[list[float]] = [[] for _ in SHARES]
    work: list[list[float]] = [[] for _ in SHARES]
    audited: list[list[float]] = [[] for _ in SHARES]
    for turn in range(rounds + 1):
        for trainer, seconds, busy, drawn in zip(trainers, wall, work, audited, strict=True):
            world.barrier()
            begin, used = time.perf_counter(), time.process_time()
            twice = 0
            for index in range(turn * steps, (turn + 1) * steps):
                stats = trainer.step.run(trainer.membership, synchronous(index, recipe.virtual_workers))
                assert stats is not None
                twice += stats.audited
            spent = torch.tensor([time.process_time() - used], dtype=torch.float64)
            world.all_reduce(spent)
            if turn:  # the first warms up, and measures the scales
                seconds.append((time.perf_counter() - begin) / steps)
                busy.append(float(spent) / steps)
                drawn.append(twice / (steps * recipe.virtual_workers))
    if rank == 0:
        for share, seconds, busy, drawn in zip(SHARES, wall, work, audited, strict=True):
            print(
                f"audit {share:<4g} computed twice {statistics.mean(drawn):.1%}   wall {told(seconds, wall[0])}   "
                f"processors {told(busy, work[0])}"
            )
    for trainer in trainers:
        trainer.close()
    world.barrier()


def told(seconds: list[float], without: list[float]) -> str:
    """The median of a step, its spread, and the cost."""
    cost = statistics.median(one / other for one, other in zip(seconds, without, strict=True)) - 1
    return (
        f"{1e3 * statistics.median(seconds):6.1f} ms ({1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}) {cost:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round, with each share")
    options = parser.parse_args()
    store = serve_store()
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=be_rank, args=(rank, store.port, options.rounds, options.steps)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()

"""Ranks that differ in speed: steps with even shares, with the best split, and with shares that follow the speed.

    python -m benchmarks slow_ranks shares --rounds 3

Three ranks of this machine share 12 virtual workers; computing is a timed wait, so that the cores are no limit, beside
the passes of a small network. First a virtual worker takes rank 2 twice as long as the others, so that the best
split is 5/5/2; after half of the steps it takes rank 0 three times as long instead, best split 2/5/5. Printed for each
half: seconds of a step with each kind of shares, its ratio to the best split, and after how many steps the shares that
follow the speed were within 10 % of it. With `--busy` nothing waits; instead real passes of digits-net run on two ranks
while another process takes the second one's core, and the even split is compared with shares that follow the speed.

Needs: nothing.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import typer
from torch import Tensor
from typer import Option

from torusgd.comm.groups import Group
from torusgd.ranks.liveness import Limits
from torusgd.ranks.supervisor import Supervisor
from torusgd.step.membership import with_counts

from ..record import sample
from .timed_run import timed_run

RANKS, WORKERS = 3, 12
SLOW = ({2: 2.0}, {0: 3.0})
"""in each half, the times by which a virtual worker takes a rank longer"""
BEST = ((5, 5, 2), (2, 5, 5))
KINDS = ("even", "best", "speed")
SETTLED = {"even": 2, "best": 2, "speed": 20}
"""steps of each half that are left out: a run's first is taken twice, and to follow the speed takes some"""
FEW = 16
"""steps with shares that stay as they are"""


def take_steps(kind: str, out: str, steps: int, wait: float, images: int, *rank: Any) -> list[float]:
    """One rank's part in a run with one kind of shares; the seconds of each of its steps."""
    options = {"shares": "speed" if kind == "speed" else "even"}

    def shared(membership: Any, entry: Any) -> Any:
        return with_counts(membership, BEST[2 * entry.step // steps]) if kind == "best" else membership

    run, seconds = timed_run((WORKERS, images, steps), options, out, rank, shared)
    passes = run.trainer.step.forward_backward
    forward = passes.forward

    def slow(at: Any, *arguments: Any) -> Tensor:
        time.sleep(wait * SLOW[2 * at.index // steps].get(run.world.rank, 1.0))
        return forward(at, *arguments)

    with patch.object(passes, "forward", slow):
        run.run()
    return seconds


def spin() -> None:
    """Takes a core."""
    os.sched_setaffinity(0, {1})
    while True:
        pass


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process computes meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()


def pinned(*arguments: Any) -> list[float]:
    """`take_steps` with each rank on a core of its own."""
    world: Group = arguments[5]
    os.sched_setaffinity(0, {world.rank})
    return take_steps(*arguments)


def run(kind: str, ranks: int, steps: int, wait: float, images: int, function: Any = take_steps) -> list[float]:
    """Rank 0's seconds of each step."""
    with tempfile.TemporaryDirectory() as out, Supervisor(ranks, "cpu", Limits()) as supervisor:
        return supervisor.run(partial(function, kind, out, steps, wait, images))[0]


def settled(kind: str, seconds: list[float], is_second: bool) -> list[float]:
    """The steps of one half of a run that are compared."""
    half = len(seconds) // 2
    return seconds[half:][SETTLED[kind] :] if is_second else seconds[:half][SETTLED[kind] :]


def main(
    rounds: int = 3,
    steps: Annotated[int, Option(help="with shares that follow the speed")] = 60,
    wait: Annotated[float, Option(help="seconds of a virtual worker")] = 0.1,
    busy: Annotated[bool, Option("--busy", help="real passes, with one core shared")] = False,
) -> None:
    if busy:
        with busy_core():
            found = [{kind: run(kind, 2, steps, 0.0, 64, pinned) for kind in ("even", "speed")} for _ in range(rounds)]
        half = steps // 2
        for kind in ("even", "speed"):
            each = [statistics.median(seconds[kind][half:]) for seconds in found]
            sample(f"one core busy, {kind}, s a step", each)
            middle = statistics.median(each)
            print(f"{kind:<6s}{1e3 * middle:8.1f} ms a step ({1e3 * min(each):.1f} to {1e3 * max(each):.1f})")
        return
    each_takes = {kind: steps if kind == "speed" else FEW for kind in KINDS}
    taken = [{kind: run(kind, RANKS, each_takes[kind], wait, 1) for kind in KINDS} for _ in range(rounds)]
    half = steps // 2
    for first, name in ((0, "first half"), (half, "second half")):
        medians = {
            kind: [statistics.median(settled(kind, each[kind], is_second=first > 0)) for each in taken]
            for kind in KINDS
        }
        best = statistics.median(medians["best"])
        for kind in KINDS:
            middle = statistics.median(medians[kind])
            sample(f"{name}, {kind}, s a step", medians[kind])
            print(
                f"{name}, {kind:<6s}{1e3 * middle:8.1f} ms a step ({1e3 * min(medians[kind]):.1f} to "
                f"{1e3 * max(medians[kind]):.1f}), {middle / best:.3f} of the best split"
            )
        until = [
            next(n for n in range(half) if statistics.median(each["speed"][first + n : first + n + 5]) <= 1.1 * best)
            for each in taken
        ]
        print(f"{name}: within 10 % of it after {', '.join(map(str, until))} steps")


if __name__ == "__main__":
    typer.run(main)

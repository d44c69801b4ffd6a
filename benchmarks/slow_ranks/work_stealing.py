"""What a pause of one rank costs a step, with idle ranks that take over its work and without; and what asking costs.

    python -m benchmarks slow_ranks work-stealing --workers 32

Four ranks of this machine share the virtual workers of a step of 4 s. Computing is a timed wait, a third of it forward
and two thirds backward, so that the cores are no limit. In every second step one rank, another one each time, pauses
for 1 s in a virtual worker of its first half. Printed: how much longer the steps with a pause take than those without.

    python -m benchmarks slow_ranks work-stealing --overhead

Without any pause: real passes of digits-net on two ranks. Every second step is taken with work stealing, so that a
busy machine is as busy with it as without. Printed: the seconds of a step, of both kinds, and of them those in which a
rank waits for the store's answers.

Needs: nothing.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any
from unittest.mock import patch

import typer
from torch import Tensor
from typer import Option

from torusgd.ranks.liveness import Limits
from torusgd.ranks.supervisor import Supervisor
from torusgd.run.run import Run
from torusgd.step.work_stealing import GroupStore

from ..record import sample
from .timed_run import timed_run

RANKS, PAUSE = 4, 1.0
FORWARD = 1 / 3
"""of the time of a virtual worker"""
WARM_UP = 20
"""steps of --overhead that are left out"""


def stealing(
    steals: bool, workers: int, images: int, steps: int, out: str, rank: Sequence[Any]
) -> tuple[Run, list[float]]:
    """A run with work stealing or without, and a list to which it adds the seconds of each step."""
    return timed_run((workers, images, steps), {"work_stealing": steals, "shares": "even"}, out, rank)


def with_pauses(
    steals: bool, workers: int, steps: int, wait: float, out: str, *rank: Any
) -> tuple[list[float], dict[str, Any]]:
    """One rank's part in a run in which ranks pause: the seconds of its steps, and the summary."""
    run, seconds = stealing(steals, workers, 1, steps, out, rank)
    passes, world = run.trainer.step.forward_backward, run.world
    forward, backward = passes.forward, passes.backward

    def slow_forward(at: Any, worker: int, *arguments: Any) -> Tensor:
        turn = at.index // 2
        is_late = at.index % 2 == 1 and world.rank == turn % world.size
        first = run.membership.mine[turn % (workers // world.size // 2)]
        time.sleep(FORWARD * wait + (PAUSE if is_late and worker == first else 0.0))
        return forward(at, worker, *arguments)

    def slow_backward() -> None:
        time.sleep((1 - FORWARD) * wait)
        backward()

    with patch.multiple(passes, forward=slow_forward, backward=slow_backward):
        return seconds, run.run().summary


def in_turn(workers: int, images: int, steps: int, out: str, *rank: Any) -> tuple[list[float], list[float]]:
    """One rank's part in a run of which every second step is with work stealing: seconds of each, waits for answers."""
    run, seconds = stealing(True, workers, images, steps, out, rank)
    asked = [0.0] * steps
    own, timed_step = replace(run.trainer.step, stealing=None), run.trainer.ahead
    assert timed_step is not None
    ask = GroupStore.query

    def alternating(membership: Any, entry: Any) -> Any:
        if entry.step % 2:
            return timed_step.run(membership, entry)
        begin = time.perf_counter()
        stats = own.run(membership, entry)
        seconds.append(time.perf_counter() - begin)
        return stats

    def timed_ask(store: GroupStore, question: Callable[[Any], Any]) -> Any:
        begin = time.perf_counter()
        answer = ask(store, question)
        asked[len(seconds)] += time.perf_counter() - begin
        return answer

    alternating_steps: Any = SimpleNamespace(run=alternating)
    run.trainer = replace(run.trainer, ahead=alternating_steps)
    with patch.object(GroupStore, "query", timed_ask):
        run.run()
    return seconds, asked


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0 gives; `arguments`: those before the run's folder."""
    with tempfile.TemporaryDirectory() as out, Supervisor(ranks, "cpu", Limits()) as supervisor:
        return supervisor.run(partial(function, *arguments, out))[0]


def show_pauses(workers: int, seconds: float, pauses: int) -> None:
    """Steps with a pause beside those without."""
    hashes = set()
    for steals in (False, True):
        wait = seconds / (workers / RANKS)
        taken, summary = on_ranks(RANKS, with_pauses, steals, workers, 2 * pauses + 1, wait)
        hashes.add(summary["weights_sha256"])
        plain = statistics.median(taken[2::2])
        late = [each - plain for each in taken[1::2]]
        sample(f"{workers} virtual workers, work_stealing {steals}, cost of a pause, s", late)
        print(
            f"{workers} virtual workers, work_stealing {steals}: step {plain:.3f} s; a pause of {PAUSE:g} s costs "
            f"{statistics.median(late):.3f} s ({min(late):.3f} to {max(late):.3f}, n = {len(late)}); "
            f"{summary['taken_over_workers']} taken over, {summary['taken_over_saved_seconds']:.2f} s saved, it says",
            flush=True,
        )
    assert len(hashes) == 1, "the weights are the same"


def show_overhead(ranks: int, workers: int, images: int, steps: int) -> None:
    """Steps with work stealing beside those without."""
    seconds, asked = on_ranks(ranks, in_turn, workers, images, steps)
    without, with_it, waits = seconds[WARM_UP::2], seconds[WARM_UP + 1 :: 2], asked[WARM_UP + 1 :: 2]
    for word, each in (("without", without), ("with", with_it)):
        sample(f"{workers} virtual workers of {images} images, {word}, ms a step", [1e3 * one for one in each])
    middles = [statistics.median(each) for each in (without, with_it, waits)]
    print(
        f"{workers} virtual workers of {images} images on {ranks} ranks: {1e3 * middles[0]:.2f} ms a step without, "
        f"{1e3 * middles[1]:.2f} with (medians of {len(without)} each): {middles[1] / middles[0] - 1:+.2%}; "
        f"{1e3 * middles[2]:.3f} ms of it for answers of the store: {middles[2] / middles[0]:.2%}",
        flush=True,
    )


def main(
    workers: Annotated[int, Option(help="virtual workers")] = 32,
    seconds: Annotated[float, Option(help="of a step")] = 4.0,
    pauses: int = 8,
    overhead: Annotated[bool, Option("--overhead")] = False,
    rounds: Annotated[int, Option(help="of --overhead")] = 3,
) -> None:
    if not overhead:
        show_pauses(workers, seconds, pauses)
        return
    for images in (16, 256):
        for _ in range(rounds):
            show_overhead(2, 16, images, 400 if images < 100 else 120)


if __name__ == "__main__":
    typer.run(main)

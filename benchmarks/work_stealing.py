"""What a pause of one rank costs a step, with idle ranks that take over its work and without; and what asking costs.

    python benchmarks/work_stealing.py --workers 32

Four ranks of this machine share the virtual workers of a step of 4 s. Computing is a timed wait, a third of it forward
and two thirds backward, so that the cores are no limit. In every second step one rank, another one each time, pauses
for 1 s in a virtual worker of its first half. Printed: how much longer the steps with a pause take than those without.

    python benchmarks/work_stealing.py --overhead

Without any pause: the same program with short steps of 0.1 s by timed waits, and real passes of digits-net on two
ranks; half of the runs with and half without, in turn. Printed: the seconds of a step, and the ratio.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from torusgd.comm.groups import Group
from torusgd.comm.liveness import Liveness
from torusgd.launch.processes import Supervisor
from torusgd.launch.roll_call import Limits
from torusgd.recipe.load import load_recipe
from torusgd.recipe.runtime_options import RuntimeOptions
from torusgd.runtime import resolve_auto
from torusgd.signals import StopFlag
from torusgd.train.job import Job
from torusgd.train.run import Run
from torusgd.train.run_dir import RunDir

RANKS, PAUSE = 4, 1.0
FORWARD = 1 / 3
"""of the time of a virtual worker"""
RECIPE = (
    "data={source: synthetic, train_images: 8192, eval_images: 8, image_size: 8, channels: 1, classes: 4, "
    "mean: [0.5], std: [0.25]}",
    "rate={lr: 0.01}",
    "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
    "precision=float32",
    "polish=null",
)


def take_steps(
    steals: bool,
    out: str,
    workers: int,
    images: int,
    steps: int,
    wait: float,
    pause: float,
    world: Group,
    stop: StopFlag,
    restarts: int,
    live: Liveness,
) -> tuple[list[float], dict[str, Any]]:
    """One rank's part in a run: the seconds of each of its steps, and the summary.

    Args:
        steals: Whether idle ranks take over work.
        out: The run's folder.
        workers: Virtual workers.
        images: Of each.
        steps: To be taken; the first one's passes run twice.
        wait: Seconds that a virtual worker takes beside its passes.
        pause: Seconds, in every second step.
    """
    given = [
        *RECIPE,
        f"virtual_workers={workers}",
        f"stages=[{{until: {steps}st, images_per_worker: {images}}}]",
        f"evaluate.every={steps}st",
    ]
    recipe = resolve_auto(load_recipe("digits", given).recipe, "cpu")
    if world.rank == 0:
        RunDir(Path(out)).claim(recipe, fresh=False)
    world.barrier()
    options = RuntimeOptions(work_stealing=steals, shares="even", drift_every=0)
    run = Run(Job(recipe, options, "cpu", Path(out)), world, stop, restarts, live)
    passes, step, seconds = run.trainer.step.forward_backward, run.trainer.step, list[float]()
    forward, backward, take = passes.forward, passes.backward, step.run

    def slow_forward(at: Any, worker: int, *arguments: Any) -> Tensor:
        turn = at.index // 2
        is_late = at.index % 2 == 1 and world.rank == turn % world.size
        first = run.membership.mine[turn % (workers // world.size // 2)]
        time.sleep(FORWARD * wait + (pause if is_late and worker == first else 0.0))
        return forward(at, worker, *arguments)

    def slow_backward() -> None:
        time.sleep((1 - FORWARD) * wait)
        backward()

    def timed(membership: Any, entry: Any) -> Any:
        begin = time.perf_counter()
        stats = take(membership, entry)
        seconds.append(time.perf_counter() - begin)
        return stats

    passes.forward, passes.backward, step.run = slow_forward, slow_backward, timed  # type: ignore[method-assign]
    return seconds, run.run().summary


def run(ranks: int, *arguments: Any) -> tuple[list[float], dict[str, Any]]:
    """What `take_steps` gives on rank 0; `arguments`: its own, but the folder."""
    with tempfile.TemporaryDirectory() as out, Supervisor(ranks, "cpu", Limits()) as supervisor:
        return supervisor.run(partial(take_steps, arguments[0], out, *arguments[1:]))[0]


def show_pauses(workers: int, seconds: float, pauses: int) -> None:
    """Steps with a pause beside those without."""
    hashes = set()
    for steals in (False, True):
        wait = seconds / (workers / RANKS)
        taken, summary = run(RANKS, steals, workers, 1, 2 * pauses + 1, wait, PAUSE)
        hashes.add(summary["weights_sha256"])
        plain = statistics.median(taken[2::2])
        late = [each - plain for each in taken[1::2]]
        print(
            f"{workers} virtual workers, work_stealing {steals}: step {plain:.3f} s; a pause of {PAUSE:g} s costs "
            f"{statistics.median(late):.3f} s ({min(late):.3f} to {max(late):.3f}, n = {len(late)}); "
            f"{summary['taken_over_workers']} taken over, {summary['taken_over_saved_seconds']:.2f} s saved, it says",
            flush=True,
        )
    assert len(hashes) == 1, "the weights are the same"


def show_overhead(name: str, rounds: int, ranks: int, *arguments: Any) -> None:
    """The same run with work stealing and without, in turn."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        steals = number % 4 in (1, 2)
        seconds, _ = run(ranks, steals, *arguments)
        found[steals].append(statistics.median(seconds[len(seconds) // 5 :]))
    for steals, each in found.items():
        middle = statistics.median(each)
        print(f"{name}, work_stealing {steals}: a step {1e3 * middle:.2f} ms ", end="")
        print(f"({1e3 * min(each):.2f} to {1e3 * max(each):.2f}, n = {rounds})", flush=True)
    without, with_it = map(statistics.median, found.values())
    print(f"{name}: {with_it / without - 1:+.2%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=32, help="virtual workers")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a step")
    parser.add_argument("--pauses", type=int, default=8)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--rounds", type=int, default=5, help="of --overhead")
    options = parser.parse_args()
    if not options.overhead:
        show_pauses(options.workers, options.seconds, options.pauses)
        return
    show_overhead("waits, 32 virtual workers on 4 ranks", options.rounds, RANKS, 32, 1, 60, 0.1 / 8, 0.0)
    show_overhead("digits-net, 8 virtual workers of 64 images on 2 ranks", options.rounds, 2, 8, 64, 100, 0.0, 0.0)


if __name__ == "__main__":
    main()

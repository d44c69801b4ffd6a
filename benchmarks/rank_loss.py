"""What the loss of a rank costs: seconds from SIGKILL until steps are done again, going on against starting again.

    python benchmarks/rank_loss.py --workers 4 --runs 5

Each run trains `digits` on ranks of our own and kills one of them in mid-run, rank 0 in every second run. The time ends
with the first step that is written to events.jsonl and was not done before the kill. The peer is the same run with
sharded updates, in which all ranks start again from the last checkpoint, one every 20 steps. Both take turns.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from tests.train.processes import last_step, summary, torusgd, wait_for_step  # noqa: E402

PEERS = {"go on": ["--update", "replicated"], "start again": ["--update", "sharded"]}


def main() -> None:
    """Runs both in turn, and prints medians, extremes, steps redone and whether the weights are equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=90)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in PEERS}
    redone: dict[str, list[int]] = {name: [] for name in PEERS}
    hashes = set()
    draw = random.Random(0)
    for run in range(arguments.runs):
        at = draw.randrange(arguments.steps // 4, arguments.steps // 2)
        for name, flags in PEERS.items():
            with tempfile.TemporaryDirectory() as folder:
                loss, again, told = lose_a_rank(Path(folder), flags, arguments.workers, arguments.steps, at, run % 2)
            seconds[name].append(loss)
            redone[name].append(again)
            hashes.add(told["weights_sha256"])
    for name in PEERS:
        each = seconds[name]
        print(
            f"{name}: {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f}), n {len(each)}, "
            f"steps redone {min(redone[name])} to {max(redone[name])}"
        )
    print(f"ratio {statistics.median(seconds['start again']) / statistics.median(seconds['go on']):.1f}; "
          f"{len(hashes)} weights hash in {2 * arguments.runs} runs")  # fmt: skip


def lose_a_rank(out: Path, flags: list[str], workers: int, steps: int, at: int, victim: int) -> tuple:
    """(seconds until a new step is done, steps redone, summary) of a run that loses a rank after step `at`."""
    words = ["--workers", str(workers), "--max-steps", str(steps), "--checkpoint-every", "20st", *flags]
    process = torusgd(out / "told", out / "run", Path("digits"), *words)
    out /= "run"
    wait_for_step(out, at, process)
    pid = process.rank(out, victim)
    done = last_step(out)
    begin = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    least = done + 1
    while (now := last_step(out)) <= done:
        least = min(least, now)
        time.sleep(0.001)
    taken = time.perf_counter() - begin
    assert process.end() == 0, process.output
    # The step under way is done again in any case; those that are missing from the events are, too.
    return taken, 1 + max(0, done - least), summary(out)


if __name__ == "__main__":
    main()

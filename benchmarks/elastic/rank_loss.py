"""What the loss of a rank costs: seconds from SIGKILL until steps are done again, going on against starting again.

    python -m benchmarks elastic rank-loss --workers 4 --runs 5
    python -m benchmarks elastic rank-loss --how freeze --runs 5
    python -m benchmarks elastic rank-loss --how cut --runs 5

Each run trains `digits` on ranks of our own and kills one of them in mid-run, rank 0 in every second run. The time ends
with the first step that is written to events.jsonl and was not done before the kill. The peer is the same run with
sharded updates, in which all ranks start again from the last checkpoint, one every 20 steps; or with column blocks,
likewise. All take turns. With `--how freeze` a rank is suspended (SIGSTOP), and with `--how cut` the link of a machine
that has joined with one rank is cut, in a network of namespaces (which needs root). Both are found out after `timeout`,
5 s here; printed are the seconds until the rank is named, and from there until a step is done.

Needs: nothing; root with `--how cut`.
"""

import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import typer
from tests.polling import until
from tests.rehearse.test_train_in_lab import COMMAND
from tests.run.processes import last_step, summary, torusgd, wait_for_step

from torusgd.ranks.join import make_token
from torusgd.rehearse.lab import Host, Lab

from ..record import sample
from .changes import GO_ON, LONGEST

PEERS = {
    "go on": ["--update", "replicated"],
    "start again": ["--update", "sharded"],
    "start again, column blocks": ["--set", "column_blocks=2", "--model-parallel", "2"],
}
LIMIT = ["--set", "runtime.timeout=5"]


def main(
    workers: int = 4,
    runs: int = 5,
    steps: int = 90,
    how: Literal["kill", "freeze", "cut"] = "kill",
) -> None:
    """Runs both in turn, and prints medians, extremes, steps redone and whether the weights are equal."""
    if how != "kill":
        show_what_is_named(workers, runs, steps, how)
        return
    seconds: dict[str, list[float]] = {name: [] for name in PEERS}
    redone: dict[str, list[int]] = {name: [] for name in PEERS}
    hashes: dict[str, set[str]] = {name: set() for name in PEERS}
    draw = random.Random(0)
    for run in range(runs):
        at = draw.randrange(steps // 4, steps // 2)
        for name, flags in PEERS.items():
            with tempfile.TemporaryDirectory() as folder:
                loss, again, told = lose_a_rank(Path(folder), flags, workers, steps, at, run % 2)
            seconds[name].append(loss)
            redone[name].append(again)
            hashes[name].add(told["weights_sha256"][:8])
    for name, each in seconds.items():
        sample(f"{name}, s", each)
        print(
            f"{name}: {spread(each)}, steps redone {min(redone[name])} to {max(redone[name])}, "
            f"weights {', '.join(hashes[name])}"
        )


def show_what_is_named(workers: int, runs: int, steps: int, how: str) -> None:
    """Runs it several times, and prints how long it took to find the lost rank, and to take a step without it."""
    named, after, told = list[float](), list[float](), list[dict[str, Any]]()
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            lose = freeze_a_rank if how == "freeze" else cut_a_machine_off
            one, other, summary = lose(Path(folder), workers, steps)
        named.append(one)
        after.append(other)
        told.append(summary)
    lost = {(str(each["lost_ranks"]), each["restarts"], each["weights_sha256"][:8]) for each in told}
    sample(f"{how}: named after, s", named)
    sample(f"{how}: a step later, s", after)
    print(f"{how}: named after {spread(named)}; a step {spread(after)} later; lost, restarts, weights: {lost}")


def spread(seconds: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), n {len(seconds)}"


def lose_a_rank(
    out: Path, flags: list[str], workers: int, steps: int, at: int, victim: int
) -> tuple[float, int, dict[str, Any]]:
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


def freeze_a_rank(folder: Path, workers: int, steps: int) -> tuple[float, float, dict[str, Any]]:
    """(seconds until a suspended rank is named, seconds from there until a new step, summary)."""
    out = folder / "run"
    process = torusgd(
        folder / "told", out, Path("digits"), "--workers", str(workers), "--max-steps", str(steps), *LIMIT
    )
    until(lambda: last_step(out) >= steps // 3, "it has begun", process, LONGEST)
    os.kill(process.rank(out, 1), signal.SIGSTOP)
    times = find_out(lambda: process.err, out)
    assert process.end() == 0, process.output
    return *times, summary(out)


def cut_a_machine_off(folder: Path, workers: int, steps: int) -> tuple[float, float, dict[str, Any]]:
    """The same of a machine that has joined with one rank, whose cable is pulled."""
    out, script, token = (folder / name for name in ("run", "command.py", "token"))
    script.write_text(COMMAND)
    make_token(token)
    with Lab([Host(latency=1e-4, rate=1e9)] * 2) as lab:
        where = f"{lab.addresses[0]}:7000"
        train = ["train", "digits", "--out", str(out), "--max-steps", str(steps), "--workers", str(workers - 1), *LIMIT]
        gate = folder / "gate"  # until it is gone images take their time, else the run could end before the other joins
        gate.touch()
        source = f"{{recipe: digits, gate: '{gate}', pause: 0.003}}"
        train += [
            "--set",
            "data.source=benchmarks.elastic.changes:Paced",
            "--set",
            f"data.options={source}",
            "--listen",
            where,
            "--token-file",
            str(token),
        ]
        join = ["join", where, "--workers", "1", "--token-file", str(token)]
        words = {"WORDS": json.dumps([train, join]), "STARTED": str(out / "events.jsonl")}
        path = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", ""))
        crew = lab.start([str(script)], {"PYTHONPATH": path, **words})
        until(lambda: "joins; " in crew.outputs()[0], "it joins", timeout=LONGEST)
        lab.cut(1)
        times = find_out(lambda: crew.outputs()[0].partition("joins; ")[2].partition("\n")[2], out)
        gate.unlink()
        until((out / "summary.json").exists, "the run is done", timeout=LONGEST)
        crew.end()
    return *times, summary(out)


def find_out(told: Callable[[], str], out: Path) -> tuple[float, float]:
    """Seconds from now until a line of the launcher says who goes on, and from there until a step is done."""
    begin = time.perf_counter()
    until(lambda: GO_ON in told(), "the others go on", pause=0.001)
    named, done = time.perf_counter(), last_step(out)
    until(lambda: last_step(out) > done, "a step", pause=0.001)
    return named - begin, time.perf_counter() - named


if __name__ == "__main__":
    typer.run(main)

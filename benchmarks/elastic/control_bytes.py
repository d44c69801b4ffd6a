"""What control costs: bytes through the launcher's store a step, beside those of the gradients.

    python -m benchmarks elastic control-bytes --ranks 2,8

A run of fashion-net on synthetic images, on ranks of this machine. The launcher's only socket is its store; Linux
counts the bytes of each connection (`ss -ti`, of iproute2). Two readings in mid-run give the bytes a second on it,
both ways; with the steps done meanwhile they are bytes a step. Beside them stand the bytes of all other connections of
the ranks: gradients and control vectors. No model data passes the store, and its traffic is by time (a heartbeat a
second), whatever the number of steps.

Needs: `ss` of iproute2.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from tests.run.processes import last_step
from typer import Option

from ..record import sample

RECIPE = (
    "data={source: synthetic, train_images: 65536, eval_images: 16, image_size: 28, channels: 1, classes: 10, "
    "mean: [0.5], std: [0.25]}",
    "model={name: fashion-net}",
    "virtual_workers=32",
    "stages=[{until: 100000st, images_per_worker: 2}]",
    "rate={lr: 0.01}",
    "optimizer={name: sgd, momentum: 0.9, weight_decay: 1.0e-4}",
    "precision=float32",
    "evaluate.every=100000st",
    "polish=null",
)


def main(
    ranks: Annotated[str, Option(help="numbers of ranks")] = "2,8",
    seconds: Annotated[float, Option(help="from one reading to the next")] = 15.0,
) -> None:
    """Runs it for each number of ranks and prints a line each."""
    for each in map(int, ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), each, seconds)
        for name, value in found.items():
            sample(f"{each} ranks, {name}", [value])
        print(json.dumps(found), flush=True)


def measure(out: Path, ranks: int, seconds: float) -> dict[str, float]:
    """Bytes of a run with so many ranks."""
    sets = [word for change in RECIPE for word in ("--set", change)]
    words = ["train", "digits", *sets, "--out", str(out), "--workers", str(ranks), "--shares", "even"]
    process = subprocess.Popen([sys.executable, "-m", "torusgd", *words], stdout=subprocess.DEVNULL)
    try:
        while last_step(out) < 20:
            assert process.poll() is None, "ended early"
            time.sleep(0.1)
        store = store_port(process.pid)
        step, began, before = last_step(out), time.perf_counter(), traffic(process.pid, store)
        time.sleep(seconds)
        done, taken, after = last_step(out) - step, time.perf_counter() - began, traffic(process.pid, store)
    finally:
        process.terminate()
        process.wait()
    control, others = after[0] - before[0], after[1] - before[1]
    return {
        "ranks": ranks,
        "steps": done,
        "store_bytes_a_second": round(control / taken),
        "store_bytes_a_second_and_rank": round(control / taken / ranks),
        "store_bytes_a_step": round(control / done),
        "other_bytes_a_step": round(others / done),
    }


def store_port(launcher: int) -> int:
    """The port at which a run's launcher listens."""
    lines = subprocess.run(["ss", "-tlnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = [line for line in lines if f"pid={launcher}," in line]
    assert len(found) == 1, "the launcher listens at its store alone"
    return int(found[0].split()[3].rpartition(":")[2])


def processes(launcher: int) -> list[int]:
    """The launcher and all that it has started."""
    found = [launcher]
    for pid in found:
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(path.parent.name))
    return found


def traffic(launcher: int, store: int) -> tuple[int, int]:
    """Bytes that a run's processes have sent so far: on connections with the store, and on all others."""
    lines = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    owned = re.compile("|".join(f"pid={pid}," for pid in processes(launcher)))
    control = others = 0
    for ends, details in zip(lines[::2], lines[1::2], strict=True):
        if not owned.search(ends):
            continue
        here, there = (end.rpartition(":")[2] for end in ends.split()[3:5])
        count = re.search(r"bytes_sent:(\d+)", details)
        sent = int(count[1]) if count else 0
        if str(store) in (here, there):
            control += sent
        else:
            others += sent
    return control, others


if __name__ == "__main__":
    typer.run(main)

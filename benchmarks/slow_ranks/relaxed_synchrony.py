"""Cutoff where a rank pauses, and local steps on a slow link, each beside the synchronous run.

    .venv/bin/python -m benchmarks slow_ranks relaxed-synchrony pauses
    sudo .venv/bin/python -m benchmarks slow_ranks relaxed-synchrony slow-link

`pauses`: 4 ranks, 16 virtual workers, each of whose passes takes 40 ms more than its computation, so that ranks on few
cores don't wait for each other's. On rank 1 a pass sleeps 2 s more with probability 0.02, which nothing can end. The
journal of the cutoff is replayed on 1, 2, 3 and 5 ranks, which must give the same weights. Three runs of each, in turn.

`slow-link`: 4 emulated hosts, 100 Mb/s and 1 ms; the same updates of each virtual worker, with a message for each, and
with one for eight; each three times, in turn. Bytes are those that the kernel counted at the first host's interface.

Needs: root with `slow-link`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torusgd.models import MODELS
from torusgd.rehearse.lab import Host, Lab

from ..hosts import interface_bytes
from ..record import sample

ROOT = Path(__file__).parents[2]
PAUSES, PASS = "TORUSGD_BENCHMARK_PAUSES", "TORUSGD_BENCHMARK_PASS"
COMMON = ("--set", "evaluate.every=null", "--set", "polish=null", "--set", "model.options={}")
SMALL = (*COMMON, "--set", "virtual_workers=16", "--set", "stages=[{until: 52st, images_per_worker: 8}]")
CUTOFF = ("--set", "synchrony={form: cutoff, threshold: measured, warmup: 20}")
RUNS = 3
WARM = 22
"""steps before the ones that count: the warm-up, in which the threshold is measured"""


class Pausing(nn.Module):
    """digits-net whose training passes take longer, by what the environment says."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.net = MODELS["digits-net"](classes=classes, channels=channels)
        self._random = random.Random(os.environ.get("RANK"))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(float(os.environ.get(PASS, "0")))
            if os.environ.get(PAUSES) == os.environ.get("RANK", "-") and self._random.random() < 0.02:
                time.sleep(2.0)
        return self.net(images)


def run(words: list[str], out: Path, **environment: str) -> dict[str, Any]:
    """The summary of a run of the command line into `out`."""
    path = f"{ROOT}:{ROOT / 'src'}"
    told = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "torusgd", *words, "--out", str(out)],
        env=told,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return dict(json.loads((out / "summary.json").read_text()))


def step_seconds(out: Path, first: int) -> list[float]:
    """Of the steps from `first` on."""
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event["step_seconds"] for event in events if "event" not in event][first:]


def pauses(folder: Path) -> None:
    """One of four ranks pauses."""
    model = ("--set", "model.name=benchmarks.slow_ranks.relaxed_synchrony:Pausing")
    train = ["train", "digits", *model, *SMALL, "--workers", "4"]
    variants = {"synchronous": ((), ""), "synchronous, pauses": ((), "1"), "cutoff, pauses": (CUTOFF, "1")}
    times: dict[str, list[list[float]]] = {name: [] for name in variants}
    told: dict[str, dict[str, Any]] = {}
    for name in list(variants) * RUNS:  # in turn, so that other work on the machine meets all alike
        flags, paused = variants[name]
        out = folder / f"{name} {len(times[name])}"
        told[name] = run([*train, *flags], out, **{PASS: "0.04", PAUSES: paused})
        times[name].append(step_seconds(out, WARM))
        middle, mean, most = (1e3 * of(times[name][-1]) for of in (statistics.median, statistics.mean, max))
        print(f"{name}: median {middle:.0f}, mean {mean:.0f}, longest {most:.0f} ms", flush=True)
    assert told["synchronous"]["weights_sha256"] == told["synchronous, pauses"]["weights_sha256"]
    base = [statistics.mean(each) for each in times["synchronous"]]
    print(
        "| run | step: median ms | mean | longest | longest over the undisturbed mean |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for name, runs in times.items():
        cells = [[1e3 * statistics.median(each) for each in runs], [1e3 * statistics.mean(each) for each in runs],
                 [1e3 * max(each) for each in runs]]  # fmt: skip
        sample(f"{name}, mean ms a step", cells[1])
        ratios = [max(each) / one for each, one in zip(runs, base, strict=True)]
        print(f"| {name} | {' | '.join(spread(cell, 0) for cell in cells)} | {spread(ratios, 2)} |")
    for ranks in (1, 2, 3, 5):
        summary = run(["replay", str(out), "--workers", str(ranks)], folder / f"replay{ranks}")
        assert summary["weights_sha256"] == told["cutoff, pauses"]["weights_sha256"], ranks
        print(
            f"replay on {ranks} ranks: the same weights; {summary['steps'] / summary['seconds']:.1f} updates a second"
        )
    print(f"left out {summary['left_out_share']:.1%}; {summary['journal']['bytes_per_update']} bytes an update")


def spread(values: list[float], digits: int) -> str:
    """Median (least to most)."""
    low, middle, high = (f"{each:.{digits}f}" for each in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def slow_link(folder: Path) -> None:
    """Local steps beside synchronous ones on 100 Mb/s."""
    wide = ("--set", "model.options={dropout: 0.1, zero_gamma: true, width: 96}", "--set", "virtual_workers=4")
    rate = ("--set", "rate={lr: 0.05, decay: {shape: constant}}", "--set", "optimizer={name: sgd, momentum: 0.9}")
    usual = ("--set", "evaluate.every=null", "--set", "polish=null", *wide, *rate)
    variants = {
        "synchronous": ("--set", "stages=[{until: 48st, images_per_worker: 16}]"),
        "local, 8 steps": (
            "--set",
            "stages=[{until: 6st, images_per_worker: 128}]",
            "--set",
            "synchrony={form: local, local_steps: 8}",
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    told: dict[str, str] = {}
    for name in list(variants) * RUNS:  # in turn, so that other work on the machine meets both alike
        out = folder / f"{name} {len(seconds[name])}"
        with Lab([Host(latency=1e-3, rate=100e6)] * 4) as lab:
            words = ["-m", __name__, "inside", "train", "digits", "--out", str(out), *usual, *variants[name]]
            output = lab.run(words, timeout=300, environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"})[0]
        sent = json.loads(output.splitlines()[-1])
        summary = json.loads((out / "summary.json").read_text())
        seconds[name].append(sum(step_seconds(out, 0)))
        told[name] = f"{summary['steps']} | {sent / 1e6:.1f} | {summary['loss']:.3f}"
        print(f"{name}: {seconds[name][-1]:.1f} s", flush=True)
    print(
        "| run | messages | MB sent by rank 0 | loss at the end | seconds |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for name, times in seconds.items():
        sample(f"{name}, s", times)
        print(f"| {name} | {told[name]} | {spread(times, 1)} |")


def main() -> None:
    """One of the two, or a command of torusgd inside of a host of the lab."""
    if sys.argv[1:2] == ["inside"]:
        from torusgd.__main__ import main as torusgd

        sys.argv = ["torusgd", *sys.argv[2:]]
        try:
            torusgd()
        finally:
            print(interface_bytes()["tun0"], flush=True)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pauses", "slow-link"])
    with tempfile.TemporaryDirectory() as folder:
        {"pauses": pauses, "slow-link": slow_link}[parser.parse_args().what](Path(folder))


if __name__ == "__main__":
    main()

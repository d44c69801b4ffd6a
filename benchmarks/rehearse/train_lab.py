"""Steps of `torusgd train` on emulated hosts: Gloo's all_reduce beside `auto`, exact sums, runs in turn. Needs root.

    sudo .venv/bin/python -m benchmarks rehearse train-lab --hosts 8 --rounds 2

The digits recipe with a wider network (2.6 MiB of gradients), a virtual worker a host, 5 ms and 1 Gb/s. The time of a
step is rank 0's, as events.jsonl tells it, without those before the buckets are settled; hidden is the share of the
time with messages on their way that nobody waited. All runs must end with the same weights.

Needs: root, for the network lab.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from torusgd.gradients.reducer import REBUILD_STEPS
from torusgd.rehearse.lab import Host, Lab

from ..record import sample

VARIANTS = {
    "native, 4 MiB buckets": ("--allreduce", "native", "--buckets", "4.0"),
    "auto, 4 MiB buckets": ("--allreduce", "auto", "--buckets", "4.0"),
    "auto, buckets auto": ("--allreduce", "auto"),
}
WIDER = "model.options={dropout: 0.1, zero_gamma: true, width: 96}"
ROOT = Path(__file__).parents[2]


def train(hosts: list[Host], flags: Sequence[str], steps: int, folder: Path) -> tuple[list[float], float, str]:
    """Seconds of the steps, the share that was hidden, and the weights' hash of one run."""
    words = ["-m", "torusgd", "train", "digits", "--out", str(folder / "out"), "--max-steps", str(steps), *flags]
    words += ["--set", WIDER, "--set", f"virtual_workers={len(hosts)}"]
    with Lab(hosts) as lab:
        output = lab.run(words, timeout=300, environment={"PYTHONPATH": str(ROOT / "src")})[0]
    print(*[line for line in output.splitlines() if line.startswith(("allreduce", "buckets"))], sep="\n")
    events = [json.loads(line) for line in (folder / "out" / "events.jsonl").read_text().splitlines()]
    taken = [event for event in events if "event" not in event][REBUILD_STEPS[-1] + 1 :]
    shares = [event["hidden_share"] for event in taken]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return [event["step_seconds"] for event in taken], statistics.median(shares), summary["weights_sha256"]


def main(
    hosts: int = 8,
    rounds: int = 2,
    steps: int = 24,
) -> None:
    """Builds the lab for each run and shows the medians."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    hidden: dict[str, list[float]] = {name: [] for name in VARIANTS}
    hashes = set()
    for _ in range(rounds):
        for name, flags in VARIANTS.items():
            with tempfile.TemporaryDirectory() as folder:
                host = Host(latency=5e-3, rate=1e9)
                seconds, share, weights = train([host] * hosts, flags, steps, Path(folder))
            found[name] += seconds
            hidden[name].append(share)
            hashes.add(weights)
    assert len(hashes) == 1, hashes
    print(f"\n{hosts} hosts x 1 rank, 5 ms, 1 Gb/s, {rounds} runs of {steps} steps each\n")
    print("| step of | median ms | quartiles | n | native / it | hidden |", "|---|---|---|---|---|---|", sep="\n")
    plain = statistics.median(next(iter(found.values())))
    for name, times in found.items():
        sample(f"{hosts} hosts, {name}, ms a step", [1e3 * each for each in times])
        low, median, high = (1e3 * value for value in statistics.quantiles(times, n=4))
        print(
            f"| {name} | {median:.0f} | {low:.0f} - {high:.0f} | {len(times)} | {1e3 * plain / median:.2f} "
            f"| {statistics.median(hidden[name]):.0%} |"
        )


if __name__ == "__main__":
    typer.run(main)

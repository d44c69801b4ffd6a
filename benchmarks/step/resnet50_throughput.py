"""ResNet-50 at 224 px on this machine's CPU: a plain PyTorch script, the same tuned by hand, and torusgd.

    python -m benchmarks step resnet50-throughput --rounds 3 --batch 128

Four programs in turn, each a process (or two) of its own: a plain float32 loop with two threads; the same loop with
bfloat16 and channels-last; `torusgd train resnet50` on one worker; on two workers (one thread each). torusgd's virtual
workers have 16 images each; the loops take 32 at a time and accumulate. Synthetic images, made in advance for the
loops and by the loader for torusgd.
Prints images/s from the median step (the first two are left out), and the ratios.

Needs: nothing.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch.nn import functional as F
from typer import Option

from torusgd.models.networks import resnet50

from ..record import sample

PASS = 32
"""images of one forward pass of the loops"""
RECIPE = [
    "data.source=synthetic",
    "data.train_images=1000",
    "data.eval_images=4",
    "data.classes=1000",
    "data.augment={flip: 0.5}",
    "data.resize=null",
    "rate={lr: 0.1}",
    "precision=bfloat16",
    "evaluate={every: null, images_per_chunk: 4}",
    "polish=null",
    "target_top1=null",
]


def loop(tuned: bool, steps: int, batch: int) -> list[float]:
    """Seconds of each step of a hand-written loop on two threads."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    form = torch.channels_last if tuned else torch.contiguous_format
    model = resnet50(classes=1000, channels=3)
    model.to(memory_format=form)  # type: ignore[call-overload]  # torch does not declare memory_format here
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(PASS, 3, 224, 224).contiguous(memory_format=form)
    targets = torch.randint(0, 1000, (PASS,))
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(batch // PASS):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=tuned):
                loss = F.cross_entropy(model(images), targets)
            (loss / (batch // PASS)).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return times


def torusgd(workers: int, steps: int, batch: int) -> list[float]:
    """Seconds of each step of a run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        changes = [*RECIPE, f"virtual_workers={batch // 16}", f"stages=[{{until: {steps}st, images_per_worker: 16}}]"]
        flags = [word for change in changes for word in ("--set", change)]
        command = [sys.executable, "-m", "torusgd", "train", "resnet50", "--workers", str(workers), "--out", str(out)]
        subprocess.run([*command, "--checkpoint-every", "1000st", *flags], check=True, capture_output=True)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        return [event["step_seconds"] for event in events if "step_seconds" in event]


PROGRAMS = {
    "plain float32, 2 threads": lambda steps, batch: child("plain", steps, batch),
    "bfloat16, channels-last, 2 threads": lambda steps, batch: child("tuned", steps, batch),
    "torusgd, 1 worker": lambda steps, batch: torusgd(1, steps, batch),
    "torusgd, 2 workers": lambda steps, batch: torusgd(2, steps, batch),
}


def child(kind: str, steps: int, batch: int) -> list[float]:
    """The loop in a process of its own, as the runs of torusgd are."""
    command = [sys.executable, "-m", __name__, "--child", kind, "--steps", str(steps), "--batch", str(batch)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(
    rounds: int = 3,
    steps: Annotated[int, Option(help="steps a round; the first two are not counted")] = 6,
    batch: Annotated[int, Option(help=f"images a step, a multiple of {PASS}")] = PASS,
    child: Annotated[Literal["plain", "tuned"] | None, Option(hidden=True)] = None,
) -> None:
    if child:
        print(json.dumps(loop(child == "tuned", steps, batch)))
        return
    rates: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(rounds):
        for name, program in PROGRAMS.items():
            rates[name].append(batch / statistics.median(program(steps, batch)[2:]))
    print(f"ResNet-50, 224 px, batch {batch}, n = {rounds} rounds of {steps - 2} steps, images/s")
    for name, values in rates.items():
        sample(f"{name}, images/s", values)
        base = [b / p for b, p in zip(values, rates["plain float32, 2 threads"], strict=True)]
        print(f"  {name:36} {statistics.median(values):6.2f} ({min(values):.2f} to {max(values):.2f}), "
              f"{statistics.median(base):.2f}x the plain one")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

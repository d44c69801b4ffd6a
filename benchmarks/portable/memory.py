"""The peak of a training step's memory by portable arithmetic, over float32's: each in a process of its own.

    python -m benchmarks portable memory

The peak of resident memory during two steps, less what the process had before the network was made. A step of digits
comes before, which loads what all networks share, so that its own peak would mean nothing.

Needs: nothing.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
from typer import Option

from ..record import sample
from .cases import MODELS, Training, name_of

KINDS = ("float32", "portable")
_WARM = "digits"
NETWORKS = [name for name in MODELS if name != _WARM]


def resident(which: str) -> float:
    """MiB: now (VmRSS), or the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def peak(model: str, kind: str) -> float:
    """MiB of this process."""
    torch.set_num_threads(1)
    warm = Training(_WARM, kind)
    warm.step()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    training = Training(model, kind)
    for _ in range(2):
        training.step()
    return resident("VmHWM") - before


def main(
    model: Annotated[list[str] | None, Option(help=f"of {', '.join(NETWORKS)}; all by default")] = None,
    rounds: int = 3,
    kind: Annotated[str, Option(hidden=True)] = "",
) -> None:
    """Starts a process for each figure."""
    if kind:
        assert model
        print(json.dumps(peak(model[0], kind)))
        return
    for name in model or NETWORKS:
        found: dict[str, list[float]] = {each: [] for each in KINDS}
        for _ in range(rounds):
            for each in KINDS:
                words = [sys.executable, "-m", "benchmarks", "portable", "memory", "--model", name, "--kind", each]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                found[each].append(json.loads(done.stdout))
        low, high = (min(found[each]) for each in KINDS)
        print(f"{name_of(name)}: {low:.0f} MiB, portable {high:.0f} MiB, {high / low:.2f} times", flush=True)
        for each, values in found.items():
            sample(f"{name_of(name)}, {each}, MiB", values)

"""One optimizer step on ResNet-50's 161 parameters: our LARS beside torch's SGD and, from another environment, timm's.

    python -m benchmarks update lars-step --threads 2 --steps 30 --timm-python /path/to/env/bin/python

All take turns, a step each, on parameters and gradients of their own with the same groups: weight decay (and trust)
on weights, none on batch norm and bias. The ratio is that of the medians, against torch's SGD by foreach.

Needs: nothing; timm in another environment for its row.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

HYPER: dict[str, Any] = {"lr": 1e-6, "momentum": 0.9, "weight_decay": 1e-4}
Shapes = list[list[int]]


def groups(shapes: Shapes) -> list[dict[str, Any]]:
    """Weights and the rest, with gradients of a usual size."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.05) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape) * 1e-3
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]


def timed(step: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def serve_timm() -> None:
    """In the other environment: a line with the shapes comes in, and then a step and its time for each further line."""
    from timm import __version__
    from timm.optim.lars import Lars

    optimizer = Lars(groups(json.loads(input())), **HYPER)
    print(f"timm {__version__} Lars, torch {torch.__version__}", flush=True)
    for _ in sys.stdin:
        print(timed(optimizer.step), flush=True)


class Served:
    """A contestant in another environment."""

    def __init__(self, python: str, shapes: Shapes, threads: int) -> None:
        self.process = subprocess.Popen(
            [python, __file__, "--serve", "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        self.name = self.ask(json.dumps(shapes))

    def ask(self, line: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30, help="steps of each that count; 3 more come before")
    parser.add_argument("--timm-python", help="python of an environment with timm")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        return serve_timm()

    from torusgd.models.networks import resnet50
    from torusgd.optim import Lars, Sgd

    from ..record import sample

    shapes = [list(param.shape) for param in resnet50(classes=1000, channels=3).parameters()]
    lars_groups = groups(shapes)
    lars_groups[1]["trust"] = None
    ours: dict[str, torch.optim.Optimizer] = {
        f"torch {torch.__version__} SGD foreach": torch.optim.SGD(groups(shapes), **HYPER, foreach=True),
        f"torch {torch.__version__} SGD fused": torch.optim.SGD(groups(shapes), **HYPER, fused=True),
        "torusgd Sgd": Sgd(groups(shapes), **HYPER),
        "torusgd Lars": Lars(lars_groups, **HYPER),
    }
    contestants: dict[str, Callable[[], float]] = {
        name: partial(timed, optimizer.step) for name, optimizer in ours.items()
    }
    if options.timm_python:
        served = Served(options.timm_python, shapes, options.threads)
        contestants[served.name] = lambda: float(served.ask())
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(options.steps + 3):
        for name, step in contestants.items():
            # Threads of the one before may still spin for work.
            time.sleep(0.02)
            taken = step()
            if turn >= 3:
                times[name].append(taken)
    reference = statistics.median(times[next(iter(times))])
    print(
        f"{len(shapes)} tensors, {sum(map(torch.Size.numel, map(torch.Size, shapes))):,} parameters, "
        f"{options.threads} threads, {options.steps} steps each in turn"
    )
    print(f"{'':36}{'median':>10}{'quartiles':>18}{'ratio':>8}")
    for name, values in times.items():
        sample(f"{name}, ms", values)
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name:36}{median:8.1f} ms{f'{low:.1f} - {high:.1f}':>18}{median / reference:8.2f}")
    return None


if __name__ == "__main__":
    main()

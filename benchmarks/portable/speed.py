"""What a training step by portable arithmetic costs, in turn with float32's and bfloat16's, and its floor.

    python -m benchmarks portable speed --model resnet50 --rounds 5

One thread, its own clock, so that other work on the machine counts less. The floor is Python's dispatch: all operators
of a step on two images, recorded and called again one after the other, on the same tensors and without any rule
between them. The step on two images stands over it.
That is for the networks that it bounds, the small ones.

Needs: nothing.
"""

import statistics
import time
from typing import Annotated, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer import Option

from ..record import sample
from .cases import KINDS, MODELS, Training, name_of

FEW = 2
"""images"""
SMALL = "digits", "fashion"
"""whose steps Python bounds; their recorded operators leave tensors so that they can be called again"""
FEWS = 15
"""of the times on few images"""


class Recorded(TorchDispatchMode):
    """The operators that reach torch, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def again(self) -> None:
        """Calls them one after the other."""
        with torch.no_grad():
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)


def recorded(training: Training) -> Recorded:
    """A step; of portable arithmetic the operators that rules call."""
    with Recorded() as found:
        training.step()
    return found


def milliseconds(work: Any) -> float:
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e3


def show(words: str, values: list[float], base: float | None = None) -> None:
    middle = statistics.median(values)
    ratio = f", {middle / base:.2f} of float32's" if base else ""
    print(f"{words}: {middle:.1f} ({min(values):.1f} to {max(values):.1f}, n = {len(values)}){ratio}", flush=True)
    sample(words, values)


def measure(model: str, rounds: int) -> None:
    trainings = {kind: Training(model, kind) for kind in KINDS}
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 2):
        for kind, training in trainings.items():
            times[kind].append(milliseconds(training.step))
            if number < 2:  # the first steps try methods
                times[kind].clear()
    base = statistics.median(times["float32"])
    for kind, values in times.items():
        show(f"{name_of(model)}, {kind}, ms", values, base)
    del trainings
    if model in SMALL:
        measure_floor(model)


def measure_floor(model: str) -> None:
    few = Training(model, "portable", FEW)
    found = [milliseconds(few.step) for _ in range(FEWS + 2)][2:]
    calls = recorded(few)
    floor = statistics.median(milliseconds(calls.again) for _ in range(FEWS))
    outside = len(recorded(Training(model, "float32", FEW)).calls)
    show(f"{name_of(model)}, portable, {FEW} images alone, ms", found)
    print(
        f"  operators a step: {outside} of the network's, for which rules call {len(calls.calls)}; these alone take "
        f"{floor:.1f} ms, the step {statistics.median(found) / floor:.2f} times that",
        flush=True,
    )
    sample(f"{name_of(model)}, operators a step", [outside])
    sample(f"{name_of(model)}, operators within rules", [len(calls.calls)])
    sample(f"{name_of(model)}, floor, ms", [floor])


def main(
    model: Annotated[list[str] | None, Option(help=f"of {', '.join(MODELS)}; all by default")] = None,
    rounds: int = 5,
) -> None:
    """Prints and records."""
    torch.set_num_threads(1)
    for name in model or MODELS:
        measure(name, rounds)

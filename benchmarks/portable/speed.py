"""What a training step by portable arithmetic costs, in turn with float32's and bfloat16's, and its floor.

    python -m benchmarks portable speed --model resnet50 --rounds 5

One thread, its own clock, so that other work on the machine counts less. The floor is what the step's operators cost
without their data: those that the network calls, each by a dispatch mode that passes it on, and those that rules call
inside, each as one addition of two numbers. The step on a batch of two images is shown beside it.

Needs: nothing.
"""

import statistics
import time
from collections import Counter
from typing import Annotated, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer import Option

from ..record import sample
from .cases import KINDS, MODELS, Training, name_of

FEW = 2
"""images"""
CALLS = 1000


class Counted(TorchDispatchMode):
    """Counts the operators that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class PassedOn(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def calls_of(model: str, kind: str) -> int:
    """Operators of a step; by portable arithmetic those that rules call."""
    training = Training(model, kind, FEW)
    training.step()
    with Counted() as counted:
        training.step()
    return counted.calls.total()


def milliseconds(work: Any) -> float:
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e3


def microseconds_of_a_call(passed_on: bool) -> float:
    """Of an addition of two numbers."""
    a, b = torch.ones(2), torch.ones(2)

    def many() -> None:
        for _ in range(CALLS):
            torch.add(a, b)

    def few() -> float:
        if not passed_on:
            return milliseconds(many)
        with PassedOn():
            return milliseconds(many)

    return statistics.median(few() for _ in range(15)) * 1e3 / CALLS


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
    outside, inside = calls_of(model, "float32"), calls_of(model, "portable")
    call, passed_on = microseconds_of_a_call(False), microseconds_of_a_call(True)
    floor = (outside * (passed_on - call) + inside * call) / 1e3
    few = Training(model, "portable", FEW)
    values = [milliseconds(few.step) for _ in range(rounds + 2)][2:]
    show(f"{name_of(model)}, portable, {FEW} images alone, ms", values)
    middle = statistics.median(times["portable"])
    print(
        f"  operators a step: {outside}, of which rules make {inside}; one costs {call:.2f} us, one that Python passes "
        f"on {passed_on:.2f} us; floor {floor:.1f} ms, the step {middle / floor:.2f} of it",
        flush=True,
    )
    sample(f"{name_of(model)}, operators a step", [outside])
    sample(f"{name_of(model)}, operators within rules", [inside])
    sample(f"{name_of(model)}, floor, ms", [floor])


def main(
    model: Annotated[list[str] | None, Option(help=f"of {', '.join(MODELS)}; all by default")] = None,
    rounds: int = 5,
) -> None:
    """Prints and records."""
    torch.set_num_threads(1)
    for name in model or MODELS:
        measure(name, rounds)

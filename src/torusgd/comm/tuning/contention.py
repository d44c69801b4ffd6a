"""How much slower ranks compute while others compute, or while messages travel: they share cores, memory and power.

Two measurements of `tune`, with a small convolutional network as the work. They hold for whatever it is that ranks
share, so that a plan need not know it: eight ranks on two cores are found four times as slow as one, or slower.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ..algorithms import Algorithm
from ..base import Work
from ..connection import Connection, ranks_a_core
from .profile import Crowd, InStep

Start = Callable[[torch.Tensor], Work]
_TASKS = 4
"""number of tasks of a timing of crowding, some 100 ms on one core"""
_MESSAGES = 16
"""number of all-reduces among a computation, so that their cost stands out from the noise"""


class _Task:
    """Forward and backward of a few convolutions with batch norm, as records are made of."""

    def __init__(self, device: torch.device, images: int) -> None:
        self._images = torch.rand(images, 3, 32, 32, device=device)
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            for inputs, outputs in ((3, 32), (32, 32), (32, 64)):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self._network = nn.Sequential(*layers).to(device)

    def run(self, times: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # as a worker of a CPU recipe
        for _ in range(times):
            self._network(self._images).sum().backward()
        torch.set_num_threads(before)


def crowding(connection: Connection, repetitions: int) -> tuple[Crowd, ...]:
    """How many times longer the slowest of the first n ranks takes than one alone, for n = 2, 4, 8 ... and all.

    If n ranks have fewer cores it is at least their number over that of the cores, whatever was measured.
    """
    counts = sorted({*(1 << power for power in range(connection.size.bit_length())), connection.size})
    task = _Task(connection.engine.device, images=32)
    task.run(_TASKS)  # warms up
    # Ratios within a turn, and then their median: what slows the machine for a while slows all counts of a turn.
    turns = [[_compute(connection, task, _TASKS, count) for count in counts] for _ in range(repetitions)]
    ratios = [statistics.median(turn[i] / turn[0] for turn in turns) for i in range(len(counts))]
    on_cores = connection.engine.device.type == "cpu"
    least = [max(1.0, ranks_a_core(connection.group, count) if on_cores else 0.0) for count in counts]
    pairs = zip(counts[1:], ratios[1:], least[1:], strict=True)
    return tuple(Crowd(ranks=count, slowdown=max(ratio, bound)) for count, ratio, bound in pairs)


def in_step(connection: Connection, algorithm: Algorithm | None, size: int, seconds: float) -> InStep:
    """What an all-reduce of `size` bytes adds to a computation that hides it, and to one that it follows.

    Every rank computes and starts an all-reduce now and then, as backward does with buckets; they end while it still
    computes. The time that they add is divided among them. It is little if cores are free, or a GPU sends; if ranks
    share cores it may be more than the all-reduce takes alone, for each message interrupts each rank. Then the same
    with ranks that wait for each message, at which they arrive one later than the other. `seconds` is the time for
    computations without, with and between all-reduces in turn, 1 to 9 of each.
    """
    task = _Task(connection.engine.device, images=4)
    tensors = [torch.zeros(max(1, size // 4), device=connection.engine.device) for _ in range(_MESSAGES)]
    start: Start = partial(connection.engine.run, algorithm=algorithm)
    _between(connection, start, tensors, task, _MESSAGES)
    # The least of three: a pause of the machine in the only one would make all that follows as much longer.
    at_once = min(_beside(connection, start, tensors, task, 0) for _ in range(3))
    one = _compute(connection, task, _MESSAGES, connection.size) / _MESSAGES
    # Twice as long as the messages take at once, so that the second half of the computation still hides the last one.
    tasks = _MESSAGES * max(2, math.ceil(2 * at_once / one / _MESSAGES))
    rows: list[tuple[float, float, float]] = []
    while not rows or (len(rows) < 9 and sum(map(sum, rows)) < seconds):
        alone = _compute(connection, task, tasks, connection.size)
        beside, between = (run(connection, start, tensors, task, tasks) for run in (_beside, _between))
        rows.append((alone, beside, between))
    alone, beside, between = (statistics.median(column) for column in zip(*rows, strict=True))
    hidden, waited = (max(0.0, added - alone) / _MESSAGES for added in (beside, between))
    return InStep(size=size, hidden=hidden, waited=waited)


def _compute(connection: Connection, task: _Task, tasks: int, count: int) -> float:
    """Seconds of the slowest of the first `count` ranks, the same number everywhere."""

    def compute() -> None:
        if connection.rank < count:
            task.run(tasks)

    return connection.slowest([connection.stopwatch(compute)])[0]


def _beside(connection: Connection, start: Start, tensors: Sequence[torch.Tensor], task: _Task, tasks: int) -> float:
    """Seconds of so many tasks and all-reduces that begin during the first half, on the slowest rank."""
    before_each = tasks // 2 // len(tensors)

    def compute() -> None:
        sent = []
        for tensor in tensors:
            task.run(before_each)
            sent.append(start(tensor))
        task.run(tasks - len(tensors) * before_each)
        for message in sent:
            message.wait()

    return connection.slowest([connection.stopwatch(compute)])[0]


def _between(connection: Connection, start: Start, tensors: Sequence[torch.Tensor], task: _Task, tasks: int) -> float:
    """Seconds of as many tasks before each all-reduce, which is waited for, on the slowest rank."""

    def compute() -> None:
        for tensor in tensors:
            task.run(tasks // len(tensors))
            start(tensor).wait()

    return connection.slowest([connection.stopwatch(compute)])[0]

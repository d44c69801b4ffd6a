"""Which rank is slow, and why: an all-reduce makes every rank as slow as the last one, and hides which it was.

So each rank notes when its gradients were ready, counted from the end of its own previous all-reduce, before it waits
for anyone. Every so many steps these notes travel in the step's control vector, each rank's at an index of its own.

Where the network is to blame, the all-reduce is as slow on every rank, whoever's link it is. So small messages to the
next rank and back are timed now and then, off the step's path: a rank with a slow link is slow in both pairs that it
belongs to; its neighbours are so in one.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.groups import Group
from ..gradients.reducer import Reducer
from .control_vector import ControlVector
from .watch import NO_WORDS, StepView, StepWatch

EVERY = 10
"""steps from one comparison to the next; of more than 100 ranks a tenth of their number"""
_FIELDS = 5
"""of a rank's notes"""
UNIT = 1e-6
"""seconds; notes travel as integers"""
_BYTES = 1 << 16
_TRIPS = 3
"""Round trips of a probe; the minimum is used, since the first may wait for a slow peer."""
_PATIENCE = 600.0
"""Timeout in seconds of a probe; a neighbour that does not answer is not probed again."""
_CLEAR = 1.5
"""a link that takes so many times the median is to blame"""


@dataclass(frozen=True)
class Straggler:
    """The rank whose gradients were ready last, or whose link is slow."""

    rank: int
    behind: float
    """seconds after the median rank, or of the link beyond the median link"""
    cause: str
    """what took the most time that others did not need: data, compute, or network (waiting after all were ready)"""


class Stragglers(StepWatch):
    """Notes of this rank's times, to be compared with those of all ranks.

    Args:
        index: Of this rank among all.
        size: Number of ranks.
        reducer: Sums the gradients of the steps.
        data_seconds: How long this rank has waited for images in a step.
        probe: Of this rank's link; None if nothing can be compared: of two ranks nobody can say whose is slow.
    """

    name = "timings"

    def __init__(
        self,
        index: int,
        size: int,
        reducer: Reducer,
        data_seconds: Callable[[], float],
        probe: "LinkProbe | None" = None,
    ) -> None:
        self._index, self._size, self._probe = index, size, probe
        self._reducer, self._data_seconds = reducer, data_seconds
        self._every = steps_between_notes(size)
        self.words = size * _FIELDS
        self._noted: Callable[[], list[float]] | None = None
        self._last_end = time.perf_counter()

    def due(self, step: int) -> bool:
        """Whether the ranks compare their notes in this step."""
        return self._size > 1 and step % self._every == 0

    def before_send(self, view: StepView) -> Tensor:
        """This rank's notes of the step before, at its index among all."""
        # After a resume there is no step before yet, on no rank.
        if self._noted is None or not self.due(view.step.index):
            return NO_WORDS
        notes = torch.zeros(self._size, _FIELDS, dtype=torch.int64)
        notes[self._index] = torch.tensor([int(note / UNIT) for note in self._noted()])
        return notes.reshape(-1)

    def before_accept(self, view: StepView, control: ControlVector) -> None:
        """Notes the times of the step, whose all-reduce has just ended."""
        begin, end, reducer, data_seconds = self._last_end, time.perf_counter(), self._reducer, self._data_seconds()
        first, last = reducer.first_ready, reducer.last_ready
        link = self._probe.seconds if self._probe is not None else 0.0
        # Called a step later, when a GPU has surely come there.
        self._noted = lambda: [first() - begin, last() - begin, data_seconds, end - begin, link]
        self._last_end = end
        reducer.clock.set()
        # Half-way between two notes: the probe's own messages must not delay the step that compares.
        if self._probe is not None and view.step.index % self._every == self._every // 2:
            self._probe.measure()

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        return {"slowest": slowest(control.section(self.name), view.membership.ranks)}

    def close(self) -> None:
        """Ends what probes the links; every rank calls it."""
        if self._probe is not None:
            self._probe.close()


def steps_between_notes(size: int) -> int:
    """Steps from one comparison of so many ranks to the next: notes grow with their number, a step's part must not."""
    return max(EVERY, size // 10)


def slowest(message: Tensor, ranks: Sequence[int]) -> Straggler | None:
    """Compares the notes of all ranks; None without notes.

    Args:
        message: int64 [ranks * _FIELDS], the sections of all ranks, summed.
        ranks: In the order of their indices.
    """
    if not message.numel():
        return None
    _, ready, data, total, links = (message.view(-1, _FIELDS).double() * UNIT).unbind(dim=1)
    rank = int(ready.argmax())
    compute = ready - data
    excess = {
        "data": float(data[rank] - data.median()),
        "compute": float(compute[rank] - compute.median()),
        "network": float(total.median() - ready.max()),
    }
    cause = max(excess, key=lambda key: excess[key])
    behind = float(ready[rank] - ready.median())
    if cause == "network" and (culprit := slow_link(links.tolist())) is not None:
        rank, behind = culprit, float(links[culprit] - links.median())
    return Straggler(ranks[rank], behind, cause)


class LinkProbe:
    """Times this rank's round trips in a thread and connections of its own; every rank makes one, at the same time.

    Each rank is connected with the next and the one before only: a probe of N ranks opens N connections in all.

    Args:
        world: All ranks.
    """

    def __init__(self, world: Group) -> None:
        self._rank, self._size = world.rank, world.size
        # Each rank is in one pair a turn, so that what is measured is that pair alone.
        pairs = [[rank, (rank + 1) % self._size] for rank in range(self._size)]
        turns = [[pair for pair in pairs if self._turn(pair[0]) == turn] for turn in range(3)]
        self._groups = [world.partition(turn, timeout=_PATIENCE, device=torch.device("cpu")) for turn in turns if turn]
        self.seconds = 0.0
        """there and back, of the last measurement that ended; 0: none has"""
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="torusgd-link-probe")
        self._thread.start()

    def measure(self) -> None:
        """Begins a measurement; every rank calls it after the same step."""
        self._asked.put(True)

    def close(self) -> None:
        """Ends the thread; every rank calls it.

        First it makes the measurement that has begun: a neighbour that has begun waits for this rank's part.
        """
        self._asked.put(False)
        self._thread.join()
        for group in self._groups:
            group.close()

    def _serve(self) -> None:
        with suppress(RuntimeError):  # a neighbour is lost: the step's own messages find it
            while self._asked.get():
                self.seconds = self._measure()

    def _measure(self) -> float:
        seconds = 0.0
        for turn, group in enumerate(self._groups):
            if group.size == 1:
                continue
            if self._turn(self._rank) == turn:
                seconds = self._ask(group)
            else:
                self._answer(group)
        return seconds

    def _turn(self, rank: int) -> int:
        """Of the pair of a rank and the next one."""
        return 2 if self._size % 2 and rank == self._size - 1 else rank % 2

    def _ask(self, group: Group) -> float:
        load, replies, peer = torch.zeros(_BYTES, dtype=torch.uint8), torch.zeros(_TRIPS), 1 - group.rank
        received = [group.receive(reply, peer) for reply in replies.split(1)]
        times = []
        for reply in received:
            begin = time.perf_counter()
            group.send(load, peer).wait()
            reply.wait()
            times.append(time.perf_counter() - begin)
        return min(times)

    def _answer(self, group: Group) -> None:
        loads, peer = torch.zeros(_TRIPS, _BYTES, dtype=torch.uint8), 1 - group.rank
        for load in [group.receive(load, peer) for load in loads.unbind()]:
            load.wait()
            group.send(torch.zeros(1), peer).wait()


def slow_link(seconds: Sequence[float]) -> int | None:
    """The rank whose link is slow, from all ranks' seconds to the next one and back; None where none stands out.

    >>> slow_link([0.01, 0.05, 0.06, 0.01])
    2
    """
    if len(seconds) < 3 or min(seconds) <= 0:
        return None
    both = [min(seconds[rank - 1], seconds[rank]) for rank in range(len(seconds))]
    worst = max(range(len(both)), key=lambda rank: both[rank])
    return worst if both[worst] > _CLEAR * sorted(both)[len(both) // 2] else None

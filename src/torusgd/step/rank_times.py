"""The ranks' times compared: which rank is slow, and why; and shares that follow the ranks' speed.

Every so many steps these times travel in the step's control vector: every rank finds the same from the same numbers.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..comm.groups import Group
from ..gradients.reducer import Reducer
from ..recipe.schedule import best_counts, even_counts, slowest_rank
from .control_vector import NO_WORDS, ControlVector
from .membership import Membership, with_counts
from .watch import StepView, StepWatch

# Steps from one comparison to the next; of more than 100 ranks a tenth of their number: notes grow with their number, a
# step's part must not.
EVERY = 10
# Seconds: notes travel as integers.
_UNIT = 1e-6
_BYTES = 1 << 16
# Round trips of a probe; the minimum is used, since the first may wait for a slow peer.
_TRIPS = 3
# Timeout in seconds of a probe; a neighbour that does not answer is not probed again.
_PATIENCE = 600.0
# A link that takes so many times the median is to blame.
_CLEAR = 1.5
# Fraction of the time that the slowest rank computes; for less nothing is moved.
LEAST_GAIN = 0.05
# Comparisons without a move after one that made no step shorter; twice as many after each further one.
REST = 8
# Ranks whose shares stand in a line.
_MOST_SHOWN = 16
# Steps since the last comparison, of which a rank's speed can be measured in two halves.
_FEWEST = 6
# Times the median of the ranks; from there on a rank counts as slow.
SLOW = 1.2


class _Notes(StepWatch):
    """A watcher that compares `fields` times of each rank every so many steps, if there are several ranks."""

    def __init__(self, index: int, size: int, fields: int) -> None:
        self._index, self._size, self._fields = index, size, fields
        self._every, self.words = max(EVERY, size // 10), size * fields

    def due(self, step: int) -> bool:
        return self._size > 1 and step % self._every == 0

    def _section(self, seconds: Sequence[float]) -> Tensor:
        notes = torch.zeros(self._size, self._fields, dtype=torch.int64)
        notes[self._index] = torch.tensor([int(each / _UNIT) for each in seconds])
        return notes.reshape(-1)


class LinkProbe:
    """Times this rank's round trips in a thread and connections of its own; every rank makes one, at the same time."""

    # Each rank is connected with the next and the one before only: a probe of N ranks opens N connections in all.
    # If the network is to blame, the all-reduce is as slow on every rank, whoever's link it is. So small messages to
    # the next rank and back are timed now and then, off the step's path: a rank with a slow link is slow in both pairs
    # that it belongs to; its neighbours are so in one.

    def __init__(self, world: Group) -> None:
        self._rank, self._size = world.rank, world.size
        # Each rank is in one pair a turn, so that what is measured is that pair alone.
        pairs = [[rank, (rank + 1) % self._size] for rank in range(self._size)]
        turns = [[pair for pair in pairs if self._turn(pair[0]) == turn] for turn in range(3)]
        self._groups = [world.partition(turn, timeout=_PATIENCE, device=torch.device("cpu")) for turn in turns if turn]
        # There and back, of the last measurement that ended; 0: none has.
        self.seconds = 0.0
        self._requested: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="torusgd-link-probe")
        self._thread.start()

    def measure(self) -> None:
        """Begins a measurement; every rank calls it after the same step."""
        self._requested.put(True)

    def close(self) -> None:
        # First the measurement that has begun is made: a neighbour that has begun waits for this rank's part.
        self._requested.put(False)
        self._thread.join()
        for group in self._groups:
            group.close()

    def _serve(self) -> None:
        with suppress(RuntimeError):  # a neighbour is lost: the step's own messages find it
            while self._requested.get():
                for turn, group in enumerate(self._groups):
                    if group.size > 1 and self._turn(self._rank) == turn:
                        self.seconds = self._ping(group)
                    elif group.size > 1:
                        self._answer(group)

    def _turn(self, rank: int) -> int:
        return 2 if self._size % 2 and rank == self._size - 1 else rank % 2

    def _ping(self, group: Group) -> float:
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


@dataclass(frozen=True)
class Straggler:
    """The rank whose gradients were ready last, or whose link is slow."""

    rank: int
    behind: float  # seconds after the median rank, or of the link beyond the median link
    cause: str  # what took the most time that others did not need: data, compute, network (waits after all were ready)


class Stragglers(_Notes):
    """Finds the slowest rank of the step before, from what each knows of itself; without `probe` no slow links."""

    # An all-reduce makes every rank as slow as the last one, and hides which it was. So each rank notes when its
    # gradients were ready, counted from the end of its own previous all-reduce, before it waits for anyone.
    name = "timings"
    FIELDS = 5

    def __init__(
        self, index: int, size: int, reducer: Reducer, data_seconds: Callable[[], float], probe: LinkProbe | None = None
    ) -> None:
        super().__init__(index, size, self.FIELDS)
        self._reducer, self._data_seconds, self._probe = reducer, data_seconds, probe
        self._noted: Callable[[], list[float]] | None = None
        self._last_end = time.perf_counter()

    def before_send(self, view: StepView) -> Tensor:
        # After a resume there is no step before yet, on no rank.
        if self._noted is None or not self.due(view.step.index):
            return NO_WORDS
        return self._section(self._noted())

    def before_accept(self, view: StepView, control: ControlVector) -> None:
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
        if self._probe is not None:
            self._probe.close()


def slowest(message: Tensor, ranks: Sequence[int]) -> Straggler | None:
    """Compares the notes of all ranks, in the order of their indices: int64 [ranks * 5]; None without notes."""
    if not message.numel():
        return None
    _, ready, data, total, links = (message.view(-1, Stragglers.FIELDS).double() * _UNIT).unbind(dim=1)
    rank = int(ready.argmax())
    behind = float(ready[rank] - ready.median())
    excess = {name: float((each - each.median())[rank]) for name, each in (("data", data), ("compute", ready - data))}
    excess["network"] = float(total.median() - ready.max())
    cause = max(excess, key=lambda key: excess[key])
    if cause == "network" and (culprit := slow_link(links.tolist())) is not None:
        rank, behind = culprit, float(links[culprit] - links.median())
    return Straggler(ranks[rank], behind, cause)


def slow_link(seconds: Sequence[float]) -> int | None:
    """The index of the rank whose link stands out as slow, from all ranks' seconds to the next one and back."""
    if len(seconds) < 3 or min(seconds) <= 0:
        return None
    both = [min(seconds[rank - 1], seconds[rank]) for rank in range(len(seconds))]
    worst = max(range(len(both)), key=lambda rank: both[rank])
    return worst if both[worst] > _CLEAR * sorted(both)[len(both) // 2] else None


@dataclass(frozen=True)
class Move:
    """Other shares, from the next step on."""

    membership: Membership
    moved: int
    gain: float  # fraction of the time that the slowest rank computed, which should be saved
    is_back: bool = False  # to the shares before a move that saved nothing

    def __str__(self) -> str:
        counts = self.membership.counts
        shown = "/".join(map(str, counts)) if len(counts) <= _MOST_SHOWN else f"{min(counts)} to {max(counts)}"
        if self.is_back:
            return f"shares go back to {shown} virtual workers: the others made no step shorter"
        return f"shares follow the ranks' speed: now {shown} virtual workers, compute {self.gain:.0%} shorter"


@dataclass(frozen=True)
class Balance:
    """What all ranks know of their speed at a time, and what follows; the same on every rank."""

    seconds: dict[int, float]  # of a virtual worker lately, by rank
    saved: float  # seconds that the present shares have saved in these steps, against even ones
    move: Move | None

    @property
    def slow(self) -> dict[int, float]:
        """The slow ranks, and how many times the median a virtual worker takes them."""
        middle = median(self.seconds.values())
        return {rank: round(each / middle, 2) for rank, each in self.seconds.items() if each >= SLOW * middle}


class SpeedWatch(_Notes):
    """Measures how fast the ranks are, and finds the shares that fit; `speed` is that of `StepClock`."""

    # Any rank can compute any virtual worker with the same bits, so shares are free to change between two steps: a slow
    # rank computes fewer virtual workers, and the others wait less for it. Each rank measures how long a virtual worker
    # takes it, without what it waits for messages.
    name = "speeds"

    def __init__(self, index: int, size: int, speed: Callable[[], Callable[[], float]]) -> None:
        super().__init__(index, size, fields=2)
        self._speed = speed
        self._seconds: list[Callable[[], float]] = []
        # Of the last move, until it is judged: its stage, the shares before it, and how long the slowest rank computed.
        self._tried: tuple[int, tuple[int, ...], float] | None = None
        self._rest, self._next_rest = 0, REST

    def after_passes(self, view: StepView) -> None:
        if self._size > 1:
            self._seconds.append(self._speed())

    def before_send(self, view: StepView) -> Tensor:
        # After a resume there are no steps yet, on no rank.
        if not self._seconds or not self.due(view.step.index):
            return NO_WORDS
        # Read only now, when a GPU has surely done those passes.
        seconds, self._seconds = [each() for each in self._seconds], []
        if len(seconds) < _FEWEST:
            return self._section([0.0, 0.0])
        # Noise must not move work to and fro: two times, of the earlier and of the later half of the steps since the
        # last message, each a median, since a pause in one step says nothing of the rank's speed.
        half = len(seconds) // 2
        return self._section([median(seconds[:half]), median(seconds[half:])])

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        section = control.section(self.name)
        if not section.numel() or int(section.min()) == 0:  # a rank has not been measured
            return {}
        earlier, later = (section.view(-1, 2).double() * _UNIT).T.tolist()
        found = balance(view.membership, earlier, later, self._every)
        move = self._worth(found.move, view, slowest_rank(view.membership.counts, later))
        return {"balance": replace(found, move=move)}

    def _worth(self, move: Move | None, view: StepView, seconds: float) -> Move | None:
        """A move, unless the last one has made no step shorter: then back, and none for a while."""
        # Where images come slower than they are needed, a rank with fewer virtual workers finds them there and seems
        # quick, and one with more seems slow. Work that followed that would go to and fro, and every step be longer.
        tried, self._tried, self._rest = self._tried, None, max(0, self._rest - 1)
        stage, counts, before = tried or (-1, (), 0.0)
        if stage == view.step.stage and seconds > (1 - LEAST_GAIN) * before:
            self._rest, self._next_rest = self._next_rest, 2 * self._next_rest
            return move_to(view.membership, counts, 1 - before / seconds, is_back=True)
        if self._rest:
            return None
        if move is not None:
            self._tried = view.step.stage, view.membership.counts, seconds
        return move


def balance(membership: Membership, earlier: Sequence[float], later: Sequence[float], steps: int) -> Balance:
    """Compares a virtual worker's seconds by rank, in two halves of so many steps, and finds better shares.

    >>> from torusgd.step.membership import even_shares
    >>> found = balance(even_shares([0, 1, 2], me=0, virtual_workers=12), [1, 1, 2], [1, 1, 2], steps=10)
    >>> found.move.membership.counts, found.move.gain
    ((5, 5, 2), 0.375)
    """
    now, workers = membership.counts, sum(membership.counts)
    even, best, move = even_counts(workers, len(now)), best_counts(workers, later), None
    # Work moves only if the new sizes would have made the steps of both halves shorter, and clearly so.
    if all(slowest_rank(best, each) <= (1 - LEAST_GAIN) * slowest_rank(now, each) for each in (earlier, later)):
        move = move_to(membership, best, 1 - slowest_rank(best, later) / slowest_rank(now, later))
    seconds = dict(zip(membership.ranks, later, strict=True))
    return Balance(seconds, steps * (slowest_rank(even, later) - slowest_rank(now, later)), move)


def move_to(membership: Membership, counts: Sequence[int], gain: float, is_back: bool = False) -> Move:
    moved = sum(max(0, new - old) for old, new in zip(membership.counts, counts, strict=True))
    return Move(with_counts(membership, counts), moved, gain, is_back)

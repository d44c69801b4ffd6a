"""What one rank does in a step, as a list: compute for so long, start a message, wait for a message.

A plan walks the list with the formulas of the network; a rehearsal (`torusgd.rehearse`) walks the same list with real
messages and timed waits. By symmetry one rank's list stands for all.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple, get_args

from .cluster import Cluster, Communication
from .network import Axis, Phase, axis_sum, halves, phases

Kind = Literal["sum", "scatter", "gather"]
Content = Literal["gradients", "weights", "statistics", "activations"]
CONTENTS: tuple[Content, ...] = get_args(Content)


class Compute(NamedTuple):
    """The device works for so many seconds."""

    seconds: float


class Send(NamedTuple):
    """A message leaves: a sum over ranks, or its first or second half (reduce-scatter, all-gather)."""

    name: str
    """of its own in the step"""
    kind: Kind
    content: Content
    bytes: float
    """of the whole tensor, before it is cut into shards"""
    members: int | None = None
    """ranks of a group that exchange among themselves; None: all"""
    apart: int = 1
    """how far the members are from each other"""


class Wait(NamedTuple):
    """Until that message has arrived; nothing where this step or the one before has not sent it."""

    name: str


Action = Compute | Send | Wait
Price = Callable[[Send], Sequence[Phase]]


def price_of(cluster: Cluster, how: Communication, devices: int, message: Send) -> tuple[Phase, ...]:
    """The parts of a message by the formulas of the network."""
    if message.members is None:
        whole = phases(cluster, how, devices, message.bytes)
    else:
        whole = axis_sum(cluster, how, Axis(message.members, message.apart), message.bytes)
    return whole if message.kind == "sum" else halves(whole)[0 if message.kind == "scatter" else 1]


def compute_seconds(actions: Sequence[Action]) -> float:
    """Seconds of the step without any waiting."""
    return sum(action.seconds for action in actions if isinstance(action, Compute))


def waited_seconds(actions: Sequence[Action], price: Price, pipelined: bool) -> float:
    """Seconds by which messages make a step longer, by the formulas: the exposed communication.

    Steps follow each other, so that what a step leaves on its way may hide behind the next one.

    Args:
        actions: Of a step.
        price: The parts of a message, each of which keeps an axis busy.
        pipelined: Messages on different axes travel at the same time; else each has the whole network to itself.
    """
    line = _Line(price, pipelined)
    ends = [0.0]
    for _ in range(3):
        now = ends[-1]
        for action in actions:
            match action:
                case Compute(seconds):
                    now += seconds
                case Send():
                    line.send(action, now)
                case Wait(name):
                    now = max(now, line.arrival(name))
        ends.append(now)
    return max(0.0, ends[-1] - ends[-2] - compute_seconds(actions))


class _Line:
    """Messages on their way: past its latency an axis serves one of them at a time, in the order of arrival."""

    def __init__(self, price: Price, pipelined: bool) -> None:
        self._price, self._pipelined = price, pipelined
        self._waiting: list[tuple[float, int, int, str, Sequence[Phase]]] = []
        self._free: dict[str, float] = {}
        self._arrived: dict[str, float] = {}
        self._on_the_way: set[str] = set()
        self._numbers = count()

    def send(self, message: Send, now: float) -> None:
        parts = self._price(message)
        if not self._pipelined:
            parts = [Phase("all", sum(phase.seconds for phase in parts), sum(phase.latency for phase in parts))]
        self._arrived[message.name] = now
        if parts:
            self._on_the_way.add(message.name)
            heappush(self._waiting, (now, next(self._numbers), 0, message.name, parts))

    def arrival(self, name: str) -> float:
        """When the message is there; those sent later can't delay it, for they are sent after that."""
        while name in self._on_the_way:
            now, number, part, owner, parts = heappop(self._waiting)
            axis, seconds, latency = parts[part]
            end = max(now + latency, self._free.get(axis, 0.0)) + seconds - latency
            self._free[axis] = end
            if part + 1 < len(parts):
                heappush(self._waiting, (end, number, part + 1, owner, parts))
            else:
                self._arrived[owner] = end
                self._on_the_way.discard(owner)
        return self._arrived.get(name, 0.0)

"""Runs routes over a Gloo group: point-to-point messages between CPU tensors, in the background.

A Gloo send waits until the receiver has announced its buffer; so all receives of an all-reduce are posted when it
starts, and every round but the first costs one latency instead of two. Messages carry tags that both sides derive from
the order of calls, so several all-reduces, and the chunks of one, are on their way at the same time.
"""

import queue
import threading
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from .algorithms import Algorithm
from .base import CommTimeout, ConnectionLost, Work
from .rounds import Message, Round

LANES = 2
"""threads that carry messages; an all-reduce stays in one lane, so that a short one need not wait for a long one"""
_PLANS_KEPT = 256
_TRIPS = 1 << 12
_TAGS = 1 << 18
"""tags a trip: two for each round of each chunk; trips that are on their way together have different ones"""


class _Turn(NamedTuple):
    """Receives of one chunk's round, then the sends of its next one; messages with their tags."""

    chunk: int
    adds: tuple[tuple[Message, int], ...]
    copies: tuple[tuple[Message, int], ...]
    rewrites: bool
    """adds to what the round itself sent"""
    sends: tuple[tuple[Message, int], ...]


def _tagged(messages: tuple[Message, ...], base: int) -> tuple[tuple[Message, int], ...]:
    """Two messages of a round between the same ranks (a run of blocks that wraps) keep their order by tag."""
    seen: dict[int, int] = {}
    tagged = []
    for message in messages:
        nth = seen[message.peer] = seen.get(message.peer, -1) + 1
        tagged.append((message, base + nth))
    return tuple(tagged)


def _weave(routes: list[list[Round]]) -> list[_Turn]:
    """The turns of all chunks in one order, the same on every rank: round r of chunk c belongs to wave r + c.

    The common order keeps ranks that wait for each other from waiting in a circle.
    """
    rounds, chunks = len(routes[0]), len(routes)
    assert 2 * (rounds + 2) * chunks <= _TAGS
    turns = []
    for wave in range(-1, rounds + chunks - 1):
        for chunk, route in enumerate(routes):
            now = wave - chunk
            if not -1 <= now < rounds:
                continue
            done = route[now] if now >= 0 else Round()
            following = route[now + 1] if now + 1 < rounds else Round()
            base = 2 * ((now + 1) * chunks + chunk)
            rewrites = any(s.low < a.high and a.low < s.high for s in done.sends for a in done.adds)
            adds, copies = _tagged(done.adds, base), _tagged(done.copies, base)
            turn = _Turn(chunk, adds, copies, rewrites, _tagged(following.sends, base + 2 * chunks))
            if turn.adds or turn.copies or turn.sends:
                turns.append(turn)
    return turns


class _Trip:
    """One tensor on its way, all its receives posted."""

    def __init__(self, engine: "GlooEngine", tensor: torch.Tensor, turns: list[_Turn], tag: int) -> None:
        self._engine, self._tensor, self._turns, self._tag = engine, tensor, turns, tag
        self._finished = threading.Event()
        self._error: Exception | None = None
        self._ended = 0.0
        elements = sum(m.high - m.low for turn in turns for m, _ in turn.adds)
        scratch = torch.empty(elements, dtype=tensor.dtype)
        free = 0
        self._received: list[list[tuple[dist.Work, torch.Tensor | None, torch.Tensor]]] = []
        for turn in turns:
            received: list[tuple[dist.Work, torch.Tensor | None, torch.Tensor]] = []
            for message, nth in turn.adds:
                target = scratch[free : free + message.high - message.low]
                free += target.numel()
                received.append((engine.receive(target, message.peer, tag + nth), target, self._piece(message)))
            for message, nth in turn.copies:
                # Safe before our own turn: a final piece can't come before what we sent of it has arrived.
                piece = self._piece(message)
                received.append((engine.receive(piece, message.peer, tag + nth), None, piece))
            self._received.append(received)

    def _piece(self, message: Message) -> torch.Tensor:
        return self._tensor[message.low : message.high]

    def run(self) -> None:
        """Carries the messages, in a lane."""
        try:
            self._go()
        except Exception as error:
            self._error = error
        self._received = []
        self._ended = time.perf_counter()
        self._finished.set()

    def _go(self) -> None:
        sent: dict[int, list[dist.Work]] = {turn.chunk: [] for turn in self._turns}
        for turn, received in zip(self._turns, self._received, strict=True):
            if turn.rewrites:
                while sent[turn.chunk]:
                    sent[turn.chunk].pop().wait()
            for work, scratch, piece in received:
                work.wait()
                if scratch is not None:
                    piece.add_(scratch)
            sent[turn.chunk] += [self._engine.send(self._piece(m), m.peer, self._tag + nth) for m, nth in turn.sends]
        for works in sent.values():
            for work in works:
                work.wait()

    def wait(self, limit: float | None = None) -> None:
        if not self._finished.wait(limit):
            raise CommTimeout("no answer in time")
        if self._error is not None:
            raise ConnectionLost(f"all-reduce failed: {self._error}") from self._error

    def done(self) -> bool:
        return self._finished.is_set()

    def ended(self) -> float | None:
        return self._ended


class GlooEngine:
    """Carries messages between the ranks of a Gloo group that nothing else sends in.

    Every rank makes the same calls in the same order. A message that takes longer than the group's timeout makes `wait`
    raise, and the engine is of no more use.
    """

    device = torch.device("cpu")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._woven: dict[tuple[Algorithm, int], list[_Turn]] = {}
        self._started = 0
        self._lanes = [queue.SimpleQueue[_Trip | None]() for _ in range(LANES)]
        self._threads = [threading.Thread(target=_work, args=(lane,), daemon=True) for lane in self._lanes]
        for thread in self._threads:
            thread.start()

    def run(self, tensor: torch.Tensor, plan: Algorithm) -> Work:
        """Sums a 1-D contiguous tensor in place by a plan, the same on every rank."""
        key = plan, tensor.numel()
        if key not in self._woven:
            if len(self._woven) == _PLANS_KEPT:
                self._woven.clear()
            self._woven[key] = _weave(plan.routes(self._rank, tensor.numel()))
        return self._depart(tensor, self._woven[key])

    def carry(self, tensor: torch.Tensor, routes: list[list[Round]]) -> Work:
        """Carries out routes that are no plan's, as measurements do."""
        return self._depart(tensor, _weave(routes))

    def _depart(self, tensor: torch.Tensor, turns: list[_Turn]) -> Work:
        trip = _Trip(self, tensor, turns, self._started % _TRIPS * _TAGS)
        self._lanes[self._started % LANES].put(trip)
        self._started += 1
        return trip

    def send(self, piece: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Sends to a rank of the group."""
        work = dist.isend(piece, group=self._group, tag=tag, group_dst=peer)
        assert work is not None
        return work

    def receive(self, target: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Posts a receive from a rank of the group."""
        work = dist.irecv(target, group=self._group, tag=tag, group_src=peer)
        assert work is not None
        return work

    def close(self) -> None:
        """Ends the threads."""
        for lane in self._lanes:
            lane.put(None)
        for thread in self._threads:
            thread.join()


def _work(lane: "queue.SimpleQueue[_Trip | None]") -> None:
    while (trip := lane.get()) is not None:
        trip.run()

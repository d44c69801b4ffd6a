"""Runs rounds over a Gloo group, in the background: messages between CPU tensors, of several all-reduces at a time."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from .algorithms import Algorithm, Message, Round
from .base import Engine, Work
from .groups import Group, numbered
from .works import Followed, LaneWork, start_lane

# Number of threads that carry messages; an all-reduce stays in one, and a short one need not wait for a long one.
LANES = 2
AHEAD = 128  # number of turns whose receives are posted before their messages are waited for
STREAM_BYTES = 1 << 18  # fewest bytes of a message in each stream: below that a further connection gains no time
_MOST_SCHEDULES = 256
_SUMS_AT_ONCE = 1 << 12
# number of tags of one sum: two for each round of each chunk; the last _SUMS_AT_ONCE sums have different ones
_TAGS = 1 << 18

Tagged = tuple[tuple[Message, int], ...]  # messages, each with its tag within the sum
# a turn's messages: the parts under way, the scratch memory if it is to be added, and its elements of the tensor
_Received = list[tuple[list[Work], torch.Tensor | None, torch.Tensor]]


class _Turn(NamedTuple):
    """The work of a lane for a chunk without a pause: a round's receives, then the next round's sends."""

    chunk: int
    adds: Tagged
    copies: Tagged
    # whether the round adds to elements that it also sent: those sends must have ended before
    rewrites: bool
    sends: Tagged


def _tagged(messages: tuple[Message, ...], base: int) -> Tagged:
    # A round has up to two messages between the same ranks (a run of blocks that wraps around): base and base + 1.
    return tuple((message, base + nth) for message, nth in numbered(messages, lambda message: message.peer))


def _weave(rounds: list[list[Round]]) -> list[_Turn]:
    # The turns of all chunks in one order: round r of chunk c belongs to wave r + c, and waves follow each other.
    # So the chunks are a round apart: while one waits for a message, the next adds up what it has received. The order
    # is the same on every rank, which keeps ranks from waiting for each other in a circle: the first turn that any rank
    # has not done yet needs only sends of earlier turns, and those have begun.
    # A message has the same tag on both sides, since both find it in the same round of the same chunk: twice that
    # turn's number, plus 1 for the second message between two ranks.
    length, chunks = len(rounds[0]), len(rounds)
    assert 2 * (length + 2) * chunks <= _TAGS
    turns = []
    for wave in range(-1, length + chunks - 1):
        for chunk, its_rounds in enumerate(rounds):
            number = wave - chunk
            if not -1 <= number < length:
                continue
            # Turn -1 has only sends, those of round 0; the last turn has none.
            received = its_rounds[number] if number >= 0 else Round()
            following = its_rounds[number + 1] if number + 1 < length else Round()
            base = 2 * ((number + 1) * chunks + chunk)
            rewrites = any(s.low < a.high and a.low < s.high for s in received.sends for a in received.adds)
            adds, copies = _tagged(received.adds, base), _tagged(received.copies, base)
            turn = _Turn(chunk, adds, copies, rewrites, _tagged(following.sends, base + 2 * chunks))
            if turn.adds or turn.copies or turn.sends:
                turns.append(turn)
    return turns


# A Gloo send waits until the receiver has announced its buffer. So receives are posted AHEAD turns before their
# messages are waited for, those of a short all-reduce all when it starts, and every round but the first costs one
# latency instead of two. A ring of thousands of ranks has tens of thousands of turns, so not all are posted at once.
class _Sum(LaneWork):
    def __init__(self, streams: Sequence[Group], tensor: torch.Tensor, turns: list[_Turn], tag: int) -> None:
        super().__init__(self._exchange)
        self._streams, self._tensor, self._turns, self._tag = streams, tensor, turns, tag
        # Memory for all addends at once: one that was shared between turns would have to wait for the earlier turn.
        lengths = [m.high - m.low for turn in turns for m, _ in turn.adds]
        memory, ends = torch.empty(sum(lengths), dtype=tensor.dtype), accumulate(lengths, initial=0)
        self._scratch = (memory[low:high] for low, high in pairwise(ends))
        # receives of the turns that come next
        self._posted: deque[_Received] = deque()
        for turn in turns[:AHEAD]:
            self._post(turn)

    def _post(self, turn: _Turn) -> None:
        received: _Received = []
        for index, (message, nth) in enumerate((*turn.adds, *turn.copies)):
            # Copies go straight into the tensor, before our own turn: a final sum of these elements can't come before
            # what we sent of them has arrived.
            elements = self._tensor[message.low : message.high]
            scratch = next(self._scratch) if index < len(turn.adds) else None
            parts = self._parts(elements if scratch is None else scratch)
            works = [group.receive(part, message.peer, self._tag + nth) for group, part in parts]
            received.append((works, scratch, elements))
        self._posted.append(received)

    def _parts(self, elements: torch.Tensor) -> Iterator[tuple[Group, torch.Tensor]]:
        # The part of a message in each stream; both sides cut by its length alone.
        count = max(1, min(len(self._streams), elements.nbytes // STREAM_BYTES))
        return zip(self._streams, elements.tensor_split(count), strict=False)

    def _exchange(self) -> None:
        sent: dict[int, list[Work]] = {turn.chunk: [] for turn in self._turns}
        for number, turn in enumerate(self._turns):
            if number + AHEAD < len(self._turns):
                self._post(self._turns[number + AHEAD])
            received = self._posted.popleft()
            # Gloo reads a buffer until its send has ended: an addition before would change what the peer receives.
            if turn.rewrites:
                while sent[turn.chunk]:
                    sent[turn.chunk].pop().wait()
            for works, scratch, elements in received:
                for work in works:
                    work.wait()
                if scratch is not None:
                    elements.add_(scratch)
            # The sends are not waited for here: they end while later turns, of other chunks too, go on.
            for message, nth in turn.sends:
                parts = self._parts(self._tensor[message.low : message.high])
                sent[turn.chunk] += [group.send(part, message.peer, self._tag + nth) for group, part in parts]
        for works in sent.values():
            for work in works:
                work.wait()


class GlooEngine(Engine):
    """Sums CPU tensors over a Gloo group of its own, and `further` groups for parts of large messages."""

    # One TCP connection can't fill a link that is long and fast: what it may have on its way ends with the kernel's
    # window, some MiB, of which a link of 50 ms takes few a second. So an engine may have several groups of the same
    # ranks, each with connections of its own, over which a large message is cut: its streams.

    device = torch.device("cpu")

    def __init__(self, group: Group, further: Sequence[Group] = ()) -> None:
        self._streams = (group, *further)
        self._turns = lru_cache(_MOST_SCHEDULES)(lambda algorithm, length: _weave(algorithm.rounds(group.rank, length)))
        self._started, self._lanes = 0, [start_lane() for _ in range(LANES)]

    def run(self, tensor: torch.Tensor, algorithm: Algorithm | None) -> Work:
        if algorithm is None:
            return self._streams[0].start_backend_all_reduce(tensor)
        return self._start(tensor, self._turns(algorithm, tensor.numel()))

    def run_rounds(self, tensor: torch.Tensor, rounds: list[Round]) -> Work:
        return self._start(tensor, _weave([rounds]))

    def _start(self, tensor: torch.Tensor, turns: list[_Turn]) -> Work:
        peers = {message.peer for turn in turns for message, _ in (*turn.adds, *turn.copies, *turn.sends)}
        for group in self._streams:
            group.connect(peers)
        work = _Sum(self._streams, tensor, turns, self._started % _SUMS_AT_ONCE * _TAGS)
        # In turn, by the number of the call, which is the same on every rank: two sums can't stand in opposite orders
        # in the lanes of two ranks and wait for each other.
        self._lanes[self._started % LANES][0].put(work)
        self._started += 1
        return work

    def close(self) -> None:
        """Ends the threads, and the streams but the first."""
        for lane, thread in self._lanes:
            lane.put(None)
            thread.join()
        for group in self._streams[1:]:
            group.close()


class _Staged(LaneWork):
    """The sum of a CUDA tensor's values on the host, which begins in the thread once they are `copied` there."""

    def __init__(self, copied: torch.cuda.Event, start: Callable[[], Work]) -> None:
        super().__init__(partial(self._begin, copied, start))
        self._work: Work | None = None

    def _begin(self, copied: torch.cuda.Event, start: Callable[[], Work]) -> None:
        copied.synchronize()
        self._work = start()

    def wait(self, limit: float | None = None) -> None:
        super().wait(limit)
        assert self._work is not None
        self._work.wait(limit)

    def done(self) -> bool:
        return super().done() and (self._work is None or self._work.done())

    def ended(self) -> float | None:
        return None if self._work is None else self._work.ended()


class StagedEngine(Engine):
    """Sums CUDA tensors by a Gloo engine, by way of pinned memory; a thread waits for the copies to the host."""

    def __init__(self, engine: GlooEngine, device: torch.device) -> None:
        self.device, self._engine, self._stream = device, engine, torch.cuda.Stream(device)
        self._lane, self._thread = start_lane()

    def run(self, tensor: torch.Tensor, algorithm: Algorithm | None) -> Work:
        return self._stage(tensor, lambda host: self._engine.run(host, algorithm))

    def run_rounds(self, tensor: torch.Tensor, rounds: list[Round]) -> Work:
        return self._stage(tensor, lambda host: self._engine.run_rounds(host, rounds))

    def _stage(self, tensor: torch.Tensor, start: Callable[[torch.Tensor], Work]) -> Work:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # On a stream of its own the copy need not wait for what the caller enqueues from now on.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        work = _Staged(self._stream.record_event(), partial(start, host))
        # The allocator knows the caller's stream only, and would hand out the memory while it is being copied.
        tensor.record_stream(self._stream)
        self._lane.put(work)
        return Followed(work, lambda: tensor.copy_(host, non_blocking=True))

    def close(self) -> None:
        self._lane.put(None)
        self._thread.join()
        self._engine.close()

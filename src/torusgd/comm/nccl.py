"""Runs algorithms on a GPU over NCCL: all is enqueued on streams beside the caller's, and the host never waits.

A torus uses NCCL's own reduce-scatter, all-reduce and all-gather on its rows and columns, which are subgroups; the
other algorithms send their rounds as batches of point-to-point messages. Both are plain functions of groups and
streams, and run over Gloo on CPU tensors too, which is how they are tested without GPUs.

NCCL demands that the communicators of a process run in one order on all ranks, else they may wait for each other. So
all that an engine does, the backend's own all-reduce included, is enqueued by one thread, in the order of calls, on one
stream; the axes of a torus then take turns. NCCL 2.26 and later keep the order in which communicators were launched
even if they overlap, with NCCL_LAUNCH_ORDER_IMPLICIT=1: then each chunk of a torus has one of two streams.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import torch

from .algorithms import Algorithm
from .base import Work
from .groups import Group
from .rounds import Message, Round, cut

OnStream = Callable[[], AbstractContextManager[object]]
"""makes the context in which work goes to one stream"""


def run_in_batches(tensor: torch.Tensor, rounds: Sequence[Sequence[Round]], group: Group) -> None:
    """Runs the rounds of each chunk; round r of chunk c belongs to wave r + c.

    The messages of a wave are one batch, which all its chunks share, and its additions follow.
    """
    length, chunks = len(rounds[0]), len(rounds)
    for wave in range(length + chunks - 1):
        turns = [its_rounds[wave - chunk] for chunk, its_rounds in enumerate(rounds) if 0 <= wave - chunk < length]
        sends, receives = [], []
        addends: list[tuple[torch.Tensor, Message]] = []
        # Two ranks must list what they exchange in one order: chunk by chunk, as sent.
        for turn in turns:
            sends += [(_elements(tensor, m), m.peer) for m in turn.sends]
            fresh = [(torch.empty_like(_elements(tensor, m)), m) for m in turn.adds]
            receives += [(addend, m.peer) for addend, m in fresh]
            receives += [(_elements(tensor, m), m.peer) for m in turn.copies]
            addends += fresh
        for work in group.start_exchange(sends, receives, tag=wave << 8):
            work.wait()
        for addend, message in addends:
            _elements(tensor, message).add_(addend)


def _elements(tensor: torch.Tensor, message: Message) -> torch.Tensor:
    return tensor[message.low : message.high]


def grid_axes(group: Group, grid: tuple[int, int]) -> tuple[Group, Group]:
    """The row and the column of this rank as groups; every member calls it, and all make all groups in one order."""
    rows, columns = grid
    lines = [range(y * columns, (y + 1) * columns) for y in range(rows)]
    lines += [range(x, rows * columns, columns) for x in range(columns)]
    y, x = divmod(group.rank, columns)
    groups = [group.subgroup(line) for line in lines]
    return groups[y], groups[rows + x]


def torus_by_collectives(
    tensor: torch.Tensor, row: Group, column: Group, chunks: int, on_streams: Sequence[OnStream]
) -> None:
    """Reduce-scatter on rows, all-reduce on columns, all-gather on rows; chunk c works on stream c modulo their number.

    Stages are issued in waves, so that a row's next reduce-scatter is not queued behind its last all-gather.
    """
    spans = [tensor[low:high] for low, high in pairwise(cut(0, tensor.numel(), chunks))]
    padded: list[torch.Tensor] = spans[:]
    shards: list[torch.Tensor] = spans[:]

    def scatter(chunk: int) -> None:
        span = spans[chunk]
        length = -(-span.numel() // row.size)
        if span.numel() % row.size:
            padded[chunk] = span.new_zeros(length * row.size)
            padded[chunk][: span.numel()].copy_(span)
        shards[chunk] = span.new_empty(length)
        row.reduce_scatter_single(shards[chunk], padded[chunk])

    def sum_columns(chunk: int) -> None:
        column.all_reduce(shards[chunk])

    def gather(chunk: int) -> None:
        row.all_gather_single(padded[chunk], shards[chunk])
        if padded[chunk] is not spans[chunk]:
            spans[chunk].copy_(padded[chunk][: spans[chunk].numel()])

    for wave in range(chunks + 2):
        for back, stage in enumerate((scatter, sum_columns, gather)):
            chunk = wave - back
            if 0 <= chunk < chunks and spans[chunk].numel():
                with on_streams[chunk % len(on_streams)]():
                    stage(chunk)


class _Enqueued:
    """The work of a tensor whose sum is on its way on other streams."""

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self._events = events

    def wait(self, limit: float | None = None) -> None:
        for event in self._events:
            event.wait()

    def done(self) -> bool:
        return all(event.query() for event in self._events)

    def ended(self) -> float | None:
        return None


class NcclEngine:
    """Sums CUDA tensors over an NCCL group that nothing else uses for CUDA tensors."""

    def __init__(self, group: Group) -> None:
        self.device = group.device
        self._group = group
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2 if _may_overlap() else 1)]
        self._axes: dict[tuple[int, int], tuple[Group, Group]] = {}
        # The communicator: point-to-point batches may not be what makes it, since not all ranks take part in each.
        group.all_reduce(torch.zeros(1, device=self.device))

    def run(self, tensor: torch.Tensor, algorithm: Algorithm | None) -> Work:
        """See `Engine`."""
        if algorithm is None:
            return self.enqueue(tensor, lambda: self._group.all_reduce(tensor))
        if algorithm.algorithm != "torus":
            return self.run_rounds(tensor, algorithm.rounds(self._group.rank, tensor.numel()))
        if algorithm.grid not in self._axes:  # at the same call on every rank
            self._axes[algorithm.grid] = grid_axes(self._group, algorithm.grid)
        row, column = self._axes[algorithm.grid]
        streams = [lambda s=s: torch.cuda.stream(s) for s in self._streams]
        return self.enqueue(tensor, lambda: torus_by_collectives(tensor, row, column, algorithm.chunks, streams))

    def run_rounds(self, tensor: torch.Tensor, rounds: list[list[Round]]) -> Work:
        """See `Engine`."""
        return self.enqueue(tensor, lambda: run_in_batches(tensor, rounds, self._group))

    def enqueue(self, tensor: torch.Tensor, function: Callable[[], None]) -> Work:
        """Runs `function` with the engine's stream current; it begins after all that the caller has enqueued."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(stream)
        with torch.cuda.stream(self._streams[0]):
            function()
        return _Enqueued([stream.record_event() for stream in self._streams])

    def close(self) -> None:
        """Closes the axes' groups, once the GPU has done all."""
        torch.cuda.synchronize(self.device)
        for axes in self._axes.values():
            for axis in axes:
                axis.close()


def _may_overlap() -> bool:
    return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1" and torch.cuda.nccl.version() >= (2, 26)

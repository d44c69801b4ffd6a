"""Runs algorithms on a GPU over NCCL: all is enqueued in the one order of the GPU, and the host never waits.

A torus by collectives and rounds in batches are functions of groups, which run over Gloo on CPU tensors too.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from .algorithms import Algorithm, Round
from .base import Work
from .groups import Group
from .works import enqueue


def run_in_batches(tensor: torch.Tensor, rounds: Sequence[Round], group: Group) -> None:
    """Runs rounds, the messages of each as one batch, which its additions follow."""
    for number, turn in enumerate(rounds):
        addends = [(torch.empty_like(tensor[m.low : m.high]), m) for m in turn.adds]
        # Two ranks must list what they exchange in one order.
        sends = [(tensor[m.low : m.high], m.peer) for m in turn.sends]
        receives = [(addend, m.peer) for addend, m in addends]
        receives += [(tensor[m.low : m.high], m.peer) for m in turn.copies]
        for work in group.start_exchange(sends, receives, tag=number << 8):
            work.wait()
        # Only now: a message that was sent and received into at once must leave with its old values.
        for addend, message in addends:
            tensor[message.low : message.high].add_(addend)


def torus_by_collectives(tensor: torch.Tensor, row: Group, column: Group) -> None:
    """Reduce-scatter on the row, all-reduce on the column, all-gather on the row (Mikami et al., arXiv 1811.05233)."""
    if not tensor.numel():
        return
    if row.size == 1:
        column.all_reduce(tensor)
        return
    # NCCL's reduce-scatter takes equal shards: the last one is padded with zeros.
    rest = -tensor.numel() % row.size
    padded = pad(tensor, (0, rest)) if rest else tensor
    shard = tensor.new_empty(len(padded) // row.size)
    row.start_reduce_scatter_single(shard, padded).wait()
    column.all_reduce(shard)
    row.start_all_gather_single(padded, shard).wait()
    if rest:
        tensor.copy_(padded[: tensor.numel()])


class NcclEngine:
    def __init__(self, group: Group) -> None:
        self.device, self._group = group.device, group
        self._axes: dict[tuple[int, int], tuple[Group, Group]] = {}

    def effective(self, algorithm: Algorithm) -> Algorithm:
        # NCCL chooses the methods of a torus' axes. And since operations follow each other (`works.enqueue`),
        # chunks would overlap nothing and only add latency: an algorithm runs in one.
        if algorithm.algorithm == "torus":
            algorithm = replace(algorithm, vertical="ring", horizontal="ring")
        return replace(algorithm, chunks=1)

    def run(self, tensor: torch.Tensor, algorithm: Algorithm | None) -> Work:
        if algorithm is None:
            return self._group.start_all_reduce(tensor)
        if algorithm.algorithm != "torus":
            (rounds,) = self.effective(algorithm).rounds(self._group.rank, tensor.numel())
            return self.run_rounds(tensor, rounds)
        if algorithm.grid not in self._axes:  # at the same call on every rank
            rows, columns = algorithm.grid
            # All rows first, then all columns: ncclCommSplit is a collective of the parent, in one order on all ranks.
            row = self._group.partition([range(y * columns, (y + 1) * columns) for y in range(rows)])
            column = self._group.partition([range(x, rows * columns, columns) for x in range(columns)])
            self._axes[algorithm.grid] = row, column
        row, column = self._axes[algorithm.grid]
        return enqueue(self.device, [tensor], lambda: torus_by_collectives(tensor, row, column))

    def run_rounds(self, tensor: torch.Tensor, rounds: list[Round]) -> Work:
        return enqueue(self.device, [tensor], lambda: run_in_batches(tensor, rounds, self._group))

    def close(self) -> None:
        torch.cuda.synchronize(self.device)  # no group ends under a kernel that uses it
        for axes in self._axes.values():
            for axis in axes:
                axis.close()

"""Carries out plans on a GPU over NCCL: all is enqueued on a stream beside the caller's, and the host never waits.

A torus uses NCCL's own reduce-scatter, all-reduce and all-gather on the axes of a DeviceMesh; the other algorithms send
their rounds as batches of point-to-point messages. Both are plain functions of groups and streams, and run over Gloo on
CPU tensors too, which is how they are tested without GPUs.

NCCL demands that communicators are used in one order on all ranks. One stream gives that order, and no overlap of the
axes. NCCL 2.26 and later can overlap communicators launched in one order, with NCCL_LAUNCH_ORDER_IMPLICIT=1: then each
chunk of a torus has one of two streams.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .algorithms import Algorithm
from .base import Work
from .rounds import Message, Round, cut

OnStream = Callable[[], AbstractContextManager[object]]
"""makes the context in which work goes to one stream"""


def carry_in_batches(tensor: torch.Tensor, routes: Sequence[Sequence[Round]], group: dist.ProcessGroup) -> None:
    """Carries out routes: in each wave the messages of every chunk's round in one batch, then the additions."""
    rounds, chunks = len(routes[0]), len(routes)
    for wave in range(rounds + chunks - 1):
        turns = [route[wave - chunk] for chunk, route in enumerate(routes) if 0 <= wave - chunk < rounds]
        sends, receives = [], []
        addends: list[tuple[torch.Tensor, Message]] = []
        # Two ranks must list what they exchange in one order: chunk by chunk, as sent.
        for turn in turns:
            sends += [(_piece(tensor, m), m.peer) for m in turn.sends]
            fresh = [(torch.empty_like(_piece(tensor, m)), m) for m in turn.adds]
            receives += [(addend, m.peer) for addend, m in fresh]
            receives += [(_piece(tensor, m), m.peer) for m in turn.copies]
            addends += fresh
        batch = _operations(dist.isend, sends, group, wave) + _operations(dist.irecv, receives, group, wave)
        for work in dist.batch_isend_irecv(batch) if batch else []:
            work.wait()
        for addend, message in addends:
            _piece(tensor, message).add_(addend)


def _operations(
    way: Callable[..., object], pieces: list[tuple[torch.Tensor, int]], group: dist.ProcessGroup, wave: int
) -> list[dist.P2POp]:
    """NCCL matches the messages of two ranks by their order, Gloo by tag: the wave, and the order within it."""
    seen: dict[int, int] = {}
    operations = []
    for piece, peer in pieces:
        nth = seen[peer] = seen.get(peer, -1) + 1
        operations.append(dist.P2POp(way, piece, None, group, wave << 8 | nth, peer))
    return operations


def _piece(tensor: torch.Tensor, message: Message) -> torch.Tensor:
    return tensor[message.low : message.high]


def torus_by_collectives(tensor: torch.Tensor, mesh: DeviceMesh, chunks: int, on_streams: Sequence[OnStream]) -> None:
    """Reduce-scatter on rows, all-reduce on columns, all-gather on rows; chunk c works on stream c modulo their number.

    Stages are issued in waves, so that a row's next reduce-scatter is not queued behind its last all-gather.
    """
    row, column = mesh.get_group("horizontal"), mesh.get_group("vertical")
    width = dist.get_world_size(row)
    parts = [tensor[low:high] for low, high in pairwise(cut(0, tensor.numel(), chunks))]
    padded: list[torch.Tensor] = parts[:]
    shards: list[torch.Tensor] = parts[:]

    def scatter(chunk: int) -> None:
        part = parts[chunk]
        length = -(-part.numel() // width)
        if part.numel() % width:
            padded[chunk] = part.new_zeros(length * width)
            padded[chunk][: part.numel()].copy_(part)
        shards[chunk] = part.new_empty(length)
        dist.reduce_scatter_single(shards[chunk], padded[chunk], group=row)

    def sum_columns(chunk: int) -> None:
        dist.all_reduce(shards[chunk], group=column)

    def gather(chunk: int) -> None:
        dist.all_gather_single(padded[chunk], shards[chunk], group=row)
        if padded[chunk] is not parts[chunk]:
            parts[chunk].copy_(padded[chunk][: parts[chunk].numel()])

    for wave in range(chunks + 2):
        for back, stage in enumerate((scatter, sum_columns, gather)):
            chunk = wave - back
            if 0 <= chunk < chunks and parts[chunk].numel():
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
    """Carries out plans on CUDA tensors over the ranks of an NCCL group that nothing else uses."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._group, self._rank = group, dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._streams = [torch.cuda.Stream(device) for _ in range(2 if _may_overlap() else 1)]
        self._meshes: dict[tuple[int, int], DeviceMesh] = {}
        # The communicator: point-to-point batches may not be what makes it, since not all ranks take part in each.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def run(self, tensor: torch.Tensor, plan: Algorithm) -> Work:
        """See `Engine`. A torus over a part of the ranks runs by rounds: its axes would need groups of all ranks."""
        if plan.algorithm == "torus" and len(self._ranks) == dist.get_world_size():
            mesh = self._mesh(plan.grid)
            streams = [lambda s=s: torch.cuda.stream(s) for s in self._streams]
            return self._beside(tensor, lambda: torus_by_collectives(tensor, mesh, plan.chunks, streams))
        return self.carry(tensor, plan.routes(self._rank, tensor.numel()))

    def carry(self, tensor: torch.Tensor, routes: list[list[Round]]) -> Work:
        """See `Engine`."""
        return self._beside(tensor, lambda: carry_in_batches(tensor, routes, self._group))

    def _beside(self, tensor: torch.Tensor, enqueue: Callable[[], None]) -> Work:
        """Runs `enqueue` with the first stream current; all streams begin after what the caller has enqueued."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(stream)
        with torch.cuda.stream(self._streams[0]):
            enqueue()
        return _Enqueued([stream.record_event() for stream in self._streams])

    def _mesh(self, grid: tuple[int, int]) -> DeviceMesh:
        """The grid's axes as groups, made at its first use, which comes at the same call on every rank."""
        if grid not in self._meshes:
            ranks = torch.tensor(self._ranks).view(grid)
            self._meshes[grid] = DeviceMesh("cuda", ranks, mesh_dim_names=("vertical", "horizontal"))
        return self._meshes[grid]

    def close(self) -> None:
        """Destroys the axes' groups."""
        torch.cuda.synchronize(self.device)
        for mesh in self._meshes.values():
            for axis in mesh.get_all_groups():
                dist.destroy_process_group(axis)


def _may_overlap() -> bool:
    return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1" and torch.cuda.nccl.version() >= (2, 26)

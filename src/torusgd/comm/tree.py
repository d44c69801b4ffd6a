"""Small sums and broadcasts of many ranks over a tree of small meshes, so that no process is connected to all. Ours.

Gloo connects each two members of a group. So a group of more than FANOUT ranks has several groups of at most FANOUT:
runs of ranks, then runs of their first members, and so on. Of 3,456 ranks most have 31 connections, none has over 65.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from .base import Work
from .works import LaneWork, start_lane

if TYPE_CHECKING:
    from .groups import Group

FANOUT = 32  # most members of a group in which each two are connected, unless an algorithm needs it


def meshes_of(rank: int, size: int) -> list[range]:
    """The members of each mesh that a rank is in, from the leaves to the root.

    >>> meshes_of(32, 70)
    [range(32, 64), range(0, 70, 32)]
    >>> meshes_of(33, 70)
    [range(32, 64)]
    """
    found, apart = [], 1
    while apart < size and rank % apart == 0:
        first = rank - rank % (apart * FANOUT)
        found.append(range(first, min(first + apart * FANOUT, size), apart))
        apart *= FANOUT
    return found


class Tree:
    """Collectives of `size` ranks, in a thread, by the meshes of one of them; a sum has to be free of order."""

    def __init__(self, meshes: Sequence["Group"], rank: int, size: int) -> None:
        self._meshes, self._rank, self._size = meshes, rank, size
        self._below_root = len(meshes_of(0, size)) - 1
        self._lane, _ = start_lane()

    def start_all_reduce(self, tensor: torch.Tensor, maximum: bool) -> Work:
        return self._start(partial(self._all_reduce, tensor, maximum))

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return self._start(partial(self._broadcast, tensor, source))

    def all_gather(self, tensor: torch.Tensor, watch: Callable[[Work], Work]) -> torch.Tensor:
        # Each byte is zero on all ranks but one: so the sum of bytes is a gather, of any type.
        table = torch.zeros(self._size, tensor.nbytes, dtype=torch.uint8)
        table[self._rank] = tensor.contiguous().view(-1).view(torch.uint8)
        watch(self.start_all_reduce(table, maximum=False)).wait()
        return table.view(tensor.dtype).view(self._size, *tensor.shape)

    def abort(self) -> None:
        for mesh in self._meshes:
            mesh.abort()
        self._lane.put(None)

    def close(self) -> None:
        self._lane.put(None)
        for mesh in self._meshes:
            mesh.close()

    def _start(self, function: Callable[[], None]) -> Work:
        work = LaneWork(function)
        self._lane.put(work)
        return work

    def _all_reduce(self, tensor: torch.Tensor, maximum: bool) -> None:
        for mesh in self._meshes:
            mesh.all_reduce(tensor, maximum)
        for mesh in reversed(self._meshes[: self._below_root]):
            mesh.broadcast(tensor)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        # Up from the source, in the meshes above it; then down, in all others.
        others = []
        for mesh, members in zip(self._meshes, meshes_of(self._rank, self._size), strict=True):
            above = source - source % members.step
            if above in members:
                mesh.broadcast(tensor, members.index(above))
            else:
                others.append(mesh)
        for mesh in reversed(others):
            mesh.broadcast(tensor)

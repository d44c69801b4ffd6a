"""Operators of torch.ops.torusgd, and what their Triton kernels share: tables of addresses and of blocks.

An operator has a form made of torch's own operators, for a CPU, and one to three Triton kernels for a GPU. A kernel
takes all tensors of a network at once, by a table of their addresses; each program one block, by a table of blocks.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from ..data.to_device import pinned

KERNELS = f"{__package__}.triton_kernels"  # imported once a CUDA tensor comes, since only then Triton need be there
LIBRARY = Library("torusgd", "FRAGMENT")
operators = torch.ops.torusgd  # the registered operators, by name
# of the tables of a captured pass, 1 MiB: three for each tensor whose gradient it adds
_MOST_ENTRIES = 1 << 17


def register(function: Callable[..., None], writes: Collection[str]) -> None:
    """Makes an operator of a function by torch's own; `triton_kernels` has its other form. A dataclass is unpacked."""
    name, signature = function.__name__, inspect.signature(function)
    record = next(iter(signature.parameters.values())).annotation
    is_packed = is_dataclass(record)

    def prototype(*given: Any) -> None:
        raise AssertionError(f"{name}: only its signature counts")

    prototype.__signature__ = inspect.signature(record) if is_packed else signature  # type: ignore[attr-defined]

    def call(function: Callable[..., None], given: tuple[Any, ...]) -> None:
        function(record(*given)) if is_packed else function(*given)

    LIBRARY.define(name + infer_schema(prototype, mutates_args=writes))
    LIBRARY.impl(name, lambda *given: call(function, given), "CompositeExplicitAutograd")
    LIBRARY.impl(name, lambda *given: call(getattr(import_module(KERNELS), name), given), "CUDA")


class Tables:
    """The tables of work that is captured in a CUDA graph; the graph's owner holds them as long as the graph."""

    # Tables go to the GPU from pinned memory, so that the host never waits. While a CUDA graph is captured nothing can
    # be copied from the host, and whatever is allocated lies in memory that the graph uses for other things too. A
    # table that is made during a capture therefore lies in memory that was taken before it, and is filled after it.

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(_MOST_ENTRIES, dtype=torch.int64, device=device)
        self._taken = 0
        self._unfilled: list[tuple[Tensor, Tensor]] = []

    def take(self, values: Tensor) -> Tensor:
        """A table that has these values (int64) once it is filled; RuntimeError if there is no room."""
        begin, self._taken = self._taken, self._taken + values.numel() + values.numel() % 2  # at multiples of 16 bytes
        if self._taken > _MOST_ENTRIES:
            raise RuntimeError(f"a captured pass has tables of at most {_MOST_ENTRIES} entries")
        table = self._memory[begin : begin + values.numel()].view(values.shape)
        self._unfilled.append((table, values))
        return table

    def fill(self) -> None:
        for table, values in self._unfilled:
            table.copy_(values.pin_memory() if table.is_cuda else values, non_blocking=True)
        self._unfilled.clear()


_of_capture: list[Tables] = []


@contextmanager
def tables_of_capture(device: torch.device) -> Iterator[Tables]:
    """Whatever is captured inside finds its tables in the memory that this context yields."""
    tables = Tables(device)
    _of_capture.append(tables)
    try:
        yield tables
    finally:
        _of_capture.pop()


def table_of(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [rows, columns] for a kernel; the host does not wait."""
    values = torch.tensor(rows, dtype=torch.int64, device="cpu")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return _of_capture[-1].take(values)
    return pinned(values, device).to(device, non_blocking=True)


def write_table(table: Tensor, rows: Sequence[Sequence[float]]) -> None:
    """Gives a table other values, by one copy for which the host does not wait."""
    # Pinned memory of its own for each copy: torch does not hand it out again before the copy has ended.
    values = torch.tensor(rows, dtype=table.dtype, device="cpu")
    table.copy_(values.pin_memory() if table.is_cuda else values, non_blocking=True)


@lru_cache(maxsize=64)
def cached_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """`table_of` rows that are the same at each step, such as addresses of memory that never moves."""
    # Not for a captured pass: the cache may drop a table that the graph still reads.
    return table_of(rows, device)


@lru_cache(maxsize=4096)
def blocks_of(numels: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """Tensors with so many elements, cut into blocks: int64 [blocks, 4].

    A row is the number of a block's tensor, its begin there, its elements, and its begin in all tensors in a row.
    """
    rows, offset = list[tuple[int, int, int, int]](), 0
    for number, numel in enumerate(numels):
        rows += [(number, at, min(block, numel - at), offset + at) for at in range(0, numel, block)]
        offset += numel
    return pinned(torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4), device).to(device, non_blocking=True)

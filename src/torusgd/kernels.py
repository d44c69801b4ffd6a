"""Operators of torusgd in torch's dispatcher, and what their Triton kernels share: tables of addresses and of blocks.

An operator has a form made of torch's own operators, which runs on any device. On a GPU it runs as one to three Triton
kernels instead, where there is Triton and it knows the GPU (`register`). Such a kernel takes all tensors of a network
at once: it finds them by a table of their addresses, and each of its programs takes one block of one tensor, by a table
of blocks. Both tables are made once, since what a step works on never moves, or else for each call.

Tables go to the GPU from pinned memory, so that the host never waits. While a CUDA graph is captured nothing can be
copied from the host; a table asked for then is filled by `fill_tables` before its graph runs for the first time.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

LIBRARY = Library("torusgd", "FRAGMENT")
"""the operators by name, as torch.ops.torusgd has them"""

_TRITON_FROM = (8, 0)
"""compute capability; torch's operators serve V100, T4 and RTX 20"""


def register(schema: str, function: Callable[..., Any], kernels: str) -> None:
    """Makes an operator of a function.

    Args:
        schema: Of the operator, its name first.
        function: Its form made of torch's own operators.
        kernels: The module that has a function of the operator's name for CUDA tensors; it imports Triton.
    """
    name = schema.partition("(")[0]

    def on_cuda(*arguments: Any) -> Any:
        return form_on(torch.cuda.get_device_capability(), function, kernels, name)(*arguments)

    LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    LIBRARY.impl(name, on_cuda, "CUDA")


@cache
def form_on(capability: tuple[int, int], function: Callable[..., Any], kernels: str, name: str) -> Callable[..., Any]:
    """What an operator runs on a GPU of a compute capability: the kernels' function, or else torch's own operators."""
    if capability < _TRITON_FROM:
        return function
    try:
        import triton  # noqa: F401
    except ImportError:
        return function
    form: Callable[..., Any] = getattr(import_module(kernels), name)
    return form


_unfilled: list[tuple[Tensor, Tensor]] = []


def table_of(rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """int64, or of floats float64, [rows, columns] on a device, for a kernel; the host does not wait."""
    dtype = torch.float64 if isinstance(rows[0][0], float) else torch.int64
    values = torch.tensor(rows, dtype=dtype, device="cpu")
    if device.type != "cuda":
        return values
    if not torch.cuda.is_current_stream_capturing():
        return values.pin_memory().to(device, non_blocking=True)
    table = torch.empty(values.shape, dtype=values.dtype, device=device)
    _unfilled.append((table, values))
    return table


def fill_tables() -> None:
    """Fills the tables of what was captured since the last call, before its graph runs for the first time."""
    for table, values in _unfilled:
        table.copy_(values)
    _unfilled.clear()


@lru_cache(maxsize=64)
def kept_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """`table_of` rows that are the same at each step, such as addresses of memory that never moves."""
    return table_of(rows, device)


@lru_cache(maxsize=4096)
def blocks_of(numels: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """Tensors with so many elements, cut into blocks.

    Returns:
        int64 [blocks, 4]: of each block the number of its tensor, where it begins there, its elements, and where it
        begins in all tensors one after another.

    >>> blocks_of((5, 2), 4, torch.device("cpu")).tolist()
    [[0, 0, 4, 0], [0, 4, 1, 4], [1, 0, 2, 5]]
    """
    rows, offset = list[tuple[int, int, int, int]](), 0
    for number, numel in enumerate(numels):
        rows += [(number, at, min(block, numel - at), offset + at) for at in range(0, numel, block)]
        offset += numel
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4).to(device)

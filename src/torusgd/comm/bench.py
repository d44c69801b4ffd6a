"""Times all-reduces on the ranks at hand, one algorithm after another in turn, by the slowest rank."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RunError, UserError
from .algorithms import GRIDS, parse_algorithm
from .allreduce import ALGORITHMS, over
from .base import Done, Work
from .connection import Connection, connect
from .tune import slowest, stopwatch

SIZES = tuple(1 << power for power in range(12, 25, 2))
"""bytes that are timed by default: 4 KiB to 16 MiB"""


@dataclass(frozen=True)
class Record:
    """One algorithm at one size."""

    algorithm: str
    bytes: int
    ranks: int
    grid: tuple[int, int] | None
    """vertical, horizontal; None for algorithms without"""
    runs: str
    """what ran, with its methods and chunks: for `auto`, its choice"""
    median_s: float
    min_s: float
    max_s: float
    n: int
    """repetitions, the first of each algorithm and size not counted"""

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second and rank that an algorithm without waste would move: 2 (P - 1) / P of the bytes."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.median_s

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "grid": None if self.grid is None else list(self.grid)}


def bench_allreduce(
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = ALGORITHMS,
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
    repetitions: int = 7,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[Record]:
    """Times float32 all-reduces; every rank of `group` (None: all) calls it and gets the same records.

    At each size all algorithms are run in turn, `repetitions` times after one that warms up, from a barrier to the end
    on the slowest rank. `native` is plain `torch.distributed.all_reduce`. Each result is checked.

    Raises:
        UserError: where an algorithm, the grid or a size doesn't fit.
        RunError: where a sum was wrong.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        raise UserError("bench allreduce: one rank has nothing to sum; start it on several, such as with --workers 4")
    if any(size < 4 or size % 4 for size in sizes):
        raise UserError(f"sizes {', '.join(map(str, sizes))}: give multiples of 4 bytes")
    ranks = dist.get_world_size(group)
    for name in algorithms:
        if name not in ("auto", "native"):
            parse_algorithm(name, ranks, grid if name.partition(":")[0] in GRIDS else None)
    connection = connect(group, device)
    try:
        return _bench(connection, sizes, algorithms, grid, profile, repetitions, group)
    finally:
        connection.close()


def _bench(
    connection: Connection,
    sizes: Sequence[int],
    algorithms: Sequence[str],
    grid: tuple[int, int] | None,
    profile: Path | None,
    repetitions: int,
    group: dist.ProcessGroup | None,
) -> list[Record]:
    def native(tensor: torch.Tensor) -> Work:
        dist.all_reduce(tensor, group=group)
        return Done()

    named = {
        name: over(connection, name, grid if name.partition(":")[0] in GRIDS else None, profile)
        for name in algorithms
        if name != "native"
    }
    starts = [(name, named[name].start if name in named else native) for name in algorithms]
    records = []
    for size in sizes:
        rows = []
        for _ in range(repetitions + 1):
            row = []
            for name, start in starts:
                tensor = torch.ones(size // 4, device=connection.engine.device)
                row.append(stopwatch(connection, start, tensor))
                if not bool((tensor == connection.size).all()):
                    raise RunError(f"allreduce {name}: a wrong sum of {size} bytes on rank {connection.rank}")
            rows.append(row)
        flat = slowest(connection, [value for row in rows[1:] for value in row])
        for i, (name, _) in enumerate(starts):
            times, how = flat[i :: len(starts)], named[name].algorithm_for(size) if name in named else None
            records.append(
                Record(
                    algorithm=name,
                    bytes=size,
                    ranks=connection.size,
                    grid=how.grid if how is not None and how.algorithm in GRIDS else None,
                    runs="native" if how is None else str(how),
                    median_s=statistics.median(times),
                    min_s=min(times),
                    max_s=max(times),
                    n=repetitions,
                )
            )
    return records

"""Times all-reduces on the ranks at hand, one algorithm after another in turn, by the slowest rank."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ...errors import RunError, UserError
from ...text import byte_size, listed
from ..algorithms import GRIDS, NAMES, parse_algorithm
from ..allreduce import NativeAllReduce, over
from ..base import Work
from ..connection import Elapsed, Span, connect, shuffled, typical
from ..groups import AnyGroup, group_of

SIZES = tuple(1 << power for power in range(12, 25, 2))  # sizes in bytes that are timed by default: 4 KiB to 16 MiB


@dataclass(frozen=True)
class Record:
    """One algorithm at one size."""

    algorithm: str
    bytes: int
    ranks: int
    grid: tuple[int, int] | None  # vertical, horizontal; None for algorithms without
    runs: str  # the algorithm that ran, with its methods and chunks: for `auto`, its choice
    median_s: float
    min_s: float
    max_s: float
    n: int  # number of repetitions, the first of each algorithm and size not counted
    skew_s: float = 0.0  # median of the seconds by which the first rank began before the last one
    bound_s: float = 0.0  # seconds by which clocks of several machines may have changed a time
    samples_s: tuple[float, ...] = ()
    # Median of the processor time that a sum takes on the rank where it takes most, all threads together.
    cpu_s: float = 0.0

    @property
    def is_doubtful(self) -> bool:
        return Elapsed(self.median_s, self.skew_s, self.bound_s).is_doubtful

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second and rank that an algorithm without waste would move: 2 (P - 1) / P of the bytes."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.median_s


def bench_allreduce(
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] = NAMES,
    *,
    grid: tuple[int, int] | None = None,
    profile: Path | None = None,
    repetitions: int = 7,
    streams: int = 1,
    group: AnyGroup | None = None,
    device: torch.device | str = "cpu",
) -> list[Record]:
    """Times all-reduces of int32; every rank of `group` (None: all) calls it and gets the same records.

    At each size all algorithms are run in turn, in another order each time, `repetitions` times after one that warms
    up. A time is from the last rank's begin, after a start that all agreed on, to the last rank's end. `native` runs in
    `group` itself, as plain `torch.distributed.all_reduce` does. UserError if an algorithm, the grid or a size doesn't
    fit, RunError if a sum was wrong: each is checked.
    """
    caller = group_of(group, device)
    if caller.size == 1:
        raise UserError("bench allreduce: one rank has nothing to sum; start it on several, such as with --workers 4")
    if any(size < 4 or size % 4 for size in sizes):
        raise UserError(f"sizes {listed(sizes)}: give multiples of 4 bytes")
    sizes, algorithms = list(dict.fromkeys(sizes)), list(dict.fromkeys(algorithms))  # one twice would be its own rival
    grids = {name: grid if name.partition(":")[0] in GRIDS else None for name in algorithms}
    if grid is not None and all(name.partition(":")[0] not in GRIDS for name in algorithms):
        raise UserError(
            f"grid {grid[0]}x{grid[1]}: {listed(algorithms)} take none; add torus or hierarchical, or leave it out"
        )
    for name in algorithms:
        if name not in ("auto", "native"):
            parse_algorithm(name, caller.size, grids[name])
    records = []
    with closing(connect(caller, streams=streams)) as connection:
        named = {name: over(connection, name, grids[name], profile) for name in algorithms if name != "native"}
        try:
            torch.empty(max(sizes) // 4, dtype=torch.int32, device=connection.engine.device)
        except (RuntimeError, TypeError, OverflowError):  # beyond the memory, or beyond what a tensor can have
            raise UserError(f"sizes: {byte_size(max(sizes))} do not fit into memory; give smaller ones") from None
        starts = [(name, named.get(name, NativeAllReduce(caller)).start) for name in algorithms]
        for size in sizes:
            rows, busy = [], defaultdict[str, list[float]](list)
            for turn in range(repetitions + 1):
                row = [Span(0.0, 0.0)] * len(starts)
                for index in shuffled(range(len(starts)), turn):
                    name, start = starts[index]
                    tensor = torch.ones(size // 4, dtype=torch.int32, device=connection.engine.device)
                    row[index] = connection.clock.span(partial(_sum, start, tensor, busy[name]))
                    if not bool((tensor == caller.size).all()):
                        raise RunError(f"allreduce {name}: a wrong sum of {size} bytes on rank {caller.rank}")
                rows.append(row)
            flat = connection.clock.elapsed([span for row in rows[1:] for span in row])
            cpu = connection.slowest([statistics.median(busy[name][1:]) for name, _ in starts])
            for i, (name, _) in enumerate(starts):
                times, chosen = flat[i :: len(starts)], named[name].algorithm_for(size) if name in named else None
                (median, skew, bound, _), samples = typical(times), tuple(each.seconds for each in times)
                used = chosen.grid if chosen is not None and chosen.algorithm in GRIDS else None
                records.append(Record(
                    name, size, caller.size, used, runs=str(chosen or "native"), median_s=median, min_s=min(samples),
                    max_s=max(samples), n=repetitions, skew_s=skew, bound_s=bound, samples_s=samples, cpu_s=cpu[i],
                ))  # fmt: skip
    return records


def _sum(start: Callable[[torch.Tensor], Work], tensor: torch.Tensor, busy: list[float]) -> None:
    begin = time.process_time()
    start(tensor).wait()
    busy.append(time.process_time() - begin)

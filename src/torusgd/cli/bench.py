"""`torusgd bench allreduce` and `torusgd tune`, on ranks of their own on this machine or on the ranks they find."""

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..comm.bench import SIZES, Record, bench_allreduce
from ..comm.groups import Group
from ..comm.liveness import Liveness
from ..comm.profile import Profile, Timing
from ..comm.tune import tune
from ..errors import UserError
from ..launch.heartbeat import Limits
from ..launch.processes import RankFailed, Supervisor
from ..launch.torchrun import run_joined
from ..runtime import keep_freed_memory, ranks_are_given, ranks_of
from ..signals import StopFlag, end_on_stop
from ..weights import write_text

TIMEOUT = 60.0
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def bench(
    sizes: str | None,
    algorithms: str | None,
    grid: tuple[int, int] | None,
    profile: Path | None,
    workers: int | None,
    device: str,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Times all-reduces and prints a table; `sizes` and `algorithms` are lists with commas.

    Raises:
        UserError: A size, an algorithm, the grid or the file doesn't fit.
        RunError: A sum was wrong, or a rank was lost.
    """
    _check_writable(json_file)
    chosen = [parse_size(size) for size in sizes.split(",")] if sizes else list(SIZES)
    names = algorithms.split(",") if algorithms else ["native", "ring", "halving-doubling", "doubling", "auto"]
    records = _on_ranks(workers, device, _bench_rank, chosen, names, grid, profile, repetitions)
    if records is None:
        return
    show_records([Record(**record) for record in records])
    if json_file is not None:
        plain = [{**record, "grid": list(record["grid"]) if record["grid"] else None} for record in records]
        write_text(json_file, json.dumps(plain, indent=1) + "\n")


def measure(out: Path, workers: int | None, device: str, seconds: float) -> None:
    """Measures the network between the ranks once and saves it for `--allreduce auto` and `torusgd plan`.

    Raises:
        UserError: One rank only, or a file that can't be written.
        RunError: A rank was lost.
    """
    _check_writable(out)
    text = _on_ranks(workers, device, _tune_rank, seconds)
    if text is None:
        return
    profile = Profile.parse(text)
    profile.save(out)
    console = Console(highlight=False, soft_wrap=True)
    for name, link in (("inside a host", profile.inside), ("between hosts", profile.between)):
        if link is not None:
            rate = "a rate too high to tell"
            if link.per_byte:
                rate = f"{8e-9 / link.per_byte:.2f} Gb/s (+- {link.per_byte_error / link.per_byte:.0%})"
            console.print(f"{name}: {1e6 * link.latency:.1f} us (+- {1e6 * link.latency_error:.1f}), {rate}")
    best: dict[int, Timing] = {}
    for timing in profile.timings:
        if timing.size not in best or timing.median < best[timing.size].median:
            best[timing.size] = timing
    for size, timing in sorted(best.items()):
        how = timing.as_algorithm(len(profile.hosts)) or "native"
        console.print(f"{show_size(size):>8}: {how}, {1e3 * timing.median:.3g} ms")
    if profile.crowding:
        most = profile.crowding[-1]
        console.print(f"{most.ranks} ranks at once compute {most.slowdown:.2f} times as long as one")
    for point in profile.in_steps:
        slows, waits = 1e3 * point.hidden, 1e3 * point.waited
        console.print(f"in a step {show_size(point.size)}: {waits:.2g} ms if waited for, {slows:.2g} ms if hidden")
    console.print(f"in {out}; give it as --profile {out}", markup=False)


def show_records(records: Sequence[Record]) -> None:
    """The table of a benchmark."""
    title = f"all-reduce on {records[0].ranks} ranks, median of {records[0].n}, the slowest rank's; gain: over native"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("size", "algorithm", "ms", "min-max", "bus MB/s", "gain"):
        table.add_column(column, justify="right", no_wrap=True)
    native = {record.bytes: record.median_s for record in records if record.algorithm == "native"}
    for record in records:
        ratio = native[record.bytes] / record.median_s if record.bytes in native else None
        table.add_row(
            show_size(record.bytes),
            record.runs if record.algorithm == "auto" else record.algorithm,
            f"{1e3 * record.median_s:.4g}",
            f"{1e3 * record.min_s:.3g}-{1e3 * record.max_s:.3g}",
            f"{1e-6 * record.bus_bandwidth:.0f}",
            f"{ratio:.2f}x" if ratio else "",
        )
    Console(highlight=False).print(table)


def parse_size(text: str) -> int:
    """`4KiB`, `1MiB` or `4096` in bytes; UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(f"--sizes {text!r}: write sizes as 4KiB,1MiB or in bytes")
    return int(match[1]) * _UNITS[match[2].upper()]


def show_size(size: int) -> str:
    """A size as people write it."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _on_ranks(workers: int | None, device: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments, device)` returns on rank 0, run on every rank.

    Args:
        workers: Ranks to start on this machine; None: a GPU or core each. Another launcher's ranks are taken as found.
        device: `cpu` or `cuda`.
        function: Found by its name in a module; it returns a JSON value.
        arguments: Pickled between our own processes.

    Returns:
        The result; None on the other ranks of somebody else's launcher.

    Raises:
        UserError: A mistake that the ranks found.
        RunError: A rank was lost.
    """
    on_rank = partial(_rank, function, arguments)
    limits = Limits(beat=TIMEOUT, start=TIMEOUT, stuck=inf)
    if ranks_are_given():
        result = run_joined(on_rank, device, limits)
        return result if os.environ["RANK"] == "0" else None
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    available = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    with Supervisor(workers or available, device, limits) as supervisor:
        try:
            return supervisor.run(on_rank)[0]
        except RankFailed as error:
            error.failure.throw()


def _rank(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    world: Group,
    stop: StopFlag,
    restarts: int,
    liveness: Liveness,
) -> Any:
    """A measurement on one rank; it asks nobody for late ranks, and a stop ends it as it is."""
    torch.set_num_threads(1)
    end_on_stop()
    return function(*arguments, ranks_of(world).device)


def _bench_rank(
    sizes: Sequence[int],
    names: Sequence[str],
    grid: tuple[int, int] | None,
    profile: Path | None,
    repetitions: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    records = bench_allreduce(sizes, names, grid=grid, profile=profile, repetitions=repetitions, device=device)
    return [record.__dict__ for record in records]


def _tune_rank(seconds: float, device: torch.device) -> str:
    keep_freed_memory()  # as a run does, whose computation is timed
    return tune(seconds, device=device).model_dump_json()


def _check_writable(path: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(f"{path}: can't be written; name a file in a folder that can")

"""`torusgd bench`: what a run is made of, measured on these ranks."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ..comm.algorithms import SCHEDULED, parse_grid
from ..errors import UserError
from .options import NETWORK, OUTPUT, Device, Grid, JsonFile, Profile, Streams, Workers
from .output import check_writable, console, write_json
from .scaling import scaling

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..comm.tuning.bench import Record

app = typer.Typer(help="Measure what a run is made of, on these ranks.", no_args_is_help=True)
app.command()(scaling)
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_COMPARED = ("native", "ring", "halving-doubling", "doubling", "auto")


@app.command()
def allreduce(
    sizes: Annotated[
        str | None,
        Option("--sizes", help="Such as 4KiB,1MiB. Default: 4 KiB to 16 MiB.", rich_help_panel=NETWORK),
    ] = None,
    algorithms: Annotated[
        str,
        Option("--algorithms", help=f"Of native, auto, {', '.join(SCHEDULED)}.", rich_help_panel=NETWORK),
    ] = ",".join(_COMPARED),
    grid: Grid = None,
    profile: Profile = None,
    streams: Streams = None,
    workers: Workers = None,
    device: Device = None,
    repetitions: Annotated[int, Option("-n", min=1, help="Timed runs of each.", rich_help_panel=OUTPUT)] = 7,
    json_file: JsonFile = None,
) -> None:
    """Time all-reduce algorithms in turn, by the slowest rank."""
    from ..comm.tuning.bench import SIZES, Record
    from ..comm.tuning.profile import Profile as Measured
    from ..runtime import ranks_are_given
    from .ranks import on_ranks

    check_writable("--json", json_file)
    chosen = [parse_size(size) for size in sizes.split(",")] if sizes else list(SIZES)
    places = None if grid is None else parse_grid(grid)
    names, count = algorithms.split(","), streams or 1
    if profile is not None and not ranks_are_given():
        Measured.load(profile)  # a mistake in it is told before ranks are started
    records = on_ranks(workers, device, _on_rank, chosen, names, places, profile, repetitions, count)
    if records is None:
        return
    show_records([Record(**record) for record in records])
    write_json(json_file, records)


def _on_rank(
    sizes: Sequence[int],
    names: Sequence[str],
    grid: tuple[int, int] | None,
    profile: Path | None,
    repetitions: int,
    streams: int,
    world: "Group",
) -> list[dict[str, Any]]:
    from ..comm.tuning.bench import bench_allreduce

    records = bench_allreduce(
        sizes, names, grid=grid, profile=profile, repetitions=repetitions, streams=streams, group=world
    )
    return [record.__dict__ for record in records]


def show_records(records: "Sequence[Record]") -> None:
    """The table of a benchmark."""
    from rich import box
    from rich.table import Table

    title = f"all-reduce on {records[0].ranks} ranks, median of {records[0].n}, the slowest rank's; gain: over native"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("size", "algorithm", "ms", "min-max", "bus MB/s", "gain"):
        table.add_column(column, justify="right", overflow="fold")
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
    console().print(table)


def parse_size(text: str) -> int:
    """`4KiB`, `1MiB` or `4096` in bytes; UserError for anything else.

    >>> parse_size("4KiB"), parse_size("2MB")
    (4096, 2000000)
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*([a-z]*)\s*", text, re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(f"--sizes {text!r}: write sizes as 4KiB,1MiB or in bytes")
    return int(match[1]) * _UNITS[match[2].upper()]


def show_size(size: int) -> str:
    """A size as people write it.

    >>> show_size(4096), show_size(100)
    ('4 KiB', '100 B')
    """
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"

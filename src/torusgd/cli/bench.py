"""`torusgd bench`: what a run is made of, measured on these ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..comm.algorithms import SCHEDULED
from ..text import byte_size, listed, parse_size
from .options import NETWORK, OUTPUT, JsonFile, RuntimeFlags, option
from .output import check_writable, console, write_json

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..comm.tuning.bench import Record

_COMPARED = ("native", "ring", "halving-doubling", "doubling", "auto")


def allreduce(
    runtime: RuntimeFlags,
    sizes: Annotated[
        str | None,
        option("--sizes", "Sum tensors of these sizes. Default: 4KiB to 16MiB.", NETWORK, metavar="4KiB,..."),
    ] = None,
    algorithms: Annotated[
        str, option("--algorithms", f"Compare these of native, auto, {listed(SCHEDULED)}.", NETWORK)
    ] = ",".join(_COMPARED),
    repetitions: Annotated[int, option("-n", "Time each this many times.", OUTPUT, min=1)] = 7,
    json_file: JsonFile = None,
) -> None:
    """Time all-reduce algorithms in turn, by the slowest rank."""
    from ..comm.tuning.bench import SIZES, Record
    from ..comm.tuning.profile import Profile
    from ..runtime import ranks_are_given
    from .ranks import on_ranks

    check_writable("--json", json_file)
    options = runtime.over()
    chosen = [parse_size("--sizes", each) for each in sizes.split(",")] if sizes else list(SIZES)
    profile = None if options.profile is None else Path(options.profile)
    if profile is not None and not ranks_are_given():
        Profile.load(profile)  # its mistakes are reported before ranks are started
    names, grid, streams = algorithms.split(","), options.grid_size, options.streams
    records = on_ranks(options, _on_rank, chosen, names, grid, profile, repetitions, streams)
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
            byte_size(record.bytes),
            record.runs if record.algorithm == "auto" else record.algorithm,
            f"{1e3 * record.median_s:.4g}",
            f"{1e3 * record.min_s:.3g}-{1e3 * record.max_s:.3g}",
            f"{1e-6 * record.bus_bandwidth:.0f}",
            f"{ratio:.2f}x" if ratio else "",
        )
    console().print(table)

"""What `torusgd rehearse` does with its flags: it rehearses, prints, and writes the JSON asked for."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..comm.algorithms import GRIDS, parse_algorithm, parse_grid
from ..errors import RunError, UserError
from ..plan.cluster import Cluster, Software, load_cluster, load_software
from ..plan.forecast import Workload, software_for, with_communication, workload_of
from ..plan.timeline import step_time
from ..recipe.load import load_recipe
from ..rehearse.lab import why_not
from ..rehearse.rehearsal import Rehearsal, as_torusgd, rehearse

_USUAL_MIB = 4.0


def command(
    name: str,
    overrides: Sequence[str] = (),
    *,
    cluster: str,
    devices: int,
    software: str | None = None,
    allreduce: str = "ring",
    grid: str | None = None,
    update: str = "replicated",
    model_parallel: str | None = None,
    bucket_mib: float = _USUAL_MIB,
    overlap: bool = True,
    steps: int = 3,
    seconds: float = 10.0,
    data: Path | None = None,
    json_file: Path | None = None,
) -> int:
    """Rehearses a recipe's step on a cluster.

    Args:
        name: A recipe, by name or file.
        overrides: Its --set items.
        cluster: By name or file.
        devices: How many.
        software: Profile of the compute, by name or file; the cluster's own by default.
        allreduce: Of torusgd, by name.
        grid: Y x X, for torus and hierarchical.
        update: replicated or sharded.
        model_parallel: Ranks that share linear layers, or `auto`; None: data parallelism.
        bucket_mib: Size of a bucket.
        overlap: Buckets leave during backward.
        steps: Rehearsed ones.
        seconds: About how long a step may take in the lab.
        data: The data set, where the recipe does not say how large it is.
        json_file: Where to write all of it.

    Raises:
        UserError: The input is wrong.
        RunError: There is no lab here.
    """
    console = Console(highlight=False, soft_wrap=True)
    recipe = load_recipe(name, overrides).recipe
    machine = load_cluster(cluster)
    places = _check(devices, allreduce, grid)
    workload = workload_of(recipe, path=data)
    workers = min(stage.workers for stage in workload.stages)
    if devices > workers:
        raise UserError(
            f"--devices {devices}: the recipe has {workers} virtual workers; --set virtual_workers={devices}"
        )
    program = as_torusgd(
        software_for(recipe, load_software(software or machine.software)),
        bucket_mib=bucket_mib,
        allreduce=allreduce,
        grid=places,
        overlap=overlap,
        sharded=update == "sharded",
    )
    groups = groups_of(workload, machine, program, devices, model_parallel)
    program = with_communication(program, linear_groups=groups)
    reason = why_not()
    if reason is not None:
        raise RunError(f"rehearse: {reason}")
    found = rehearse(
        workload, machine, program, devices, reduction=recipe.reduction, allreduce=allreduce, steps=steps, limit=seconds
    )
    how = f"{update} update" + ("" if groups is None else f", linear layers shared by {devices // groups}")
    console.print(f"{recipe.name} on {devices} x {machine.device.name} ({machine.name}, {program.name}), {how}")
    _show(console, found)
    if json_file is not None:
        plain = {"recipe": recipe.name, "cluster": machine.name, "update": update, "linear_groups": groups}
        try:
            json_file.write_text(json.dumps({**plain, **found.as_dict()}, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--json {json_file}: can't be written: {error.strerror}") from error
    return 0


def groups_of(
    workload: Workload, cluster: Cluster, software: Software, devices: int, model_parallel: str | None
) -> int | None:  # fmt: skip
    """The number of groups G = N / M for --model-parallel M; `auto` takes the G with the shortest planned step."""
    if model_parallel is None:
        return None
    if model_parallel == "auto":
        stage = workload.stages[-1]
        passes = math.ceil(stage.workers / devices)

        def seconds(groups: int) -> float:
            split = with_communication(software, linear_groups=groups)
            return step_time(workload.cost, cluster, split, devices, stage.images, passes).seconds

        return min((groups for groups in range(devices, 0, -1) if devices % groups == 0), key=seconds)
    if not model_parallel.isdecimal() or int(model_parallel) < 1 or devices % int(model_parallel):
        raise UserError(f"--model-parallel {model_parallel}: needs a divisor of {devices} devices, or auto")
    return devices // int(model_parallel)


def _check(devices: int, allreduce: str, grid: str | None) -> tuple[int, int] | None:
    if devices < 2:
        raise UserError(f"--devices {devices}: one device sends nothing; a rehearsal needs at least 2")
    places = None if grid is None else parse_grid(grid)
    if allreduce not in ("auto", "native"):
        parse_algorithm(allreduce, devices, places)
    if places is not None and allreduce.partition(":")[0] not in GRIDS:
        raise UserError(f"--grid {grid}: goes with --allreduce torus or hierarchical, not {allreduce}")
    return places


def _show(console: Console, found: Rehearsal) -> None:
    """The scale, a step as rehearsed and as planned, and how far they are apart."""
    console.print(
        f"lab: {found.scale}; it carries {8e-6 * found.ceiling.rate:.0f} Mb/s a host, "
        f"{1e3 * found.ceiling.round:.2f} ms a round",
        f"{found.allreduce}; {found.bytes / 1e6:.1f} MB of messages a rank and step",
        sep="\n",
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("a step, ms")
    for heading in ("rehearsed", "planned"):
        table.add_column(heading, justify="right")
    planned, rest = found.planned, found.planned.seconds - found.planned.compute - found.predicted
    rows = [
        ("compute (timed waits)", planned.compute, planned.compute),
        ("exposed communication", found.rehearsed, found.predicted),
        ("update, contention, slow devices (planned)", rest, rest),
        ("all", found.seconds, planned.seconds),
    ]
    for name, one, other in rows:
        table.add_row(name, f"{1e3 * one:.2f}", f"{1e3 * other:.2f}", style="bold" if name == "all" else None)
    speeds = [(found.alone / s, found.batch / s) for s in (found.seconds, planned.seconds)]
    table.add_row("speed-up", *(f"{speed:.2f}" for speed, _ in speeds))
    table.add_row("images/s", *(f"{rate:,.0f}" for _, rate in speeds))
    console.print(table)
    spread = f"{1e3 * min(found.waits):.2f} to {1e3 * max(found.waits):.2f} ms in {len(found.waits)} steps"
    console.print(f"exposed communication: {spread}")
    off = f"the plan is {found.error_of_step:+.1%} of the step off"
    if found.rehearsed > 0:
        off += f", {found.error:+.1%} of what was rehearsed"
        if found.scale.excess:
            late = f"{1e3 * found.predicted_late:.2f} ms ({found.error_late:+.1%})"
            off += f"; with rounds as late as the lab's it says {late}"
    console.print(off)

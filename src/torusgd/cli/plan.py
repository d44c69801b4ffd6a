"""What `torusgd plan` does with its flags: it prints, writes the JSON asked for, and returns the exit code."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..comm.algorithms import GRIDS, parse_grid
from ..comm.profile import Profile
from ..errors import UserError
from ..plan.cluster import Cluster, Software, load_cluster, load_software
from ..plan.forecast import Workload, forecast, software_for, with_communication, workload_of
from ..plan.local import local_cluster, measured_software
from ..plan.plot import check_plot, plot_sweep
from ..plan.published import predict_row, read_rows
from ..plan.search import device_counts, fixed_batch, search_settings, sweep
from ..recipe.load import load_recipe
from .plan_tables import price_of, show_best, show_forecast, show_published, show_sweep

_ALGORITHMS = ("ring", "torus", "hierarchical", "halving-doubling", "doubling", "direct", "native", "tree", "nccl")


def plan(
    name: str,
    overrides: Sequence[str] = (),
    *,
    cluster: str,
    devices: int,
    software: str | None = None,
    grid: str | None = None,
    allreduce: str | None = None,
    over: bool = False,
    search: bool = False,
    price: float | None = None,
    data: Path | None = None,
    profile: Path | None = None,
    measured: Path | None = None,
    plot: Path | None = None,
    json_file: Path | None = None,
) -> int:
    """Plans a recipe on a cluster.

    Args:
        name: A recipe, by name or file.
        overrides: Its --set items.
        cluster: By name or file.
        devices: How many.
        software: Profile, by name or file; the cluster's own by default.
        grid: Y x X of a torus, such as 32x32.
        allreduce: An algorithm's name.
        over: Also for 1 to `devices` devices, with the knee (--sweep).
        search: Also look for better settings (--best).
        price: Of a device and hour.
        data: The data set, where the recipe does not say how large it is.
        profile: What torusgd tune measured; with cluster local.
        measured: Folder of a finished run of this recipe with one worker, whose steps the plan takes for compute.
        plot: Picture of the sweep, .svg or .png.
        json_file: Where to write all of it.

    Raises:
        UserError: The input is wrong.
    """
    console = Console(highlight=False, soft_wrap=True)
    _check(devices, price)
    _check_writable("--json", json_file)
    if plot is not None:
        check_plot(plot)
        _check_writable("--plot", plot)
    recipe = load_recipe(name, overrides).recipe
    machine = _machine(cluster, profile)
    program = software_for(recipe, load_software(software or machine.software))
    program = _communicating(program, devices, grid, allreduce)
    workload = workload_of(recipe, path=data)
    if measured is not None:
        program = measured_software(workload, machine, program, measured)
    elif profile is not None:
        raise UserError("--profile: is of the network alone; add --measured RUN, a run of this recipe with one worker")
    title = f"{recipe.name} on {devices:,} x {machine.device.name} ({machine.name}, {program.name})"
    console.print(title, markup=False)
    asked, workload = workload, fixed_batch(workload, devices)
    if workload != asked:
        console.print(_cut_anew(asked, workload, devices))
    now = forecast(workload, machine, program, devices)
    show_forecast(console, now, price)
    found: dict[str, Any] = {
        "recipe": recipe.name,
        "cluster": machine.name,
        "software": program.name,
        **now.as_dict(),
        **({"cost": price_of(now, price)} if price is not None else {}),
    }
    if machine.device.memory is not None and now.memory > machine.device.memory:
        console.print(
            f"note: more than the {machine.device.memory / 2**30:.0f} GiB of a device; fewer images a worker fit"
        )
    if machine.nodes is not None and devices > machine.nodes * machine.devices_per_node:
        console.print(f"note: {machine.name} has {machine.nodes * machine.devices_per_node:,} devices")
    if over or plot is not None:
        curve = sweep(asked, machine, program, device_counts(devices, asked.stages[0].workers))
        show_sweep(console, curve, price)
        found["sweep"] = [f.as_dict() for f in curve.forecasts]
        found["knee"] = curve.knee
        if plot is not None:
            plot_sweep(curve, title, plot)
            console.print(f"wrote {plot}", markup=False)
    if search:
        chosen = search_settings(workload, machine, program, devices)
        show_best(console, chosen)
        found["best"] = {**chosen.forecast.as_dict(), "choices": [asdict(choice) for choice in chosen.choices]}
    _write(json_file, found)
    return 0


def published(path: Path, json_file: Path | None = None) -> int:
    """Predicts every row of a table of published results; UserError names what a row's prediction lacks."""
    _check_writable("--json", json_file)
    predictions = [predict_row(row) for row in read_rows(path)]
    show_published(Console(highlight=False, soft_wrap=True), predictions)
    _write(json_file, [prediction.as_dict() for prediction in predictions])
    return 0


def _communicating(software: Software, devices: int, grid: str | None, allreduce: str | None) -> Software:
    changes: dict[str, Any] = {}
    if allreduce is not None and allreduce != "auto":
        if allreduce.partition(":")[0] not in (*_ALGORITHMS, "in-network"):
            raise UserError(f"--allreduce {allreduce}: unknown; one of auto, {', '.join(_ALGORITHMS)}, in-network")
        changes["algorithm"] = allreduce
    if grid is not None:
        rows, columns = parse_grid(grid)
        if rows * columns != devices:
            raise UserError(f"--grid {grid}: has {rows * columns} places for {devices} devices")
        changes["grids"] = ((rows, columns),)
        if changes.get("algorithm", software.communication.algorithm).partition(":")[0] not in GRIDS:
            changes["algorithm"] = "torus"
    return with_communication(software, **changes) if changes else software


def _machine(cluster: str, profile: Path | None) -> Cluster:
    if profile is None:
        return load_cluster(cluster)
    if cluster != "local":
        raise UserError(f"--profile {profile}: goes with --cluster local, not {cluster}")
    return local_cluster(Profile.load(profile))


def _check(devices: int, price: float | None) -> None:
    if devices < 1:
        raise UserError(f"--devices {devices}: a plan needs at least 1")
    if price is not None and price < 0:
        raise UserError(f"--cost {price}: a price of a device-hour is not negative")


def _cut_anew(asked: Workload, workload: Workload, devices: int) -> str:
    """Says what is planned where there are more devices than virtual workers."""
    workers, images = asked.stages[0].workers, " > ".join(str(stage.images) for stage in workload.stages)
    return (
        f"note: the recipe has {workers} virtual workers; planned with its batch cut for {devices:,} devices, {images} "
        f"images each at most. For a larger batch: --set virtual_workers={devices}"
    )


def _check_writable(flag: str, path: Path | None) -> None:
    """Before the work, not after."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise UserError(f"{flag} {path}: can't be written; name a file in a folder that can")


def _write(path: Path | None, found: Any) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: can't be written: {error.strerror}") from error

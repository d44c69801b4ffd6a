"""The program that a plan prices: a software profile, changed by a recipe and the runtime options.

The profile (`software/*.yaml`) describes a program as it was published; the recipe, of its precision and of the bits of
a gradient on the wire, goes before it; and the runtime options that the user gave, as a block or as flags, before both.
The profile `torusgd` holds the defaults of the options: a plan of it is of what `torusgd train` does with the same
recipe file and flags. A rehearsal always plays torusgd's messages: `as_torusgd`.
"""

import math
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from ..comm.algorithms import GRIDS, NAMES, OTHER_PROGRAMS, parse_algorithm, squarest
from ..comm.exact_sum import gradient_integers
from ..errors import UserError, suggest
from ..gradients.layout import rule_on
from ..recipe.compatibility import BY_SPEED, Setup, obstacle
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from .cluster import Buckets, Cluster, Precision, Software, load_software
from .forecast import DEVIATIONS, HIGH, LOW, Workload, stage_step, with_communication
from .measured_run import measured_steps, no_times
from .model_cost import held_values, matched

# Of a step, over float32's: ResNet-50 takes 1.4 on a CPU with int8 dot products, 2.8 without
# (notes/portable-arithmetic.md)
_PORTABLE_SLOWDOWN = 2.5
_IN_ADVANCE = 10  # steps over which those that were launched in advance are averaged


def program_for(recipe: Recipe, runtime: RuntimeOptions, cluster: Cluster, software: Software) -> Software:
    """The program that trains a recipe on `runtime.workers` devices, for `forecast`, `step_time` and rehearsals.

    Of `runtime` the options in its `model_fields_set` count; `model_parallel` is as `resolve_model_parallel` makes it.
    """
    # Plan 3: what the recipe and the options say goes before the profile.
    assert runtime.workers is not None, "a plan is of so many devices"
    given = runtime.model_fields_set  # an option that the user did not give stays as the profile has it
    exact = gradient_integers(recipe.virtual_workers)
    wire = exact if recipe.reduction == "exact" else getattr(torch, recipe.reduction)
    changes: dict[str, Any] = {"wire_bits": 8 * wire.itemsize, "wide_norms": recipe.has_wide_norms}
    changes |= _all_reduce(runtime, runtime.workers, cluster, software)
    is_gpu = cluster.backend == "nccl"
    if software.name == "torusgd" and is_gpu:
        changes["pipelined"] = False  # all that NCCL does is enqueued in one order (comm/nccl.py)
    if "streams" in given:
        changes["streams"] = runtime.streams
    if "buckets" in given or software.communication.buckets.option == "auto":
        changes["buckets"] = Buckets(rule="torusgd", option=rule_on(is_gpu, runtime.buckets))
    sharded = runtime.update == "sharded" if "update" in given else software.sharded_update
    if "update" in given:
        changes["gather_ahead"] = sharded
    if "model_parallel" in given:
        ranks = runtime.model_parallel
        assert ranks != "auto", "resolve_model_parallel comes first"
        if runtime.workers % ranks:
            raise UserError(f"--model-parallel {ranks}: needs a divisor of {runtime.workers} devices, or auto")
        changes["linear_groups"] = None if ranks == 1 else runtime.workers // ranks
    first = runtime.weights_first if "weights_first" in given else software.weights_first
    precision = recipe.precision
    if precision == "auto":
        precision = _fastest(cluster) if software.name == "torusgd" else software.precision
    if precision == "portable":  # float32's passes with slower kernels
        precision, slowdown = "float32", _PORTABLE_SLOWDOWN
        kernels = {"math": software.math / slowdown, "memory": software.memory / slowdown}
        software = software.model_copy(update={**kernels, "launch": software.launch * slowdown})
    shares = "even" if obstacle(BY_SPEED, Setup(recipe)) else runtime.shares if "shares" in given else software.shares
    more = held_values(recipe) - 2  # beside weights and momentum; each is read and written
    return with_communication(software, **changes).model_copy(update={
        "precision": precision, "sharded_update": sharded, "shares": shares, "weights_first": first,
        "held_values": software.held_values + more, "update_bytes": software.update_bytes + 8 * more,
    })  # fmt: skip


def _fastest(cluster: Cluster) -> Precision:
    """What `precision: auto` is on such devices (`runtime.resolve_auto`), as far as their file knows it."""
    if cluster.profile is not None:
        return "float32"  # this machine's device is a nominal one
    known = cluster.device.peak
    fast: tuple[Precision, ...] = ("bfloat16", "float16") if cluster.backend == "nccl" else ("bfloat16",)
    return next((each for each in fast if each in known), "float32")


def as_torusgd(software: Software) -> Software:
    """torusgd with another program's efficiencies: its own messages, of which each costs what that program's does."""
    own, theirs = load_software("torusgd"), software.communication
    changes = {"message": theirs.message, "contention": theirs.contention}
    options = {key: getattr(own, key) for key in ("sharded_update", "shares", "weights_first", "norm_group")}
    return software.model_copy(update={**options, "communication": own.communication.model_copy(update=changes)})


def resolve_model_parallel(
    recipe: Recipe, workload: Workload, runtime: RuntimeOptions, cluster: Cluster, software: Software
) -> RuntimeOptions:
    """The options with `model_parallel: auto` replaced by the number of ranks with the shortest planned step."""
    if runtime.model_parallel != "auto":
        return runtime
    assert runtime.workers is not None, "a plan is of so many devices"
    devices, stage = runtime.workers, workload.stages[-1]
    # Candidates divide the devices, and the recipe's column blocks if it has some; of equal ones the first is taken.
    common = devices if recipe.column_blocks == 1 else math.gcd(devices, recipe.column_blocks)
    tried = [runtime.model_copy(update={"model_parallel": m}) for m in range(1, common + 1) if common % m == 0]

    def seconds(options: RuntimeOptions) -> float:
        return stage_step(workload, stage, cluster, program_for(recipe, options, cluster, software), devices).seconds

    return min(tried, key=seconds)


def _all_reduce(runtime: RuntimeOptions, devices: int, cluster: Cluster, software: Software) -> dict[str, Any]:
    """Algorithm and grid, if the user gave one of them."""
    is_given = "allreduce" in runtime.model_fields_set
    name = runtime.allreduce if is_given else software.communication.algorithm
    algorithm, grid = name.partition(":")[0], runtime.grid_size
    known = (*NAMES, *OTHER_PROGRAMS)
    if algorithm not in known or (":" in name and algorithm not in GRIDS):
        raise UserError(f"--allreduce {name}: unknown{suggest(name, known)}")
    if grid is not None and algorithm not in GRIDS:
        raise UserError(f"--grid {runtime.grid}: goes with --allreduce {' or '.join(GRIDS)}, not {name}")
    if grid is not None and math.prod(grid) != devices:
        raise UserError(f"--grid {runtime.grid}: has {math.prod(grid)} places for {devices} devices")
    if not is_given:
        return {} if grid is None else {"grids": (grid,)}
    if algorithm not in GRIDS:
        return {"algorithm": name}
    per_node = cluster.devices_per_node
    if grid is None and 1 < per_node < devices and devices % per_node == 0:
        grid = devices // per_node, per_node  # as a run without a given one
    own = parse_algorithm(name, devices, grid or squarest(devices))
    return {"algorithm": own.name, "grids": (own.grid,)}


def measured_software(
    recipe: Recipe, workload: Workload, cluster: Cluster, software: Software, run: Path, takes_graphs: bool = True
) -> Software:
    """The profile scaled to the steps of a finished run (a folder) of the same recipe with one worker; its `error`
    reaches at least from the 5th to the 95th hundredth of those steps. `takes_graphs`: whether the planned run may.
    """
    first = workload.stages[0]
    steps = measured_steps(recipe, first.batch, run)
    # The first step includes the warm-up.
    seconds = [event["step_seconds"] for event in steps[1:]]
    whole, update = median(seconds), median(event["update_seconds"] for event in steps[1:])
    if update == 0.0:  # CUDA graphs: only the device knows it
        if not takes_graphs:
            raise UserError(
                f"measured run {run}: took its steps as CUDA graphs, which several devices don't by themselves; train "
                "it again with --set runtime.cuda_graphs=false"
            )
        # Of steps that are launched in advance some take the host no time, and others that of three.
        windows = range(0, max(1, len(seconds) - _IN_ADVANCE + 1), _IN_ADVANCE)
        seconds = [mean(seconds[i : i + _IN_ADVANCE]) for i in windows]
        whole = median(seconds)
    if min(seconds) == 0:
        raise no_times(f"measured run {run}")
    low, *quartiles, high = np.quantile(seconds, (LOW, 0.25, 0.75, HIGH)).tolist()
    error = max(software.error, math.log(high / whole) / DEVIATIONS, math.log(whole / low) / DEVIATIONS)
    if cluster.profile is not None:
        software = with_communication(software, message=cluster.profile.message)
    found = {"measured_on": (cluster.device.name,), "quartiles": tuple(quartiles), "error": error}
    software, cost, passes = software.model_copy(update=found), workload.cost_of(first), whole - update
    return matched(software, cost, cluster.device, first.images, passes, update, first.workers, first.routine)

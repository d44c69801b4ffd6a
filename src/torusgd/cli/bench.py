"""`torusgd bench` and `torusgd tune`: the network measured, and a recipe's steps on 1, 2, 4 ... ranks beside a plan."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit

from ..comm.algorithms import SCHEDULED
from ..errors import UserError
from ..text import byte_size, listed, parse_size
from .options import NETWORK, OUTPUT, DataPath, JsonFile, Overrides, RecipeName, RuntimeFlags, flag
from .output import check_writable, console, table, write_file, write_json

if TYPE_CHECKING:
    from ..comm.groups import Group
    from ..comm.tuning.bench import Record
    from ..comm.tuning.profile import Profile
    from ..recipe.runtime_options import RuntimeOptions
    from ..recipe.schema import Recipe

_COMPARED = "native,ring,halving-doubling,doubling,auto"
_TIMEOUT = 60.0  # seconds without a heartbeat
_RANKS_A_CORE = 64  # more would take minutes to start, and time nothing but each other
_TUNED_FOR = "Measure how workers slow each other by this recipe's network, for plans of it; else by a small one."
_SHORT = ("evaluate.every=null", "data.eval_images=1", "polish=null")  # steps, and one image classified at the end


def allreduce(
    runtime: RuntimeFlags,
    sizes: str | None = flag("Sum tensors of these sizes. Default: 4KiB to 16MiB.", NETWORK, "4KiB,..."),
    algorithms: str = flag(f"Compare these of native, auto, {listed(SCHEDULED)}.", NETWORK, default=_COMPARED),
    repetitions: int = flag("Time each this many times.", OUTPUT, min=1, name="-n", default=7),
    json_file: JsonFile = None,
) -> None:
    """Time all-reduce algorithms in turn, by the slowest rank."""
    from ..comm.tuning.bench import SIZES, Record
    from ..comm.tuning.profile import Profile
    from ..runtime import ranks_are_given

    options = runtime.over()
    chosen = [parse_size("--sizes", each) for each in sizes.split(",")] if sizes else list(SIZES)
    profile = None if options.profile is None else Path(options.profile)
    if profile is not None and not ranks_are_given():
        Profile.load(profile)  # its mistakes are reported before ranks are started
    how = {"grid": options.grid_size, "profile": profile, "repetitions": repetitions, "streams": options.streams}
    names = [name.strip() for name in algorithms.split(",")]
    records = on_ranks(options, bench_on_rank, chosen, names, how)
    if records is None:
        return
    show_records([Record(**record) for record in records])
    write_json(json_file, records)


def bench_on_rank(sizes: Sequence[int], names: Sequence[str], how: dict[str, Any], world: "Group") -> list[Any]:
    from ..comm.tuning.bench import bench_allreduce

    return [record.__dict__ for record in bench_allreduce(sizes, names, **how, group=world)]


def show_records(records: "Sequence[Record]") -> None:
    console().print(
        f"all-reduce on {records[0].ranks} ranks, median of {records[0].n}, last begin to last end; gain: over native; "
        "skew: by which begins differ, with the error of clocks, * if above 5 % of the time"
    )
    native = {record.bytes: record.median_s for record in records if record.algorithm == "native"}
    rows = [
        (byte_size(r.bytes), r.runs if r.algorithm == "auto" else r.algorithm, f"{1e3 * r.median_s:.4g}",
         f"{1e3 * r.min_s:.3g}-{1e3 * r.max_s:.3g}", f"{1e-6 * r.bus_bandwidth:.0f}",
         f"{native[r.bytes] / r.median_s:.2f}x" if r.bytes in native else "",
         f"{1e3 * r.skew_s:.2g} +- {1e3 * r.bound_s:.2g}" + " *" * r.is_doubtful)
        for r in records
    ]  # fmt: skip
    console().print(table(("size", "algorithm", "ms", "min-max", "bus MB/s", "gain", "skew ms"), rows))


def tune(
    runtime: RuntimeFlags,
    recipe: Annotated[str | None, Argument(metavar="RECIPE", help=_TUNED_FOR)] = None,
    data: DataPath = None,
    overrides: Overrides = None,
    out: Path = flag("Write the profile to this file.", OUTPUT, default=Path("profile.json")),
    seconds: float = flag(
        "Measure for about so long; longer where even one timing of each kind takes longer.",
        min=1.0,
        max=86400,
        default=40.0,
    ),
) -> None:
    """Measure this cluster's network once, for --allreduce auto and for plans."""
    from ..comm.tuning.profile import Profile
    from ..recipe.load import load_recipe
    from ..runtime import resolve_auto, resolve_device

    check_writable("--out", out)
    if recipe is None and (data or overrides):
        raise UserError("tune: --data and --set go with a recipe; give its name, such as: torusgd tune fashion")
    written = None if recipe is None else load_recipe(recipe, overrides or []).recipe
    options = runtime.over()
    resolved = written and resolve_auto(written, resolve_device(options))
    text = on_ranks(options, tune_on_rank, seconds, options.streams, resolved, data)
    if text is None:
        return
    profile = Profile.parse(text)
    write_file("--out", out, profile.dump())
    show_profile(profile)
    console().print(f"in {out}; give it as --profile {out}")


def tune_on_rank(seconds: float, streams: int, recipe: "Recipe | None", data: Path | None, world: "Group") -> str:
    """A profile as JSON; `on_ranks` runs it on each rank."""
    from ..comm.tuning.tune import tune as measure
    from ..data.registry import open_sources
    from ..runtime import keep_freed_memory
    from ..step.forward_backward import one_pass

    keep_freed_memory()  # as a run does, whose computation is timed
    task = None
    if recipe is not None:
        classes = recipe.data.classes or len(open_sources(recipe.data, data, recipe.seed)[0].classes)
        task = one_pass(recipe, classes, world.device, recipe.stages[0].images_per_worker)
    return measure(seconds, group=world, streams=streams, one_pass=task).model_dump_json()


def show_profile(profile: "Profile") -> None:
    """Links, the best algorithm of each size, and what ranks and messages cost the computation."""
    terminal = console()
    for name, link in (("inside a host", profile.inside), ("between hosts", profile.between)):
        if link is not None:
            rate = "a rate too high to measure"
            if link.per_byte:
                rate = f"{8e-9 / link.per_byte:.2f} Gb/s (+- {link.per_byte_error / link.per_byte:.0%})"
            terminal.print(f"{name}: {1e6 * link.latency:.1f} us (+- {1e6 * link.latency_error:.1f}), {rate}")
    for each in sorted({timing.size for timing in profile.timings}):
        best = min((timing for timing in profile.timings if timing.size == each), key=lambda timing: timing.median)
        terminal.print(f"{byte_size(each):>8}: {best.as_algorithm(len(profile.hosts)) or 'native'}, {best.elapsed}")
    if profile.crowding:
        most = profile.crowding[-1]
        terminal.print(f"{most.ranks} ranks at once compute {most.slowdown:.2f} times as long as one")
    for point in profile.in_steps:
        slows, waits = 1e3 * point.hidden, 1e3 * point.waited
        terminal.print(f"in a step {byte_size(point.size)}: {waits:.2g} ms if waited for, {slows:.2g} ms if hidden")


def on_ranks(options: "RuntimeOptions", function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function(*arguments, world)` on rank 0, run on every rank; None on other ranks of a launcher. The
    function stands at a module's top level, for it travels to the ranks by name; it returns a JSON value.
    """
    import torch

    from ..launch.torchrun import run_joined
    from ..ranks.liveness import Limits
    from ..ranks.supervisor import RankFailed, Supervisor
    from ..runtime import ranks_are_given, resolve_device

    target = resolve_device(options)
    on_rank = partial(_measure, function, arguments)
    # Measurements report no progress: only a rank without heartbeats is given up.
    limits = Limits(beat=_TIMEOUT, start=_TIMEOUT, stuck=inf)
    if ranks_are_given():
        result = run_joined(on_rank, target, limits)
        return result if os.environ["RANK"] == "0" else None
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as ranks of a run have: cores are for ranks, not threads
    if options.workers_range is not None:
        raise UserError("--workers: a measurement takes one number of ranks")
    available = torch.cuda.device_count() if target == "cuda" else len(os.sched_getaffinity(0))
    workers = options.workers or available
    if workers > (most := available if target == "cuda" else _RANKS_A_CORE * available):
        raise UserError(f"workers = {workers}: a measurement on this machine takes at most {most}")
    with Supervisor(workers, target, limits) as supervisor:
        try:
            return supervisor.run(on_rank)[0]
        except RankFailed as error:
            error.failure.throw()


def _measure(function: Callable[..., Any], arguments: Sequence[Any], world: "Group", *_: object) -> Any:
    import torch

    from ..signals import end_on_stop

    torch.set_num_threads(1)
    end_on_stop()
    return function(*arguments, world)


@dataclass(frozen=True)
class Point:
    """A number of ranks: measured, and as planned from the run with one rank and the measured network."""

    ranks: int
    step_seconds: float  # median of the steps but the first
    images_per_second: float
    efficiency: float  # images a second of a rank, relative to those of the run with one rank
    planned_step_seconds: float
    planned_efficiency: float
    error: float  # relative error of the planned step against the measured one


def scaling(
    recipe: RecipeName,
    runtime: RuntimeFlags,
    data: DataPath = None,
    overrides: Overrides = None,
    steps: int = flag("Train each run for this many steps.", OUTPUT, min=3, default=30),
    seconds: float = flag(
        "Measure the network for so long, unless --profile gives it.", min=1.0, max=86400, default=10.0
    ),
    json_file: JsonFile = None,
) -> None:
    """Train for some steps on 1, 2, 4 ... and --workers ranks of this machine; print time and plan of each."""
    from ..comm.tuning.profile import Profile
    from ..launch.local import launch
    from ..recipe.load import load_recipe
    from ..recipe.runtime_options import RuntimeOptions
    from ..run.job import Job, check_job
    from ..runtime import ranks_are_given, resolve_auto, resolve_device, resolve_workers

    if ranks_are_given():
        raise UserError("bench scaling: starts 1, 2, 4 ... ranks itself; give the command without torchrun")
    written, block = load_recipe(recipe, [*(overrides or []), *_SHORT])
    options = runtime.over(block)
    if options.workers_range is not None:
        raise UserError("--workers: bench scaling takes one number, the most ranks")
    device = resolve_device(options)
    resolved = resolve_auto(written, device)
    most = resolve_workers(options, device, resolved)
    if most == 1:
        raise UserError("bench scaling: compares several ranks with one; give --workers of 2 or more")
    counts = sorted({*(2**power for power in range(most.bit_length())), most})
    # A given grid is for the most ranks, and so are model-parallel ranks that fewer can't be.
    own = {n: options if n == most else options.without(["grid", *options.unfit(n)]) for n in counts}
    chosen = {n: runtime.fitted(own[n].model_copy(update={"workers": n}), block, n) for n in counts}
    jobs = {n: Job(resolved, chosen[n], device, Path(), data, None, steps) for n in counts}
    for n, job in jobs.items():  # before minutes of work
        check_job(job, n, device, steps)
    if options.profile is not None:
        profile = Profile.load(Path(options.profile))
    else:
        console().print(f"measuring the network of {most} ranks for about {seconds:g} s")
        ranks = RuntimeOptions.model_validate({"workers": most, "device": device})
        profile = Profile.parse(on_ranks(ranks, tune_on_rank, seconds, 1, resolved, data))
    with TemporaryDirectory(prefix="torusgd-scaling-") as folder:
        runs = {n: Path(folder) / str(n) for n in counts}
        for number, n in enumerate(counts, 1):
            console().print(f"\nrun {number} of {len(counts)}: ranks {n}, steps {steps}")
            result = launch(replace(jobs[n], out=runs[n]), fresh=True)
            if not result.summary:  # stopped by a signal
                raise Exit(result.code)
        points = compare(resolved, chosen, runs, profile, data)
    show_points(points)
    write_json(json_file, [asdict(point) for point in points])


def compare(
    recipe: "Recipe", options: "dict[int, RuntimeOptions]", runs: dict[int, Path], profile: "Profile", data: Path | None
) -> list[Point]:
    """Measured and planned steps by number of ranks, of which the first is one; `options` and `runs` are by number."""
    from ..observe.events import PlanComparison
    from ..plan.cluster import load_software, local_cluster
    from ..plan.forecast import forecast, workload_of
    from ..plan.program import measured_software, program_for, resolve_model_parallel

    workload, software = workload_of(recipe, path=data), load_software("torusgd")
    cluster = local_cluster(profile)
    points: list[Point] = []
    for n, run in runs.items():
        resolved = resolve_model_parallel(recipe, workload, options[n], cluster, software)
        program = program_for(recipe, resolved, cluster, software)
        program = measured_software(recipe, workload, cluster, program, runs[1])
        planned = forecast(workload, cluster, program, n)
        stages = [(batch, step.seconds) for batch, step in zip(planned.batches, planned.run.steps, strict=True)]
        beside = PlanComparison(run, recipe.name, n, stages).beside(run / "events.jsonl")
        rate, planned_rate = beside["measured_images_per_second"], beside["images_per_second"]
        # The plan is scaled to the run with one rank, so that its rate is the planned one too.
        alone = points[0].images_per_second if points else rate
        points.append(
            Point(n, beside["measured_step_seconds"], rate, efficiency=rate / (n * alone),
                  planned_step_seconds=beside["step_seconds"], planned_efficiency=planned_rate / (n * alone),
                  error=beside["step_seconds_error"])
        )  # fmt: skip
    return points


def show_points(points: Sequence[Point]) -> None:
    console().print(
        "steps on this machine, median without the first; planned: from the run with one rank and the network"
    )
    rows = [
        (str(p.ranks), f"{1e3 * p.step_seconds:.4g}", f"{p.images_per_second:,.0f}", f"{p.efficiency:.0%}",
         f"{1e3 * p.planned_step_seconds:.4g}", f"{p.planned_efficiency:.0%}", f"{p.error:+.1%}")
        for p in points
    ]  # fmt: skip
    console().print(table(("ranks", "ms", "images/s", "efficiency", "planned ms", "planned efficiency", "error"), rows))

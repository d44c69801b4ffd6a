"""`torusgd bench scaling`: a recipe's step on 1, 2, 4 ... ranks of this machine, beside the plan made of the first."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Exit

from ..errors import UserError
from .options import OUTPUT, DataPath, JsonFile, Overrides, RecipeName, RuntimeFlags, option
from .output import check_writable, console, table, write_json

if TYPE_CHECKING:
    from ..comm.tuning.profile import Profile
    from ..recipe.runtime_options import RuntimeOptions
    from ..recipe.schema import Recipe

_SHORT = ("evaluate.every=null", "data.eval_images=1", "polish=null")  # steps, and one image classified at the end


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
    steps: Annotated[int, option("--steps", "Train each run for this many steps.", OUTPUT, min=3)] = 30,
    seconds: Annotated[
        float, option("--seconds", "Measure the network for so long, unless --profile gives it.", min=1.0)
    ] = 10.0,
    json_file: JsonFile = None,
) -> None:
    """Train for some steps on 1, 2, 4 ... and --workers ranks of this machine; print time and plan of each."""
    from ..comm.tuning.profile import Profile
    from ..launch.local import launch
    from ..recipe.load import load_recipe
    from ..run.job import Job
    from ..runtime import ranks_are_given, resolve_auto, resolve_device, resolve_workers

    check_writable("--json", json_file)
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
    counts = rank_counts(most)
    # A given grid is for the most ranks.
    own = {n: options if n == most else options.without(["grid"]) for n in counts}
    chosen = {n: runtime.fitted(own[n].model_copy(update={"workers": n}), block, n) for n in counts}
    given = options.profile
    profile = Profile.load(Path(given)) if given is not None else _measure_network(most, device, seconds)
    with TemporaryDirectory(prefix="torusgd-scaling-") as folder:
        runs = {n: Path(folder) / str(n) for n in counts}
        for number, n in enumerate(counts, 1):
            console().print(f"\nrun {number} of {len(counts)}: ranks {n}, steps {steps}")
            result = launch(Job(resolved, chosen[n], device, runs[n], data, None, steps), fresh=True)
            if not result.summary:  # stopped by a signal
                raise Exit(result.code)
        points = compare(resolved, chosen, runs, profile, data)
    show_points(points)
    write_json(json_file, [asdict(point) for point in points])


def rank_counts(most: int) -> list[int]:
    """Powers of two up to `most`, and `most` itself.

    >>> rank_counts(6)
    [1, 2, 4, 6]
    """
    return sorted({*(2**power for power in range(most.bit_length())), most})


def compare(
    recipe: "Recipe", options: "dict[int, RuntimeOptions]", runs: dict[int, Path], profile: "Profile", data: Path | None
) -> list[Point]:
    """Measured and planned steps by number of ranks, of which the first is one.

    `options` and `runs` (folders) are by number of ranks; `profile` is the network as measured.
    """
    from ..observe.compare_plan import PlanComparison
    from ..plan.cluster import load_software, local_cluster
    from ..plan.forecast import forecast, workload_of
    from ..plan.program import measured_software, program_for, resolve_model_parallel

    workload, software = workload_of(recipe, path=data), load_software("torusgd")
    cluster = local_cluster(profile)
    points: list[Point] = []
    for n, run in runs.items():
        resolved = resolve_model_parallel(recipe, workload, options[n], cluster, software)
        program = measured_software(workload, cluster, program_for(recipe, resolved, cluster, software), runs[1])
        planned = forecast(workload, cluster, program, n)
        seconds = {batch: step.seconds for batch, step in zip(planned.batches, planned.steps, strict=True)}
        beside = PlanComparison(run, recipe.name, n, seconds).beside(run / "events.jsonl")
        rate, planned_rate = beside["measured_images_per_second"], beside["images_per_second"]
        # The plan is scaled to the run with one rank, so that its rate is the planned one too.
        alone = points[0].images_per_second if points else rate
        points.append(
            Point(
                ranks=n,
                step_seconds=beside["measured_step_seconds"],
                images_per_second=rate,
                efficiency=rate / (n * alone),
                planned_step_seconds=beside["step_seconds"],
                planned_efficiency=planned_rate / (n * alone),
                error=beside["step_seconds_error"],
            )
        )
    return points


def show_points(points: Sequence[Point]) -> None:
    """The table."""
    console().print(
        "steps on this machine, median without the first; planned: from the run with one rank and the network"
    )
    rows = [
        (
            str(point.ranks),
            f"{1e3 * point.step_seconds:.4g}",
            f"{point.images_per_second:,.0f}",
            f"{point.efficiency:.0%}",
            f"{1e3 * point.planned_step_seconds:.4g}",
            f"{point.planned_efficiency:.0%}",
            f"{point.error:+.1%}",
        )
        for point in points
    ]
    headings = ("ranks", "ms", "images/s", "efficiency", "planned ms", "planned efficiency", "error")
    console().print(table(headings, rows))


def _measure_network(ranks: int, device: str, seconds: float) -> "Profile":
    from ..comm.tuning.profile import Profile
    from ..recipe.runtime_options import RuntimeOptions
    from .bench import on_ranks, tune_on_rank

    console().print(f"measuring the network of {ranks} ranks for about {seconds:g} s")
    return Profile.parse(
        on_ranks(RuntimeOptions.model_validate({"workers": ranks, "device": device}), tune_on_rank, seconds, 1)
    )

"""`torusgd plan`: predicts a run on a described cluster, or every row of a table of published results."""

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from ..errors import UserError
from ..text import byte_size, plural
from .options import OUTPUT, DataPath, JsonFile, Overrides, PlannedMachine, RuntimeFlags, flag
from .output import check_writable, console, write_file, write_json

if TYPE_CHECKING:
    from ..plan.cluster import Cluster, Software
    from ..plan.forecast import Forecast, Workload
    from ..plan.relaxed import RelaxedForecast
    from ..plan.time_to_accuracy import AccuracyPlan
    from ..recipe.runtime_options import RuntimeOptions
    from ..recipe.schema import Recipe

WANTED = "What to find"


_QUIET = 1.1  # upper over lower quartile of the steps of a run that nothing disturbed, at most


@dataclass(frozen=True)
class Wanted:
    """What a plan is to find beside the run itself, and the files to write."""

    sweep: bool = flag("Also plan for 1 to N devices, and find the knee of the curve.", WANTED, default=False)
    design: bool = flag(
        "Also show layer by layer what limits, the best groups and least images a node, and what would pay most.",
        WANTED,
        default=False,
    )
    best: bool = flag("Also look for better settings.", WANTED, default=False)
    to: str | None = flag(
        "Find time, cost and best batch to this accuracy, such as 75.9%; with --sweep by devices.", WANTED, "TOP1"
    )
    synchrony: str | None = flag(
        "Also plan steps that leave out late work, or exchange every H steps; needs --delays.",
        WANTED,
        "cutoff|backup:B|local:H",
    )
    delays: str | None = flag(
        "Delay ranks by this model, such as lognormal or exponential@0.05, or as in a run's folder; with --best "
        "try every form.",
        WANTED,
        "MODEL|RUN",
    )
    cost: float | None = flag("Add the cost at this price of a device and hour.", WANTED, "PRICE")
    published: Path | None = flag("Predict every row of a table of published results.", WANTED)
    plot: Path | None = flag("Draw the sweep as .svg or .png.", OUTPUT)
    report: Path | None = flag("Write the plan as a page of HTML, with the sweep of --sweep.", OUTPUT)

    def check(self) -> None:
        """UserError if flags don't go together, or a file can't be written."""
        if self.cost is not None and not 0 <= self.cost < math.inf:
            raise UserError(f"--cost {self.cost}: needs the price of a device and hour, a number of 0 or more")
        is_alone = self.delays is not None and self.synchrony is None and not self.best
        if is_alone or (self.synchrony is not None and self.delays is None):
            raise UserError("plan: --synchrony and --delays go together, such as --synchrony cutoff --delays lognormal")
        if self.plot is not None:
            from .plan_tables import check_plot

            check_plot(self.plot)
            check_writable("--plot", self.plot)
        if self.report is not None:
            check_writable("--report", self.report)
        at_its_batch = {"--best": self.best, "--design": self.design, "--delays": self.delays is not None}
        for name, is_given in at_its_batch.items():
            if self.to is not None and is_given:
                raise UserError(f"{name}: is at the recipe's batch, --to looks for a batch; give one of them")

    @property
    def has_sweep(self) -> bool:
        return self.sweep or self.design or self.report is not None or self.plot is not None

    def priced(self, plan: "Forecast | AccuracyPlan") -> dict[str, Any]:
        """A plan as plain values, with its cost if --cost gives a price."""
        return {**plan.as_dict(), **({} if self.cost is None else {"cost": plan.cost(self.cost)})}


def plan(
    machine: PlannedMachine,
    runtime: RuntimeFlags,
    recipe: Annotated[str | None, Argument(metavar="RECIPE", help="A built-in name, or a YAML file.")] = None,
    data: DataPath = None,
    overrides: Overrides = None,
    *,
    wanted: Wanted,
    json_file: JsonFile = None,
) -> None:
    """Predict a run on a cluster: its time, where it goes, what to change."""
    if wanted.published is not None:
        from ..plan.published import predict_row, read_rows
        from .plan_tables import show_published

        predictions = [predict_row(row) for row in read_rows(wanted.published)]
        show_published(console(), predictions)
        write_json(json_file, [prediction.as_dict() for prediction in predictions])
        return
    if recipe is None:
        raise UserError("plan: needs RECIPE, --cluster and --devices (or --published FILE alone)")
    wanted.check()
    planned = Planned.read(recipe, overrides or [], data, machine, runtime)
    if wanted.to is not None:
        found = _show_accuracy(planned, _top1(wanted.to), wanted)
    else:
        relaxed = [] if wanted.delays is None else _relaxed(planned, wanted.synchrony, wanted.delays, wanted.best)
        found = _show_plan(planned, wanted)
        if wanted.delays is not None:
            from .plan_tables import show_relaxed

            show_relaxed(console(), relaxed, wanted.delays)
            found["relaxed"] = [asdict(each) for each in relaxed]
    write_json(json_file, found)
    if wanted.report is not None:
        from ..report.page import plan_page

        write_file("--report", wanted.report, plan_page(found, shlex.join(["torusgd", *sys.argv[1:]])))
        console().print(f"wrote {wanted.report}")


@dataclass(frozen=True)
class Planned:
    """The recipe, machine and program of a plan or a rehearsal, as read from their arguments."""

    recipe: "Recipe"
    workload: "Workload"
    runtime: "RuntimeOptions"
    as_published: frozenset[str]
    """names of options that describe what `software` is known to have done, and so do not override it"""
    cluster: "Cluster"
    software: "Software"  # profile as it stands in its file
    measured: Path | None

    @classmethod
    def read(
        cls, name: str, overrides: Sequence[str], data: Path | None, machine: PlannedMachine, flags: RuntimeFlags
    ) -> "Planned":
        """Reads recipe, cluster, profile and data, and merges flags into the recipe's `runtime:` block."""
        from ..comm.tuning.profile import Profile
        from ..plan.cluster import load_cluster, load_software, local_cluster
        from ..plan.forecast import workload_of
        from ..recipe.load import load_recipe

        recipe, block = load_recipe(name, overrides)
        runtime = flags.over(block)
        if machine.cluster is None or runtime.workers is None:
            raise UserError(f"{name}: needs --cluster and --devices to be planned")
        runtime = flags.fitted(runtime, block, runtime.workers)
        if runtime.profile is None:
            cluster = load_cluster(machine.cluster)
        elif machine.cluster == "local":
            cluster = local_cluster(Profile.load(Path(runtime.profile)))
        else:
            raise UserError(
                f"--profile {runtime.profile}: goes with --cluster local, not {machine.cluster}; if it stands in "
                "the recipe, --set runtime.profile=null leaves it out"
            )
        if runtime.profile is not None and machine.measured is None:
            raise UserError(
                "--profile: is of the network alone; add --measured RUN, a run of this recipe with one worker"
            )
        # This machine runs torusgd, whoever set the record.
        record = None if machine.cluster == "local" else block.software
        software = load_software(machine.software or record or "torusgd")
        is_record = record is not None and machine.software in (None, record)
        published = block.model_fields_set - flags.given.keys() if is_record else ()
        workload = workload_of(recipe, path=data)
        return cls(recipe, workload, runtime, frozenset(published), cluster, software, machine.measured)

    @property
    def devices(self) -> int:
        assert self.runtime.workers is not None
        return self.runtime.workers

    def title(self, what: str) -> str:
        """The first line of a plan, which names the program if that is not torusgd."""
        cluster, software = self.cluster, self.software
        where = f"{what} on {self.devices:,} x {cluster.device.name} ({cluster.name}, {software.name})"
        return where if software.program is None else f"{where}, as {software.program}, not torusgd"

    def program(self, runtime: "RuntimeOptions") -> "Software":
        from ..plan.program import measured_software, program_for, resolve_model_parallel

        # A record's block describes in torusgd's words what the profile was measured with: the profile goes before it.
        runtime = runtime.without(self.as_published - {"workers"})
        resolved = resolve_model_parallel(self.recipe, self.workload, runtime, self.cluster, self.software)
        program = program_for(self.recipe, resolved, self.cluster, self.software)
        if self.measured is None:
            return program
        return measured_software(self.workload, self.cluster, program, self.measured)

    def program_on(self, devices: int) -> "Software":
        """The program that trains on another number of devices, to which a given grid does not apply."""
        if devices == self.devices:
            return self.program(self.runtime)
        return self.program(self.runtime.model_copy(update={"workers": devices, "grid": None}))


def _show_plan(planned: Planned, wanted: Wanted) -> dict[str, Any]:
    from ..plan.forecast import forecast
    from ..plan.search import device_counts, fixed_batch, search_settings
    from ..plan.search import sweep as sweep_over
    from .plan_tables import plot_sweep, show_best, show_curve, show_forecast, show_sweep

    terminal, cluster, devices = console(), planned.cluster, planned.devices
    program = planned.program(planned.runtime)
    title = planned.title(planned.recipe.name)
    terminal.print(title)
    # More devices than virtual workers share the same batch: the plan says so in a note, a run refuses it.
    workload = fixed_batch(planned.workload, devices)
    now = forecast(workload, cluster, program, devices)
    notes = _notes(planned, workload, now.memory, program)
    for note in notes:
        terminal.print(f"note: {note}")
    show_forecast(terminal, now, wanted.cost)
    names = {"recipe": planned.recipe.name, "cluster": cluster.name, "software": program.name}
    found: dict[str, Any] = {"title": title, "notes": notes, **names, **wanted.priced(now)}
    if wanted.has_sweep:
        ranks = planned.runtime.model_parallel
        counts = device_counts(devices, planned.workload.stages[0].workers)
        # A group of model-parallel ranks can't be cut.
        counts = [count for count in counts if ranks == "auto" or count % ranks == 0]
        curve = sweep_over(planned.workload, cluster, planned.program_on, counts)
        show_sweep(terminal, curve, wanted.cost)
        found["sweep"] = [wanted.priced(each) for each in curve.forecasts]
        found["knee"] = curve.knee
        if wanted.plot is not None:
            plot_sweep(curve, title, wanted.plot)
            terminal.print(f"wrote {wanted.plot}")
    if wanted.design:
        found["design"] = _show_design(planned, program)
        show_curve(terminal, curve)
    if wanted.best:
        chosen = search_settings(workload, cluster, program, devices)
        show_best(terminal, chosen)
        found["best"] = {**chosen.forecast.as_dict(), "choices": [asdict(choice) for choice in chosen.choices]}
    return found


def _show_design(planned: Planned, program: "Software") -> dict[str, Any]:
    """Prints the design point of the last stage, and what one change of machine or batch brings; as plain values."""
    from ..plan.design import design, next_steps
    from .plan_tables import show_design

    workload, cluster, devices = planned.workload, planned.cluster, planned.devices
    stage = workload.stages[-1]
    found = design(workload.cost_of(stage), cluster, program, devices, stage.batch)
    steps = next_steps(workload, cluster, planned.program_on, devices)
    link = cluster.inside if devices <= cluster.devices_per_node else cluster.between
    alpha = link.alpha + program.communication.message
    show_design(console(), found, steps, link.model_copy(update={"alpha": alpha}))
    return {**found.as_dict(), "steps": {name: each.images_per_second for name, each in steps}}


def _relaxed(planned: Planned, form: str | None, delays: str, best: bool) -> "list[RelaxedForecast]":
    from ..plan.forecast import forecast
    from ..plan.relaxed import candidate_forms, measured_delays, relaxed_forecasts
    from ..plan.search import fixed_batch
    from ..report.read_run import read_run

    workload = fixed_batch(planned.workload, planned.devices)
    now = forecast(workload, planned.cluster, planned.program(planned.runtime), planned.devices)
    forms = [*([form] if form is not None else []), *(candidate_forms(planned.devices) if best else [])]
    is_run = Path(delays).is_dir()
    late = measured_delays(read_run(Path(delays)).steps) if is_run else delays
    return relaxed_forecasts(workload, now, list(dict.fromkeys(forms)), late)


def _show_accuracy(planned: Planned, target: float, wanted: Wanted) -> dict[str, Any]:
    """Prints time, batch and cost to an accuracy, with the curve over devices if wanted; all as plain values."""
    from ..plan.search import device_counts
    from ..plan.time_to_accuracy import check_known, most_devices, plan_to_accuracy, quickest, sweep_to_accuracy
    from .plan_tables import plot_accuracy, show_accuracy, show_accuracy_sweep

    check_known(planned.recipe, target)
    terminal, cluster, devices = console(), planned.cluster, planned.devices
    program = planned.program(planned.runtime)
    title = planned.title(f"{planned.recipe.name} to {target:.1%}")
    names = {"recipe": planned.recipe.name, "cluster": cluster.name, "software": program.name}
    found: dict[str, Any] = {"title": title, **names, "target": target}
    terminal.print(title)
    if not wanted.has_sweep:
        plans = plan_to_accuracy(planned.recipe, planned.workload, cluster, program, devices)
        show_accuracy(terminal, plans, wanted.cost)
        return {**found, "batches": [wanted.priced(each) for each in plans], **wanted.priced(quickest(plans))}
    if devices > most_devices():
        terminal.print(
            f"note: up to {most_devices():,} devices only: beyond, no batch of known epochs occupies all of them"
        )
    counts = device_counts(min(devices, most_devices()), devices)
    curve = sweep_to_accuracy(planned.recipe, planned.workload, cluster, planned.program_on, counts)
    show_accuracy_sweep(terminal, curve, wanted.cost)
    if wanted.plot is not None:
        plot_accuracy(curve, title, wanted.plot)
        terminal.print(f"wrote {wanted.plot}")
    sweep = [wanted.priced(each) for each in curve.plans]
    return {**found, "sweep": sweep, "knee": curve.knee, "useful": curve.useful}


def _top1(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UserError(f"--to {text}: write a top-1 accuracy as 75.9% or 0.759")
    return round(value, 6)  # 75.9 / 100 is not 0.759 to the last bit


def _notes(planned: Planned, workload: "Workload", memory: float, program: "Software") -> list[str]:
    """Notes on what departs from the recipe, what a run would refuse, what does not fit, and what is not measured."""
    from ..recipe.compatibility import Setup, refusals
    from ..recipe.schedule import Schedule

    cluster, devices, notes = planned.cluster, planned.devices, list[str]()
    if program.measured_on is not None and cluster.device.name not in program.measured_on:
        notes.append(
            f"{program.name} was never measured on such a device ({cluster.device.name}): its share of the peak is "
            "that of other programs; --measured RUN takes it from a run with one worker on one"
        )
    if program.quartiles is not None and program.quartiles[1] > _QUIET * program.quartiles[0]:
        least, most = (f"{1e3 * each:.3g}" for each in program.quartiles)
        notes.append(
            f"half of the steps of {planned.measured} took {least} to {most} ms: the machine was not its own, and the "
            "run is not fit to plan from; measure again on a quiet one"
        )
    if workload != planned.workload:
        images = " > ".join(str(stage.images) for stage in workload.stages)
        notes.append(
            f"the recipe has {planned.workload.stages[0].workers} virtual workers; planned with its batch cut for "
            f"{devices:,} devices, {images} images each at most. For a larger batch: --set virtual_workers={devices}"
        )
    ranks = devices if devices <= planned.recipe.virtual_workers else None
    setup = Setup(planned.recipe, planned.runtime, planned.runtime.device or "", ranks)
    notes += [f"torusgd train refuses this: {line}" for line in refusals(setup)]
    if cluster.device.memory is not None and memory > cluster.device.memory:
        notes.append(f"more than the {byte_size(cluster.device.memory)} of a device; fewer images a worker fit")
    if cluster.nodes is not None and devices > cluster.nodes * cluster.devices_per_node:
        notes.append(f"{cluster.name} has {cluster.nodes * cluster.devices_per_node:,} devices")
    if planned.runtime.verify_every is not None:
        size = workload.cost_of(workload.stages[0]).checkpoint_bytes(planned.recipe)
        count = len(Schedule(planned.recipe, planned.workload.train_images).boundaries(planned.runtime.verify_every))
        notes.append(
            f"verify_every {planned.runtime.verify_every}: {plural(count, 'light checkpoint')} of about "
            f"{byte_size(size)}, {byte_size(count * size)} in all"
        )
    return notes

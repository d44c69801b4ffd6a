"""Plans: read from a command's arguments, computed and printed; their curves over devices as pictures by matplotlib."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.table import Table

from ..comm.tuning.profile import Profile
from ..errors import UserError, as_user_error
from ..plan import time_to_accuracy as accuracy
from ..plan.cluster import Cluster, Software, load_calibrated, load_cluster, load_software, local_cluster
from ..plan.design import design, next_steps
from ..plan.forecast import Forecast, Workload, forecast, workload_of
from ..plan.program import measured_software, program_for, resolve_model_parallel
from ..plan.published import base_of, counted_groups, predict_row, read_rows, summary
from ..plan.relaxed import RelaxedForecast, candidate_forms, measured_delays, relaxed_forecasts
from ..plan.search import KNEE_EFFICIENCY, SearchResult, Sweep, device_counts, fixed_batch, search_settings, sweep
from ..plan.time_to_accuracy import AccuracyPlan, AccuracySweep, quickest
from ..plan.timeline import PARTS
from ..recipe.compatibility import Setup, refusals
from ..recipe.load import load_recipe
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schedule import Schedule
from ..recipe.schema import Recipe
from ..report.page import plan_page
from ..report.read_run import read_run
from ..text import byte_size, change, duration, listed, number, plural, short
from .options import PlannedMachine, RuntimeFlags
from .output import console, table, write_file
from .plan import Wanted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_QUIET = 1.1  # upper over lower quartile of the steps of a run that nothing disturbed, at most
_SHORT = {
    "throughput": "rate", "iteration": "step", "time_to_train": "time", "scaling_efficiency": "efficiency",
    "speedup": "speedup", "allreduce_speedup_vs_ring": "all-reduce",
}  # fmt: skip
_MOST_STAGES = 5


@dataclass(frozen=True)
class Planned:
    """The recipe, machine and program of a plan or a rehearsal, as read from their arguments."""

    recipe: Recipe
    workload: Workload
    runtime: RuntimeOptions
    # Names of options that describe what `software` is known to have done, and so do not override it.
    as_published: frozenset[str]
    cluster: Cluster
    software: Software  # profile as it stands in its file
    measured: Path | None

    @classmethod
    def read(
        cls, name: str, overrides: Sequence[str], data: Path | None, machine: PlannedMachine, flags: RuntimeFlags
    ) -> Self:
        """Reads recipe, cluster, profile and data, and merges flags into the recipe's `runtime:` block."""
        recipe, block = load_recipe(name, overrides)
        runtime = flags.over(block)
        if runtime.workers is None and runtime.workers_range is not None:
            least, most = runtime.workers_range
            raise UserError(f"--devices {least}:{most}: a plan is of one number of devices; give one, such as {most}")
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

    def title(self, what: str, program: Software) -> str:
        """The first line of a plan, with its precision; it names the program if that is not torusgd."""
        cluster, software = self.cluster, self.software
        precision = "portable" if self.recipe.precision == "portable" else program.precision
        where = f"{what} on {self.devices:,} x {cluster.device.name} ({cluster.name}, {software.name}, {precision})"
        return where if software.program is None else f"{where}, as {software.program}, not torusgd"

    def program(self, runtime: RuntimeOptions) -> Software:
        # A record's block describes in torusgd's words what the profile was measured with: the profile goes before it.
        runtime = runtime.without(self.as_published - {"workers"})
        resolved = resolve_model_parallel(self.recipe, self.workload, runtime, self.cluster, self.software)
        program = program_for(self.recipe, resolved, self.cluster, self.software)
        measured = self.measured
        if measured is None:
            return program
        graphs = runtime.workers == 1 or bool(self.runtime.cuda_graphs)
        return measured_software(self.recipe, self.workload, self.cluster, program, measured, graphs)

    def program_on(self, devices: int) -> Software:
        """The program that trains on another number of devices, to which a given grid does not apply."""
        if devices == self.devices:
            return self.program(self.runtime)
        return self.program(self.runtime.model_copy(update={"workers": devices, "grid": None}))


def show_published(path: Path) -> list[dict[str, Any]]:
    """Prints the prediction of every row of a table of published results; as plain values."""
    terminal, predictions = console(), [predict_row(row) for row in read_rows(path)]
    published = [prediction.row for prediction in predictions]
    groups, rows, left_out = counted_groups(published), [], load_calibrated().left_out
    for prediction in predictions:
        row, free = prediction.row, left_out.get(prediction.row.id)
        error = change(None if free is None else free / row.value - 1)
        name = _SHORT[row.metric] + ("" if (row.cluster, row.software) in groups else " *")
        rows.append((row.id, number(row.value), number(prediction.predicted), change(prediction.error), error, name))
    terminal.print(table(("id", "published", "predicted", "error", "left out", ""), rows, left=[0, 5]))
    terminal.print("left out: predicted by the fit of all other rows.  *: the only row of its system, fitted")
    for base in sorted({base_of(row) for row in published} - {""}):
        terminal.print(f"relative to {base}: {listed(row.id for row in published if base_of(row) == base)}")
    known = [row for row in published if row.id in left_out]
    if counted_groups(known):
        terminal.print(summary(known))
    return [prediction.as_dict() for prediction in predictions]


def show_planned(planned: Planned, wanted: Wanted) -> dict[str, Any]:
    """Prints what is wanted of a plan, and writes its page; as plain values."""
    program = planned.program(planned.runtime)
    names = {"recipe": planned.recipe.name, "cluster": planned.cluster.name, "software": program.name}
    if wanted.to is not None:
        found = names | _show_accuracy(planned, program, _top1(wanted.to), wanted)
    else:
        # More devices than virtual workers share the same batch: the plan says so in a note, a run refuses it.
        workload = fixed_batch(planned.workload, planned.devices)
        now = forecast(workload, planned.cluster, program, planned.devices)
        relaxed = None if wanted.delays is None else _relaxed(workload, now, wanted, wanted.delays)
        found = names | _show_plan(planned, program, workload, now, wanted)
        if relaxed is not None:
            show_relaxed(console(), relaxed, str(wanted.delays))
            found["relaxed"] = [asdict(each) for each in relaxed]
    if wanted.report is not None:
        write_file("--report", wanted.report, plan_page(found, shlex.join(["torusgd", *sys.argv[1:]])))
        console().print(f"wrote {wanted.report}")
    return found


def _priced(wanted: Wanted, plan: Forecast | AccuracyPlan) -> dict[str, Any]:
    return {**plan.as_dict(), **({} if wanted.cost is None else {"cost": plan.cost(wanted.cost)})}


def _show_head(planned: Planned, what: str, program: Software, workload: Workload, memory: float) -> dict[str, Any]:
    title, notes = planned.title(what, program), _notes(planned, workload, memory, program)
    console().print("\n".join([title, *(f"note: {note}" for note in notes)]))
    return {"title": title, "notes": notes}


def _show_plan(
    planned: Planned, program: Software, workload: Workload, now: Forecast, wanted: Wanted
) -> dict[str, Any]:
    terminal, cluster, devices = console(), planned.cluster, planned.devices
    found = _show_head(planned, planned.recipe.name, program, workload, now.memory) | _priced(wanted, now)
    show_forecast(terminal, now, wanted.cost)
    if wanted.has_sweep:
        ranks = planned.runtime.model_parallel
        counts = device_counts(devices, planned.workload.stages[0].workers)
        # A group of model-parallel ranks can't be cut.
        counts = [count for count in counts if ranks == "auto" or count % ranks == 0]
        curve = sweep(planned.workload, cluster, planned.program_on, counts)
        show_sweep(terminal, curve, wanted.cost)
        found |= {"sweep": [_priced(wanted, each) for each in curve.forecasts], "knee": curve.knee}
        if wanted.plot is not None:
            plot_sweep(curve, found["title"], wanted.plot)
            terminal.print(f"wrote {wanted.plot}")
    if wanted.design:
        found["design"] = show_design(terminal, planned, program)
        show_curve(terminal, curve)
    if wanted.best:
        chosen = search_settings(workload, cluster, program, devices)
        show_best(terminal, chosen)
        found["best"] = {**chosen.forecast.as_dict(), "choices": [asdict(choice) for choice in chosen.choices]}
    return found


def _relaxed(workload: Workload, now: Forecast, wanted: Wanted, delays: str) -> list[RelaxedForecast]:
    forms = [wanted.synchrony] if wanted.synchrony is not None else []
    forms += candidate_forms(now.devices) if wanted.best else []
    late = measured_delays(read_run(Path(delays)).steps) if Path(delays).is_dir() else delays
    return relaxed_forecasts(workload, now, list(dict.fromkeys(forms)), late)


def _show_accuracy(planned: Planned, program: Software, target: float, wanted: Wanted) -> dict[str, Any]:
    accuracy.check_known(planned.recipe, target)
    terminal, cluster, devices = console(), planned.cluster, planned.devices
    what, memory = f"{planned.recipe.name} to {target:.1%}", 0.0  # no batch is planned that doesn't fit the memory
    found = _show_head(planned, what, program, planned.workload, memory) | {"target": target}
    if not wanted.has_sweep:
        plans = accuracy.plan_to_accuracy(planned.recipe, planned.workload, cluster, program, devices)
        best = quickest(plans)
        terminal.print(_accuracy_table("batch", plans, [best], wanted.cost))
        terminal.print(
            f"quickest: batch {best.batch:,} ({best.images} images a virtual worker), {duration(best.seconds)} "
            f"({duration(best.low)} to {duration(best.high)}); lay its schedule out for {best.schedule:.1f} epochs"
        )
        terminal.print(accuracy.epochs_known())
        return {**found, "batches": [_priced(wanted, each) for each in plans], **_priced(wanted, best)}
    most = accuracy.MOST_DEVICES
    if devices > most:
        terminal.print(f"note: up to {most:,} devices only: beyond, no batch of known epochs occupies all of them")
    counts = device_counts(min(devices, most), devices)
    curve = accuracy.sweep_to_accuracy(planned.recipe, planned.workload, cluster, planned.program_on, counts)
    # The knee, and the last number of devices that gains time.
    marked, last = [plan for plan in curve.plans if plan.devices in (curve.knee, curve.useful)], counts[-1]
    terminal.print(_accuracy_table("devices", curve.plans, marked, wanted.cost))
    terminal.print(_knee(curve.knee, last))
    more = f"quickest: {curve.useful:,} devices; more bring nothing"
    terminal.print(more if curve.useful < last else f"quickest: {last:,} devices, the most that were tried")
    terminal.print(accuracy.epochs_known())
    if wanted.plot is not None:
        plot_accuracy(curve, found["title"], wanted.plot)
        terminal.print(f"wrote {wanted.plot}")
    sweep = [_priced(wanted, each) for each in curve.plans]
    return {**found, "sweep": sweep, "knee": curve.knee, "useful": curve.useful}


def _top1(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UserError(f"--to {text}: write a top-1 accuracy as 75.9% or 0.759")
    return round(value, 6)  # 75.9 / 100 is not 0.759 to the last bit


def _notes(planned: Planned, workload: Workload, memory: float, program: Software) -> list[str]:
    """Notes on what departs from the recipe, what a run would refuse, what does not fit, and what is not measured."""
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
    device = planned.runtime.device or ("cuda" if cluster.backend == "nccl" else "cpu")
    setup = Setup(planned.recipe, planned.runtime, device, ranks)
    notes += [f"torusgd train refuses this: {line}" for line in refusals(setup)]
    synchrony = planned.recipe.synchrony
    if synchrony.leaves_out:
        how = "for which all wait; the images a second count those that a run leaves out"
        notes.append(f"synchrony.form = {synchrony.form}: planned as one pass of each virtual worker, {how}")
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


def show_forecast(console: Console, forecast: Forecast, price: float | None) -> None:
    # Of many stages (progressive resizing) the first and the last one.
    count = len(forecast.run.steps)
    shown = range(count) if count <= _MOST_STAGES else (0, count - 1)
    steps = [forecast.run.steps[stage] for stage in shown]
    which = ["" if len(steps) == count else f"stage {stage + 1}: " for stage in shown]
    batches = [f"{name}batch {forecast.batches[stage]:,}" for name, stage in zip(which, shown, strict=True)]
    parts = [(name, [getattr(step, part) for step in steps]) for part, name in PARTS.items()]
    parts = [(name, seconds) for name, seconds in parts if any(seconds)]
    parts += [("all", [step.seconds for step in steps]), ("hidden communication", [step.hidden for step in steps])]
    rows = [[name, *(f"{1e3 * each:.2f}" for each in seconds)] for name, seconds in parts]
    found = table(["a step, ms", *batches], rows, left=[0], bold=[len(rows) - 2])
    found.rows[-1].style = "dim"
    console.print(found)
    run = forecast.run
    beside_one = (
        f", {forecast.speedup:,.1f} times one device with the same global batch; efficiency {forecast.efficiency:.1%} "
        "of one device with as many images each (weak scaling)"
    )
    console.print(
        f"{forecast.images_per_second:,.0f} images/s{beside_one if forecast.devices > 1 else ''}; about "
        f"{byte_size(forecast.memory)} a device"
    )
    console.print(
        f"time to train {duration(run.seconds)} ({duration(forecast.low)} to {duration(forecast.high)}): "
        f"start {duration(run.start)}, steps {duration(run.training)}, evaluation {duration(run.evaluation)}"
    )
    if price is not None:
        console.print(f"cost {forecast.cost(price):,.2f} at {price} a device-hour")
    console.print(f"limit: {forecast.limit}")


def show_sweep(console: Console, sweep: Sweep, price: float | None) -> None:
    rows = []
    for each in sweep.forecasts:
        sent = max(step.communication / step.seconds for step in each.run.steps)
        figures = (f"{each.images_per_second:,.0f}", f"{each.efficiency:.1%}", f"{each.speedup:,.1f}", f"{sent:.1%}")
        cost = [] if price is None else [f"{each.cost(price):,.2f}"]
        rows.append([f"{each.devices:,}", *figures, duration(each.run.seconds), *cost])
    headings = ["devices", "images/s", "efficiency", "speed-up", "communication", "time to train"]
    headings += [] if price is None else ["cost"]
    devices = [forecast.devices for forecast in sweep.forecasts]
    console.print(table(headings, rows, bold=[devices.index(sweep.knee)]))
    console.print(_knee(sweep.knee, devices[-1]))


def show_curve(console: Console, sweep: Sweep) -> None:
    """A bar for each number of devices: its share of so many single devices with the same global batch."""
    rows = []
    for each in sweep.forecasts:
        share, mark = each.speedup / each.devices, " knee" if each.devices == sweep.knee else ""
        rows.append((f"{each.devices:,}", "#" * round(40 * min(share, 1.25)), f"{share:.0%}{mark}"))
    console.print(table(("devices", "speed-up of a device, the same global batch", ""), rows, left=[1, 2]))


def show_design(console: Console, planned: Planned, program: Software) -> dict[str, Any]:
    """The design point of the last stage, layer by layer; what limits now and next, what pays most; as plain values."""
    workload, cluster, devices = planned.workload, planned.cluster, planned.devices
    stage = workload.stages[-1]
    found = design(workload.cost_of(stage), cluster, program, devices, stage.batch)
    steps = next_steps(workload, cluster, planned.program_on, devices)
    link = cluster.inside if devices <= cluster.devices_per_node else cluster.between
    alpha = link.alpha + program.communication.message  # with the program's own time of a message
    critical, names = found.critical, [each.name for each in found.layers]
    rows = [
        (each.name, f"{each.flops / 1e9:.3g}", f"{each.sent / 1e6:.3g}", short(each.ratio),
         "data" if each.groups == found.devices else "model", f"{each.groups:,}", f"{1e3 * each.late():.2f}")
        for each in found.layers
    ]  # fmt: skip
    headings = ("layer", "GFLOP an image", "MB sent", "FLOP a byte", "parallel", "groups", "late, ms")
    layers = table(headings, rows, left=[0, 4], bold=[names.index(critical.name)])
    for column in (layers.columns[0], layers.columns[4]):
        column.no_wrap = True  # on a narrow screen other headings fold
    console.print(layers)
    console.print(
        f"critical: {critical.name}; of a step {1e3 * found.bubble:.2f} ms wait for weights and "
        f"{1e3 * found.exchange:.2f} ms for activations beside {1e3 * found.compute:.2f} ms of compute: efficiency "
        f"{found.efficiency:.1%}"
    )
    slower, longer = found.next_limit("transfer"), found.next_limit("latency")
    if slower is not None:
        console.print(f"next limit: {slower[1]}, with links below {link.bandwidth / slower[0] / 1e9:.3g} GB/s")
    if longer is not None:
        console.print(f"next limit: {longer[1]}, with a latency above {1e6 * alpha * longer[0]:.3g} us a message")
    console.print(
        f"{found.balance:,.0f} FLOP a byte of a node's link: at least {plural(found.least_images, 'image')} a node, at "
        f"most {plural(found.most_nodes, 'node')} at batch {found.batch:,}; {found.flops_a_weight:.1f} FLOP a weight"
    )
    rates = {name: each.images_per_second for name, each in steps}
    now = steps[0][1].images_per_second
    lines = [
        (name, f"{rates[name]:,.0f}", change(rates[name] / now - 1 if now else None), duration(each.run.seconds))
        for name, each in steps
    ]
    console.print(table(("planned", "images/s", "", "time to train"), lines, left=[0]))
    console.print(f"pays most: {max(list(rates)[1:], key=rates.__getitem__)}")
    return {**found.as_dict(), "steps": rates}


def _knee(knee: int, last: int) -> str:
    if knee == last:
        return f"no knee up to {last:,} devices: each adds {KNEE_EFFICIENCY:.0%} or more of what the first did"
    return f"knee: {knee:,} devices; beyond, another adds less than {KNEE_EFFICIENCY:.0%} of the first"


def _accuracy_table(
    first: str, plans: Sequence[AccuracyPlan], marked: Sequence[AccuracyPlan], price: float | None
) -> Table:
    is_curve = first == "devices"
    headings = [first, "batch" if is_curve else "images a worker", "epochs", "images/s", "time", "band"]
    rows = []
    for plan in plans:
        sizes = (plan.devices, plan.batch) if is_curve else (plan.batch, plan.images)
        band = f"{duration(plan.low)} to {duration(plan.high)}"
        rate = f"{plan.images_per_second:,.0f}"
        rows.append([*(f"{each:,}" for each in sizes), f"{plan.epochs:.1f}", rate, duration(plan.seconds), band])
        rows[-1] += [] if price is None else [f"{plan.cost(price):,.2f}"]
    headings += [] if price is None else ["cost"]
    found = table(headings, rows, bold=[plans.index(plan) for plan in marked])
    # On a narrow screen other columns fold first.
    found.collapse_padding = True
    for column in found.columns:
        column.no_wrap = column.header in ("images/s", "band")
    return found


def show_relaxed(console: Console, forecasts: Sequence[RelaxedForecast], delays: str) -> None:
    headings = (f"with delays {delays}", "a step, ms", "gradients used", "images/s", "of synchronous")
    rows = [
        (f.form, f"{1e3 * f.seconds:.2f}", f"{f.share:.1%}", f"{f.images_per_second:,.0f}", f"{f.speedup:.2f}")
        for f in forecasts
    ]
    console.print(table(headings, rows, left=[0]))
    best = max(forecasts, key=lambda each: each.images_per_second)
    if best.form != "synchronous":
        console.print(
            f"{best.form} brings most images a second. It changes the result: other weights than the recipe's "
            "synchronous steps, and maybe another accuracy"
        )


def show_best(console: Console, best: SearchResult) -> None:
    if not best.choices:
        console.print("--best: nothing was found that is faster than the profile's own settings")
        return
    rows = [(choice.setting, choice.value, duration(choice.saves)) for choice in best.choices]
    console.print(table(("setting", "best", "saves"), rows, left=range(3)))
    before, after = best.before.run.seconds, best.forecast.run.seconds
    console.print(f"from {duration(before)} to {duration(after)} ({after / before - 1:+.1%})")


def plot_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Draws images/s and efficiency over devices, with the knee marked; UserError if it can't be written."""
    devices = [forecast.devices for forecast in sweep.forecasts]
    rates = [forecast.images_per_second for forecast in sweep.forecasts]
    with _axes(title, "images/s", path) as (rate, efficiency):
        rate.plot(devices, rates, color="tab:blue", marker=".", label="images/s")
        linear = [rates[0] * n / devices[0] for n in devices]
        rate.plot(devices, linear, color="tab:gray", linestyle=":", label="linear")
        rate.axvline(sweep.knee, color="tab:red", linewidth=0.8, label=f"knee: {sweep.knee} devices")
        efficiency.plot(devices, [f.efficiency for f in sweep.forecasts], color="tab:green", linewidth=1)
        efficiency.set(ylabel="efficiency (green)", ylim=(0, 1.05))
        rate.legend(loc="lower right")


def plot_accuracy(sweep: AccuracySweep, title: str, path: Path) -> None:
    """Draws minutes to the accuracy with their band, and device-hours, over devices, with knee and quickest number."""
    devices = [plan.devices for plan in sweep.plans]
    minutes, lows, highs = ([getattr(p, key) / 60 for p in sweep.plans] for key in ("seconds", "low", "high"))
    with _axes(title, "minutes to the accuracy", path) as (time, spent):
        time.plot(devices, minutes, color="tab:blue", marker=".", label="minutes")
        time.fill_between(devices, lows, highs, color="tab:blue", alpha=0.2, linewidth=0)
        time.axvline(sweep.knee, color="tab:red", linewidth=0.8, label=f"knee: {sweep.knee} devices")
        time.axvline(sweep.useful, color="tab:gray", linewidth=0.8, label=f"quickest: {sweep.useful} devices")
        spent.plot(devices, [plan.cost(1.0) for plan in sweep.plans], color="tab:green", linewidth=1)
        spent.set(ylabel="device-hours (green)", ylim=(0, None))
        time.legend(loc="upper center")


@contextmanager
def _axes(title: str, label: str, path: Path) -> "Iterator[tuple[Axes, Axes]]":
    """Axes over devices, one on the left and one on the right, whose picture is written when the block ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlabel="devices", ylabel=label, title=title)
    yield axes, axes.twinx()
    with as_user_error(f"--plot {path}: can't be written"):
        # No date in the file: the same plan gives the same bytes.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})

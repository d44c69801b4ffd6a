"""Plans on the terminal.

The curve over devices as an SVG or PNG picture; matplotlib comes with the extra `plot`.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from ..errors import UserError
from ..plan.forecast import Forecast
from ..plan.published import Prediction, base_of, counted_groups, left_out, summary
from ..plan.relaxed import RelaxedForecast
from ..plan.search import KNEE_EFFICIENCY, SearchResult, Sweep
from ..plan.time_to_accuracy import (
    LARGEST,
    SMALLEST,
    TARGET,
    AccuracyPlan,
    AccuracySweep,
    curve,
    leave_one_out,
    quickest,
)
from ..text import byte_size, change, duration, listed, number

_PARTS = ("forward", "backward", "exposed", "contention", "exchange", "coordination", "update", "input", "jitter")
_SHORT = {
    "throughput": "rate",
    "iteration": "step",
    "time_to_train": "time",
    "scaling_efficiency": "efficiency",
    "allreduce_speedup_vs_ring": "all-reduce",
}
_MOST_STAGES = 5
_NAMES = {"exposed": "exposed communication", "exchange": "exchange within layers", "jitter": "slow devices"}


def price_of(forecast: Forecast, price: float) -> float:
    """The price of the whole run, at a price of a device and hour."""
    return forecast.devices * forecast.run.seconds / 3600 * price


def show_forecast(console: Console, forecast: Forecast, price: float | None) -> None:
    """Step by part, rate, efficiency, time to train with its band, and the limit."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    # Of many stages (progressive resizing) the first and the last one.
    shown = range(len(forecast.steps)) if len(forecast.steps) <= _MOST_STAGES else (0, len(forecast.steps) - 1)
    steps = [forecast.steps[stage] for stage in shown]
    table.add_column("a step, ms", overflow="fold")
    for stage in shown:
        which = "" if len(steps) == len(forecast.steps) else f"stage {stage + 1}: "
        table.add_column(f"{which}batch {forecast.batches[stage]:,}", justify="right", overflow="fold")
    for part in _PARTS:
        values = [getattr(step, part) for step in steps]
        if any(values):
            table.add_row(_NAMES.get(part, part), *(f"{1e3 * value:.2f}" for value in values))
    table.add_row("all", *(f"{1e3 * step.seconds:.2f}" for step in steps), style="bold")
    table.add_row("hidden communication", *(f"{1e3 * step.hidden:.2f}" for step in steps), style="dim")
    console.print(table)
    run = forecast.run
    console.print(
        f"{forecast.images_per_second:,.0f} images/s, efficiency {forecast.efficiency:.1%} of one device's; "
        f"about {byte_size(forecast.memory)} a device"
    )
    console.print(
        f"time to train {duration(run.seconds)} ({duration(forecast.low)} to {duration(forecast.high)}): "
        f"start {duration(run.start)}, steps {duration(run.training)}, evaluation {duration(run.evaluation)}"
    )
    if price is not None:
        console.print(f"cost {price_of(forecast, price):,.2f} at {price} a device-hour")
    console.print(f"limit: {forecast.limit}")


def show_sweep(console: Console, sweep: Sweep, price: float | None) -> None:
    """A line for each number of devices, and the knee."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    headings = ["devices", "images/s", "efficiency", "communication", "time to train", *(["cost"] if price else [])]
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    for forecast in sweep.forecasts:
        communication = max(step.communication / step.seconds for step in forecast.steps)
        cells = [
            f"{forecast.devices:,}",
            f"{forecast.images_per_second:,.0f}",
            f"{forecast.efficiency:.1%}",
            f"{communication:.1%}",
            duration(forecast.run.seconds),
            *([f"{price_of(forecast, price):,.2f}"] if price else []),
        ]
        table.add_row(*cells, style="bold" if forecast.devices == sweep.knee else None)
    console.print(table)
    if sweep.knee == sweep.forecasts[-1].devices:
        console.print(
            f"no knee up to {sweep.knee:,} devices: each adds {KNEE_EFFICIENCY:.0%} or more of what the first did"
        )
    else:
        console.print(
            f"knee: {sweep.knee:,} devices; beyond, another adds less than {KNEE_EFFICIENCY:.0%} of the first"
        )


def show_accuracy(console: Console, plans: Sequence[AccuracyPlan], price: float | None) -> None:
    """A line for each batch that was tried, the quickest one in full, and what the epochs are known from."""
    best = quickest(plans)
    console.print(_accuracy_table("batch", plans, [best], price))
    console.print(
        f"quickest: batch {best.batch:,} ({best.images} images a virtual worker), {duration(best.seconds)} "
        f"({duration(best.low)} to {duration(best.high)}); lay its schedule out for {best.schedule:.1f} epochs"
    )
    console.print(_epochs_known())


def show_accuracy_sweep(console: Console, sweep: AccuracySweep, price: float | None) -> None:
    """A line for each number of devices with its quickest batch, the knee, and where more bring nothing."""
    marked = [plan for plan in sweep.plans if plan.devices in (sweep.knee, sweep.useful)]
    console.print(_accuracy_table("devices", sweep.plans, marked, price))
    last = sweep.plans[-1].devices
    knee = f"knee: {sweep.knee:,} devices; beyond, another adds less than {KNEE_EFFICIENCY:.0%} of the first"
    console.print(knee if sweep.knee < last else f"no knee up to {last:,} devices")
    more = f"quickest: {sweep.useful:,} devices; more bring nothing"
    console.print(more if sweep.useful < last else f"quickest: {last:,} devices, the most that were tried")
    console.print(_epochs_known())


def _accuracy_table(
    first: str, plans: Sequence[AccuracyPlan], marked: Sequence[AccuracyPlan], price: float | None
) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    other = "batch" if first == "devices" else "images a worker"
    for heading in (first, other, "epochs", "images/s", "time", "band", *(["cost"] if price is not None else [])):
        table.add_column(heading, justify="right", no_wrap=heading in ("images/s", "band"), overflow="fold")
    for plan in plans:
        table.add_row(
            f"{plan.devices if first == 'devices' else plan.batch:,}",
            f"{plan.batch if first == 'devices' else plan.images:,}",
            f"{plan.epochs:.1f}",
            f"{plan.images_per_second:,.0f}",
            duration(plan.seconds),
            f"{duration(plan.low)} to {duration(plan.high)}",
            *([f"{plan.cost(price):,.2f}"] if price is not None else []),
            style="bold" if plan in marked else None,
        )
    return table


def _epochs_known() -> str:
    errors, known = sorted(abs(error) for error in leave_one_out()), curve()
    return (
        f"epochs to {TARGET:.1%}: {known.minimum:.1f} (1 + batch / {known.critical:,.0f}), fitted to MLPerf's "
        f"{len(errors)} reference points (batch {SMALLEST:,} to {LARGEST:,}, each with its own tuned rate); "
        f"leave-one-out error {median(errors):.1%} at the median, {errors[-1]:.1%} at worst"
    )


def show_relaxed(console: Console, forecasts: Sequence[RelaxedForecast], delays: str) -> None:
    """A line for each form, and which brings most images a second."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(f"with delays {delays}", overflow="fold")
    for heading in ("a step, ms", "gradients used", "images/s", "of synchronous"):
        table.add_column(heading, justify="right", overflow="fold")
    for each in forecasts:
        step, rate = f"{1e3 * each.seconds:.2f}", f"{each.images_per_second:,.0f}"
        table.add_row(each.form, step, f"{each.share:.1%}", rate, f"{each.speedup:.2f}")
    console.print(table)
    best = max(forecasts, key=lambda each: each.images_per_second)
    if best.form != "synchronous":
        console.print(
            f"{best.form} brings most images a second. It changes the result: other weights than the recipe's "
            "synchronous steps, and maybe another accuracy",
            markup=False,
        )


def show_best(console: Console, best: SearchResult) -> None:
    """What was chosen and what each choice brings."""
    if not best.choices:
        console.print("--best: nothing was found that is faster than the profile's own settings")
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("setting", "best", "saves"):
        table.add_column(heading, overflow="fold")
    for choice in best.choices:
        table.add_row(choice.setting, choice.value, duration(choice.saves))
    console.print(table)
    before, after = best.before.run.seconds, best.forecast.run.seconds
    console.print(f"from {duration(before)} to {duration(after)} ({after / before - 1:+.1%})")


def show_published(console: Console, predictions: Sequence[Prediction]) -> None:
    """Published, predicted and error of each row, and what ratios are relative to."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("id", overflow="fold")
    for heading in ("published", "predicted", "error", "left out"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("")
    groups = counted_groups([p.row for p in predictions])
    for prediction in predictions:
        row, free = prediction.row, left_out(prediction.row)
        table.add_row(
            row.id,
            number(row.value),
            number(prediction.predicted),
            change(prediction.error),
            change(None if free is None else free / row.value - 1),
            _SHORT.get(row.metric, row.metric) + ("" if (row.cluster, row.software) in groups else " *"),
        )
    console.print(table)
    console.print("left out: predicted by the fit of all other rows.  *: the only row of its system, fitted")
    for base in sorted({base_of(p.row) for p in predictions} - {""}):
        console.print(f"relative to {base}: {listed(p.row.id for p in predictions if base_of(p.row) == base)}")
    known = [p.row for p in predictions if left_out(p.row) is not None]
    if counted_groups(known):
        console.print(summary(known))


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """UserError if a picture can't be drawn: another kind of file, or no matplotlib."""
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"--plot {path}: write a picture as .svg or .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot: needs matplotlib; pip install matplotlib (the extra plot)") from error


def plot_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Draws images/s and efficiency over devices, with the knee marked; UserError if it can't be drawn or written."""
    check_plot(path)
    from matplotlib.figure import Figure

    devices = [forecast.devices for forecast in sweep.forecasts]
    rates = [forecast.images_per_second for forecast in sweep.forecasts]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    rate = figure.add_subplot()
    rate.plot(devices, rates, color="tab:blue", marker=".", label="images/s")
    rate.plot(devices, [rates[0] * n / devices[0] for n in devices], color="tab:gray", linestyle=":", label="linear")
    rate.axvline(sweep.knee, color="tab:red", linewidth=0.8, label=f"knee: {sweep.knee} devices")
    rate.set(xscale="log", yscale="log", xlabel="devices", ylabel="images/s", title=title)
    efficiency = rate.twinx()
    efficiency.plot(devices, [f.efficiency for f in sweep.forecasts], color="tab:green", linewidth=1)
    efficiency.set(ylabel="efficiency (green)", ylim=(0, 1.05))
    rate.legend(loc="lower right")
    _write(figure, path)


def plot_accuracy(sweep: AccuracySweep, title: str, path: Path) -> None:
    """Draws minutes to the accuracy with their band, and device-hours, over devices; the knee and the quickest marked.

    UserError if it can't be drawn or written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    devices = [plan.devices for plan in sweep.plans]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    time = figure.add_subplot()
    time.plot(devices, [plan.seconds / 60 for plan in sweep.plans], color="tab:blue", marker=".", label="minutes")
    lows, highs = [plan.low / 60 for plan in sweep.plans], [plan.high / 60 for plan in sweep.plans]
    time.fill_between(devices, lows, highs, color="tab:blue", alpha=0.2, linewidth=0)
    time.axvline(sweep.knee, color="tab:red", linewidth=0.8, label=f"knee: {sweep.knee} devices")
    time.axvline(sweep.useful, color="tab:gray", linewidth=0.8, label=f"quickest: {sweep.useful} devices")
    time.set(xscale="log", yscale="log", xlabel="devices", ylabel="minutes to the accuracy", title=title)
    spent = time.twinx()
    spent.plot(devices, [plan.cost(1.0) for plan in sweep.plans], color="tab:green", linewidth=1)
    spent.set(ylabel="device-hours (green)", ylim=(0, None))
    time.legend(loc="upper center")
    _write(figure, path)


def _write(figure: "Figure", path: Path) -> None:
    try:
        # No date in the file: the same plan gives the same bytes.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise UserError(f"--plot {path}: can't be written: {error.strerror}") from error

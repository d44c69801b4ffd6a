"""Plans on the terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from ..plan.forecast import Forecast
from ..plan.published import Prediction, base_of, counted_groups, left_out, number, percent, summary
from ..plan.relaxed import RelaxedForecast
from ..plan.search import KNEE_EFFICIENCY, SearchResult, Sweep

_PARTS = ("forward", "backward", "exposed", "contention", "exchange", "coordination", "update", "input", "jitter")
_SHORT = {
    "throughput": "rate",
    "iteration": "step",
    "time_to_train": "time",
    "scaling_efficiency": "efficiency",
    "allreduce_speedup_vs_ring": "all-reduce",
}
_NAMES = {"exposed": "exposed communication", "exchange": "exchange within layers", "jitter": "slow devices"}


def duration(seconds: float) -> str:
    """122 s, 31.5 min or 7.3 h.

    >>> duration(90), duration(3000), duration(90000)
    ('90.0 s', '50.0 min', '25.0 h')
    """
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def price_of(forecast: Forecast, price: float) -> float:
    """Of the whole run, at a price of a device and hour."""
    return forecast.devices * forecast.run.seconds / 3600 * price


def show_forecast(console: Console, forecast: Forecast, price: float | None) -> None:
    """Step by part, rate, efficiency, time to train with its band, and the limit."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("a step, ms")
    for batch in forecast.batches:
        table.add_column(f"batch {batch:,}", justify="right")
    for part in _PARTS:
        values = [getattr(step, part) for step in forecast.steps]
        if any(values):
            table.add_row(_NAMES.get(part, part), *(f"{1e3 * value:.2f}" for value in values))
    table.add_row("all", *(f"{1e3 * step.seconds:.2f}" for step in forecast.steps), style="bold")
    table.add_row("hidden communication", *(f"{1e3 * step.hidden:.2f}" for step in forecast.steps), style="dim")
    console.print(table)
    run = forecast.run
    console.print(
        f"{forecast.images_per_second:,.0f} images/s, efficiency {forecast.efficiency:.1%} of one device's; "
        f"about {forecast.memory / 2**30:.1f} GiB a device"
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
        table.add_column(heading, justify="right")
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


def show_relaxed(console: Console, forecasts: Sequence[RelaxedForecast], delays: str) -> None:
    """A line for each form, and which brings most images a second."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(f"with delays {delays}")
    for heading in ("a step, ms", "gradients used", "images/s", "of synchronous"):
        table.add_column(heading, justify="right")
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
        table.add_column(heading)
    for choice in best.choices:
        table.add_row(choice.setting, choice.value, duration(choice.saves))
    console.print(table)
    before, after = best.before.run.seconds, best.forecast.run.seconds
    console.print(f"from {duration(before)} to {duration(after)} ({after / before - 1:+.1%})")


def show_published(console: Console, predictions: Sequence[Prediction]) -> None:
    """Published, predicted and error of each row, and what ratios are relative to."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("id", no_wrap=True)
    for heading in ("published", "predicted", "error", "left out"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    groups = counted_groups([p.row for p in predictions])
    for prediction in predictions:
        row, free = prediction.row, left_out(prediction.row)
        table.add_row(
            row.id,
            number(row.value),
            number(prediction.predicted),
            percent(prediction.error),
            percent(None if free is None else free / row.value - 1),
            _SHORT.get(row.metric, row.metric) + ("" if (row.cluster, row.software) in groups else " *"),
        )
    console.print(table)
    console.print("left out: predicted by the fit of all other rows.  *: the only row of its system, fitted")
    for base in sorted({base_of(p.row) for p in predictions} - {""}):
        console.print(f"relative to {base}: {', '.join(p.row.id for p in predictions if base_of(p.row) == base)}")
    known = [p.row for p in predictions if left_out(p.row) is not None]
    if counted_groups(known):
        console.print(summary(known))

"""The curve over devices as an SVG or PNG picture; matplotlib comes with the extra `plot`."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from .search import Sweep
from .time_to_accuracy import AccuracySweep

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

"""The curve over devices as an SVG or PNG picture; matplotlib comes with the extra `plot`."""

from pathlib import Path

from ..errors import UserError
from .search import Sweep


def check_plot(path: Path) -> None:
    """UserError where a picture can't be drawn: another kind of file, or no matplotlib."""
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"--plot {path}: write a picture as .svg or .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot: needs matplotlib; pip install 'torusgd[plot]'") from error


def plot_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Draws images/s and efficiency over devices, with the knee marked.

    Raises:
        UserError: matplotlib is missing, or the file is no .svg or .png or can't be written.
    """
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
    try:
        # No date in the file: the same plan gives the same bytes.
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise UserError(f"--plot {path}: can't be written: {error.strerror}") from error

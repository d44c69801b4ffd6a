"""Tables of published against predicted figures: for the terminal, for JSON, and as docs/published.md."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from .calibration import load_calibrated, load_parameters
from .catalog import load_cluster, load_software
from .fit import aims_at
from .published import Prediction, Row
from .rehearsed import best_of, read_played, section


def left_out(row: Row) -> float | None:
    """The row predicted by the fit of all other rows, if it is one of those that the calibration knows."""
    return load_calibrated().left_out.get(row.id)


def base_of(row: Row) -> str:
    """What a speed-up or efficiency is relative to."""
    if row.metric == "allreduce_speedup_vs_ring":
        return "flat ring"
    if row.metric not in ("speedup", "scaling_efficiency"):
        return ""
    devices = load_software(row.software).base_devices
    share = "the same batch" if row.metric == "speedup" else "as many images each"
    return f"{devices} device{'s' * (devices > 1)}, {share}"


def counted_groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by (cluster, software), those with two rows or more."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.cluster, row.software].append(row)
    return {key: members for key, members in groups.items() if len(members) > 1}


def summary(rows: Sequence[Row]) -> str:
    """How good the calibration is on rows that it knows, in a few plain sentences."""
    parameters, outliers = load_parameters().parameters, load_parameters().outliers
    known = [row for row in rows if left_out(row) is not None]
    counted = [row for members in counted_groups(known).values() for row in members]
    inside = [row for row in counted if row.id not in outliers]
    errors = sorted(abs((left_out(row) or 0.0) / row.value - 1) for row in counted)
    worst = max(abs((left_out(row) or 0.0) / row.value - 1) for row in inside)
    odd = [row.id for row in counted if row.id in outliers]
    shared = [p for p in parameters if any(aims_at(p, row) for row in counted)]
    return (
        f"{len(parameters)} parameters for {len(known)} rows. Leave-one-out, {len(counted)} rows of systems with two "
        f"rows or more ({len(shared)} of the parameters): median error {100 * median(errors):.1f} %, "
        f"worst {100 * worst:.1f} % without {len(odd)} outlier{'s' * (len(odd) != 1)} ({', '.join(odd)}). "
        f"The other {len(known) - len(counted)} rows are of systems with one row: fitted, and not counted."
    )


def number(value: float) -> str:
    """Four significant digits, with thousands marked."""
    digits = 4 if value < 1000 else 0
    return f"{value:,.0f}" if not digits else f"{value:.4g}"


def percent(error: float | None) -> str:
    """A signed percentage, or nothing."""
    return "" if error is None else f"{100 * error:+.1f} %"


def markdown(predictions: Sequence[Prediction], further: Sequence[Prediction]) -> str:
    """The page docs/published.md."""
    lines = [
        "# Published results and what the planner says of them",
        "",
        "Written by `python -m torusgd.plan.calibrate`; do not edit. The table is `src/torusgd/plan/published.csv`,",
        "its facts are those of the papers, submissions and logs that the cluster files and software profiles name.",
        "",
        summary([p.row for p in predictions]),
        "",
        "*Left out* is the error where the fit has not seen the row; *fitted* marks systems with one row, which are",
        "not counted: their left-out error shows how well the stated values alone do. The band holds the slowest",
        "device's luck (5 to 95 %) and the profile's own error. *Rehearsed* is torusgd's own best, see below.",
        "",
        "| id | devices | images | metric | published | predicted | band | error | left out | rehearsed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    played = read_played()
    groups, outliers = counted_groups([p.row for p in predictions]), load_parameters().outliers
    for prediction in predictions:
        row = prediction.row
        alone = "" if (row.cluster, row.software) in groups else " (fitted)"
        mark = " (outlier)" if row.id in outliers else ""
        free = left_out(row)
        best = best_of(played, row.id)
        alone = f"{percent(None if free is None else free / row.value - 1)}{alone}{mark}"
        lines.append(f"{_line(prediction)} {alone} | {'' if best is None else f'{best.speedup:.3g}'} |")
    lines += [
        "",
        "## Two networks check a third",
        "",
        "Where a program trained three networks or more: each row predicted by a fit without any row of its network,",
        "so that only the others speak for the program and its machines.",
        "",
        "| id | network | published | predicted | error |",
        "|---|---|---|---|---|",
    ]
    others = load_calibrated().other_networks
    for row in [p.row for p in predictions if p.row.id in others]:
        value = others[row.id]
        lines.append(
            f"| {row.id} | {row.model} | {number(row.value)} | {number(value)} | {percent(value / row.value - 1)} |"
        )
    lines += ["", "## Relative to what", ""]
    for base in sorted({base_of(p.row) for p in predictions} - {""}):
        ids = ", ".join(p.row.id for p in predictions if base_of(p.row) == base)
        lines.append(f"* {base}: {ids}")
    lines += ["", "## Outliers", ""]
    lines += [f"* `{name}`: {physics}." for name, physics in outliers.items()]
    lines += [
        "",
        "## Parameters",
        "",
        "| parameter | multiplies | meaning | factor | spread before | rows |",
        "|---|---|---|---|---|---|",
    ]
    factors = load_calibrated().factors
    for parameter in load_parameters().parameters:
        count = sum(aims_at(parameter, p.row) for p in predictions if p.row.id not in outliers)
        targets = ", ".join(f"`{target}`" for target in parameter.targets)
        lines.append(
            f"| {parameter.name} | {targets} | {parameter.meaning} | {factors[parameter.name]:.3g} | "
            f"{parameter.spread} | {count} |"
        )
    lines += [
        "",
        "## Further published figures, never fitted",
        "",
        "From the same papers and logs (`src/torusgd/plan/checks.csv`). Some share a run with a row above; none was",
        f"used by the fit. Median error {100 * median(abs(p.error) for p in further):.1f} %.",
        "",
        "| id | devices | images | metric | published | predicted | band | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(prediction) for prediction in further]
    if played:
        lines += ["", *section(played)]
    lines += ["", "## Sources", ""]
    for name in sorted({p.row.cluster for p in predictions}):
        lines.append(f"* cluster `{name}`: {load_cluster(name).source}.")
    for name in sorted({p.row.software for p in predictions}):
        lines.append(f"* software `{name}`: {load_software(name).source}.")
    return "\n".join(lines) + "\n"


def _line(prediction: Prediction) -> str:
    row = prediction.row
    images = " > ".join(str(each) for each in row.images)
    band = f"{number(prediction.low)} to {number(prediction.high)}"
    return (
        f"| {row.id} | {row.devices:,} | {images} | {row.metric}, {row.unit} | {number(row.value)} | "
        f"{number(prediction.predicted)} | {band} | {percent(prediction.error)} |"
    )

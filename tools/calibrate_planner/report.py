"""docs/published.md and notes/published.md: published, predicted and rehearsed figures beside each other."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from torusgd.plan.cluster import load_calibrated, load_cluster, load_parameters, load_software
from torusgd.plan.published import Prediction, Row, base_of, counted_groups, read_rows, summary
from torusgd.text import change, number

from .findings import section as findings

HERE = Path(__file__).parent
_NUMBERS = (
    "compute_ms", "exposed_ms", "least_ms", "most_ms", "planned_ms", "planned_late_ms", "step_ms", "speedup",
    "planned_speedup", "stretch", "shrink", "excess_us",
)  # fmt: skip


@dataclass(frozen=True)
class Played:
    """A rehearsed step; times in milliseconds of the planned machine."""

    system: str
    devices: int
    settings: str
    published_id: str
    """of the row of published.csv that had this network, cluster, batch and number of devices; may be empty"""
    date: str
    compute: float
    exposed: float
    least: float
    most: float
    planned: float
    """exposed communication as planned"""
    planned_late: float
    """the same with rounds as late as they were in the lab"""
    step: float
    speedup: float
    planned_speedup: float
    stretch: float
    shrink: float
    excess: float
    """microseconds of the machine by which a round of messages took too long in the lab"""

    @property
    def error(self) -> float:
        """Of the planned exposed communication, against the rehearsed."""
        return self.planned / self.exposed - 1 if self.exposed else 0.0

    @property
    def error_late(self) -> float:
        """The same of the plan for the network as it was played."""
        return self.planned_late / self.exposed - 1 if self.exposed else 0.0

    @property
    def error_of_step(self) -> float:
        """The same difference as a share of the rehearsed step."""
        return (self.planned - self.exposed) / self.step


def further_rows() -> list[Row]:
    """The published figures that are kept out of the fit."""
    return read_rows(HERE / "checks.csv")


def step_rows() -> list[Row]:
    """Steps of other runs of NVIDIA's in MLPerf's logs that a profile and a cluster file describe; never fitted."""
    return read_rows(HERE / "steps.csv")


def markdown(predictions: Sequence[Prediction], further: Sequence[Prediction], steps: Sequence[Prediction]) -> str:
    """The page docs/published.md: rows that were fitted, and the errors of `further_rows` and `step_rows`."""
    lines = [
        "# Published results and what the planner says of them",
        "",
        "Written by `python -m tools.calibrate_planner`; do not edit. The table is `src/torusgd/plan/published.csv`,",
        "its facts are those of the papers, submissions and logs that the cluster files and software profiles name.",
        "",
        summary([p.row for p in predictions]),
        "",
        "*Left out* is the error if the fit has not seen the row, *system out* if it has seen no row of that cluster",
        "with that program; the stated values of both remain, of which some were chosen with published figures in view",
        "([which](methods/planner.md#parameters-and-how-they-are-fitted)). *Fitted* marks systems with one row, which",
        "are not counted: their left-out error shows how well the stated values alone do. The band holds the slowest",
        "device's luck (5 to 95 %) and the profile's own error. *Rehearsed* is torusgd's own best, see below.",
        "",
        "| id | devices | images | metric | published | predicted | band | error | left out | system out | rehearsed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    played = read_played()
    groups, fit = counted_groups([p.row for p in predictions]), load_calibrated()
    for prediction in predictions:
        row = prediction.row
        alone = "" if (row.cluster, row.software) in groups else " (fitted)"
        best = best_of(played, row.id)
        free, farther = (
            change(by[row.id] / row.value - 1 if row.id in by else None) for by in (fit.left_out, fit.system_left_out)
        )
        rehearsed = "" if best is None else f"{best.speedup:.3g}"
        lines.append(f"{_line(prediction)} {free}{alone} | {farther} | {rehearsed} |")
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
            f"| {row.id} | {row.model} | {number(row.value)} | {number(value)} | {change(value / row.value - 1)} |"
        )
    lines += ["", "## Relative to what", ""]
    for base in sorted({base_of(p.row) for p in predictions} - {""}):
        ids = ", ".join(p.row.id for p in predictions if base_of(p.row) == base)
        lines.append(f"* {base}: {ids}")
    lines += [
        "",
        "## Figures that were never fitted",
        "",
        f"Further published figures of the same papers and logs (n = {len(further)}). {_errors(further)}",
        f"Steps of NVIDIA's other ResNet-50 runs in MLPerf's logs (n = {len(steps)}). {_errors(steps)}",
        "",
        "## Rehearsed",
        "",
        f"{len(read_played())} steps were played with torusgd's own messages in the network lab",
        "([rehearsal](methods/rehearsal.md)). What communication adds to a step is planned with an error of",
        f"{_errors_of_plays(read_played())}.",
        "",
        "## Details",
        "",
        "notes/published.md has the rows of both kinds, the fitted parameters, the rehearsed steps, what the sources",
        "leave open, and the source of each cluster file and software profile.",
    ]
    return "\n".join(lines) + "\n"


def details(predictions: Sequence[Prediction], further: Sequence[Prediction], steps: Sequence[Prediction]) -> str:
    """The page notes/published.md: what stands behind the figures of docs/published.md."""
    lines = [
        "# Published results: what stands behind the figures",
        "",
        "Written by `python -m tools.calibrate_planner`; do not edit. The fitted rows and their errors:",
        "docs/published.md.",
        "",
        "## Parameters",
        "",
        "| parameter | multiplies | meaning | factor | spread before | rows |",
        "|---|---|---|---|---|---|",
    ]
    factors = load_calibrated().factors
    for parameter in load_parameters():
        count = sum(parameter.aims_at(p.row.cluster, p.row.software) for p in predictions)
        targets = ", ".join(f"`{target}`" for target in parameter.targets)
        lines.append(
            f"| {parameter.name} | {targets} | {parameter.meaning} | {factors[parameter.name]:.3g} | "
            f"{parameter.spread} | {count} |"
        )
    lines += [
        "",
        "## Further published figures, never fitted",
        "",
        "From the same papers and logs (`tools/calibrate_planner/checks.csv`). Some share a run with a row above;",
        f"none was used by the fit. {_errors(further)}",
        "The times of `nvidia_*_time` hold start and evaluations as the logs of the same program tell them (the",
        "software profiles name the runs): for all but `nvidia_h100_1_time` and `nvidia_a100_230_time` the logs of",
        "that very run, so that what they check is the steps.",
        "",
        *_TABLE,
        *map(_line, further),
        "",
        "## Steps of other runs, never fitted",
        "",
        "The steps of NVIDIA's other ResNet-50 runs in the logs of MLPerf v0.6, v0.7, v1.1, v2.0, v3.0 and v4.0, of",
        "machines that have a cluster file (`tools/calibrate_planner/steps.csv`): the median time from one evaluation",
        "to the next, by whole steps, median of 5 runs; read on 2026-11-23, after all else on this page was there. The",
        "programs of v2.0's runs of up to 128 nodes and of v4.0 are taken to be those of v1.1 and v3.0.",
        _errors(steps),
        "",
        *_TABLE,
        *map(_line, steps),
        "",
        *findings(predictions, further),
    ]
    lines += ["", *section(read_played())]
    lines += ["", "## Sources", ""]
    for name in sorted({p.row.cluster for p in predictions}):
        lines.append(f"* cluster `{name}`: {load_cluster(name).source}.")
    for name in sorted({p.row.software for p in predictions}):
        lines.append(f"* software `{name}`: {load_software(name).source}.")
    return "\n".join(lines) + "\n"


_TABLE = (
    "| id | devices | images | metric | published | predicted | band | error |",
    "|---|---|---|---|---|---|---|---|",
)


def _errors_of_plays(played: Sequence[Played]) -> str:
    sizes = sorted(100 * abs(each.error_of_step) for each in played)
    return f"{median(sizes):.1f} % of the step in the median, at most {sizes[-1]:.1f} %"


def _errors(predictions: Sequence[Prediction]) -> str:
    sizes = sorted(100 * abs(prediction.error) for prediction in predictions)
    return f"Median error {median(sizes):.1f} %, worst {sizes[-1]:.1f} % and {sizes[-2]:.1f} %."


def _line(prediction: Prediction) -> str:
    row = prediction.row
    images = " > ".join(str(each) for each in row.images)
    band = f"{number(prediction.low)} to {number(prediction.high)}"
    return (
        f"| {row.id} | {row.devices:,} | {images} | {row.metric}, {row.unit} | {number(row.value)} | "
        f"{number(prediction.predicted)} | {band} | {change(prediction.error)} |"
    )


def read_played() -> list[Played]:
    """The steps that were rehearsed, as benchmarks/rehearse/rehearsals.py left them in rehearsed.csv."""
    return [
        Played(
            row["system"], int(row["devices"]), row["settings"], row["published_id"], row["date"],
            *(float(row[key]) for key in _NUMBERS),
        )
        for row in csv.DictReader((HERE / "rehearsed.csv").read_text().splitlines())
    ]  # fmt: skip


def best_of(played: Sequence[Played], row_id: str) -> Played | None:
    """The quickest rehearsal of a published row."""
    found = [each for each in played if each.published_id == row_id]
    return max(found, key=lambda each: each.speedup, default=None)


def section(played: Sequence[Played]) -> list[str]:
    """The lines of notes/published.md with all of them."""
    lines = [
        "## Rehearsed",
        "",
        "Steps of the same networks, batches and clusters with torusgd's own messages, played in the network lab",
        "(`torusgd rehearse`, docs/methods/rehearsal.md), as `benchmarks rehearse rehearsals` wrote them to",
        "`tools/calibrate_planner/rehearsed.csv`. *Exposed* is the communication that compute waits for: median and",
        "range. *Late* is by how many microseconds of the machine a round of messages was longer in the lab than it",
        "should have been; the plan is given for the machine and for rounds as late. Errors are those of the plan",
        "against the rehearsal, the first also as a share of the step. Compute, update, contention and slow devices",
        "are the plan's in both; speed-ups are over one device with the same batch.",
        "",
        "| system | devices | settings | compute ms | exposed ms | planned ms | error | of the step | late us "
        "| planned so | error | speed-up | planned |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in played:
        lines.append(
            f"| {each.system} | {each.devices} | {each.settings} | {each.compute:.4g} "
            f"| {each.exposed:.3g} ({each.least:.3g} to {each.most:.3g}) | {each.planned:.3g} "
            f"| {100 * each.error:+.0f} % | {100 * each.error_of_step:+.1f} % | {each.excess:.0f} "
            f"| {each.planned_late:.3g} | {100 * each.error_late:+.0f} % "
            f"| {each.speedup:.2f} | {each.planned_speedup:.2f} |"
        )
    return lines

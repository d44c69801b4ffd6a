"""Steps that were rehearsed in the network lab, as `benchmarks/rehearsals.py` left them in rehearsed.csv."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

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


def read_played() -> list[Played]:
    """The table that ships; empty where there is none."""
    path = files(__package__).joinpath("rehearsed.csv")
    if not path.is_file():
        return []
    return [
        Played(
            row["system"], int(row["devices"]), row["settings"], row["published_id"], row["date"],
            *(float(row[key]) for key in _NUMBERS),
        )
        for row in csv.DictReader(path.read_text().splitlines())
    ]  # fmt: skip


def best_of(played: Sequence[Played], row_id: str) -> Played | None:
    """The quickest rehearsal of a published row."""
    found = [each for each in played if each.published_id == row_id]
    return max(found, key=lambda each: each.speedup, default=None)


def section(played: Sequence[Played]) -> list[str]:
    """The lines of docs/published.md that tell them all."""
    lines = [
        "## Rehearsed",
        "",
        "Steps of the same networks, batches and clusters with torusgd's own messages, played in the network lab",
        "(`torusgd rehearse`, [rehearsal.md](methods/rehearsal.md)), as `benchmarks/rehearsals.py` wrote them to",
        "`src/torusgd/plan/rehearsed.csv`. *Exposed* is the communication that compute waits for: median and range.",
        "*Late* is by how many microseconds of the machine a round of messages was longer in the lab than it should",
        "have been; the plan is given for the machine and for rounds as late. Errors are those of the plan against the",
        "rehearsal, the first also as a share of the step. Compute, update, contention and slow devices are the plan's",
        "in both; speed-ups are over one device with the same batch.",
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

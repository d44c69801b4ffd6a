"""Rehearses the systems of Das et al. and a slice of ABCI, one idea at a time, and writes the table. Needs root.

    sudo .venv/bin/python -m benchmarks rehearse rehearsals --date 2026-11-21 --minutes 5
    sudo .venv/bin/python -m benchmarks rehearse rehearsals --date 2026-11-21 --only "ethernet-16: native"

Each case is one step of a recipe, with the batch of the publication, planned for a cluster and played in the network
lab (`torusgd rehearse`). Results go to tools/calibrate_planner/rehearsed.csv, a line a case, from which the page
notes/published.md is made; a case whose line is there is left out, so that a call goes on where the last one ended.

Needs: root, for the network lab.
"""

import csv
import json
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from torusgd.cli.options import PlannedMachine, RuntimeFlags
from torusgd.cli.rehearse import rehearse

from ..record import sample

TABLE = Path(__file__).parents[2] / "tools" / "calibrate_planner" / "rehearsed.csv"
COLUMNS = (
    "system", "devices", "settings", "published_id", "steps", "compute_ms", "exposed_ms", "least_ms", "most_ms",
    "planned_ms", "planned_late_ms", "step_ms", "planned_step_ms", "speedup", "planned_speedup", "stretch", "shrink",
    "excess_us", "date",
)  # fmt: skip


@dataclass(frozen=True)
class System:
    """A published system: its recipe, cluster, batch, and the id of its row in published.csv for 16 devices."""

    recipe: str
    cluster: str
    batch: int
    seconds: float
    """that a step may take in the lab"""
    published: str = ""
    software: str | None = None
    """the profile whose speed of compute is played; None: the record's"""


SYSTEMS = {
    "ethernet": System("intel-aws-vgga-16", "aws-c4.8xlarge", 256, 12.0, "das_vgga_aws"),
    "fdr-cddnn": System("intel-cddnn-16", "endeavor", 1024, 8.0, "das_cddnn_16"),
    "fdr-vgga": System("intel-aws-vgga-16", "endeavor", 256, 12.0),
    "fdr-overfeat": System("intel-overfeat-64", "endeavor", 256, 12.0),
    "abci": System("resnet50", "abci", 512, 6.0, software="mxnet-fujitsu"),
}
IDEAS: dict[str, dict[str, Any]] = {
    "native, no overlap": {"allreduce": "native", "overlap": False},
    "native": {"allreduce": "native"},
    "ring": {"allreduce": "ring"},
    "halving-doubling": {"allreduce": "halving-doubling"},
    "torus": {"allreduce": "torus"},
    "auto": {"allreduce": "auto"},
    "ring, sharded": {"allreduce": "ring", "update": "sharded"},
    "halving-doubling, sharded": {"allreduce": "halving-doubling", "update": "sharded"},
    "torus, sharded": {"allreduce": "torus", "update": "sharded"},
    "ring, hybrid": {"allreduce": "ring", "model_parallel": "auto"},
    "ring, sharded, hybrid": {"allreduce": "ring", "update": "sharded", "model_parallel": "auto"},
    "halving-doubling, sharded, hybrid": {
        "allreduce": "halving-doubling", "update": "sharded", "model_parallel": "auto",
    },
}  # fmt: skip
PLAIN = {"update": "replicated", "model_parallel": "1", "weights_first": False}
"""what an idea does not change, whatever the record's own block has"""
SPLIT_SECONDS = 48.0
"""a step of split layers: what the lab adds to each exchange, which is waited for at once, shrinks with it"""
LADDER = ("native, no overlap", "native", "ring, sharded", "ring, sharded, hybrid")
BEST = "halving-doubling, sharded, hybrid"
CASES = [
    *[(system, 16, idea) for system in ("fdr-cddnn", "ethernet") for idea in (*LADDER, BEST)],
    *[("abci", 16, idea) for idea in ("native", "torus", "torus, sharded")],
    *[(system, n, idea) for n in (8, 4, 2) for system in ("fdr-cddnn", "ethernet") for idea in ("native", BEST)],
    *[(system, 16, idea) for system in ("fdr-cddnn", "ethernet") for idea in ("halving-doubling", "torus")],
    *[(system, 16, "auto") for system in ("abci", "fdr-cddnn", "ethernet")],
    *[(system, 16, "ring, hybrid") for system in ("fdr-cddnn", "ethernet")],
    *[(system, 16, idea) for system in ("fdr-overfeat", "fdr-vgga") for idea in ("native", BEST)],
    *[(system, 16, "ring") for system in ("abci", "fdr-cddnn", "ethernet")],
    ("abci", 16, "native, no overlap"),
]
"""the most telling first"""


def play(name: str, devices: int, idea: str, steps: int, date: str) -> dict[str, str]:
    """One case as a line of the table."""
    system = SYSTEMS[name]
    share = system.batch // devices
    sets = [f"virtual_workers={devices}", f"stages.0.images_per_worker={share}"]
    if system.recipe == "resnet50":
        sets = [f"virtual_workers={devices}", f"stages=[{{until: 90ep, images_per_worker: {share}}}]"]
    seconds = SPLIT_SECONDS if "model_parallel" in IDEAS[idea] else system.seconds
    flags = PLAIN | IDEAS[idea]
    overlap = flags.pop("overlap", True)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        rehearse(
            system.recipe, PlannedMachine(system.cluster, system.software), RuntimeFlags(workers=devices, **flags),
            overrides=sets, overlap=bool(overlap), steps=steps, seconds=seconds, json_file=Path(file.name),
        )  # fmt: skip
        found = json.loads(Path(file.name).read_text())
    groups = found["linear_groups"]
    values = {
        "compute_ms": 1e3 * found["compute"], "exposed_ms": 1e3 * found["exposed_rehearsed"],
        "least_ms": 1e3 * min(found["exposed_steps"]), "most_ms": 1e3 * max(found["exposed_steps"]),
        "planned_ms": 1e3 * found["exposed_predicted"],
        "planned_late_ms": 1e3 * found["exposed_predicted_late"], "step_ms": 1e3 * found["seconds"],
        "planned_step_ms": 1e3 * found["seconds_predicted"], "speedup": found["speedup"],
        "planned_speedup": found["speedup_predicted"], "stretch": found["stretch"], "shrink": found["shrink"],
        "excess_us": 1e6 * found["round_excess"],
    }  # fmt: skip
    return {
        "system": name,
        "devices": str(devices),
        "settings": idea + (f" in {groups} group{'s' * (groups > 1)}" if groups else ""),
        "published_id": system.published if devices == 16 else "",
        "steps": str(steps),
        **{key: f"{value:.4g}" for key, value in values.items()},
        "date": date,
    }


def read(path: Path) -> list[dict[str, str]]:
    """The lines so far."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """All lines, by system, number of devices and ideas."""
    systems, ideas = list(SYSTEMS), list(IDEAS)
    rows.sort(key=lambda row: (systems.index(row["system"]), -int(row["devices"]), ideas.index(plain(row)[2])))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(
    date: Annotated[str, Option(help="noted in the table, such as 2026-11-21")],
    only: Annotated[str, Option(help="regular expression for SYSTEM-DEVICES: SETTINGS")] = "",
    steps: int = 3,
    minutes: Annotated[float, Option(help="no case begins after so many; call again to go on")] = 1e9,
    out: Path = TABLE,
) -> None:
    """Plays the cases asked for."""
    stop = time.monotonic() + 60 * minutes
    for system, devices, idea in CASES:
        if not re.search(only, f"{system}-{devices}: {idea}") or time.monotonic() > stop:
            continue
        rows = read(out)
        if any(plain(row) == (system, str(devices), idea) for row in rows):
            continue
        row = play(system, devices, idea, steps, date)
        sample(f"{system}-{devices}: {idea}, exposed ms", [float(row["exposed_ms"])])
        write(out, [*rows, row])


def plain(row: dict[str, str]) -> tuple[str, str, str]:
    """The case of a line."""
    return row["system"], row["devices"], re.sub(r" in \d+ groups?$", "", row["settings"])


if __name__ == "__main__":
    typer.run(main)

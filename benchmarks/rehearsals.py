"""Rehearses the systems of Das et al. and a slice of ABCI, one idea at a time, and writes the table. Needs root.

    sudo .venv/bin/python benchmarks/rehearsals.py --date 2026-11-21 --only "ethernet-16: native" --seconds 20

Each case is one step of a recipe, with the batch of the publication, planned for a cluster and played in the network
lab (`torusgd rehearse`). Results go to src/torusgd/plan/rehearsed.csv, a line a case, from which docs/published.md is
made; a case that is there already is played again and replaced.
"""

import argparse
import csv
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torusgd.rehearse.command import command

TABLE = Path(__file__).parents[1] / "src" / "torusgd" / "plan" / "rehearsed.csv"
COLUMNS = (
    "system", "devices", "settings", "published_id", "steps", "compute_ms", "exposed_ms", "least_ms", "most_ms",
    "planned_ms", "step_ms", "planned_step_ms", "speedup", "planned_speedup", "stretch", "shrink", "excess_us", "date",
)  # fmt: skip


@dataclass(frozen=True)
class System:
    """A published system: its recipe, cluster, batch, and the id of its row in published.csv for 16 devices."""

    recipe: str
    cluster: str
    batch: int
    published: str = ""


SYSTEMS = {
    "ethernet": System("intel-aws-vgga-16", "aws-c4.8xlarge", 256, "das_vgga_aws"),
    "fdr-cddnn": System("intel-cddnn-16", "endeavor", 1024, "das_cddnn_16"),
    "fdr-vgga": System("intel-aws-vgga-16", "endeavor", 256),
    "fdr-overfeat": System("intel-overfeat-64", "endeavor", 256),
    "abci": System("resnet50", "abci", 512),
}
IDEAS = {
    "native, no overlap": {"allreduce": "native", "overlap": False},
    "native": {"allreduce": "native"},
    "ring": {"allreduce": "ring"},
    "halving-doubling": {"allreduce": "halving-doubling"},
    "torus": {"allreduce": "torus"},
    "auto": {"allreduce": "auto"},
    "halving-doubling, sharded": {"allreduce": "halving-doubling", "update": "sharded"},
    "torus, sharded": {"allreduce": "torus", "update": "sharded"},
    "halving-doubling, hybrid": {"allreduce": "halving-doubling", "model_parallel": "auto"},
    "halving-doubling, sharded, hybrid": {
        "allreduce": "halving-doubling", "update": "sharded", "model_parallel": "auto",
    },
}  # fmt: skip
ALL = tuple(IDEAS)
FEW = ("native", "halving-doubling, sharded, hybrid")
CASES = [
    *[("ethernet", 16, idea) for idea in ALL if idea != "torus, sharded"],
    *[("fdr-cddnn", 16, idea) for idea in ALL if idea != "torus, sharded"],
    *[(system, n, idea) for system in ("ethernet", "fdr-cddnn") for n in (8, 4, 2) for idea in FEW],
    *[("fdr-vgga", 16, idea) for idea in FEW],
    *[("fdr-overfeat", 16, idea) for idea in FEW],
    *[("abci", 16, idea) for idea in ("native, no overlap", "native", "ring", "torus", "auto", "torus, sharded")],
]


def play(name: str, devices: int, idea: str, steps: int, seconds: float, date: str) -> dict[str, str]:
    """One case as a line of the table."""
    system = SYSTEMS[name]
    share = system.batch // devices
    sets = [f"virtual_workers={devices}", f"stages.0.images_per_worker={share}"]
    if system.recipe == "resnet50":
        sets = [f"virtual_workers={devices}", f"stages=[{{until: 90ep, images_per_worker: {share}}}]"]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command(
            system.recipe, sets, cluster=system.cluster, devices=devices, steps=steps, seconds=seconds,
            json_file=Path(file.name), **IDEAS[idea],
        )  # fmt: skip
        found = json.loads(Path(file.name).read_text())
    groups = found["linear_groups"]
    values = {
        "compute_ms": 1e3 * found["compute"], "exposed_ms": 1e3 * found["exposed_rehearsed"],
        "least_ms": 1e3 * min(found["exposed_steps"]), "most_ms": 1e3 * max(found["exposed_steps"]),
        "planned_ms": 1e3 * found["exposed_predicted"], "step_ms": 1e3 * found["seconds"],
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
    """All lines, sorted as the cases are."""
    order = {(system, str(n)): place for place, (system, n, _) in enumerate(reversed(CASES))}
    rows.sort(key=lambda row: -order.get((row["system"], row["devices"]), 0))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Plays the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression for SYSTEM-DEVICES: SETTINGS")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="a step in the lab")
    parser.add_argument("--date", required=True, help="noted in the table, such as 2026-11-21")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    for system, devices, idea in CASES:
        if not re.search(options.only, f"{system}-{devices}: {idea}"):
            continue
        row = play(system, devices, idea, options.steps, options.seconds, options.date)
        key = ("system", "devices", "settings")
        others = [old for old in read(options.out) if [old[k] for k in key] != [row[k] for k in key]]
        write(options.out, [*others, row])


if __name__ == "__main__":
    main()

"""What a plan of this machine reads: the folder of a finished run, and a measured network; and a network to plan."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torusgd.comm.tuning.profile import Link, Profile, Timing
from torusgd.plan.forecast import Workload, workload_of
from torusgd.recipe.load import load_recipe

VGG = load_recipe("intel-aws-vgga-16").recipe


@cache
def vgg() -> Workload:
    return workload_of(VGG)


def measured_run(
    folder: Path, seconds: float, *, update: float = 0.02, batch: int = 96, ranks: int = 1, disturbed: Any = (1.0,) * 4,
    more: Mapping[str, object] | None = None, recipe: str = "digits", changes: Sequence[str] = (),
) -> Path:  # fmt: skip
    """A finished run of five steps of so many seconds, times `disturbed`, the first of which takes 9 s.

    Its steps' events have `more`; it is of a built-in recipe with `changes`.
    """
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(load_recipe(recipe, changes).recipe.as_dict()))
    (folder / "summary.json").write_text(json.dumps({"world_size": ranks}))
    steps = [
        {"step": n, "stage": 0, "batch": batch, "step_seconds": taken, "update_seconds": update, **(more or {})}
        for n, taken in enumerate((9.0, *(seconds * each for each in disturbed)), 1)
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*steps, {"event": "evaluation"}]))
    return folder


def link(latency: float, per_byte: float) -> Link:
    return Link(latency=latency, latency_error=0.0, per_byte=per_byte, per_byte_error=0.0)


def timing(size: int, algorithm: str, median: float, grid: tuple[int, int] | None = None) -> Timing:
    return Timing(size=size, algorithm=algorithm, grid=grid, chunks=1, median=median)


def network(hosts: tuple[int, ...] = (0, 1), latency: float = 1e-3, message: float = 1e-5, **more: Any) -> Profile:
    """A measured network: a quick one inside hosts, a slow one between them."""
    inside = link(1e-5, 1e-10) if len(set(hosts)) < len(hosts) else None
    between = link(latency, 1e-8) if len(set(hosts)) > 1 else None
    values: dict[str, Any] = {"hosts": hosts, "message": message, "inside": inside, "between": between, "timings": ()}
    return Profile(**{"backend": "gloo", **values, **more})

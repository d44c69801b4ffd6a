"""A trace of a few steps on every rank, in Chrome's format: open trace.json in ui.perfetto.dev or chrome://tracing.

Each rank records its steps with `torch.profiler`: torch's operators, kernels of a GPU, and the spans that the code
names by `record_function`, such as step and update. The first rank puts the records on one clock and into one file.
"""

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

from ..comm.connection import Clock
from ..comm.groups import Group
from ..errors import UserError
from ..rundir.run_dir import TRACE
from ..weights import write_text

# Process numbers from here on stand for the devices of a rank, which torch numbers from 0 on every host.
_DEVICES = 1_000_000


class TracedSteps(NamedTuple):
    """Which steps are traced, counted from 1 as in events.jsonl."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "TracedSteps":
        """From `10:12`, or `10` for a single step; UserError if it is neither.

        >>> TracedSteps.parse("10:12")
        TracedSteps(first=10, last=12)
        """
        found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise UserError(f"--trace {text}: write the first and the last step, counted from 1, such as 10:12")
        return cls(first, last)


class StepTrace:
    """This rank's part of a trace; all ranks have one, and the first writes it into the run's folder."""

    def __init__(self, steps: TracedSteps, world: Group, folder: Path) -> None:
        self._steps, self._world, self._path = steps, world, folder / TRACE
        self._profile: profile | None = None

    def between_steps(self, done: int) -> None:
        """So many steps are done; every rank calls it between two steps. After the last one the file is written."""
        if self._profile is None and self._steps.first <= done + 1 <= self._steps.last:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
            self._profile = profile(activities=activities)
            self._profile.start()
        elif self._profile is not None and done >= self._steps.last:
            self._profile.stop()
            self._write(self._profile)
            self._profile = None

    def close(self) -> None:
        """Ends a record that is under way, when the ranks change: torch has one a thread."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _write(self, recorded: profile) -> None:
        world = self._world
        with tempfile.TemporaryDirectory() as folder:
            recorded.export_chrome_trace(f"{folder}/rank.json")
            own: dict[str, Any] = json.loads(Path(f"{folder}/rank.json").read_text())
        part = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            # Whole nanoseconds: a float64 of today's nanoseconds has lost the last two digits.
            "base": own.get("baseTimeNanoseconds", 0) - time.time_ns() + round(1e9 * Clock(world).now()),
            "events": own["traceEvents"],
        }
        parts = [world.broadcast_json(part, index) for index in range(world.size)]
        if world.rank == 0:
            write_text(self._path, json.dumps(merged(dict(zip(world.ranks, parts, strict=True)))) + "\n")


def merged(parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """One trace on one clock, from the part of each rank: host, process, events as torch exports them, in microseconds,
    and the nanoseconds of the ranks' common clock from which these count."""
    first = next(iter(parts.values()))
    events: list[dict[str, Any]] = []
    for rank, part in parts.items():
        shift = part["base"] - first["base"]
        name = {"name": f"rank {rank} ({part['host']})"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        for event in part["events"]:
            if not isinstance(event.get("pid"), int) or event.get("name") == "process_name":
                continue
            is_own = event["pid"] == part["process"]
            moved = {**event, "pid": rank if is_own else _DEVICES * (rank + 1) + event["pid"]}
            if "ts" in moved:
                moved["ts"] = float(moved["ts"]) + shift / 1e3
            events.append(moved)
    return {"traceEvents": events, "displayTimeUnit": "ms"}

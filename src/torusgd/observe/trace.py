"""A trace of a few steps on every rank, in Chrome's format: open trace.json in ui.perfetto.dev or chrome://tracing.

A rank notes when its passes, its waits and its messages begin and end, by `time.perf_counter`. On Linux that clock is
the same for all processes of a host. Hosts differ, so that the ranks of another host are moved by what their clocks
differ in when all have just left a barrier: right to within the time that a barrier takes.

On a GPU the times of passes are those at which they are launched; messages and waits are as the host sees them.
"""

import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from ..comm.groups import Group
from ..comm.monitor import Monitor
from ..data.pipeline import Batch
from ..errors import UserError
from ..recipe.schedule import Step
from ..rundir.run_dir import TRACE
from ..step.forward_backward import ForwardBackward
from ..step.membership import Membership
from ..step.stats import StepClock, StepTimes
from ..weights import write_text

if TYPE_CHECKING:
    from ..step.step import TrainStep

R = TypeVar("R")
TRACKS = ("steps", "compute", "images", "waits for messages")
"""of a rank, as threads; messages overlap, and lie beside them"""


@dataclass(frozen=True)
class TracedSteps:
    """Which steps are traced, counted from 1 as in events.jsonl."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "TracedSteps":
        """From `10:12`, or `10` for a single step; UserError where it is neither.

        >>> TracedSteps.parse("10:12")
        TracedSteps(first=10, last=12)
        """
        found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise UserError(f"--trace {text}: write the first and the last step, counted from 1, such as 10:12")
        return cls(first, last)


class StepTrace:
    """This rank's part of a trace; all ranks have one, or none has.

    Args:
        steps: Which steps.
        world: All ranks.
        path: Of the file, which the first rank writes.
    """

    def __init__(self, steps: TracedSteps, world: Group, path: Path) -> None:
        self._steps, self._world, self._path = steps, world, path
        self._spans: list[dict[str, Any]] = []
        self._is_on = self._is_written = False

    def attach(self, step: "TrainStep", monitor: Monitor) -> None:
        """From now on the parts of a step tell this trace when they begin and end."""
        step.forward_backward = _TracedPasses(step.forward_backward, self)
        step.clock = _TracedClock(step.clock.loader, monitor, self)
        step.loader.observe = lambda begin, end: self.add("images", "wait for images", begin, end)
        monitor.observe = self._note_message

    def reach(self, done: int) -> None:
        """So many steps are done; every rank calls it between two steps. After the last one the file is written."""
        self._is_on = self._steps.first <= done + 1 <= self._steps.last
        if done >= self._steps.last and self._spans and not self._is_written:
            self._is_written = True
            self._write()

    def add(self, track: str, name: str, begin: float, end: float, **more: int) -> None:
        """A span of this rank's time, in seconds of time.perf_counter; nothing outside the traced steps."""
        if self._is_on:
            self._spans.append({"track": track, "name": name, "begin": begin, "end": end, **more})

    def _note_message(self, kind: str, begin: float, end: float, size: int) -> None:
        if kind == "wait":
            self.add("waits for messages", "wait", begin, end)
        else:
            self.add("messages", f"message of {size} bytes" if size else "message", begin, end, bytes=size)

    def _write(self) -> None:
        """Gathers the parts of all ranks; collective."""
        world = self._world
        world.barrier()
        own = {"host": socket.gethostname(), "left_barrier": time.perf_counter(), "spans": self._spans}
        parts = [json.loads(world.broadcast_text(json.dumps(own), place)) for place in range(world.size)]
        if world.rank == 0:
            ranks = {str(rank): part for rank, part in zip(world.ranks, parts, strict=True)}
            write_text(self._path, json.dumps(merged(ranks)) + "\n")


def trace_steps(
    steps: TracedSteps | None, step: "TrainStep", monitor: Monitor, world: Group, folder: Path
) -> Callable[[int], object]:
    """Attaches a trace of these steps, which is written into the run's folder; what it must be told between steps.

    Raises:
        UserError: The run has fewer steps.
    """
    if steps is None:
        return lambda done: None
    if steps.last > len(step.schedule):
        raise UserError(f"--trace {steps.first}:{steps.last}: the run has {len(step.schedule)} steps")
    trace = StepTrace(steps, world, folder / TRACE)
    trace.attach(step, monitor)
    return trace.reach


def merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One trace on one clock, of what each rank has noted.

    Args:
        parts: By rank its host, when it left the barrier, and its spans, all in seconds of its host's clock.
    """
    left = {part["host"]: part["left_barrier"] for part in list(parts.values())[::-1]}  # the first rank of each host
    reference = next(iter(parts.values()))["left_barrier"]
    shift = {host: reference - seconds for host, seconds in left.items()}
    begins = [span["begin"] + shift[part["host"]] for part in parts.values() for span in part["spans"]]
    zero = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, part in parts.items():
        events += _named(int(rank), part["host"])
        for number, span in enumerate(part["spans"]):
            begin = 1e6 * (span["begin"] + shift[part["host"]] - zero)
            microseconds = 1e6 * (span["end"] - span["begin"])
            events += _events(int(rank), number, span, round(begin, 3), round(microseconds, 3))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(rank: int, host: str) -> list[dict[str, Any]]:
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({host})"}}]
    for number, track in enumerate(TRACKS):
        names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}})
    return names


def _events(rank: int, number: int, span: Mapping[str, Any], begin: float, length: float) -> list[dict[str, Any]]:
    """A complete event on a thread; or of a message, which others overlap, its begin and its end."""
    event = {"name": span["name"], "cat": span["track"], "pid": rank, "ts": begin}
    if span["track"] != "messages":
        return [{**event, "ph": "X", "tid": TRACKS.index(span["track"]), "dur": length}]
    event |= {"tid": TRACKS.index("compute"), "id": f"{rank}.{number}"}
    ends = {**event, "ph": "e", "ts": round(begin + length, 3)}
    return [{**event, "ph": "b", "args": {"bytes": span["bytes"]}}, ends]


class _TracedPasses:
    """Tells a trace when passes begin and end."""

    def __init__(self, passes: ForwardBackward, trace: StepTrace) -> None:
        self.in_step, self.control_follows = passes.in_step, passes.control_follows
        self._passes, self._trace, self._worker = passes, trace, 0

    @property
    def is_added(self) -> bool:
        return self._passes.is_added

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        self._worker = worker
        return self._timed("forward", lambda: self._passes.forward(step, worker, batch, membership))

    def backward(self) -> None:
        self._timed("backward", self._passes.backward)

    def _timed(self, name: str, call: Callable[[], R]) -> R:
        begin = time.perf_counter()
        result = call()
        self._trace.add("compute", f"{name} {self._worker}", begin, time.perf_counter())
        return result


class _TracedClock(StepClock):
    """Tells a trace when a step begins and ends, and what comes after its last pass."""

    def __init__(self, loader: Any, monitor: Monitor, trace: StepTrace) -> None:
        super().__init__(loader, monitor)
        self._trace, self._began, self._passes_done = trace, 0.0, 0.0

    def start(self) -> None:
        super().start()
        self._began = time.perf_counter()

    def passes_done(self) -> None:
        super().passes_done()
        self._passes_done = time.perf_counter()

    def stop(self) -> StepTimes:
        times, now = super().stop(), time.perf_counter()
        self._trace.add("compute", "sums and update", self._passes_done, now)
        self._trace.add("steps", "step", self._began, now)
        return times

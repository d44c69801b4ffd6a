"""The files that a gradient passes on its way to the weight, and a run from a SIGKILL to the step that is redone.

The rule is the same for both: a file is passed if a function of it runs between two marks, in any thread. What runs
under a function of `BESIDE_GRADIENT` or `BESIDE_LOSS` does not count: it is another concern of the step, or of a rank
that begins, and is listed under that name. So new code counts until somebody says beside what it is, and whatever ran
is printed. Code that runs while a module is imported is no function; the `__init__` of a dataclass lies in no file.

A gradient: from the start of the last `BACKWARD` of a step on a rank to the end of the `UPDATE`. A file counts if the
rank passes it in each of the traced steps. What a rank passes in some of them only is listed as "now and then", and
what the launcher does meanwhile is listed apart.

A SIGKILL: in the launcher from the end of the `NOTICE` that reports it to the end of `ANNOUNCE`; in the lowest rank
that is left from where the error that ends its `STEP` is raised to the next `STEP`, the redone one. Control enters a
file if another file calls a function of it (all calls by one run of the caller are one entry), and if the error brings
control back to it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from .calls import Call

BACKWARD = "WholeNetwork.backward"
UPDATE = "Update.step"
STEP = "TrainStep.run"
NOTICE = "Supervisor.wait"
ANNOUNCE = "Supervisor._go_on"
BESIDE = {
    "Heartbeat._run": "heartbeats (a thread)",
    "Heartbeat.late": "who is late, as waits ask again and again",
    "Loader": "images (threads)",
}
BESIDE_GRADIENT = {
    **BESIDE,
    "Audit": "watchers",
    "DriftWatch": "watchers",
    "NoiseWatch": "watchers",
    "ReplacedImages": "watchers",
    "Requests": "watchers",
    "SpeedWatch": "watchers",
    "Stragglers": "watchers",
    "StepWatch": "watchers",
    "ControlMessage": "losses, statistics and counts (the control vector)",
    "wants_stop": "losses, statistics and counts (the control vector)",
    "StepClock": "the step's times",
}
BESIDE_LOSS = {
    **BESIDE,
    "Trainer.close": "the step's parts are closed, as at an end",
    "build": "the step's parts are made, as at a start",
    "Requests": "the step's parts are made, as at a start",
    "ReplacedImages": "the step's parts are made, as at a start",
    "StepState": "tensors out of the model and into it, as at a checkpoint",
    "DriftWatch": "weights are compared, as before a checkpoint",
    "Recorder": "records of the state, cut back as at a resume",
    "Group.all_gather": "messages by which the ranks agree",
    "Group.all_reduce": "messages by which the ranks agree",
    "Group.barrier": "messages by which the ranks agree",
    "Group.broadcast_json": "messages by which the ranks agree",
    "Group.small_device": "messages by which the ranks agree",
    "Group._connect.<locals>.run": "connections (a thread)",
    "Saver": "checkpoints",
    "CheckpointWriter": "checkpoints",
    "CheckpointTimes": "checkpoints",
    "Telemetry": "events and status",
    "Trackers": "events and status",
    "journal_of": "events and status",
    "StepStats.as_event": "events and status",
    "warn": "events and status",
    "Schedule": "recipe and schedule",
    "Recipe": "recipe and schedule",
    "arithmetic_of": "recipe and schedule",
    "Synchrony": "recipe and schedule",
    "weights_metadata": "recipe and schedule",
}

Threads = Mapping[int, Sequence[Call]]
"""the calls of a process by thread, in the order in which they began"""
Beside = dict[str, dict[str, None]]
"""by concern the files, a set in order"""


class NotFoundError(Exception):
    """A mark did not come by: the function has another name by now, or the run went another way."""


@dataclass
class Passed:
    """The files of a way in the order in which they are first entered, and what is beside it."""

    files: dict[str, str] = field(default_factory=dict)
    """by file the function by which it is entered first"""
    beside: Beside = field(default_factory=lambda: defaultdict(dict))


def is_rank(threads: Threads) -> bool:
    """Whether a process takes steps."""
    return any(call.function == STEP for thread in threads.values() for call in thread)


def passed(threads: Threads, begin: int, end: int, beside: Mapping[str, str] = MappingProxyType({})) -> Passed:
    """What is passed between two times, with those who call it."""
    way = Passed()
    for call in sorted(_begun(threads, begin, end), key=lambda call: call.begin):
        concern = concern_of(call, beside)
        if concern is not None:
            way.beside[concern][call.file] = None
            continue
        if call.caller is not None:  # it runs too, though it began before
            way.files.setdefault(call.caller.file, call.caller.function)
        way.files.setdefault(call.file, call.function)
    return way


def concern_of(call: Call, beside: Mapping[str, str]) -> str | None:
    """Under whose name a call is listed, by the outermost function that has one; None: it is part of the way."""
    outermost_first = reversed([*call.stack()])
    return next((beside[name] for each in outermost_first for name in beside if each.is_one_of(name)), None)


def steps_of(threads: Threads, count: int) -> list[tuple[int, int]]:
    """When the gradients of the last so many steps were on their way."""
    calls = [call for thread in threads.values() for call in thread]
    starts = [call.begin for call in calls if call.function == BACKWARD]
    updates = [call for call in calls if call.function == UPDATE and call.end is not None]
    found = []
    for update in updates[-count:]:
        before = [start for start in starts if start < update.begin]
        if before and update.end is not None:
            found.append((before[-1], update.end))
    if len(found) < count:
        raise NotFoundError(f"{BACKWARD} and {UPDATE} ran in {len(found)} of {count} steps")
    return found


@dataclass
class Gradient:
    """The way of a gradient in a rank."""

    files: dict[str, str]
    """passed in each step"""
    sometimes: dict[str, int]
    """in how many steps the other files are passed"""
    beside: Beside


def gradient(threads: Threads, steps: Sequence[tuple[int, int]]) -> Gradient:
    """Finds what is passed in steps whose times are given."""
    ways = [passed(threads, begin, end, BESIDE_GRADIENT) for begin, end in steps]
    counts: dict[str, int] = defaultdict(int)
    beside: Beside = defaultdict(dict)
    for way in ways:
        for file in way.files:
            counts[file] += 1
        for concern, files in way.beside.items():
            beside[concern] |= files
    always = {file: function for file, function in ways[-1].files.items() if counts[file] == len(ways)}
    return Gradient(always, {file: n for file, n in counts.items() if n < len(ways)}, beside)


@dataclass(frozen=True)
class Entry:
    """Control comes to a file."""

    time: int
    file: str
    origin: str
    """the file from which it comes"""


@dataclass
class Loss:
    """The way of a loss in one process."""

    entries: list[Entry]
    beside: Beside


def loss_in_launcher(threads: Threads, killed: int) -> Loss:
    """From where a SIGKILL (nanoseconds) is noticed until the other ranks can know of it."""
    for thread in threads.values():
        noticed = None
        for call in thread:
            if call.function == NOTICE:
                noticed = call.end
            if call.function == ANNOUNCE and call.begin > killed and call.end is not None and noticed is not None:
                return _loss(threads, noticed, call.end, "the kill")
    raise NotFoundError(f"{NOTICE} and {ANNOUNCE} did not run after the kill")


def loss_in_rank(threads: Threads, killed: int) -> Loss:
    """From the error that a rank learns of the loss by to the step that is redone."""
    for thread in threads.values():
        steps = [call for call in thread if call.function == STEP]
        for step, redone in pairwise(steps):
            if step.end is not None and step.end > killed and step.gave_none:
                # An error ends a call, then its caller, and so on: the innermost of them has raised it.
                raised = step
                while raised.last is not None and raised.last.gave_none:
                    raised = raised.last
                since = raised.end or step.end
                return _loss(threads, since, redone.begin, "the error", raised.file)
    raise NotFoundError(f"{STEP} was not ended by an error after the kill, and called again")


def _loss(threads: Threads, begin: int, end: int, cause: str, raised_in: str = "") -> Loss:
    entries = [Entry(begin, raised_in, cause)] if raised_in else []
    beside: Beside = defaultdict(dict)
    for thread in threads.values():
        seen: set[tuple[Call, str]] = set()
        resumed = raised_in
        for call in _begun({0: thread}, begin, end):
            caller, concern = call.caller, concern_of(call, BESIDE_LOSS)
            if concern is not None:
                beside[concern][call.file] = None
            # What ran already when it happened goes on only because control came back to it.
            if caller is not None and caller.begin < begin and concern_of(caller, BESIDE_LOSS) is None:
                if caller.file != resumed:
                    entries.append(Entry(call.begin, caller.file, cause))
                resumed = caller.file
            # A generator that is passed to another file goes on in its own.
            if concern is not None or call.function.endswith("<genexpr>"):
                continue
            if caller is None:
                entries.append(Entry(call.begin, call.file, "outside"))
            elif caller.file != call.file and (caller, call.file) not in seen:
                seen.add((caller, call.file))
                entries.append(Entry(call.begin, call.file, caller.file))
    return Loss(entries, beside)


def _begun(threads: Threads, begin: int, end: int) -> Iterable[Call]:
    return (call for thread in threads.values() for call in thread if begin <= call.begin <= end)

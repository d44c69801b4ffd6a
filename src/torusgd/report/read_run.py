"""What a run's folder says, finished or not, whole or cut off in writing; and what logs of other trainers say."""

# Others may have written the folder, and a machine may have died in the middle of a line. So what is read is bounded,
# a line that can't be understood is counted and left out, and only values of the expected type go any further.

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError, as_user_error
from ..recipe.load import read_run_recipe
from ..recipe.schema import Recipe
from ..rundir.run_dir import RECORDS
from ..rundir.run_view import STATUS, gone, read_status
from ..step.records import MOST_BYTES, parse_records, states_of
from ..text import is_number, plural
from ..untrusted import check_regular, parse_json, read_text

MOST_EVENT = 1 << 20  # bytes of a line of events.jsonl; a step of a thousand ranks has some 20,000
# Types of the values of summary.json and status.json that are no numbers or words.
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("shares", "conditions", "predicted", "runtime", "records"), dict),
    **dict.fromkeys(("lost_ranks", "other_conditions", "mixed_conditions"), list),
}
_STEP_KEYS = ("step", "epoch", "lr", "batch", "step_seconds", "data_seconds", "sync_seconds", "update_seconds")
_STEPS = ("step", "global_step", "steps")  # of other trainers


@dataclass(frozen=True)
class RunRecord:
    """All that the pages show of a run."""

    folder: Path
    recipe: Recipe
    state: str  # `RunStatus.state`: finished, running, stopped or gone
    why: str  # one sentence on a run that is not finished; empty otherwise
    steps: tuple[Mapping[str, Any], ...]  # events of steps, with numbers under `_STEP_KEYS`; the loss may be missing
    evaluations: tuple[Mapping[str, Any], ...]  # events of evaluations, the one after the polish last
    summary: Mapping[str, Any]  # summary.json; empty unless the run is finished
    status: Mapping[str, Any]  # status.json: the options by which the ranks were started
    unread: int  # lines of events.jsonl that could not be understood
    records: str = ""  # which states have hashes, and whether they are a chain up to the summary; empty: none have
    verified: tuple[tuple[str, str], ...] = ()  # ranges that somebody computed anew, each with what was found

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    def numbers(self, key: str) -> list[float]:
        return [float(step[key]) for step in self.steps]

    @cached_property
    def epochs(self) -> dict[int, float]:
        return {int(event["step"]): float(event["epoch"]) for event in self.steps}


def read_verified(path: Path) -> Mapping[str, Any]:
    """What `torusgd verify --json` wrote; UserError if it is something else."""
    with as_user_error(f"--verified {path}: can't be read", of=(OSError, ValueError)):
        tree = parse_json(read_text(path))
    if not isinstance(tree, dict) or not isinstance(tree.get("found"), list) or "records_sha256" not in tree:
        raise UserError(f"--verified {path}: is no file of torusgd verify --json")
    return tree


def read_run(folder: Path, checks: Sequence[Mapping[str, Any]] = ()) -> RunRecord:
    """Reads a run's folder; `checks` are of `read_verified`, those of other runs among them."""
    status, recipe = read_status(folder), read_run_recipe(folder / "recipe.yaml")
    events, unread = _read_events(folder / "events.jsonl")
    why = "" if status.state == "finished" else f"This run is not finished: {gone(status)}."
    if status.state == "running":
        why = "The run is still at work; this page shows it as far as it has come."
    summary = _expected(status.reported) if status.state == "finished" else {}
    last = summary.get("records", {}).get("sha256")
    found = (each for check in checks if last and check["records_sha256"] == last for each in check["found"])
    return RunRecord(
        folder, recipe, status.state, why,
        steps=tuple(event for event in events if "event" not in event),
        evaluations=tuple(event for event in events if event.get("event") in ("evaluation", "polished")),
        summary=summary, status=_expected(_read_tree(folder / STATUS)), unread=unread,
        records=_chain(folder / RECORDS, last),
        verified=tuple((str(each.get("name")), str(each.get("state"))) for each in found if isinstance(each, dict)),
    )  # fmt: skip


def _chain(path: Path, last: str | None) -> str:
    """What a file of records has; `last` is the hash of its last line in the summary, None if there is no summary."""
    try:
        lines, head, problem = parse_records(read_text(path, MOST_BYTES))
    except (OSError, ValueError):
        return ""
    if problem or (last is not None and head != last):
        return f"broken: {problem or 'the last line is not that of summary.json'}"
    states = states_of(lines)
    return f"a whole chain, {plural(len(states), 'state')} of the steps 0 to {max(states, default=0)}"


def _read_tree(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        if isinstance(tree := parse_json(read_text(path)), dict):
            return tree
    return {}


def _expected(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in tree.items() if isinstance(value, _TYPES.get(key, object))}


def _read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    found, unread = list[dict[str, Any]](), 0
    readable = as_user_error(f"{path}: can't be read", of=(OSError, ValueError))
    # Missing: the run was stopped before its first step.
    with readable, suppress(FileNotFoundError), check_regular(path).open("rb") as file:
        # Bounded: a line without an end would fill the memory.
        while line := file.readline(MOST_EVENT):
            event = None
            with suppress(ValueError):
                event = parse_json(line.decode())
            if isinstance(event, dict) and _is_whole(event):
                found.append(event)
            else:
                unread += 1
    return found, unread


def _is_whole(event: Mapping[str, Any]) -> bool:
    if event.get("event") in ("evaluation", "polished"):
        needed: tuple[str, ...] = ("step", "top1", "top5")
    else:
        needed = ("step",) if "event" in event else _STEP_KEYS  # the loss of a diverged run is null
    return all(is_number(event.get(key)) for key in needed)


class Log(NamedTuple):
    name: str
    columns: dict[str, list[tuple[float, float]]]


def read_log(path: Path) -> Log:
    """Reads trainer_state.json (Hugging Face), metrics.csv (Lightning's CSVLogger), or JSON lines with a `step`."""
    with as_user_error(f"{path}: can't be read as a log", of=(OSError, ValueError, csv.Error)):
        rows = _rows(path, read_text(path))
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        step = next((row[key] for key in _STEPS if is_number(row.get(key))), None)
        for key, value in row.items() if step is not None else ():
            if key not in _STEPS and is_number(value):
                columns[str(key)].append((float(step or 0), float(value)))
    if not columns:
        raise UserError(
            f"{path}: no log with a step and a number in a row; give trainer_state.json, metrics.csv or .jsonl"
        )
    # Of a file that every run calls alike, the folder's name.
    name = path.parent.name if path.name in ("trainer_state.json", "metrics.csv") else path.name
    return Log(name or path.name, {key: sorted(points) for key, points in columns.items()})


def _rows(path: Path, text: str) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        return [{key: _number(cell) for key, cell in row.items() if key} for row in csv.DictReader(io.StringIO(text))]
    if path.suffix == ".jsonl":
        tree: Any = [parse_json(line) for line in text.splitlines() if line.strip()]
    else:
        tree = parse_json(text)
        tree = tree.get("log_history") if isinstance(tree, dict) else tree
    return [row for row in tree if isinstance(row, dict)] if isinstance(tree, list) else []


def _number(cell: str | None) -> float | None:
    with suppress(ValueError, TypeError, OverflowError):
        return float(parse_json(cell or "null"))
    return None

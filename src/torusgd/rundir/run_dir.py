"""The run's folder: what it holds, who may write to it, and whether the run in it is done."""

import errno
import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from ..errors import RunError, UserError, reason_of, warn
from ..locks import HOLDER, LOCK, held
from ..recipe.load import read_run_recipe
from ..recipe.schema import Recipe
from ..step.records import ASIDE
from ..untrusted import is_there, parse_json, read_text
from ..weights import write_text
from .checkpoint import DAMAGED, LIGHT, STATE, list_checkpoints, step_on_disk
from .run_view import HEAD, STATUS, forget_requests, is_run

TRACE = "trace.json"
# The file with the name by which servers know the run, however often it is resumed.
TRACKING_ID = "tracking-id.txt"
RECORDS = "records.jsonl"
FILES = (
    "events.jsonl", STATUS, "summary.json", "model.safetensors", "journal.txt", RECORDS, ASIDE, TRACKING_ID, TRACE,
)  # fmt: skip
STEP = "step-" + 8 * "[0-9]"
# Sub-folders, and what a run writes into them.
PARTS = {
    "checkpoints": (STEP, f"{STEP}{DAMAGED}*", f".{STEP}.partial"),
    "verify": (f"{STEP}{LIGHT}", f".{STEP}{LIGHT}.*"),
    "tensorboard": ("events.out.tfevents.*",),
    "wandb": ("latest-run", "offline-run-*", "run-*", "debug*.log"),
}
OWN = ("recipe.yaml", *FILES, *PARTS)
_AGENTS = ".agents"
# Types of what a summary is asked for, which a stranger may have written.
_TYPES = (("steps", int), ("records", dict), ("journal", dict))
# By file system, options of its mount that keep locks on one host.
_LOCAL_LOCKS = {"nfs": {"nolock", "local_lock=all", "local_lock=flock"}, "lustre": {"localflock"}}


class RunDir:
    """The folder of a run, which `lock` makes, and paths in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.summary = path / "summary.json"
        self.model = path / "model.safetensors"
        self.events = path / "events.jsonl"
        self.journal = path / "journal.txt"
        self.records = path / RECORDS
        self.checkpoints = path / "checkpoints"
        self.verify = path / "verify"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Makes the folder, and keeps others out; a run refused before its first step leaves no trace."""
        with self._telling():
            is_new, traces = not is_there(self.path), [] if is_there(self.path / LOCK) else [LOCK]
            self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # Errors of the disk inside the block that the lock is for are not the lock's.
            with self._telling():
                stack.enter_context(held(self.path, f"--out {self.path}"))
            mounts = Path("/proc/mounts")  # of Linux alone
            if why := local_locks(self.path.resolve(), mounts.read_text().splitlines() if mounts.exists() else []):
                warn(f"--out {self.path}: {why}: start no second run on this folder from another host")
            traces += [name for name in (self.recipe.name, _AGENTS) if not is_there(self.path / name)]
            try:
                yield
            except UserError:
                if not self._has_begun():
                    with suppress(OSError):
                        for name in (HOLDER, *traces):
                            (self.path / name).unlink(missing_ok=True)
                        if is_new:
                            self.path.rmdir()
                raise

    def claim(self, recipe: Recipe, fresh: bool, agents: Collection[int] = ()) -> None:
        """Makes the folder this recipe's (under `lock`); with `fresh` an earlier run in it is deleted.

        `agents` are torchrun's. UserError if it is another recipe's run that has begun, or holds files of no run.
        """
        with self._telling():
            known = self.agents()
            # They start the ranks again with the same words when one fails or the nodes change; then `--fresh` is old.
            fresh = fresh and known.isdisjoint(agents)
            if not is_run(self.path):
                self._refuse_strangers(fresh)
            elif fresh:
                self._delete_run()
            else:
                self._make_room(recipe)
            self.sweep()
            forget_requests(self.path)  # they were of an earlier run, which may have ended before it saw them
            if not is_there(self.recipe):
                write_text(self.recipe, dump_recipe(recipe))
            if agents:
                write_text(self.path / _AGENTS, json.dumps(sorted({*agents} if fresh else known.union(agents))))

    def finished(self, steps: int) -> dict[str, Any] | None:
        """The summary, if the run in this folder has done `steps` steps; that of a shorter run is removed.

        So it is where the weights are gone and the last checkpoint is there, from which they are made again.
        """
        summary = self.read_summary()
        done = None if summary is None else summary.get("steps")
        if isinstance(done, int) and done > steps:
            more = f"has done {done} steps already; give at least as many, or --fresh"
            raise UserError(f"--max-steps {steps}: the run in {self.path} {more}")
        is_lacking = not is_there(self.model) and step_on_disk(self.checkpoints) == steps
        if summary is None or (done == steps and not is_lacking):
            return summary
        with self._telling():
            self.summary.unlink()
            self.model.unlink(missing_ok=True)
        return None

    def read_summary(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            summary = parse_json(read_text(self.summary))
            if isinstance(summary, dict) and all(isinstance(summary.get(key), kind | None) for key, kind in _TYPES):
                return summary
        return None

    def known_summary(self) -> dict[str, Any]:
        """The summary, empty while the run is not finished; UserError if it is there and can't be read."""
        summary = self.read_summary()
        if summary is None and is_there(self.summary):
            raise UserError(f"{self.summary}: can't be read; without it nobody can say that the run is finished")
        return summary or {}

    def data_revision(self) -> str:
        """The commit of the hub's data set that the run here reads; empty if it reads none, or has just begun."""
        for file in (self.summary, *self._states()):
            with suppress(OSError, ValueError, AttributeError):
                tree = parse_json(read_text(file))
                return str(tree.get("fingerprint", tree).get("data_revision", ""))
        return ""

    def journal_reached(self) -> dict[str, Any] | None:
        """How far the journal had come at the newest checkpoint, of a `JournalHead`; None: nobody knows."""
        for file in self._states():
            with suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                head = parse_json(read_text(file))["journal"]
                return {key: head[key] for key in ("size", "sha256")}
        return None

    def _states(self) -> list[Path]:
        with self._telling():
            return [checkpoint / STATE for checkpoint in list_checkpoints(self.checkpoints)]

    def agents(self) -> set[int]:
        """The agents of torchrun that have begun ranks here; none if that was not noted, or the note is damaged."""
        with suppress(OSError, ValueError, TypeError):
            return set(parse_json(read_text(self.path / _AGENTS)))
        return set()

    def _refuse_strangers(self, fresh: bool) -> None:
        names = {path.name for path in self.path.iterdir() if not path.name.startswith(".")}
        if ambiguous := names.intersection(OWN):
            what = f"holds {min(ambiguous)!r} but not the recipe of a run that wrote it"
            raise UserError(f"--out {self.path}: {what}; choose another folder, or put that recipe back")
        if names and not fresh:
            remedy = "choose an empty folder, or give --fresh to write beside what is there"
            raise UserError(f"--out {self.path}: holds {min(names)!r} but no run; {remedy}")

    def _make_room(self, recipe: Recipe) -> None:
        """Refuses the folder of another recipe's run, unless that one ended before its first step, as by a mistake."""
        other = read_run_recipe(self.recipe)
        if other.sha256() != recipe.sha256():
            if not self._has_begun():
                self._delete_run()
                return
            key = _first_difference(other.as_dict(), recipe.as_dict())
            what, remedy = f"{other.name}; {key} differs", "choose another folder, or give --fresh to delete that run"
            raise UserError(f"--out {self.path}: holds a run of another recipe ({what}); {remedy}")

    def _has_begun(self) -> bool:
        return any(is_there(path) for path in (self.events, self.summary, self.model, self.checkpoints))

    def _delete_run(self) -> None:
        # Only what a run wrote, by its names, and only since `recipe.yaml` shows that a run wrote here.
        for part, patterns in PARTS.items():
            folder = self.path / part
            for path in [found for pattern in patterns for found in folder.glob(pattern)]:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        self.recipe.unlink()  # the last: with it goes the sign that the others are a run's

    def sweep(self) -> None:
        """Removes what a killed process was writing under another name."""
        for pattern in (*(f".{name}.*" for name in OWN), f"{self.verify.name}/.{STEP}{LIGHT}.*"):
            for path in self.path.glob(pattern):
                if re.fullmatch(r"\.[0-9a-f]{8}", path.suffix):  # as `replacing` names it; others are somebody else's
                    path.unlink()
        for path in self.checkpoints.glob(f".{STEP}.partial"):
            shutil.rmtree(path)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = reason_of(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise RunError(f"--out {self.path}: can't be written: {reason}; free space on that disk") from None
            raise UserError(f"--out {self.path}: can't be written: {reason}; choose another folder") from None


def local_locks(path: Path, mounts: Iterable[str]) -> str:
    """Why a lock under an absolute path does not bind other hosts, by the lines of /proc/mounts; empty if it does.

    >>> local_locks(Path("/data/run"), ["server:/x /data nfs4 rw,local_lock=none 0 0", "y / ext4 rw 0 0"])
    ''
    >>> local_locks(Path("/data/run"), ["ost /data lustre rw,localflock 0 0", "y / ext4 rw 0 0"])
    '/data (lustre) is mounted with localflock, so locks bind this host only'
    """
    # Linux passes locks of NFS and Lustre to their server, unless the file system was mounted so that they stay local.
    # If a file system knows no locks at all, `filelock` makes a lock of the file's existence, which binds all hosts.
    fields = [line.split()[:4] for line in mounts]
    above = [each for each in fields if len(each) > 3 and path.is_relative_to(each[1])]
    _, point, kind, options = max(above, key=lambda each: len(each[1]), default=("", "", "", ""))
    found = _LOCAL_LOCKS.get(kind.rstrip("4"), set()).intersection(options.split(","))
    return f"{point} ({kind}) is mounted with {min(found)}, so locks bind this host only" if found else ""


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML, defaults included."""
    head = f"{HEAD} recipe_sha256: {recipe.sha256()}\n"
    return head + yaml.safe_dump(recipe.as_dict(), sort_keys=False, default_flow_style=None, width=110)


def _first_difference(one: Any, other: Any, path: str = "") -> str:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if one.get(key) != other.get(key):
                return _first_difference(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    return path

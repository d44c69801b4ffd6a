"""What others see of a run and request of it, through its folder or its bucket alone: no run listens for anybody.

Rank 0 writes `status.json` about once a second. Who may write into the folder may have the run stop, or go on with
another number of ranks, by a small file, for which rank 0 or the launcher looks once a second. Of a run in a bucket the
files are copied here. This module imports no torch, since whoever runs `status` should not wait for it.
"""

import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RunError, UserError, as_user_error, printable
from ..locks import is_locked
from ..storage import CACHE, Store, cache_folder, place, url_of
from ..text import json_text
from ..untrusted import check_regular, is_there, parse_json, read_text
from .lease import EXPIRES, RENEW, Lease, object_name

STATUS = "status.json"
# First words of the recipe.yaml that a run writes.
HEAD = "# The complete recipe of this run, defaults included."
# Seconds from one status to the next, and from one look at requests to the next.
SECONDS = 1.0
# Seconds for which a status of another host counts as a sign of life.
FRESH = 30.0
# Seconds for which a sign of life of a run in a bucket is awaited.
_AWAITED = RENEW + 5.0
# Files that request a checkpoint and the run's end, or another number of ranks.
STOP, WORKERS = ".stop", ".workers"
REQUESTS = frozenset({STOP, WORKERS})
# In a bucket each has a name of its own, so that one which comes as another is read is not deleted with it.
REQUEST_OBJECT = re.compile(rf"({'|'.join(map(re.escape, sorted(REQUESTS)))})-[0-9]{{20}}")


class StatusFile:
    """Writes a run's status, in which `about`, plain JSON, stays as it is; rank 0 has one."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._path = folder / STATUS
        self._told = {**about, "host": socket.gethostname(), "process": os.getpid()}
        self._written = 0.0

    def update(self, now: bool = False, **news: Any) -> None:
        """Adds news, plain JSON by name; they are written once a second, or `now`."""
        self._told |= news
        if now or time.monotonic() - self._written >= SECONDS:
            self._written = time.monotonic()
            with suppress(OSError):  # a disk that takes no status at the moment ends no run
                _write(self._path, json_text(self._told, indent=1) + "\n")


class RunRequests:
    """Requests to a run since this was made."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._looked, self._is_stopping = folder, time.monotonic(), False

    def to_stop(self) -> bool:
        """Whether to stop; it costs a look at the disk once a second."""
        if not self._is_stopping and self._is_time():
            self._is_stopping = is_asked_to_stop(self._folder)
        return self._is_stopping

    def workers(self) -> int | None:
        """The requested number of ranks, which is then forgotten; None: there is none."""
        path, taken = self._folder / WORKERS, self._folder / f"{WORKERS}.taken"
        number = None
        with suppress(OSError, ValueError):  # a disk that can't be read at the moment ends no run
            if self._is_time() and path.is_file():  # a pipe would have no end
                path.replace(taken)  # so that no request which comes meanwhile is deleted unread
                try:
                    number = parse_json(read_text(taken))
                finally:
                    taken.unlink()
        return number if type(number) is int and number > 0 else None

    def _is_time(self) -> bool:
        if time.monotonic() - self._looked < SECONDS:
            return False
        self._looked = time.monotonic()
        return True


def is_asked_to_stop(folder: Path) -> bool:
    """Whether `torusgd stop` has asked a run to stop; no where the disk can't say so at the moment."""
    with suppress(OSError):
        return (folder / STOP).exists()
    return False


def forget_requests(folder: Path) -> None:
    for name in REQUESTS:
        (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class RunStatus:
    state: str  # running, finished, stopped, or gone: not finished, and no process is at work on it
    reported: dict[str, Any]  # by the run itself, see `Telemetry`; of a finished run its summary
    age: float  # seconds since it reported that

    def as_dict(self) -> dict[str, Any]:
        return {"state": self.state, "age": round(self.age, 1), **self.reported}


def read_status(folder: Path, is_alive: bool | None = None, name: str = "") -> RunStatus:
    """How a run is, by its folder or a copy; UserError if it is none.

    `is_alive`: its lock is held elsewhere. `name`: for people, if it is a copy.
    """
    with as_user_error(f"{folder}: can't be read", "ask whose run it is for the right to"):
        if not is_run(folder):
            remedy = "give the folder that was --out of torusgd train, such as runs/digits"
            raise UserError(f"{folder}: holds no run; {remedy}")
    is_running = is_locked(folder) if is_alive is None else is_alive
    with as_user_error(f"{name or folder}: its status can't be read", of=(OSError, ValueError)):
        if not is_running and is_there(folder / "summary.json"):
            return RunStatus("finished", *_reported(folder / "summary.json"))
        reported, age = _reported(folder / STATUS) if is_there(folder / STATUS) else ({}, 0.0)
    # Where locks do not bind other hosts, the status of a run elsewhere is its only sign of life.
    is_elsewhere = reported.get("host") not in (None, socket.gethostname()) and abs(age) < FRESH
    ended = "stopped" if reported.get("phase") == "stopped" else "gone"
    return RunStatus("running" if is_running or (is_elsewhere and ended == "gone") else ended, reported, age)


def gone(status: RunStatus) -> str:
    """Why a run that is not finished does not run."""
    at = printable(f" after step {status.reported['step']}") if "step" in status.reported else ""
    why = "was stopped" if status.state == "stopped" else "is not running, its process is gone"
    return f"the run {why}{at}; the same `torusgd train` goes on with it"


def write_request(path: Path, text: str) -> None:
    """Writes a request to a run, a file of `REQUESTS` in its folder; UserError if it can't be written."""
    with as_user_error(f"{path.parent}: can't be written, so nothing can be requested"):
        _write(path, text)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name.removeprefix('.')}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # what a full disk took of it


def is_run(folder: Path) -> bool:
    """Whether a run wrote here; PermissionError if this user may not know."""
    try:
        with check_regular(folder / "recipe.yaml").open(errors="replace") as file:
            return file.readline().startswith(HEAD)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False


def _reported(path: Path) -> tuple[dict[str, Any], float]:
    """What a file of a run says, and how old it is, in seconds."""
    tree = None
    with suppress(ValueError):
        tree = parse_json(read_text(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path.name} is damaged; the same `torusgd train` writes it anew")
    return tree, time.time() - path.stat().st_mtime


_RECIPE, _WEIGHTS = "recipe.yaml", "model.safetensors"
_SMALL = (_RECIPE, STATUS, "summary.json")
_ALL = (*_SMALL, "events.jsonl", "journal.txt", "records.jsonl", _WEIGHTS)


class RunView:
    """A run to look at, and to send requests to, by its folder or URL; UserError if the package for that is missing."""

    def __init__(self, path: Path) -> None:
        url = url_of(path)
        self.name = url or str(path)
        self.poll = 0.2 if url is None else 3.0  # seconds after which another look may tell something new
        self._store = Store(url) if url is not None and not is_locked(working_folder(url)) else None
        self._folder = path if url is None else working_folder(url) if self._store is None else _copy_of(url)

    def read(self) -> RunStatus:
        """How the run is; UserError if there is none, or its status can't be read."""
        if self._store is None:
            return read_status(self._folder)
        _fetch(self._store, self._folder, _SMALL)
        try:
            lease = Lease(self._store, self._folder)
            number, holder = lease.newest()
            # A sign of life of late, by the store's clock and this one; or now, where one of the two is wrong.
            if holder is not None and not holder.released:
                is_late = abs(time.time() - self._store.modified(object_name(number))) >= EXPIRES
                holder = lease.next_sign(number, holder, _AWAITED) if is_late else holder
            return read_status(self._folder, holder is not None and not holder.released, self.name)
        except OSError as error:
            raise UserError(f"{self.name}: can't be read: {error}") from error

    def running(self, to: str) -> RunStatus:
        """The status of a run that is at work; UserError if it isn't. `to`: the request, for the error."""
        status = self.read()
        if status.state == "finished":
            raise UserError(f"{self.name}: the run is finished; there is nothing to {to}")
        if status.state != "running":
            raise UserError(f"{self.name}: {gone(status)}; there is nothing to {to}")
        return status

    def request(self, name: str, text: str) -> None:
        """Writes one of the files `status.REQUESTS` for the run; UserError if that can't be."""
        assert name in REQUESTS
        if self._store is None:
            write_request(self._folder / name, text)
            return
        try:
            self._store.write(f"{name}-{time.time_ns():020}", text.encode())
        except OSError as error:
            raise UserError(f"{self.name}: can't be written, so nothing can be requested: {error}") from error


def local_run(path: Path) -> Path:
    """The folder, checkpoint or weight file of a run on this machine; of one in a bucket a copy."""
    url = url_of(path)
    if url is None:
        return path
    if is_locked(working_folder(url)):
        return working_folder(url)
    folder = _copy_of(url)
    try:
        if url.endswith((".safetensors", ".pth", ".pt")):
            above, _, name = url.rpartition("/")
            return _get(Store(above), name, folder / name)
        store = Store(url)
        there = store.sizes()
        if _RECIPE not in there and _WEIGHTS in there:  # a checkpoint
            _get(store, _WEIGHTS, folder / _WEIGHTS)
            return folder
        _fetch(store, folder, _ALL)
        whole = (name.split("/") for name in there if name.endswith("/manifest.json"))
        newest = max((parts[1] for parts in whole if parts[0] == "checkpoints"), default="")
        for old in folder.glob("checkpoints/*"):  # else one of an earlier run there, of more steps, would be the newest
            if old.name != newest:
                shutil.rmtree(old)
        if newest and _WEIGHTS not in there:
            _get(store, f"checkpoints/{newest}/{_WEIGHTS}", folder / "checkpoints" / newest / _WEIGHTS)
    except OSError as error:
        raise UserError(f"{url}: can't be read: {error}") from error
    return folder


@contextmanager
def read_here(path: Path) -> Iterator[Path]:
    """A block with `local_run`, whose errors name a run in a bucket by its URL and not by the copy's path."""
    here = local_run(path)
    try:
        yield here
    except (UserError, RunError) as error:
        if (line := called(path, here, str(error))) == str(error):
            raise
        raise type(error)(line) from error


def called(path: Path, here: Path, text: str) -> str:
    """A text for people in which the copy of a run in a bucket, `here`, has the run's own name."""
    return text.replace(str(here), place(path)) if url_of(path) is not None else text


def working_folder(url: str) -> Path:
    """Where a run of that URL works on this machine; UserError for a web server, which takes none."""
    if url.startswith("http"):
        raise UserError(f"{url}: a web server holds no run; runs are in folders, s3://, gs:// and hf://")
    return cache_folder() / "runs" / hashlib.sha256(url.encode()).hexdigest()[:32]


def _copy_of(url: str) -> Path:
    """Where what is there is copied to; its last part is the run's name, as pages show it."""
    folder = cache_folder() / "seen" / working_folder(url).name / url.rpartition("/")[2]
    with as_user_error(f"{folder}: can't be made", f"set {CACHE} to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fetch(store: Store, folder: Path, names: tuple[str, ...]) -> None:
    """Copies what is there of these files; what is there no more goes here too."""
    try:
        there = store.sizes()
        if _RECIPE not in there or not store.read(_RECIPE).decode(errors="replace").startswith(HEAD):
            raise UserError(f"{store.url}: holds no run; give the URL that was --out of torusgd train")
        for name in names:
            if name in there:
                _get(store, name, folder / name)
            else:
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{store.url}: can't be read: {error}") from error


def _get(store: Store, name: str, file: Path) -> Path:
    """Copies an object unless it is here already, of the same time and size."""
    written = store.modified(name)
    if not file.exists() or (file.stat().st_mtime, file.stat().st_size) != (written, store.size(name)):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            store.get(name, temporary)
            os.utime(temporary, (written, written))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)  # what came of an object until the connection broke
    return file

"""A run as other processes see it, by its folder or by its bucket: its status, its results, requests to it.

Of a run in a bucket the files are copied here, to a folder of their own; where the run works on this very machine its
own folder is looked at. Requests to a run elsewhere lie in the bucket until its launcher looks, every few
seconds. This module imports no torch, as `status` doesn't.
"""

import hashlib
import os
import time
from pathlib import Path

from ..errors import UserError
from ..locks import is_locked
from ..storage import Store, cache_folder, url_of
from .lease import EXPIRES, Lease, object_name
from .status import HEAD, REQUESTS, STATUS, RunStatus, gone, read_status, write_request

_RECIPE, _WEIGHTS = "recipe.yaml", "model.safetensors"
_SMALL = (_RECIPE, STATUS, "summary.json")
_ALL = (*_SMALL, "events.jsonl", "journal.txt", _WEIGHTS)


class RunView:
    """A run to look at, and to send requests to.

    Args:
        path: Its folder or its URL.

    Raises:
        UserError: The package for that kind of bucket is missing.
    """

    def __init__(self, path: Path) -> None:
        url = url_of(path)
        self.name = url or str(path)
        self.poll = 0.2 if url is None else 3.0
        """seconds after which another look may tell something new"""
        self._store = Store(url) if url is not None and not is_locked(working_folder(url)) else None
        self._folder = path if url is None else working_folder(url) if self._store is None else _copy_of(url)

    def read(self) -> RunStatus:
        """How the run is.

        Raises:
            UserError: There is no run, or its status can't be read.
        """
        if self._store is None:
            return read_status(self._folder)
        _fetch(self._store, self._folder, _SMALL)
        try:
            return read_status(self._folder, _is_alive(self._store, self._folder))
        except OSError as error:
            raise UserError(f"{self.name}: can't be read: {error}") from error

    def running(self, to: str) -> RunStatus:
        """The status of a run that is at work; UserError where it isn't.

        Args:
            to: The request, for the error.
        """
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
            self._store.write(name, text.encode())
        except OSError as error:
            raise UserError(f"{self.name}: can't be written, so nothing can be requested: {error}") from error


def local_run(path: Path) -> Path:
    """The folder, checkpoint or weight file of a run on this machine; of one in a bucket a copy of what it left there.

    Raises:
        UserError: The URL holds no run and no weights, or can't be read.
    """
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
        if newest and _WEIGHTS not in there:
            _get(store, f"checkpoints/{newest}/{_WEIGHTS}", folder / "checkpoints" / newest / _WEIGHTS)
    except OSError as error:
        raise UserError(f"{url}: can't be read: {error}") from error
    return folder


def working_folder(url: str) -> Path:
    """Where a run of that URL works on this machine."""
    return cache_folder() / "runs" / _digest(url)


def _digest(url: str) -> str:
    """A folder's name for a URL."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _copy_of(url: str) -> Path:
    """Where what is there is copied to; its last part is the run's name, as pages show it."""
    folder = cache_folder() / "seen" / _digest(url) / url.rpartition("/")[2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: can't be made: {error.strerror}; set TORUSGD_CACHE to another folder") from error
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
    written, size = store.modified(name), store.size(name)
    if not file.exists() or (file.stat().st_mtime, file.stat().st_size) != (written, size):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        store.get(name, temporary)
        os.utime(temporary, (written, written))
        os.replace(temporary, file)
    return file


def _is_alive(store: Store, folder: Path) -> bool:
    """Whether a holder of the run's lock has given a sign of life of late, by the store's clock and this one."""
    number, holder = Lease(store, folder).newest()
    if holder is None or holder.released:
        return False
    return abs(time.time() - store.modified(object_name(number))) < EXPIRES

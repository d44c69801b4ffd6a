"""Checkpoints: atomic, checksummed, the newest few retained, written beside the training.

A checkpoint is a folder `step-00000120` with the weights, the rest of the state, and a manifest of SHA-256 sums.
Nothing good is ever deleted: what was read and is damaged is renamed, `step-00000120.damaged`, and a run that has left
checkpoints never begins anew by itself, even if none of them is good.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import DiskError, RunError, UserError, as_run_error, in_one_line, is_transient, retry, warn
from ..storage import url_of
from ..text import json_text
from ..untrusted import check_regular, is_there, parse_json
from ..weights import Tensors, save_weights, write_text

# The format of what is in a checkpoint, written into its progress; another number is refused with a line.
FORMAT = 4
MANIFEST = "manifest.json"
# The file that says how far the run had come, plain JSON.
STATE = "state.json"
FILES = ("model.safetensors", "state.safetensors", STATE)
# What the names of a model's tensors begin with where they stand beside the rest of the state.
MODEL = "model/"
# The end of the name of a light checkpoint, a file of tensors alone.
LIGHT = ".safetensors"
# The end of the name of a checkpoint that was set aside.
DAMAGED = ".damaged"
# Seconds before each further attempt to read from a disk that gave an error.
READ_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)
# Checkpoints for which a light one leaves room on the disk: the run's own, the one before, and the result.
ROOM = 3
# Seconds that a checkpoint may take to be written before the next one is put off.
WRITE_PATIENCE = 10.0
_NAME = re.compile(r"step-[0-9]{8}")

T = TypeVar("T")
Copy = Callable[[Path], object]  # takes what was written, such as to a bucket


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the next step needs."""

    tensors: Tensors  # by the names of `StepState.state_dict`: MODEL and one of the model's, `optimizer/KEY/NAME`, ...
    progress: dict[str, Any]  # plain JSON: format, step, totals, times, fingerprint

    @property
    def step(self) -> int:
        return int(self.progress["step"])


def split(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The model's parameters and buffers, by its own names, and the rest of a checkpoint's tensors."""
    model = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    return model, {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL)}


def write_checkpoint(folder: Path, checkpoint: Checkpoint, metadata: dict[str, str]) -> Path:
    """Writes one checkpoint under `folder`, whole or not at all; OSError as it comes."""
    # Written under another name, flushed, and renamed: a folder of the right name is whole unless the disk damaged it.
    final = folder / f"step-{checkpoint.step:08d}"
    temporary = _partial(final)
    shutil.rmtree(temporary, ignore_errors=True)
    # Not the run's folder: somebody who has deleted or moved it in mid-run gets no other one.
    folder.mkdir(exist_ok=True)
    temporary.mkdir()
    try:
        model, rest = split(checkpoint.tensors)
        save_weights(temporary / FILES[0], model, metadata)
        save_weights(temporary / FILES[1], rest, {})
        write_text(temporary / FILES[2], json_text(checkpoint.progress, indent=1))
        sums = {}
        for name in FILES:
            with (temporary / name).open("rb") as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        write_text(temporary / MANIFEST, json_text(sums, indent=1))
        _flush_folder(temporary)
        if is_there(final):
            set_aside(final)
        os.replace(temporary, final)
        _flush_folder(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_checkpoint(folder: Path) -> Checkpoint:
    """What a checkpoint's folder holds; UserError names a file that is missing or damaged, OSError comes as it is."""
    try:
        files = {name: check_regular(folder / name).read_bytes() for name in (MANIFEST, *FILES)}
        sums = parse_json(files[MANIFEST].decode())
        for name in FILES:
            if sums[name] != hashlib.sha256(files[name]).hexdigest():
                raise UserError(f"{folder}: {name} is damaged (its SHA-256 is not the manifest's)")
        model, rest = (safetensors.torch.load(files[name]) for name in FILES[:2])
        tensors = {f"{MODEL}{name}": tensor for name, tensor in model.items()} | rest
        checkpoint = Checkpoint(tensors, parse_json(files[FILES[2]].decode()))
        if checkpoint.step < 0:
            raise ValueError(f"of step {checkpoint.step}")
        return checkpoint
    except UserError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder}: not a whole checkpoint ({type(error).__name__}: {in_one_line(error)})") from None


def list_checkpoints(folder: Path, end: str = "") -> list[Path]:
    """The checkpoints under a folder (LIGHT: the light ones), newest first, if there is one; OSError as it comes."""
    names = sorted((name for name in _names(folder) if name.endswith(end)), reverse=True)
    return [folder / name for name in names if _NAME.fullmatch(name.removesuffix(end))]


def light_bytes(tensors: Mapping[str, Tensor]) -> int:
    """About the bytes of a light checkpoint of these tensors."""
    total = sum(each.nbytes for each in tensors.values())
    places: dict[str, Any] = {"dtype": "F32", "data_offsets": [total, total]}
    heads = {name: places | {"shape": [*each.shape]} for name, each in tensors.items()}
    return total + len(json.dumps(heads, separators=(",", ":")))


class LightWriter:
    """Writes light checkpoints beside the steps, one at a time; one that can't be written is a warning."""

    def __init__(self, folder: Path, copy: Copy | None = None) -> None:
        self.folder, self._copy = folder, copy
        self._pool = ThreadPoolExecutor(1, "light-checkpoint")
        self._pending: Future[None] | None = None
        self._missing = 0

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Takes a snapshot now and writes it later; RunError if another machine has taken the run over."""
        if self._is_settled(WRITE_PATIENCE):
            self._pending = self._pool.submit(self._write, step, _copies(tensors))
        else:
            self._miss(step, f"the one before has been written for {WRITE_PATIENCE:g} s")

    def close(self) -> None:
        try:
            self._is_settled(None)
        finally:
            self._pool.shutdown()
            if self._missing > 1:
                warn(f"{self.folder}: lacks {self._missing} checkpoints that could not be written")

    def _is_settled(self, seconds: float | None) -> bool:
        if self._pending is not None:
            if not wait([self._pending], timeout=seconds).done:
                return False
            pending, self._pending = self._pending, None
            pending.result()
        return True

    def _write(self, step: int, tensors: Tensors) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            if shutil.disk_usage(self.folder).free < ROOM * sum(each.nbytes for each in tensors.values()):
                raise OSError(errno.ENOSPC, f"the disk has no room for {ROOM} more checkpoints")
            path = self.folder / f"step-{step:08d}{LIGHT}"
            save_weights(path, tensors, {})
            if self._copy is not None:
                self._copy(path)
        except OSError as error:
            self._miss(step, error.strerror or in_one_line(error))

    def _miss(self, step: int, why: str) -> None:
        self._missing += 1
        if self._missing == 1:  # what is wrong with a disk is wrong with the next ones too
            warn(f"{self.folder}: the checkpoint of step {step} is left out: {why}; the run goes on")


def step_on_disk(folder: Path, unread: int = 0) -> int:
    """The step of the newest checkpoint, 0 where there is none; `unread` where the disk does not answer."""
    with suppress(OSError):
        return max((int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)), default=0)
    return unread


def newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint; None: there has never been one. Damaged ones are set aside, with a warning.

    RunError if the disk can't be read, or all are damaged: nothing may begin anew.
    """
    for path in _patiently(list_checkpoints, folder):
        try:
            return _patiently(read_checkpoint, path)
        except UserError as error:
            warn(f"{error}; it is set aside as {_patiently(set_aside, path).name}")
    damaged = [name for name in _patiently(_names, folder) if DAMAGED in name]
    if damaged:
        remedy = "put a good copy there, or begin anew with --fresh, which deletes them"
        raise RunError(f"{folder}: no good checkpoint is left, {len(damaged)} damaged ones are set aside; {remedy}")
    return None


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that it is neither read again nor lost; its new path."""
    names = (path.name + DAMAGED + (f"-{number}" if number > 1 else "") for number in count(1))
    return path.rename(next(aside for aside in map(path.with_name, names) if not aside.exists()))


class CheckpointWriter:
    """Writes checkpoints beside the steps, one at a time, and keeps the newest `keep`; `copy` takes each."""

    def __init__(self, folder: Path, keep: int, metadata: dict[str, str], copy: Copy | None = None) -> None:
        self.folder, self._copy, self._keep, self._metadata = folder, copy, keep, metadata
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._began = self.seconds = 0.0  # `seconds`: that the last one took to be written

    def save(self, checkpoint: Checkpoint, progress: Callable[[float], object] = lambda seconds: None) -> None:
        """Takes a snapshot now and writes it later; first it waits for the one before, as `wait` does."""
        self.wait(progress)
        snapshot = Checkpoint(_copies(checkpoint.tensors), checkpoint.progress)
        self._began = time.monotonic()
        self._pending = self._pool.submit(self._write, snapshot)

    @property
    def is_writing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    @property
    def is_slow(self) -> bool:
        """Whether the last checkpoint has been written for so long that the next one had better come later."""
        return self.is_writing and time.monotonic() - self._began > WRITE_PATIENCE

    def wait(self, progress: Callable[[float], object] = lambda seconds: None) -> None:
        """Returns when nothing is being written, and calls `progress` meanwhile; RunError if the last write failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        while not wait([pending], timeout=1.0).done:
            progress(time.monotonic() - began)
        try:
            pending.result()
        except RunError:  # of the copy: another machine has taken over
            raise
        except Exception as error:
            reason = getattr(error, "strerror", None) or str(error)
            kind = DiskError if isinstance(error, OSError) and is_transient(error) else RunError
            remedy = "free space or mend the folder, then give the same command again"
            what, on = f"{self.folder}: can't write a checkpoint", ""
            if (url := url_of(Path(str(getattr(error, "filename", ""))))) is not None:  # of the copy; the folder has it
                remedy = "mend what keeps the bucket from taking it, then give the same command again"
                what, on = f"{url}: can't be written", " on this machine"
            raise kind(f"{what}: {reason}; {self._last_good()}{on}; {remedy}") from None

    def close(self) -> None:
        self._pool.shutdown()

    def _last_good(self) -> str:
        with suppress(OSError):
            last = next(iter(list_checkpoints(self.folder)), None)
            return f"the last good one is {last}" if last else "there is none yet"
        return "what stands there can't be listed"

    def _write(self, checkpoint: Checkpoint) -> None:
        written = write_checkpoint(self.folder, checkpoint, self._metadata)
        try:
            if self._copy is not None:
                self._copy(written)
        except OSError as error:
            if not is_transient(error):
                raise
            # Another start of the ranks would not help: nothing is lost while this machine's disk has it.
            where = url_of(Path(str(error.filename))) or written
            warn(f"{where}: can't be written: {error.strerror}; {written.name} is here alone, the next one tries again")
        self.seconds = time.monotonic() - self._began
        for old in [path for path in list_checkpoints(self.folder) if path.name <= written.name][self._keep :]:
            os.replace(old, _partial(old))  # so that a process that is killed meanwhile leaves no half of one
            shutil.rmtree(_partial(old), ignore_errors=True)


class CheckpointTimes:
    """When one is due, by rank 0's clock: after certain steps, or if the `last` is old; put off while one is slow."""

    def __init__(
        self, steps: Collection[int], seconds: float, writer: CheckpointWriter, last: float | None = None
    ) -> None:
        self._steps, self._seconds, self._writer, self._is_due = steps, seconds, writer, False
        self.last = time.monotonic() if last is None else last

    def is_due(self, step: int) -> bool:
        """Whether to take one after so many steps; called before the last of them is done."""
        self._is_due = self._is_due or step in self._steps or time.monotonic() - self.last >= self._seconds
        return self._is_due and not self._writer.is_slow

    def taken(self) -> None:
        self.last, self._is_due = time.monotonic(), False


def _patiently(read: Callable[[Path], T], path: Path) -> T:
    """What `read` gives for a path; after errors of the disk it is read again, and then the run ends."""
    # A disk that can't be read at the moment says nothing about what is on it.
    tried = f"{len(READ_PAUSES) + 1} attempts in {sum(READ_PAUSES):g} s; nothing was changed"
    with as_run_error(f"{path}: can't be read", f"{tried}: mend the disk, then give the same command again"):
        return retry(lambda: read(path), READ_PAUSES, lambda error: isinstance(error, OSError))


def _names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return [entry.name for entry in os.scandir(folder)]
    return []


def _partial(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.partial")


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _flush_folder(folder: Path) -> None:
    # Without it a power cut could undo a rename that has returned.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

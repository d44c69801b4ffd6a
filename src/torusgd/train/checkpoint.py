"""Checkpoints: atomic, checksummed, the newest few kept, written beside the training.

A checkpoint is a folder `step-00000120` with the weights, the rest of the state, and a manifest of SHA-256 sums. It is
written under another name, flushed, and renamed; a folder of the right name is whole unless the disk damaged it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import RunError, UserError
from ..weights import Tensors, load_weights, save_weights, write_text

FORMAT = 3
"""of what is in a checkpoint, written into its progress; another number is refused with a line"""
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "state.safetensors", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the next step needs."""

    model: Tensors
    """parameters and buffers by name"""
    state: Tensors
    """`optimizer/KEY/NAME` of a parameter, `gradient_bounds`, the loss scale"""
    progress: dict[str, Any]
    """plain JSON: format, step, totals, times, fingerprint"""

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.progress["step"])


def write_checkpoint(folder: Path, checkpoint: Checkpoint, metadata: dict[str, str]) -> Path:
    """Writes one checkpoint under `folder`, whole or not at all; OSError as it comes.

    A folder of its step can only stand there already if it was passed over as damaged: it is replaced.
    """
    final = folder / f"step-{checkpoint.step:08d}"
    temporary = folder / f".{final.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_weights(temporary / FILES[0], checkpoint.model, metadata)
        save_weights(temporary / FILES[1], checkpoint.state, {})
        write_text(temporary / FILES[2], json.dumps(checkpoint.progress, indent=1))
        write_text(temporary / MANIFEST, json.dumps({name: _file_sha256(temporary / name) for name in FILES}, indent=1))
        _flush_folder(temporary)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        _flush_folder(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint's folder; UserError naming the file that is missing or damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        damaged = [name for name in FILES if manifest[name] != _file_sha256(folder / name)]
        progress = json.loads((folder / FILES[2]).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: not a whole checkpoint ({type(error).__name__}: {error})") from None
    if damaged:
        raise UserError(f"{folder}: {damaged[0]} is damaged (its SHA-256 is not the manifest's)")
    return Checkpoint(load_weights(folder / FILES[0])[0], load_weights(folder / FILES[1])[0], progress)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints under a folder, newest first."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), reverse=True)


def newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest good checkpoint; `warn` gets a line for each damaged one that is passed over."""
    paths = list_checkpoints(folder)
    for number, path in enumerate(paths, 1):
        try:
            return read_checkpoint(path)
        except UserError as error:
            is_last = number == len(paths)
            then = "none is left: starting from the beginning" if is_last else f"falling back to {paths[number].name}"
            warn(f"{error}; {then}")
    return None


class CheckpointWriter:
    """Writes checkpoints in the background, one at a time, and keeps the newest `keep`.

    Args:
        folder: Where checkpoints stand; made when the first is written.
        keep: How many stay.
        metadata: Written into the weight file, such as the class names.
    """

    def __init__(self, folder: Path, keep: int, metadata: dict[str, str]) -> None:
        self._folder = folder
        self._keep = keep
        self._metadata = metadata
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Takes a snapshot now and writes it later; first waits for the one before, and raises its failure."""
        self.wait()
        snapshot = Checkpoint(_copies(checkpoint.model), _copies(checkpoint.state), checkpoint.progress)
        self._pending = self._pool.submit(self._write, snapshot)

    def wait(self, progress: Callable[[int], object] = lambda written: None) -> None:
        """Returns when nothing is being written; RunError when the last write failed.

        `progress` is called about once a second, with the bytes that lie on the disk, as long as they grow.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            written = 0
            while not wait_for([pending], timeout=1.0).done:
                partial = sum(path.stat().st_size for path in self._folder.glob(".*.partial/*"))
                if partial > written:
                    written = partial
                    progress(written)
            try:
                pending.result()
            except Exception as error:
                reason = getattr(error, "strerror", None) or str(error)
                last = next(iter(list_checkpoints(self._folder)), None)
                good = f"the last good one is {last}" if last else "there is none yet"
                raise RunError(
                    f"{self._folder}: can't write a checkpoint: {reason}; {good}; free space or mend the "
                    "folder, then give the same command again"
                ) from None

    def close(self) -> None:
        """Ends the background thread, after what it is writing."""
        self._pool.shutdown()

    def _write(self, checkpoint: Checkpoint) -> None:
        written = write_checkpoint(self._folder, checkpoint, self._metadata)
        standing = list_checkpoints(self._folder)
        # Those of later steps were passed over as damaged, or this run would have gone on from there.
        later = [path for path in standing if path.name > written.name]
        for old in later + standing[len(later) + self._keep :]:
            shutil.rmtree(old, ignore_errors=True)


def _copies(tensors: dict[str, Tensor]) -> Tensors:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Faults inside a rank of a run, for tests and campaigns: the source of a recipe brings them in by its import path.

`TORUSGD_FAULT` holds JSON: `kind` is a name in `FAULTS`, `rank` the rank that it strikes, `step` the step before which
it does, `mark` a file that says that it has, so that ranks that start again are spared. `TORUSGD_BLIND` names one of
`DETECTORS`, which then sees nothing: a campaign shows by it that the detector is what finds the fault.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import torch
from torch import Tensor

from tests.run.slow import Slow
from torusgd.data.pipeline import Batch
from torusgd.run import build
from torusgd.rundir import checkpoint
from torusgd.rundir.run_dir import RunDir
from torusgd.step.step import TrainStep
from torusgd.weights import save_weights

FAULT, BLIND = "TORUSGD_FAULT", "TORUSGD_BLIND"
DAY = 86_400.0

Fault = Callable[[TrainStep, Path], None]
"""strikes a step of this rank; a file says that it has"""


def flipped(values: Tensor, bit: int = 21) -> Tensor:
    """A copy of a float32 tensor with one bit of its largest value the other way round."""
    copy = values.detach().clone().contiguous()
    copy.view(-1).view(torch.int32)[int(copy.abs().argmax())] ^= 1 << bit
    return copy.view_as(values)


def in_gradient(step: TrainStep, mark: Path) -> None:
    """Of one tensor, in every virtual worker from now on, as by a core that computes wrongly."""
    add = step.reducer.add

    def wrong(slot: int, gradient: Tensor) -> None:
        add(slot, flipped(gradient) if slot == 0 else gradient)

    _replace(step.reducer, "add", wrong)


def in_weights(step: TrainStep, mark: Path) -> None:
    """Of one parameter, once."""
    weight = next(p for p in step.state.model.parameters() if p.dim() > 1)
    weight.data.copy_(flipped(weight.data))


def in_images(step: TrainStep, mark: Path) -> None:
    """Of one virtual worker's images, from now on, as by a damaged copy of the data on one host."""
    loader, take = step.images._loader, step.images._loader.take

    def wrong(*arguments: Any) -> Batch:
        batch = take(*arguments)
        return Batch(flipped(batch.images), batch.targets, batch.positions, batch.replaced)

    _replace(loader, "take", wrong)


def clock_jumps(step: TrainStep, mark: Path) -> None:
    """The clock of the day is a day ahead from now on."""
    now = time.time
    time.time = lambda: now() + DAY


def read_error(step: TrainStep, mark: Path) -> None:
    """Three images can't be read, with EIO each time."""
    read, reads = Slow.read, count()

    def broken(self: Slow, index: int) -> Any:
        if next(reads) < 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"/data/{index}.png")
        return read(self, index)

    _replace(Slow, "read", broken)


def write_error(step: TrainStep, mark: Path) -> None:
    """The next file of a checkpoint can't be written, with EIO."""
    write, writes = save_weights, count()

    def broken(path: Path, *arguments: Any) -> None:
        if next(writes) < 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        write(path, *arguments)

    _replace(checkpoint, "save_weights", broken)


FAULTS: dict[str, Fault] = {
    each.__name__: each for each in (in_gradient, in_weights, in_images, clock_jumps, read_error, write_error)
}


_EQUAL = SimpleNamespace(hexdigest=lambda: ANY)  # to every other
DETECTORS: dict[str, tuple[object, str, object]] = {
    "no_fingerprint": (build, "check_ranks_agree", lambda *arguments, **more: []),
    "no_checksum": (checkpoint, "hashlib", SimpleNamespace(file_digest=hashlib.file_digest, sha256=lambda _: _EQUAL)),
    "no_lock": (RunDir, "lock", lambda self, *arguments, **more: nullcontext()),
}
"""what stands in whose place of a name, which is then blind"""


def _replace(owner: object, name: str, by: object) -> None:
    """A name that is there; else the detector would go on seeing, and its row would prove nothing."""
    assert hasattr(owner, name), name
    setattr(owner, name, by)


def prepare() -> None:
    """Puts the fault of this process' environment in its place."""
    if os.environ.get(BLIND):
        _replace(*DETECTORS[os.environ[BLIND]])
    told = json.loads(os.environ.get(FAULT) or "{}")
    mark = Path(told.get("mark", ""))
    if not told or os.environ.get("RANK") != str(told["rank"]) or mark.exists():
        return
    take_step = TrainStep.run

    def struck(self: TrainStep, membership: Any, entry: Any) -> Any:
        if entry.step >= told["step"] and not mark.exists():
            mark.write_text(str(time.monotonic()))
            FAULTS[told["kind"]](self, mark)
        return take_step(self, membership, entry)

    _replace(TrainStep, "run", struck)


class Struck(Slow):
    """`Slow`, and whatever fault the environment names."""


prepare()

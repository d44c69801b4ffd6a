"""What ends a rank, and the one channel by which the launcher, or other ranks, learn it: the ranks' common store."""

import json
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import store_keys as keys
from ..comm.base import CommError, LateRank
from ..errors import DiskError, RunError, UserError, is_transient, limit_failure, output_failure

# Failures that a rank reads to say why all end.
MOST_CAUSES = 16


class FailureKind(Enum):
    USER_ERROR = "user error"  # the input is wrong; a new start would not help
    RUN_ERROR = "run error"  # the run can't go on, though the input was right
    DISK_ERROR = "disk error"  # a disk, or the network to it, failed on a rank: a new start may help, but not twice
    OUTPUT_CLOSED = "output closed"
    DEFECT = "defect"  # of torusgd, or of a user's own model or data source
    RANK_LOST = "rank lost"  # another rank, or the way to it, is gone: the reason lies there, and a new start may help

    @property
    def exit_code(self) -> int:
        return 2 if self is FailureKind.USER_ERROR else 1


@dataclass(frozen=True)
class Failure:
    """Why a rank ended."""

    kind: FailureKind
    rank: int
    host: str
    text: str
    trace: str = ""  # of a defect: the traceback

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Sorts the exception that ended a rank of this process."""
        kind, line, trace = _kind_of(error), (str(error).splitlines() or [""])[0], ""
        if kind is FailureKind.OUTPUT_CLOSED:
            line = "nobody reads the output any more; the last checkpoint, if there is one, is good"
        elif kind is FailureKind.DEFECT and (limit := _limit_of(error)) is not None:
            kind, line = FailureKind.RUN_ERROR, f"rank {rank}: {limit}"
        elif kind is FailureKind.DEFECT:
            line = f"rank {rank}: {type(error).__name__}: {line} (traceback above)"
            trace = "".join(traceback.format_exception(error))
        elif isinstance(error, OSError):
            line = output_failure(error) or f"rank {rank}: {line}"
        return cls(kind, rank, socket.gethostname(), line, trace)

    @classmethod
    def parse(cls, text: str) -> "Failure":
        tree = json.loads(text)
        return cls(**{**tree, "kind": FailureKind(tree["kind"])})

    def dump(self) -> str:
        return json.dumps({**self.__dict__, "kind": self.kind.value})

    @property
    def is_loss(self) -> bool:
        """The reason lies with another rank."""
        return self.kind is FailureKind.RANK_LOST

    def throw(self) -> NoReturn:
        """Raises the error that ends the command with this line and this exit code; a traceback is printed first."""
        print(self.trace, end="", file=sys.stderr)
        raise UserError(self.text) if self.kind.exit_code == 2 else RunError(self.text)


class Exit(NamedTuple):
    """The end of a rank's process."""

    rank: int
    code: int  # minus the signal's number if a signal ended it, or the fork server and so the rank with it
    how: str
    is_remote: bool


class FailureChannel:
    """The failures of the `size` ranks of an attempt, in its store."""

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = PrefixStore(keys.FAILURES, store), size

    def report(self, failure: Failure) -> bool:
        """Leaves this rank's failure; True once the store has it, DistError if it can't be reached."""
        # To be called before a rank closes any connection, by which others learn of its end, and look for a reason
        # here.
        self._store.set(keys.FAILURE.format(rank=failure.rank), failure.dump())
        # Causes have keys of their own, so that of a thousand ranks that lose each other nobody reads a thousand.
        if not failure.is_loss:
            number = self._store.add(keys.CAUSES, 1)
            self._store.set(keys.CAUSE.format(number=number), failure.dump())
        return self.has_reported(failure.rank)

    def reported(self) -> dict[int, Failure]:
        """The failures so far, by rank; for the launcher, since it looks for each rank's."""
        return {r: self._read(keys.FAILURE.format(rank=r)) for r in range(self._size) if self.has_reported(r)}

    def causes(self) -> list[Failure]:
        """The first failures that are no mere loss of others: a few, whatever the number of ranks."""
        count = min(self._store.add(keys.CAUSES, 0), MOST_CAUSES)
        names = [keys.CAUSE.format(number=number) for number in range(1, count + 1)]
        return [self._read(name) for name in names if self._store.check([name])]

    def has_reported(self, rank: int) -> bool:
        return self._store.check([keys.FAILURE.format(rank=rank)])

    def claim(self, rank: int) -> bool:
        """Whether this rank is the one to print why the run ends: the first that calls it, and no other."""
        # The store compares and sets in one go, so that two ranks never both find the key empty.
        return self._store.compare_set(keys.SPEAKER, "", str(rank)).decode() == str(rank)

    def _read(self, key: str) -> Failure:
        return Failure.parse(self._store.get(key).decode())


def cause_of(failures: Iterable[Failure]) -> Failure | None:
    """The failure that explains why all ranks end; None if ranks only say that they lost others."""
    causes = (failure for failure in failures if not failure.is_loss)
    # If all ranks find the same mistake at once, the longest report says most of it.
    return max(causes, key=lambda failure: (bool(failure.trace), len(failure.text)), default=None)


def explain(store: Store, count: int, failed: Sequence[Exit], late: Sequence[LateRank]) -> tuple[Failure, bool]:
    """Why ranks of an attempt of `count` have ended, or are late; and whether all that have ended are merely lost."""
    early = FailureChannel(PrefixStore(keys.JOINING, store), count).reported()
    own = FailureChannel(store, count).reported()
    # Ranks that were called in are not among those that join.
    reported = {exit.rank: early[exit.rank] for exit in failed if exit.rank in early} | own
    # SIGKILL 2: a negative exit code is a signal's number. An orphan ended with the fork server; one on another
    # machine by a cut of its way to the store. Whatever is wrong with the run itself its ranks report.
    lost = [exit for exit in failed if exit.code < 0 or (exit.is_remote and exit.rank not in own)]
    are_lost = len(lost) == len(failed)
    if cause := cause_of(reported.values()):
        return cause, are_lost
    silent, kind = [exit for exit in failed if exit.rank not in reported], FailureKind.RANK_LOST
    if late:
        rank, text = late[0].rank or 0, "; ".join(map(str, late))
    elif silent and silent[0] in lost:
        rank, text = silent[0].rank, "; ".join(f"rank {exit.rank} {exit.how}" for exit in silent if exit in lost)
    elif silent:
        # It ended itself, in code that is not ours, and would do so again.
        kind, rank = FailureKind.RUN_ERROR, silent[0].rank
        text = f"rank {rank} ended with exit code {silent[0].code} and no result"
    else:
        rank = min(reported)
        text = f"the ranks lost each other ({reported[rank].text})"
    return Failure(kind, rank, socket.gethostname(), text), are_lost


def _limit_of(error: BaseException) -> str | None:
    """A line on a limit of this machine, if that is what a defect's exception is of; else None."""
    # Torch has a type for a GPU's memory alone.
    of_cpu = isinstance(error, RuntimeError) and "CPUAllocator: can't allocate memory" in str(error)
    if of_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError):
        line = (str(error).splitlines() or [""])[0]
        return f"{line}; use smaller stages.N.images_per_worker, evaluate.images_per_chunk or images"
    limit = limit_failure(error)
    return limit and f"{limit}; the last checkpoint, if there is one, is good"


def _kind_of(error: BaseException) -> FailureKind:
    # By the type of the exception, never by its text; the kinds that are part of others come first.
    if isinstance(error, UserError):
        return FailureKind.USER_ERROR
    if isinstance(error, DiskError) or (isinstance(error, OSError) and is_transient(error)):
        return FailureKind.DISK_ERROR
    if isinstance(error, RunError):
        return FailureKind.RUN_ERROR
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # Rich makes it an exit
        return FailureKind.OUTPUT_CLOSED
    if isinstance(error, CommError | dist.DistError):
        return FailureKind.RANK_LOST
    return FailureKind.RUN_ERROR if isinstance(error, OSError) else FailureKind.DEFECT

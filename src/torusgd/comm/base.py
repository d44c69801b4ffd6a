"""What an all-reduce is to its users: `start` it on a tensor, `wait` for it later; what a wait raises, and who is late.

A message can't tell what the other ranks are doing, so its age is no measure: waits ask a `Liveness`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .algorithms import Algorithm, Round


@dataclass(frozen=True)
class LateRank:
    """A rank that has made no progress for too long, and what it did last; None: not known."""

    why: str  # one line, such as `no heartbeat for 12 s`
    rank: int | None = None
    host: str | None = None
    phase: str | None = None  # as it was given to `Liveness.progress`, such as `backward`
    step: int | None = None

    def __str__(self) -> str:
        about = ((" on ", self.host), (" in ", self.phase), (" of step ", self.step))
        known = "".join(f"{word}{value}" for word, value in about if value is not None)
        return self.why if self.rank is None else f"rank {self.rank}{known}: {self.why}"


class Liveness:
    """What all ranks are doing, as `ranks.liveness.Heartbeat` knows; here none is late, and waits end by timeout."""

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost since all were last started, and whose work the others have taken over."""
        return ()

    def progress(self, phase: str, step: int, unit: int) -> None:
        """This rank begins a unit (a virtual worker, a bucket) of a phase (such as `forward`) of a step."""

    def outside(self, what: str, where: str) -> None:
        """Until its next progress this rank waits for a disk, or what else is outside the run: (`images`, `/data`)."""

    def compiles(self) -> None:
        """A compiler begins with another part of the network, on this rank: progress that may take long."""

    def late(self) -> list[LateRank]:
        """The ranks for which nobody needs to wait any longer; a wait asks it every `monitor.SLICE` seconds."""
        return []

    def ranks_change(self) -> bool:
        """Whether ranks are to join or to leave as soon as a step is done."""
        return False

    def lacks_ranks(self) -> bool:
        """Whether these ranks are fewer than the run wants, so that they wait for others before the next step."""
        return False


class CommError(RuntimeError):
    """Ranks could not exchange a message: the reason lies with another rank or the network, not with the caller.

    No wait raises a bare error of Gloo or NCCL. The all-reduce and its group are of no more use afterwards.
    """


class CommTimeout(CommError):
    """A message has not come in time: a rank is frozen, late or cut off, or did not come; `late` are known to be."""

    def __init__(self, text: str, late: Sequence[LateRank] = ()) -> None:
        super().__init__(text)
        self.late = tuple(late)


class ConnectionLost(CommError):
    """A connection was closed before its message came: a rank has ended, or has aborted its group."""


class Work(Protocol):
    """A message, or a collective such as an all-reduce, on its way."""

    def wait(self, limit: float | None = None) -> None:
        """Returns when the result is there (CUDA: when the current stream will have it).

        CommTimeout after `limit` seconds (None: the timeout of the group; NCCL knows none), when it may be called
        again; ConnectionLost if nothing will come.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def ended(self) -> float | None:
        """After `wait`: when the result was there (time.perf_counter); None where only a GPU's stream knows."""
        return None


class AllReduce(Protocol):
    """Sums tensors over ranks that all call `start` with equal shapes and dtypes in one order, several at a time."""

    name: str

    def start(self, tensor: torch.Tensor) -> Work:
        """Sums `tensor` (1-D, contiguous) over all ranks in place; it is ours until `wait` returns."""

    def close(self) -> None:
        """Ends the threads and groups that it began; every rank calls it, with nothing on its way."""


class Engine(Protocol):
    """Runs algorithms on tensors of one device: what the all-reduces by name and the measurements stand on."""

    device: torch.device

    def run(self, tensor: torch.Tensor, algorithm: Algorithm | None) -> Work:
        """Sums a 1-D contiguous tensor in place by an algorithm, the same on every rank; None: the backend's own."""

    def effective(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm that runs in this one's place; several may come to the same."""
        return algorithm

    def run_rounds(self, tensor: torch.Tensor, rounds: list[Round]) -> Work:
        """Runs rounds of no named algorithm, as shards and measurements do."""

    def close(self) -> None:
        """Ends what it began; its group stays open."""


class Done(Work):
    """The work of a sum that needed none, as on one rank."""

    def __init__(self) -> None:
        self._ended = time.perf_counter()

    def wait(self, limit: float | None = None) -> None:
        pass

    def done(self) -> bool:
        return True

    def ended(self) -> float | None:
        return self._ended

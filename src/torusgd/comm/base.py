"""What an all-reduce is to its users: `start` it on a tensor, `wait` for it later; what a wait raises, and who is late.

What Gloo and NCCL have under way is a `Work` here too, whose errors are ours.

How long a message may take depends on what the other ranks are doing, which a message can't tell: its age is no
measure. So waits ask a `Liveness`, which knows what each rank did last. `NoLiveness` knows nothing and leaves every
wait to the timeout of its group.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from .algorithms import Algorithm
from .rounds import Round

SLACK = 2e-3
"""seconds by which a backend's clock may end a wait before ours: it takes whole milliseconds"""
_PLACE = re.compile(r"^\[[^]]*] ")
"""file and line of the backend's source, before its message"""


@dataclass(frozen=True)
class LateRank:
    """A rank that has made no progress for too long, and what it did last; None: not known."""

    why: str
    """one line, such as `no heartbeat for 12 s`"""
    rank: int | None = None
    """in the run"""
    host: str | None = None
    phase: str | None = None
    """as it was given to `Liveness.progress`, such as `backward`"""
    step: int | None = None

    def __str__(self) -> str:
        """As an error shows it.

        >>> str(LateRank("no heartbeat for 12 s", rank=2, host="a1", phase="backward", step=7))
        'rank 2 on a1 in backward of step 7: no heartbeat for 12 s'
        """
        if self.rank is None:
            return self.why
        host = "" if self.host is None else f" on {self.host}"
        phase = "" if self.phase is None else f" in {self.phase}"
        step = "" if self.step is None else f" of step {self.step}"
        return f"rank {self.rank}{host}{phase}{step}: {self.why}"


class Liveness(Protocol):
    """What all ranks are doing. `launch` implements it by heartbeats through the ranks' common store."""

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that were lost since all were last started, and whose work the others have taken over."""

    def progress(self, phase: str, step: int, unit: int) -> None:
        """This rank begins a unit (a virtual worker, a bucket) of a phase (such as `forward`) of a step."""

    def outside(self, what: str, where: str) -> None:
        """Until its next progress this rank waits for a disk, or what else is outside the run: (`images`, `/data`)."""

    def late(self) -> list[LateRank]:
        """The ranks for which nobody needs to wait any longer; a wait asks it every `monitor.SLICE` seconds."""

    def ranks_change(self) -> bool:
        """Whether ranks are to join or to leave as soon as a step is done."""

    def lacks_ranks(self) -> bool:
        """Whether these ranks are fewer than the run wants, so that they wait for others before the next step."""


class NoLiveness:
    """Knows of no late rank, ever: waits end by the timeout of their group."""

    lost: tuple[int, ...] = ()

    def progress(self, phase: str, step: int, unit: int) -> None:
        """Does nothing."""

    def outside(self, what: str, where: str) -> None:
        """Does nothing."""

    def late(self) -> list[LateRank]:
        """Nobody."""
        return []

    def ranks_change(self) -> bool:
        """Never."""
        return False

    def lacks_ranks(self) -> bool:
        """Never."""
        return False


class CommError(RuntimeError):
    """Ranks could not exchange a message: the reason lies with another rank or the network, not with the caller.

    Whatever waits in `torusgd.comm` raises one of its subclasses, and no bare error of Gloo or NCCL. The all-reduce and
    its group are of no more use afterwards.
    """


class CommTimeout(CommError):
    """A message has not come in time: a rank is frozen, late or cut off, or did not come to meet the others.

    Args:
        text: One line.
        late: The ranks that are known to be late.
    """

    def __init__(self, text: str, late: Sequence[LateRank] = ()) -> None:
        super().__init__(text)
        self.late = tuple(late)


class ConnectionLost(CommError):
    """A connection was closed before its message came: a rank has ended, or has aborted its group."""


@runtime_checkable
class Work(Protocol):
    """A message, or a collective such as an all-reduce, on its way."""

    def wait(self, limit: float | None = None) -> None:
        """Returns when the result is there (CUDA: when the current stream will have it).

        Args:
            limit: Seconds after which it gives up waiting, and may be called again; None: the timeout of the group.
                Where nothing is waited for on the host, as with NCCL, it has no meaning.

        Raises:
            CommTimeout: Nothing came in time.
            ConnectionLost: Nothing will come.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def ended(self) -> float | None:
        """After `wait`: when the result was there (time.perf_counter); None where only a GPU's stream knows."""


@runtime_checkable
class AllReduce(Protocol):
    """Sums tensors over the ranks of a group.

    Every rank calls `start` with equal shapes and dtypes in the same order; several may be on their way at a time.
    """

    name: str

    def start(self, tensor: torch.Tensor) -> Work:
        """Sums `tensor` (1-D, contiguous) over all ranks in place; it is ours until `wait` returns."""

    def close(self) -> None:
        """Ends the threads and groups that it began; every rank calls it, with nothing on its way."""


class Engine(Protocol):
    """Runs algorithms on tensors of one device: what the all-reduces by name and the measurements stand on."""

    device: torch.device
    """where its tensors live"""

    def run(self, tensor: torch.Tensor, algorithm: Algorithm | None) -> Work:
        """Sums a 1-D contiguous tensor in place by an algorithm, the same on every rank; None: the backend's own."""

    def effective(self, algorithm: Algorithm) -> Algorithm:
        """The algorithm that runs in this one's place; several may come to the same."""

    def run_rounds(self, tensor: torch.Tensor, rounds: list[list[Round]]) -> Work:
        """Runs the rounds of each chunk, those of no named algorithm, as shards and measurements do."""

    def close(self) -> None:
        """Ends what it began; its group stays open."""


class Done:
    """The work of a sum that needed none, as on one rank."""

    def __init__(self) -> None:
        self._ended = time.perf_counter()

    def wait(self, limit: float | None = None) -> None:
        """Returns at once."""

    def done(self) -> bool:
        """Always true."""
        return True

    def ended(self) -> float | None:
        """When it was made."""
        return self._ended


def check_tensor(tensor: torch.Tensor) -> None:
    """Our own callers keep to what `start` takes."""
    assert tensor.dim() == 1, tensor.shape
    assert tensor.is_contiguous(), tensor.stride()


class BackendMessage:
    """A message between two members on its way. A wait with a limit that is not kept closes the whole group."""

    def __init__(self, work: dist.Work, peer: str, timeout: float) -> None:
        self._work, self._peer, self._timeout = work, peer, timeout
        self._ended: float | None = None

    def wait(self, limit: float | None = None) -> None:
        """See `Work`."""
        begin = time.perf_counter()
        try:
            if limit is None:
                self._work.wait()
            else:
                self._work.wait(_duration(limit))
        except RuntimeError as error:
            raise comm_error(error, self._peer, begin, self._timeout if limit is None else limit) from error
        if self._ended is None:
            self._ended = time.perf_counter()

    def done(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()

    def ended(self) -> float | None:
        """See `Work`."""
        return self._ended


class BackendCollective:
    """A collective of Gloo on its way; those of NCCL are enqueued (`launch_order`)."""

    def __init__(self, work: dist.Work, timeout: float) -> None:
        self._work, self._timeout = work, timeout
        self._begin = time.perf_counter()
        self._ended: float | None = None
        with suppress(RuntimeError):  # Gloo's reduce-scatter has no future: it ended when it was waited for
            work.get_future().add_done_callback(self._note_end)

    def wait(self, limit: float | None = None) -> None:
        """See `Work`."""
        begin = time.perf_counter()
        try:
            if limit is None:
                self._work.wait()
            else:
                self._work.wait(_duration(limit))
        except RuntimeError as error:
            # The backend counts its timeout from when it began the collective, and our limit from when we wait.
            if limit is None or time.perf_counter() - self._begin >= self._timeout:
                begin, limit = self._begin, self._timeout
            raise comm_error(error, "the group", begin, limit) from error
        self._note_end()

    def done(self) -> bool:
        """See `Work`."""
        return self._work.is_completed()

    def ended(self) -> float | None:
        """See `Work`."""
        return self._ended

    def _note_end(self, _: object = None) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()


def _duration(limit: float) -> timedelta:
    """For torch, which takes whole milliseconds, and 0 as no limit."""
    return timedelta(milliseconds=max(1, round(1e3 * limit)))


def comm_error(error: RuntimeError, where: str, begin: float, limit: float) -> CommError:
    """An error of the backend as one of ours, by when it came and not by its text.

    After `limit` seconds since `begin` nobody has answered; an error that comes sooner is a connection that was closed.
    """
    if isinstance(error, CommError):
        return error
    if time.perf_counter() - begin >= limit - SLACK:
        return CommTimeout(f"no answer within {limit:.3g} s")
    reason = _PLACE.sub("", (str(error).splitlines() or [""])[0]).split(". ")[0]
    # SIGKILL 5: the kernel has closed the dead rank's connections, so whoever waits for its message comes here.
    return ConnectionLost(f"the connection to {where} is lost: {reason}")

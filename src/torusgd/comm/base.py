"""What an all-reduce is to its users: `start` it on a tensor, `wait` for it later."""

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from .algorithms import Algorithm
from .liveness import LateRank
from .rounds import Round


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
    """One all-reduce on its way."""

    def wait(self, limit: float | None = None) -> None:
        """Returns when the tensor holds the sum (CUDA: when the current stream will); raises what went wrong.

        After `limit` seconds (None: after the group's timeout) it raises CommTimeout, and the all-reduce is of no more
        use; NCCL, where nothing is waited for on the host, has the group's timeout alone.
        """

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    def ended(self) -> float | None:
        """After `wait`: when the sum was there (time.perf_counter); None where only a GPU's stream knows."""


@runtime_checkable
class AllReduce(Protocol):
    """Sums tensors over the ranks of a process group.

    Every rank calls `start` with equal shapes and dtypes in the same order; several may be on their way at a time.
    """

    name: str

    def start(self, tensor: torch.Tensor) -> Work:
        """Sums `tensor` (1-D, contiguous) over all ranks in place; it is ours until `wait` returns."""

    def close(self) -> None:
        """Ends the threads and groups that it began; every rank calls it, with nothing on its way."""


class Engine(Protocol):
    """Carries out plans: what the algorithms by name and the measurements stand on."""

    device: torch.device
    """where its tensors live"""

    def run(self, tensor: torch.Tensor, plan: Algorithm) -> Work:
        """Sums a 1-D contiguous tensor in place by a plan, the same on every rank."""

    def carry(self, tensor: torch.Tensor, routes: list[list[Round]]) -> Work:
        """Carries out routes that are no plan's, as measurements do."""

    def close(self) -> None:
        """Ends what it began."""


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

"""The step's first message: what all ranks must know of a step beside its gradients, as one typed record.

It leaves when the last forward pass of a rank is done, so it travels while backward runs. Counts are added over ranks;
batch-norm statistics and losses are added over virtual workers as exact sums, whose bits depend on no order.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..comm.base import AllReduce, Work
from ..comm.exact_sum import NARROW, decode
from ..cuda.operators import operators
from ..data.upload import pinned
from ..errors import RunError

VERSION = 4
"""of the record: ranks with programs that would read each other's fields otherwise find out at the first step"""


@dataclass
class Counts:
    """What each rank counts, in the order in which it travels."""

    version: int = VERSION
    """times the ranks"""
    ranks: int = 1
    contributions: int = 0
    """virtual workers whose gradients are in the step's sum: what its mean divides by"""
    replaced: int = 0
    """training images that could not be decoded and were replaced"""
    stop: int = 0
    """ranks that were asked to stop"""
    failed: int = 0
    """ranks that could not read their images"""
    save: int = 0
    """rank 0 wants a checkpoint after this step"""
    keep: int = 0
    """rank 0 wants each node to keep a copy of the state after this step"""
    change: int = 0
    """ranks that know of others that are to join, or to leave, after this step"""


@dataclass(frozen=True)
class ControlVector:
    """What all ranks said together; the same on every rank."""

    counts: Counts
    loss: float
    """mean over virtual workers"""
    batch_norm: Tensor
    """float32: the mean of the batch statistics, as BatchNormStatistics.update takes it"""
    is_finite: bool
    """whether all batch statistics are"""
    finished: list[int]
    """of each virtual worker the microseconds after which it had finished, 0 where it was left out (`closing`); empty
    where no clock decides"""
    taken_over: Tensor
    """int64: what the ranks told of work that they took over (`work_stealing`); empty where they don't"""
    timings: Tensor
    """int64: what the ranks noted of their times now and then (`stragglers`); mostly empty"""
    fingerprints: Tensor
    """int64: of what the ranks hold, now and then (`drift`); mostly empty"""


class ControlMessage:
    """Collects one rank's part of a step's control vector, and sums it over ranks.

    Args:
        width: Values of the batch-norm statistics of a virtual worker.
        device: Where the values live.
        to_host: Gives a tensor's values on the host (`comm.monitor.Monitor.to_host`); called once a step.
        room: The most elements of timings and fingerprints, for a record that never moves, since CUDA graphs read and
            write it; None: it may move.
    """

    def __init__(
        self,
        width: int,
        device: torch.device,
        to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
        room: int | None = None,
    ) -> None:
        self._to_host, self._may_move = to_host, room is None
        self._rows = (NARROW.rows, width + 1)
        # The sums of the passes, then what `send` puts behind them: all of it stays where it is, and travels as it is.
        length = NARROW.rows * (width + 1) + len(fields(Counts)) + (room or 0)
        self._memory = torch.zeros(length, dtype=torch.int64, device=device)
        self._message = self._memory
        self._timings = self._taken = 0
        self.counts = Counts()
        """of this rank, to be added to"""
        self.finished: list[int] = []
        """see `ControlVector`: of one length on all ranks, each of which fills in its own"""
        self.taken_over: list[int] = []
        """see `ControlVector`: likewise"""

    def clear(self) -> None:
        """Begins the passes of a step, also when they are repeated."""
        self.counts, self.finished, self.taken_over = Counts(), [], []

    def add(self, batch_norm: Tensor, loss: Tensor) -> None:
        """Adds a virtual worker: its batch statistics (float32, flat) and its loss (float32, 0-d)."""
        operators.add_statistics(self._values, batch_norm, loss, is_first=not self.counts.contributions)
        self.counts.contributions += 1

    def add_captured(self, batch_norm: Tensor, loss: Tensor) -> None:
        """The part of `add` that goes into a CUDA graph, which is the same for the first pass and for all others."""
        operators.add_statistics(self._values, batch_norm, loss, is_first=False)

    def will_be_added(self) -> None:
        """The rest of it, before such a graph is replayed."""
        if not self.counts.contributions:
            self._values.zero_()
        self.counts.contributions += 1

    def send(self, allreduce: AllReduce, timings: Tensor, fingerprints: Tensor) -> Work:
        """Begins the sum over ranks; both tensors (int64, of one length on all ranks) are summed along."""
        device, length = self._memory.device, self._length
        if not self.counts.contributions:
            self._values.zero_()
        counts = [getattr(self.counts, field.name) for field in fields(Counts)]
        numbers = torch.tensor([*counts, *self.finished, *self.taken_over])
        small = pinned(torch.cat([numbers, timings]) if timings.numel() else numbers, device)
        self._taken, self._timings = len(self.taken_over), timings.numel()
        total = length + small.numel() + fingerprints.numel()
        if total > len(self._memory):
            assert self._may_move, "graphs know where it lies"
            self._memory = torch.cat([self._memory[:length], self._memory.new_zeros(total - length)])
        self._message = self._memory[:total]
        self._message[length : length + small.numel()].copy_(small, non_blocking=True)
        if fingerprints.numel():
            self._message[length + small.numel() :].copy_(fingerprints)
        return allreduce.start(self._message)

    @property
    def _values(self) -> Tensor:
        """int64 [NARROW.rows, values + 1]: the sums of this rank's passes."""
        return self._memory[: self._length].view(self._rows)

    @property
    def _length(self) -> int:
        rows, columns = self._rows
        return rows * columns

    @property
    def on_device(self) -> Tensor:
        """int64: of the summed record, after its work has been waited for, limbs of the statistics and the loss, and
        counts."""
        return self._memory[: self._length + len(fields(Counts))]

    def read(self) -> ControlVector:
        """The summed record, after its work has been waited for; one transfer to the host.

        Raises:
            RunError: The ranks' programs have other records.
        """
        length = self._length
        sums = decode(self._message[:length].view(self._rows), NARROW)
        floats = torch.cat([sums[-1:], sums[:-1].isfinite().all().double().reshape(1)])
        small = self._to_host(torch.cat([floats.view(torch.int64), self._message[length:]]))
        words = small.tolist()
        loss, is_finite = struct.unpack("2d", struct.pack("2q", *words[:2]))
        many = 2 + len(fields(Counts))
        clocks = many + len(self.finished)
        counts, finished, rest = Counts(*words[2:many]), words[many:clocks], small[clocks:]
        if counts.version != VERSION * counts.ranks:
            raise RunError("the ranks run different versions of torusgd; install the same on all machines")
        workers = max(counts.contributions, 1)
        means = sums[:-1] / workers
        taken_over, timings, fingerprints = rest.tensor_split([self._taken, self._taken + self._timings])
        return ControlVector(
            counts, loss / workers, means.float(), is_finite > 0, finished, taken_over, timings, fingerprints
        )

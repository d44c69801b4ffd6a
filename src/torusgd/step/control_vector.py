"""The step's first message: what all ranks must know of a step beside its gradients, as one typed record.

It leaves when the last forward pass of a rank is done, so it travels while backward runs. Counts are added over ranks;
batch-norm statistics and losses are added over virtual workers as exact sums, whose bits depend on no order.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..arithmetic.reductions import over
from ..comm.base import AllReduce, Work
from ..comm.exact_sum import NARROW, decode, encode
from ..data.to_device import pinned
from ..errors import RunError

# Of the record: ranks with programs that would read each other's fields otherwise find out at the first step.
VERSION = 6
NO_WORDS = torch.zeros(0, dtype=torch.int64)  # the section of a watcher in a step that does not concern it


@dataclass
class Counts:
    """What each rank counts, in the order in which it travels; `version` is summed over ranks as well."""

    version: int = VERSION
    ranks: int = 1
    contributions: int = 0  # virtual workers whose gradients are in the step's sum: what its mean divides by
    replaced: int = 0
    failed: int = 0


@dataclass(frozen=True)
class ControlVector:
    """What all ranks have sent together; the same on every rank. Loss and statistics are means over virtual workers."""

    counts: Counts
    loss: float
    batch_norm: Tensor  # float64: the mean of the batch statistics, as BatchNormStatistics.update takes it
    is_finite: bool
    sections: Mapping[str, Tensor]  # int64, summed over ranks, by name: what each watcher (`watch`) sent in this step

    def section(self, name: str) -> Tensor:
        """A section; empty if nobody sent it in this step."""
        return self.sections.get(name, NO_WORDS)

    def words(self, name: str) -> list[int]:
        return [int(word) for word in self.section(name).tolist()]


class ControlMessage:
    """Collects one rank's part of a step's control vector, of `width` statistics, and sums it over ranks."""

    def __init__(self, width: int, device: torch.device, to_host: Callable[[Tensor], Tensor] = Tensor.cpu) -> None:
        self._to_host, self._rows, self._length = to_host, (NARROW.rows, width + 1), NARROW.rows * (width + 1)
        # The sums of the passes, then what `send` puts behind them.
        self._memory = torch.zeros(self._length + len(fields(Counts)), dtype=torch.int64, device=device)
        self.message = self._memory  # int64, what was sent, then summed: limbs (statistics, loss), counts, sections
        # Of the message that was sent last, the length of each section.
        self._words: dict[str, int] = {}
        self.counts = Counts()

    def clear(self) -> None:
        """Begins the passes of a step, also when they are repeated."""
        self.counts = Counts()

    def add(self, batch_norm: Tensor, loss: Tensor) -> None:
        """Adds a virtual worker: its batch statistics (float32, flat) and its loss (float32, 0-d)."""
        add_statistics(self._values, batch_norm, loss, is_first=not self.counts.contributions)
        self.counts.contributions += 1

    def send(self, allreduce: AllReduce, sections: Mapping[str, Tensor]) -> Work:
        """Begins the sum over ranks; sections are int64, on one device and of one length and order on all ranks."""
        device, length = self._memory.device, self._length
        if not self.counts.contributions:
            self._values.zero_()
        # What is on the host goes over in one copy; what a GPU has computed is never brought to the host for it.
        here = {name: section for name, section in sections.items() if section.device.type == "cpu"}
        there = {name: section for name, section in sections.items() if name not in here}
        counts = torch.tensor([*vars(self.counts).values()])
        parts = [pinned(torch.cat([counts, *here.values()]), device), *there.values()]
        self._words = {name: section.numel() for name, section in (here | there).items()}
        total = length + sum(part.numel() for part in parts)
        if total > len(self._memory):
            self._memory = torch.cat([self._memory[:length], self._memory.new_zeros(total - length)])
        self.message = self._memory[:total]
        for target, part in zip(self.message[length:].split([part.numel() for part in parts]), parts, strict=True):
            target.copy_(part, non_blocking=True)
        return allreduce.start(self.message)

    @property
    def _values(self) -> Tensor:
        """int64 [NARROW.rows, values + 1]: the sums of this rank's passes."""
        return self._memory[: self._length].view(self._rows)

    def read(self) -> ControlVector:
        """The summed record, after `send`'s work; one transfer to the host. RunError if the ranks' programs differ."""
        sums = decode(self.message[: self._length].view(self._rows), NARROW)
        floats = torch.cat([sums[-1:], sums[:-1].isfinite().all().double().reshape(1)])
        small = self._to_host(torch.cat([floats.view(torch.int64), self.message[self._length :]]))
        loss, is_finite = struct.unpack("2d", struct.pack("2q", *small[:2].tolist()))
        behind = 2 + len(fields(Counts))
        counts = Counts(*small[2:behind].tolist())
        if counts.version != VERSION * counts.ranks:
            raise RunError("the ranks run different versions of torusgd; install the same on all machines")
        workers = max(counts.contributions, 1)
        sections = dict(zip(self._words, small[behind:].split([*self._words.values()]), strict=True))
        return ControlVector(counts, loss / workers, over(sums[:-1], workers), is_finite > 0, sections)


def add_statistics(sums: Tensor, statistics: Tensor, loss: Tensor, is_first: bool) -> None:
    """Adds a pass' statistics, float32 [values], and loss to exact sums, int64 [NARROW.rows, values + 1]."""
    limbs = encode(torch.cat([statistics, loss.reshape(1)]), NARROW)
    sums.copy_(limbs if is_first else sums + limbs)

"""The step's first message: batch-norm statistics, loss and counts of all virtual workers, as exact sums.

It leaves when the last forward pass of a rank is done, so it travels while backward runs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.base import AllReduce, Work
from ..comm.exact_sum import NARROW, decode, encode

_COUNTS = ("replaced", "stop", "failed")


@dataclass(frozen=True)
class Totals:
    """What all virtual workers of a step said together; the same on every rank."""

    batch_norm: Tensor
    """float32: the mean of the batch statistics, as BatchNormStatistics.update takes it"""
    loss: float
    """mean over virtual workers"""
    replaced: int
    """training images that could not be decoded and were replaced"""
    stop: int
    """ranks that were asked to stop"""
    failed: int
    """ranks that could not read their images"""
    notes: Tensor
    """int64: the sum of what each rank handed to `send`"""


class StepStatistics:
    """Collects the statistics of a step and sums them over virtual workers and ranks.

    Args:
        width: Values of the batch-norm statistics.
        virtual_workers: V over all ranks.
        device: Where the values live.
    """

    def __init__(self, width: int, virtual_workers: int, device: torch.device) -> None:
        self._workers = virtual_workers
        self._values = torch.zeros(NARROW.rows, width + 1, dtype=torch.int64, device=device)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._message = torch.zeros(0)

    def clear(self) -> None:
        """Begins a step."""
        self._values.zero_()
        self._counts = dict.fromkeys(_COUNTS, 0)

    def add(self, batch_norm: Tensor, loss: Tensor) -> None:
        """Adds a virtual worker: its batch statistics (float32, flat) and its loss (float32, 0-d)."""
        self._values += encode(torch.cat([batch_norm, loss.reshape(1)]), NARROW)

    def count(self, name: str, number: int) -> None:
        """Adds to `replaced`, `stop` or `failed`."""
        self._counts[name] += number

    def send(self, allreduce: AllReduce, notes: Tensor) -> Work:
        """Starts the sum over ranks; `notes` (int64, of one length on all ranks) are summed along."""
        device = self._values.device
        counts = torch.tensor([self._counts[name] for name in _COUNTS], device=device)
        self._message = torch.cat([self._values.reshape(-1), counts, notes.to(device)])
        return allreduce.start(self._message)

    def totals(self) -> Totals:
        """Reads the summed message, after its work has been waited for; one transfer to the host."""
        length = self._values.numel()
        means = decode(self._message[:length].view_as(self._values), NARROW) / self._workers
        loss, *numbers = torch.cat([means[-1:], self._message[length:].to(torch.float64)]).tolist()
        counts = [int(number) for number in numbers]
        replaced, stop, failed = counts[: len(_COUNTS)]
        notes = torch.tensor(counts[len(_COUNTS) :], dtype=torch.int64)
        return Totals(means[:-1].float(), loss, replaced, stop, failed, notes)

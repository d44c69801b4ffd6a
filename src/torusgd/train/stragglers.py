"""Which rank is slow, and why: an all-reduce makes every rank as slow as the last one, and hides which it was.

So each rank notes when its gradients were ready, counted from the end of its own previous all-reduce, before it waits
for anyone. Now and then these notes travel in the step's first message, each rank in a place of its own.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gradients.reducer import Reducer
from .link_probe import Links, slow_link

EVERY = 10
"""steps from one comparison to the next"""
_FIELDS = 5
_UNIT = 1e-6  # seconds; the notes travel as integers


@dataclass(frozen=True)
class Slowest:
    """The rank whose gradients were ready last, or whose link is slow."""

    rank: int
    behind: float
    """seconds after the median rank, or of the link beyond the median link"""
    cause: str
    """what took the most time that others did not need: data, compute, or network (waiting after all were ready)"""


class Stragglers:
    """Notes of this rank, and the comparison of all ranks' notes.

    Args:
        rank: Of this process.
        size: Ranks in all.
        links: Of this rank; None where nothing is to be compared.
    """

    def __init__(self, rank: int, size: int, links: Links | None = None) -> None:
        self._rank, self._size, self._links = rank, size, links
        self._notes = [0.0] * _FIELDS
        self._last_end = time.perf_counter()

    def note(self, step: int, reducer: Reducer, data_seconds: float) -> None:
        """Notes a step whose all-reduce has just ended."""
        end = time.perf_counter()
        marks = (reducer.first_ready - self._last_end, reducer.last_ready - self._last_end, data_seconds)
        self._notes = [*marks, end - self._last_end, self._links.seconds if self._links is not None else 0.0]
        self._last_end = end
        if self._links is not None and step % EVERY == EVERY // 2:
            self._links.measure()

    def close(self) -> None:
        """Ends what watches the links; every rank calls it."""
        if self._links is not None:
            self._links.close()

    def message(self, step: int) -> Tensor:
        """int64: this rank's notes of the step before, in its place among all; empty in most steps."""
        if self._size == 1 or step == 0 or step % EVERY:
            return torch.zeros(0, dtype=torch.int64)
        places = torch.zeros(self._size, _FIELDS, dtype=torch.int64)
        places[self._rank] = torch.tensor([int(note / _UNIT) for note in self._notes])
        return places.reshape(-1)


def slowest(message: Tensor) -> Slowest | None:
    """Compares the notes of all ranks, as `Stragglers.message` sent them, summed; None without notes."""
    if not message.numel():
        return None
    _, ready, data, total, links = (message.view(-1, _FIELDS).double() * _UNIT).unbind(dim=1)
    rank = int(ready.argmax())
    compute = ready - data
    parts = {
        "data": float(data[rank] - data.median()),
        "compute": float(compute[rank] - compute.median()),
        "network": float(total.median() - ready.max()),
    }
    cause = max(parts, key=lambda part: parts[part])
    behind = float(ready[rank] - ready.median())
    if cause == "network" and (culprit := slow_link(links.tolist())) is not None:
        rank, behind = culprit, float(links[culprit] - links.median())
    return Slowest(rank, behind, cause)

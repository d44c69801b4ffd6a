"""Which virtual workers' gradients, of which version of the weights, enter an update: data that a step takes.

A synchronous run takes every virtual worker's gradient of the present weights in every step, so its journal follows
from the recipe and is not written. A run that leaves out late work, or mixes ages, depends on time; its journal makes
it repeatable: recipe and journal decide the result.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Contribution:
    """One virtual worker's gradient in an update."""

    worker: int
    """of 0..V-1"""
    version: int
    """steps done when the weights were made that its passes used"""


@dataclass(frozen=True)
class JournalEntry:
    """One update."""

    step: int
    contributions: tuple[Contribution, ...]

    def workers(self) -> frozenset[int]:
        """The virtual workers that take part."""
        return frozenset(contribution.worker for contribution in self.contributions)


def synchronous(step: int, virtual_workers: int) -> JournalEntry:
    """Every virtual worker once, of the weights of this very step.

    >>> synchronous(step=7, virtual_workers=2).contributions[1]
    Contribution(worker=1, version=7)
    """
    return JournalEntry(step, tuple(Contribution(worker, step) for worker in range(virtual_workers)))

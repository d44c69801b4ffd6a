"""Silent data corruption, found before it enters the weights: a share of the work is computed twice, on two ranks.

Any rank can compute any virtual worker, and must get the same integers. So some virtual workers of a step are computed
again on another rank, and 64-bit hashes of the integers (`gradients.integer_hash`) are compared before the step is
accepted. Where they differ a third rank computes too, and the one that stands alone is named. Ours; that processors
compute wrongly in silence is told by Hochschild et al., "Cores that don't count" (HotOS 2021).

Which ones: a *turn* is the n-th virtual worker of every rank. A keyed draw takes a share of a step's turns, and the
virtual workers of such a turn are computed again by the ranks that are a keyed distance further. So all ranks audit at
the same time, none waits for another, and each audits and is audited as often as any other.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..comm.base import AllReduce, CommError, Work
from ..comm.groups import Group
from ..errors import CorruptionError, RunError, UserError
from ..gradients.integer_hash import IntegerHash
from ..recipe.runtime_options import RuntimeOptions
from ..recipe.schema import Recipe
from ..rng import AUDIT, keyed_integer, keyed_uniform
from .drift import named_with_host
from .membership import Membership

Again = Callable[[int], IntegerHash]
"""Computes a virtual worker of this step again: images, forward and backward; OSError or RunError without images."""

_SHIFT, _TURN = range(2)


@dataclass(frozen=True)
class Check:
    """A virtual worker that is computed twice."""

    worker: int
    owner: int
    """the place whose gradients enter the sum"""
    auditor: int
    """the place that computes them again"""


class Audit:
    """Decides what is audited, and compares.

    Args:
        share: Of the virtual workers that is computed twice, from 0 (none) to 1.
        seed: The recipe's.
        world: All ranks.
        allreduce: Over all ranks.
    """

    def __init__(self, share: float, seed: int, world: Group, allreduce: AllReduce) -> None:
        self._share, self._seed, self._world, self._allreduce = share, seed, world, allreduce
        self._hashes: dict[int, IntegerHash] = {}
        self._sent = torch.zeros(0, dtype=torch.int64)
        """of each check the hash by its owner, by its auditor, and whether this one could not read the images"""
        self._work: Work | None = None

    def checks(self, step: int, membership: Membership) -> list[Check]:
        """The virtual workers of a step that are computed twice, the same on every rank."""
        if not self._share:
            return []
        size, shares = len(membership.ranks), membership.shares
        turns = np.arange(max(map(len, shares)))
        taken = turns[keyed_uniform(AUDIT, self._seed, step, _TURN, turns) < self._share]
        shift = 1 + int(keyed_integer(size - 1, AUDIT, self._seed, step, _SHIFT))
        return [
            Check(workers[turn], owner, (owner + shift) % size)
            for turn in taken.tolist()
            for owner, workers in enumerate(shares)
            if turn < len(workers)
        ]

    def hash_of(self, step: int, worker: int, membership: Membership) -> IntegerHash | None:
        """What takes the integers of one of this rank's own virtual workers; None: it is not audited in this step."""
        if all(check.worker != worker for check in self.checks(step, membership)):
            return None
        self._hashes[worker] = IntegerHash(self._world.device)
        return self._hashes[worker]

    def start(self, step: int, membership: Membership, again: Again) -> None:
        """Computes this rank's part of the checks again, and sends the hashes; every rank calls it.

        It belongs behind the last backward pass of a rank's own virtual workers, whose gradients then travel meanwhile.
        """
        if self._work is not None:  # of an attempt at a step whose sums were not accepted
            self._work.wait()
            self._work = None
        checks = self.checks(step, membership)
        if not checks:
            return
        hashes = torch.zeros(3, len(checks), dtype=torch.int64)
        for number, check in enumerate(checks):
            if check.owner == self._world.rank:
                hashes[0, number] = self._hashes.pop(check.worker).value()
            if check.auditor == self._world.rank:
                hashes[1, number], hashes[2, number] = _value(again, check.worker)
        self._sent = hashes.to(self._world.device).reshape(-1)
        self._work = self._allreduce.start(self._sent)

    def compare(self, step: int, membership: Membership, again: Again) -> int:
        """Compares what all ranks sent with `start`, before a step is accepted; every rank calls it.

        Returns:
            The number of virtual workers that were computed twice.

        Raises:
            CorruptionError: Two ranks found other integers. Every rank raises it, naming rank and host.
            RunError: The images can't be read a second time.
        """
        if self._work is None:
            return 0
        self._work.wait()
        self._work = None
        checks = self.checks(step, membership)
        first, second, unread = self._sent.cpu().view(3, len(checks))
        if unread.any():
            raise RunError(f"step {step}: {int(unread.sum())} audited virtual workers' images can't be read again")
        wrong = (first != second).nonzero().flatten().tolist()
        if wrong:
            self._settle(step, checks[wrong[0]], int(first[wrong[0]]), int(second[wrong[0]]), again)
        return len(checks)

    def _settle(self, step: int, check: Check, first: int, second: int, again: Again) -> None:
        """Asks a third rank, and raises what it finds."""
        pair, size = [check.owner, check.auditor], self._world.size
        what = f"step {step}: {{}} other integers than {{}} for the same virtual worker ({check.worker})"
        remedy = "; take the machine out and give the same command again: the last checkpoint is good"
        third = next((place for place in range(size) if place not in pair), None)
        if third is None:
            one, two = map(self._name, pair)
            raise CorruptionError(
                f"{what.format(f'{one} found', two)}: one of them computes wrongly, and it takes a third rank to say "
                f"which{remedy}"
            )
        answer = torch.zeros(2, dtype=torch.int64, device=self._world.device)
        if third == self._world.rank:
            answer.copy_(torch.tensor(_value(again, check.worker)))
        try:
            self._allreduce.start(answer).wait()
        except CommError as error:  # the step must not be taken by those who are left: one of them may be the wrong one
            two = " and ".join(f"rank {self._world.ranks[place]}" for place in pair)
            raise CorruptionError(
                f"step {step}: {two} found other integers for the same virtual worker ({check.worker}), and ranks "
                f"were lost before a third could say which is right{remedy}"
            ) from error
        value, unread = answer.tolist()
        alone = [place for place, found in zip(pair, (first, second), strict=True) if found != value or unread]
        names = [self._name(place) for place in [*alone, *(place for place in (*pair, third) if place not in alone)]]
        if len(alone) > 1:
            raise CorruptionError(f"{what.format(', '.join(names) + ' each found', 'the others')}{remedy}")
        raise CorruptionError(
            f"{what.format(f'{names[0]} computes wrongly: it found', f'{names[1]} and {names[2]}')}{remedy}"
        )

    def _name(self, place: int) -> str:
        return named_with_host(self._world, place)


def check_audit(options: RuntimeOptions, recipe: Recipe, ranks: int) -> None:
    """UserError where virtual workers can't be computed twice with the same integers."""
    if not options.audit:
        return
    asked = f"audit = {options.audit:g}"
    if ranks == 1:
        raise UserError(f"{asked}: one rank has no other to check it; use at least 2 workers, better 3")
    if recipe.reduction != "exact":
        raise UserError(f"{asked}: only integers can be compared, the recipe has reduction: {recipe.reduction}")
    if recipe.column_blocks > 1:
        raise UserError(f"{asked}: layers in column blocks can't be audited; set column_blocks: 1")
    if options.mixed:
        raise UserError(f"{asked}: ranks under mixed conditions round differently; leave out audit or mixed")


def _value(again: Again, worker: int) -> tuple[int, int]:
    """The hash of a virtual worker that this rank computes again, and 0; or 0 and 1 where it can't read the images."""
    try:
        return again(worker).value(), 0
    except (OSError, RunError):  # of this rank alone: the others must learn of it before any of them ends
        return 0, 1

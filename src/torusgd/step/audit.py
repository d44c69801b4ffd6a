"""Silent data corruption, found before it enters the weights: a share of the work is computed twice, on two ranks.

Any rank can compute any virtual worker, and must get the same integers. So some virtual workers of a step are computed
again on another rank, and 64-bit hashes of the integers (`gradients.integer_hash`) are compared before the step is
accepted. Where they differ a third rank computes too, and the one that stands alone is named. Ours; that processors
compute wrongly in silence is reported by Hochschild et al., "Cores that don't count" (HotOS 2021).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm.base import AllReduce, CommError, Work
from ..comm.groups import Group
from ..errors import CorruptionError, RunError
from ..gradients.integer_hash import IntegerHash
from ..rng import AUDIT, keyed_hash, keyed_integer, keyed_uniform
from .control_vector import ControlVector
from .drift import named_with_host
from .membership import Membership
from .watch import StepView, StepWatch

_REMEDY = "; take the machine out and give the same command again: the last checkpoint is good"
_SHIFT, _TURN, _KEY = range(3)


@dataclass(frozen=True)
class Check:
    """A virtual worker that is computed twice, with the indices of two ranks."""

    worker: int
    owner: int
    """rank whose gradients enter the sum"""
    auditor: int
    """rank that computes them again"""


class Audit(StepWatch):
    """Decides what is audited, a `share` of the virtual workers from 0 (none) to 1, and compares."""

    def __init__(self, share: float, seed: int, world: Group, allreduce: AllReduce) -> None:
        self._share, self._seed, self._world, self._allreduce = share, seed, world, allreduce
        self._step = -1
        # The hashes of this rank's virtual workers that are audited in this step, and of those that it computed again.
        self._own: dict[int, IntegerHash] = {}
        self._again: dict[int, int] = {}
        # The keyed sum of the hashes, how many were compared, and how many could not be for want of images.
        self._sent = torch.zeros(0, dtype=torch.int64)
        self._work: Work | None = None
        self._compared = 0

    def due(self, step: int) -> bool:
        return self._share > 0

    def reads_too(self, step: int, membership: Membership) -> list[int]:
        if not self._share:
            return []
        turns, distance = self._turns(step, membership)
        owner = (membership.me - distance) % len(membership.ranks)
        return _at(turns, membership.shares[owner])

    def before_worker(self, step: int, worker: int, membership: Membership) -> IntegerHash | None:
        if step != self._step:  # the last one may have ended without a comparison
            self._step, self._own = step, {}
        if not self._share or worker not in _at(self._turns(step, membership)[0], membership.mine):
            return None
        self._own[worker] = IntegerHash(self._world.device)
        return self._own[worker]

    def after_passes(self, view: StepView) -> None:
        """Computes this rank's part of the step's audit, and sends what it found, while its gradients travel."""
        step, membership = view.step.index, view.membership
        if self._work is not None:  # of an attempt at a step whose sums were not accepted
            self._work.wait()
            self._work = None
        if not self._share or not self._turns(step, membership)[0]:
            return
        unread, self._again = 0, {}
        if not view.is_stopping:
            for worker in self.reads_too(step, membership):
                self._again[worker], failed = _value(view.recompute, worker)
                unread += failed
        own = {worker: found.value() for worker, found in self._own.items()}
        # What travels in a good step is one number, whatever the number of ranks: each rank adds the hashes of its own
        # virtual workers, each times an odd key, and takes away those of the ones that it computed again. All in all
        # they cancel out, modulo 2**64. One hash that differs never does, and several do with a chance of 2**-64.
        balance = _keyed_sum(self._seed, step, own) - _keyed_sum(self._seed, step, self._again)
        balance = (balance + 2**63) % 2**64 - 2**63  # as int64 has it
        self._sent = torch.tensor([balance, len(own), unread], device=self._world.device)
        self._work = self._allreduce.start(self._sent)

    def before_accept(self, view: StepView, control: ControlVector) -> None:
        """Compares what all ranks sent after their passes.

        CorruptionError, on every rank, if two ranks found other integers: names rank and host. RunError if the images
        can't be read a second time.
        """
        step = view.step.index
        self._compared = 0
        if self._work is None or view.is_skipped:
            return
        self._work.wait()
        self._work = None
        balance, self._compared, unread = self._sent.tolist()
        if unread:
            raise RunError(f"step {step}: {unread} audited virtual workers' images can't be read again")
        if balance:  # only now all hashes are sent
            self._blame(step, *self._first_difference(step, view.membership), view.recompute)

    def after(self, view: StepView, control: ControlVector) -> Mapping[str, Any]:
        return {"audited": self._compared}

    def _turns(self, step: int, membership: Membership) -> tuple[list[int], int]:
        """The turns of a step that are audited, and how far from its owner a virtual worker is computed again."""
        # A turn is the n-th virtual worker of every rank. A keyed draw takes a share of a step's turns, and the virtual
        # workers of such a turn are computed again by the ranks that are a keyed distance further. So all ranks audit
        # at the same time, none waits for another, and each audits and is audited as often as any other.
        return _draw(self._share, self._seed, step, membership.most, len(membership.ranks))

    def _first_difference(self, step: int, membership: Membership) -> tuple[Check, int, int]:
        """The first virtual worker of which two ranks found different hashes, and these; all hashes are sent for it."""
        turns, distance = self._turns(step, membership)
        checks = [
            Check(worker, owner, (owner + distance) % self._world.size)
            for owner, workers in enumerate(membership.shares)
            for worker in _at(turns, workers)
        ]
        hashes = torch.zeros(2, len(checks), dtype=torch.int64)
        for number, check in enumerate(checks):
            if check.owner == self._world.rank:
                hashes[0, number] = self._own[check.worker].value()
            if check.auditor == self._world.rank:
                hashes[1, number] = self._again[check.worker]
        sent = hashes.to(self._world.device).reshape(-1)
        self._sum(
            sent, f"step {step}: two ranks found other integers for the same virtual worker", "they could be named"
        )
        first, second = sent.cpu().view(2, -1)
        number = int((first != second).nonzero()[0])
        return checks[number], int(first[number]), int(second[number])

    def _sum(self, tensor: Tensor, what: str, purpose: str) -> None:
        """Sums over ranks; if some are lost, those that are left must not take the step: one may be the wrong one."""
        try:
            self._allreduce.start(tensor).wait()
        except CommError as error:
            raise CorruptionError(f"{what}, and ranks were lost before {purpose}{_REMEDY}") from error

    def _blame(self, step: int, check: Check, first: int, second: int, recompute: Callable[[int], IntegerHash]) -> None:
        """Has a third rank compute the virtual worker, and raises what it finds."""
        pair, size = [check.owner, check.auditor], self._world.size
        what = f"step {step}: {{}} other integers than {{}} for the same virtual worker ({check.worker})"
        third = next((index for index in range(size) if index not in pair), None)
        if third is None:
            one, two = (named_with_host(self._world, index) for index in pair)
            raise CorruptionError(
                f"{what.format(f'{one} found', two)}: one of them computes wrongly, and it takes a third rank to say "
                f"which{_REMEDY}"
            )
        answer = torch.zeros(2, dtype=torch.int64, device=self._world.device)
        if third == self._world.rank:
            answer.copy_(torch.tensor(_value(recompute, check.worker)))
        two = " and ".join(f"rank {self._world.ranks[index]}" for index in pair)
        both = f"step {step}: {two} found other integers for the same virtual worker ({check.worker})"
        self._sum(answer, both, "a third could say which is right")
        value, unread = answer.tolist()
        alone = [index for index, found in zip(pair, (first, second), strict=True) if found != value or unread]
        others = [index for index in (*pair, third) if index not in alone]
        names = [named_with_host(self._world, index) for index in [*alone, *others]]
        if len(alone) > 1:
            raise CorruptionError(f"{what.format(', '.join(names) + ' each found', 'the others')}{_REMEDY}")
        raise CorruptionError(
            f"{what.format(f'{names[0]} computes wrongly: it found', f'{names[1]} and {names[2]}')}{_REMEDY}"
        )


def _value(recompute: Callable[[int], IntegerHash], worker: int) -> tuple[int, int]:
    """The hash of a virtual worker that this rank computes again, and 0; or 0 and 1 if it can't read the images."""
    try:
        return recompute(worker).value(), 0
    except (OSError, RunError):  # of this rank alone: the others must learn of it before any of them ends
        return 0, 1


# Cached: the draw of a step is wanted several times a step, and by the loader for the steps that follow.
@lru_cache(maxsize=64)
def _draw(share: float, seed: int, step: int, most: int, ranks: int) -> tuple[list[int], int]:
    turns = np.arange(most)
    distance = 1 + int(keyed_integer(ranks - 1, AUDIT, seed, step, _SHIFT))
    return turns[keyed_uniform(AUDIT, seed, step, _TURN, turns) < share].tolist(), distance


def _at(turns: Sequence[int], workers: Sequence[int]) -> list[int]:
    """Of a rank's virtual workers those in these turns."""
    return [workers[turn] for turn in turns if turn < len(workers)]


def _keyed_sum(seed: int, step: int, hashes: Mapping[int, int]) -> int:
    """The sum of hashes, each times an odd key of its virtual worker and the step."""
    keys = keyed_hash(AUDIT, seed, step, _KEY, np.array([*hashes], dtype=np.int64)) | np.uint64(1)
    return sum(key * value for key, value in zip(keys.tolist(), hashes.values(), strict=True))

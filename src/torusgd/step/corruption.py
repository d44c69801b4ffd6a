"""Silent corruption, found before it enters the weights or a checkpoint: work computed twice, and weights compared.

Any rank can compute any virtual worker, and must get the same integers. So some virtual workers of a step are computed
again on another rank, and 64-bit hashes of the integers (`gradients.integer_hash`) are compared before the step is
accepted (`Audit`). Where they differ a third rank computes too, and the one that stands alone is named. Ours; that
processors compute wrongly in silence is reported by Hochschild et al., "Cores that don't count" (HotOS 2021).

All ranks compute the same update from the same sums, until a bit flips. So every few steps each rank's 64-bit
fingerprint of what it holds travels in the step's first message, and once more before each checkpoint (`DriftWatch`).
In a sharded update the gather overwrites a rank's copy of the others' shards after every step: a flip there is found in
steps that are compared only, and one in a rank's own shard, which reaches all ranks alike, never.
"""

import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..comm.base import AllReduce, CommError, Work
from ..comm.groups import Group
from ..errors import CorruptionError, RunError
from ..gradients.integer_hash import IntegerHash, keyed_sum, odd_keys
from ..gradients.layout import Slot
from ..rng import AUDIT, DRIFT, keyed_hash, keyed_integer, keyed_uniform
from .control_vector import NO_WORDS, ControlVector
from .membership import Membership
from .watch import StepView, StepWatch

_MOST_NAMED = 8
# After so many images a comparison costs a thousandth of them, an update counting as _OF_UPDATE of them.
_IMAGES = 15_000
_OF_UPDATE = 100
_REMEDY = "; take the machine out and give the same command again: the last checkpoint is good"
_SHIFT, _TURN, _KEY = range(3)


class DriftWatch(StepWatch):
    """Compares the reducer's `slots`, and `others` that all ranks hold alike, every so many steps (0: never)."""

    name = "fingerprints"

    def __init__(
        self,
        slots: Sequence[Slot],
        others: Sequence[Tensor],
        world: Group,
        every: int,
        wait_weights: Callable[[], object] = lambda: None,
    ) -> None:
        self._world, self._wait_weights = world, wait_weights
        self._every = every if world.size > 1 else 0
        # Of M ranks that share a layer's column blocks, each holds the same as every M-th rank after it.
        self._held: dict[int, list[Tensor]] = {1: [tensor for tensor in others if tensor.numel()]}
        for slot in slots:
            held = self._held.setdefault(slot.parallel, [])
            held += [slot.tensor] if slot.held and slot.tensor.numel() else []
        longest = max((t.numel() for held in self._held.values() for t in held), default=1)
        # On a CPU as many as stay in the cache.
        self._run = min(longest, 1 << 16 if world.device.type == "cpu" else 1 << 21)
        many = max(sum(-(-t.numel() // self._run) for t in held) for held in self._held.values())
        self._keys = odd_keys(DRIFT, 0, -(-self._run // 2)).to(world.device)
        self._run_keys = odd_keys(DRIFT, 1, many).to(world.device)
        self.words = world.size * len(self._held)

    def due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def before_send(self, view: StepView) -> Tensor:
        return self._section() if self.due(view.step.index) else NO_WORDS

    def check(self, view: StepView, control: ControlVector) -> None:
        """CorruptionError, on every rank, if fingerprints differ: names the minority, or all if there is none."""
        section = control.section(self.name)
        if section.numel():
            self._compare(section, view.step.index, None)

    def _compare(self, message: Tensor, step: int, members: Collection[int] | None) -> None:
        columns = message.view(self._world.size, -1).T.tolist()
        suspects, is_clear = set[int](), True
        compared = range(self._world.size) if members is None else members
        for parallel, found in zip(self._held, columns, strict=True):
            for first in range(parallel):
                odd, by_majority = differing({n: found[n] for n in sorted(compared) if n % parallel == first})
                suspects |= odd
                is_clear &= by_majority
        if suspects:
            raise CorruptionError(self._blamed(sorted(suspects), is_clear, step))

    def compare(self, steps: int, allreduce: AllReduce, members: Collection[int] | None = None) -> None:
        """Compares at once; every rank calls it, `members` (None: all) should hold the same. Raises as `check`."""
        if self._every:
            message = self._section()
            allreduce.start(message).wait()
            self._compare(message.cpu(), steps, members)

    def _section(self) -> Tensor:
        self._wait_weights()
        rows = torch.zeros(self._world.size, len(self._held), dtype=torch.int64, device=self._world.device)
        rows[self._world.rank] = torch.stack([self._fingerprint(held) for held in self._held.values()])
        return rows.reshape(-1)

    def _fingerprint(self, tensors: Sequence[Tensor]) -> Tensor:
        # A sum modulo 2**64 over the 64-bit words of all tensors, each times an odd random factor of its position: no
        # order of the additions changes it, and a single flipped bit always does.
        runs = (run for tensor in tensors for run in tensor.detach().reshape(-1).split(self._run))
        sums = [keyed_sum(run, self._keys) for run in runs]
        if not sums:
            return torch.zeros((), dtype=torch.int64, device=self._world.device)
        return (torch.stack(sums) * self._run_keys[: len(sums)]).sum()

    def _blamed(self, suspects: Sequence[int], is_clear: bool, step: int) -> str:
        who = ", ".join(named_with_host(self._world, index) for index in suspects[:_MOST_NAMED])
        who += f" and {len(suspects) - _MOST_NAMED} more" if len(suspects) > _MOST_NAMED else ""
        what = "other weights than most ranks: its memory or processor has failed" if is_clear else (
            "different weights, and no majority says which are right: a memory or processor has failed"
        )  # fmt: skip
        verb = "hold" if len(suspects) > 1 else "holds"
        remedy = "leave that machine out and give the same command again, which goes on from the last checkpoint"
        return f"step {step}: {who} {verb} {what}; nothing of it was saved: {remedy}"


def named_with_host(world: Group, index: int) -> str:
    """A rank to blame, for people; every rank calls it. Without its host if ranks are lost at that very moment."""
    name = f"rank {world.ranks[index]}"
    try:
        return f"{name} on {world.broadcast_text(socket.gethostname(), index)}"
    except CommError:  # a corruption must be reported all the same: else the ranks that are left would go on with it
        return name


def steps_between(images: int) -> int:
    """Steps between comparisons that cost less than a thousandth of the time, for a rank's images of a step.

    >>> [steps_between(images) for images in (1, 32, 1000, 20_000)]
    [149, 114, 14, 1]
    """
    # A comparison reads each weight once. A step does at least ten times as much with it when it rounds, sums and
    # updates, and each image multiplies by it three times or more. So neither the network's size nor the machine's
    # speed matters, and no clock is read: all ranks find the same.
    return -(-_IMAGES // (_OF_UPDATE + images))


def differing(fingerprints: dict[int, int]) -> tuple[set[int], bool]:
    """Who differs from the majority, and whether there is one; without one, all that could be wrong."""
    ((usual, count),) = Counter(fingerprints.values()).most_common(1)
    if 2 * count > len(fingerprints):
        return {index for index, value in fingerprints.items() if value != usual}, True
    return set(fingerprints), False


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
        """CorruptionError, on every rank, if two ranks found other integers; RunError if images can't be read again."""
        step, self._compared = view.step.index, 0
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
        # The turns of a step that are audited, and how far from its owner a virtual worker is computed again.
        # A turn is the n-th virtual worker of every rank. A keyed draw takes a share of a step's turns, and the virtual
        # workers of such a turn are computed again by the ranks that are a keyed distance further. So all ranks audit
        # at the same time, none waits for another, and each audits and is audited as often as any other.
        return _draw(self._share, self._seed, step, max(membership.counts), len(membership.ranks))

    def _first_difference(self, step: int, membership: Membership) -> tuple[int, dict[int, int]]:
        """The first virtual worker of which two ranks found different hashes, and these by rank index, owner first."""
        (turns, distance), size = self._turns(step, membership), self._world.size
        checks = [(owner, worker) for owner, mine in enumerate(membership.shares) for worker in _at(turns, mine)]
        hashes = torch.zeros(2, len(checks), dtype=torch.int64)
        for number, (owner, worker) in enumerate(checks):
            if owner == self._world.rank:
                hashes[0, number] = self._own[worker].value()
            if (owner + distance) % size == self._world.rank:
                hashes[1, number] = self._again[worker]
        sent, what = hashes.to(self._world.device).reshape(-1), "two ranks found other integers"
        self._sum(sent, f"step {step}: {what} for the same virtual worker", "they could be named")
        first, second = sent.cpu().view(2, -1)
        number = int((first != second).nonzero()[0])
        owner, worker = checks[number]
        return worker, {owner: int(first[number]), (owner + distance) % size: int(second[number])}

    def _sum(self, tensor: Tensor, what: str, purpose: str) -> None:
        """Sums over ranks; if some are lost, those that are left must not take the step: one may be the wrong one."""
        try:
            self._allreduce.start(tensor).wait()
        except CommError as error:
            raise CorruptionError(f"{what}, and ranks were lost before {purpose}{_REMEDY}") from error

    def _blame(self, step: int, worker: int, pair: dict[int, int], recompute: Callable[[int], IntegerHash]) -> None:
        what = f"step {step}: {{}} other integers than {{}} for the same virtual worker ({worker})"
        third = next((index for index in range(self._world.size) if index not in pair), None)
        if third is None:
            one, two = (named_with_host(self._world, index) for index in pair)
            who = f"one of them computes wrongly, and it takes a third rank to say which{_REMEDY}"
            raise CorruptionError(f"{what.format(f'{one} found', two)}: {who}")
        found = _value(recompute, worker) if third == self._world.rank else (0, 0)
        answer = torch.tensor(found, device=self._world.device)
        two = " and ".join(f"rank {self._world.ranks[index]}" for index in pair)
        both = f"step {step}: {two} found other integers for the same virtual worker ({worker})"
        self._sum(answer, both, "a third could say which is right")
        value, unread = answer.tolist()
        alone = [index for index, own in pair.items() if own != value or unread]
        others = [index for index in (*pair, third) if index not in alone]
        names = [named_with_host(self._world, index) for index in [*alone, *others]]
        if len(alone) > 1:
            raise CorruptionError(f"{what.format(', '.join(names) + ' each found', 'the others')}{_REMEDY}")
        wrong, right = f"{names[0]} computes wrongly: it found", f"{names[1]} and {names[2]}"
        raise CorruptionError(f"{what.format(wrong, right)}{_REMEDY}")


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
    # Each hash times an odd key of its virtual worker and the step.
    keys = keyed_hash(AUDIT, seed, step, _KEY, np.array([*hashes], dtype=np.int64)) | np.uint64(1)
    return sum(key * value for key, value in zip(keys.tolist(), hashes.values(), strict=True))

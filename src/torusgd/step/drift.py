"""Drift: ranks that should hold the same weights and do not, found within a few steps and named.

All ranks compute the same update from the same sums, so what they hold in common has the same bits. A flipped bit of a
memory, or a processor that computes wrongly, ends that in silence: from then on one rank's gradients are of other
weights. So every few steps each rank makes a 64-bit fingerprint of what it holds, which travels in the step's first
message, and before each checkpoint they are compared once more, so that none is written from weights that differ.

What it can't see: in a sharded update the gather overwrites a rank's copy of the others' shards after every step, so a
flip there is found in steps that are compared only, and one in a rank's own shard reaches all ranks alike.
"""

import socket
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ..comm.base import AllReduce, CommError
from ..comm.groups import Group
from ..errors import CorruptionError
from ..gradients.integer_hash import keyed_sum, odd_keys
from ..gradients.layout import Slot
from ..rng import DRIFT
from .control_vector import NO_WORDS, ControlVector
from .watch import StepView, StepWatch

_MOST_NAMED = 8
# After so many images a comparison costs a thousandth of them, an update counting as _OF_UPDATE of them.
_IMAGES = 15_000
_OF_UPDATE = 100


class DriftWatch(StepWatch):
    """Compares what the ranks hold in common, every so many steps (0: never). Every rank makes one.

    What this rank holds of the reducer's `slots` is compared with the ranks that hold the same; `others` are more
    float32 tensors that all ranks hold alike. `wait_weights` returns when the new weights of the last step are there.
    """

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
        compared = set(range(self._world.size) if members is None else members)
        for parallel, found in zip(self._held, columns, strict=True):
            for first in range(parallel):
                group = compared.intersection(range(first, self._world.size, parallel))
                odd, by_majority = differing({index: found[index] for index in sorted(group)})
                suspects |= odd
                is_clear &= by_majority
        if suspects:
            raise CorruptionError(self._blamed(sorted(suspects), is_clear, step))

    def compare(self, steps: int, allreduce: AllReduce, members: Collection[int] | None = None) -> None:
        """Compares at once, before what so many steps left is saved; every rank calls it. Raises as `check`.

        `members` are the indices of the ranks that should hold the same; None: all. Others only without column blocks.
        """
        if self._every:
            message = self._section()
            allreduce.start(message).wait()
            self._compare(message.cpu(), steps, members)

    def _section(self) -> Tensor:
        """int64: the fingerprints of all ranks, of which this rank fills in its own."""
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
        named = [named_with_host(self._world, index) for index in suspects[:_MOST_NAMED]]
        more = f" and {len(suspects) - _MOST_NAMED} more" if len(suspects) > _MOST_NAMED else ""
        who = ", ".join(named) + more
        what = "other weights than most ranks: its memory or processor has failed" if is_clear else (
            "different weights, and no majority says which are right: a memory or processor has failed"
        )  # fmt: skip
        verb = "hold" if len(suspects) > 1 else "holds"
        return (
            f"step {step}: {who} {verb} {what}; nothing of it was saved: leave that machine out and give the same "
            "command again, which goes on from the last checkpoint"
        )


def named_with_host(world: Group, index: int) -> str:
    """A rank to blame, for people; every rank calls it. Without its host if ranks are lost at that very moment."""
    name = f"rank {world.ranks[index]}"
    try:
        return f"{name} on {world.broadcast_text(socket.gethostname(), index)}"
    except CommError:  # a corruption must be reported all the same: else the ranks that are left would go on with it
        return name


def steps_between(images: int) -> int:
    """Steps from one comparison to the next that cost less than a thousandth of a step's time, by measurement.

    `images` are those that a rank computes in a step (ours; docs/benchmarks.md has what it costs).

    >>> [steps_between(images) for images in (1, 32, 1000, 20_000)]
    [149, 114, 14, 1]
    """
    # A comparison reads each weight once. A step does at least ten times as much with it when it rounds, sums and
    # updates, and each image multiplies by it three times or more. So neither the network's size nor the machine's
    # speed matters, and no clock is read: all ranks find the same.
    return -(-_IMAGES // (_OF_UPDATE + images))


def differing(fingerprints: dict[int, int]) -> tuple[set[int], bool]:
    """Who differs from the majority, and whether there is one; without one, all that could be wrong.

    >>> differing({0: 7, 1: 7, 2: 8}), differing({0: 7, 1: 8})
    (({2}, True), ({0, 1}, False))
    """
    ((usual, count),) = Counter(fingerprints.values()).most_common(1)
    if 2 * count > len(fingerprints):
        return {index for index, value in fingerprints.items() if value != usual}, True
    return set(fingerprints), False

"""Which gradients travel together, and where each tensor lies: slots in sending order, buckets, shards, norm blocks.

A slot is a tensor whose gradient is summed with one scale: a parameter, or a column block of one. Slots stand in the
order in which backward completes them, which is the order in which they are sent; a bucket is a run of slots that
travels as one message. Buckets change no bit of an exact sum, whose scales are a slot's and not a bucket's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from ..comm.tuning.profile import Profile, hidden, waited
from ..optim.norms import BLOCK

# MiB of 4-byte elements, the number of tensors in each bucket, Fujitsu's groups, or `auto`.
BucketRule = Literal["auto", "cubic"] | float | tuple[int, ...]
USUAL_MIB = 4.0  # size of a bucket without a measurement; with `auto`, during the first steps
# On a GPU, as in DistributedDataParallel: its host takes 0.2 ms to launch what a bucket needs, whatever its size.
GPU_MIB = 25.0
_BYTES = 4

Span = tuple[int, int]


@dataclass(frozen=True)
class Bucket:
    """A run of tensors that travels together, one after another: slots first..stop-1, and their sizes."""

    first: int
    numels: tuple[int, ...]

    @cached_property
    def stop(self) -> int:
        return self.first + len(self.numels)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return tuple(accumulate(self.numels[:-1], initial=0))

    @cached_property
    def length(self) -> int:
        return sum(self.numels)

    def moved(self, slots: int) -> "Bucket":
        """The same tensors, so many places further on in sending order."""
        return replace(self, first=self.first + slots)

    def views(self, message: Tensor) -> list[Tensor]:
        """Each tensor's run of a message of this bucket."""
        return list(message[: self.length].split(self.numels))

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Offsets at which the message may be cut into shards: the edges of norm blocks, so that none is split.

        >>> Bucket(first=0, numels=(5000, 100)).cuts
        (0, 4096, 5000, 5100)
        """
        inner = {offset + i for offset, n in zip(self.offsets, self.numels, strict=True) for i in range(0, n, BLOCK)}
        return (*sorted(inner), self.length)

    def spans(self, low: int, high: int) -> list[Span]:
        """The elements of each tensor within [low, high) of the message; (0, 0) if there are none."""
        spans = []
        for offset, numel in zip(self.offsets, self.numels, strict=True):
            begin, end = max(low - offset, 0), min(high - offset, numel)
            spans.append((begin, end) if begin < end else (0, 0))
        return spans


class Slot(NamedTuple):
    """A tensor that is summed with one scale, and the ranks that sum it."""

    name: str
    parameter: str
    tensor: Tensor  # the parameter itself, or a view of some of its rows
    # Number of ranks that share the column blocks: 1 sums over all ranks, M over the ranks with the same columns.
    parallel: int = 1
    # Index of a layer in column blocks, whose gradients arrive one layer after another; None: from autograd.
    layer: int | None = None
    held: bool = True  # whether this rank computes, sums and updates it
    is_owner: bool = True  # whether this rank reports it to the others, of all ranks of a group that hold it
    is_wide: bool = False  # whether it travels as float32, in buckets of its own, while the others travel in 16 bits
    completed: int = 0  # index in the order of backward; the order of sending differs if wide slots are sent last


class ParameterLayout:
    """Slots over all ranks, and the buckets of those that this rank holds.

    `slots` are all in sending order, the same on every rank but for `held` and `is_owner`; `buckets` are of the held
    slots, which have indices of their own.
    """

    def __init__(self, slots: Sequence[Slot], buckets: Sequence[Bucket]) -> None:
        self.slots, self.buckets = tuple(slots), tuple(buckets)
        self.places = tuple(number for number, slot in enumerate(slots) if slot.held)  # among all slots
        self.held = tuple(slots[place] for place in self.places)  # what this rank sums, in sending order
        self.is_whole = len(self.held) == len(slots)
        self.bucket_of = tuple(index for index, bucket in enumerate(buckets) for _ in bucket.numels)
        columns = sum(slot.layer is not None for slot in slots)
        # The numbers of slots in column blocks and of other slots; each kind has a largest gradient of its own.
        self.sections = tuple(count for count in (columns, len(slots) - columns) if count)
        self.parallel = tuple(self.held[bucket.first].parallel for bucket in buckets)  # that of all slots of a bucket


def rule_on(is_gpu: bool, rule: BucketRule) -> BucketRule:
    """The rule that `auto` stands for on a GPU; on a CPU it is one of its own."""
    return GPU_MIB if is_gpu and rule == "auto" else rule


def lay_out_slots(slots: Sequence[Slot], rule: BucketRule) -> ParameterLayout:
    held = [slot for slot in slots if slot.held]
    buckets: list[Bucket] = []
    # No bucket holds two layers in column blocks: their gradients come in turn, and the first would wait for the last.
    for layer in dict.fromkeys(slot.layer for slot in held):
        part = sorted((slot for slot in held if slot.layer == layer), key=lambda slot: slot.completed)
        numels, is_wide = [slot.tensor.numel() for slot in part], [slot.is_wide for slot in part]
        cut = lay_out_wide_last(rule, numels, is_wide) if layer is None else plan_buckets(numels, most_elements(rule))
        sent = buckets[-1].stop if buckets else 0
        buckets += [bucket.moved(sent) for bucket in cut]
    return ParameterLayout(slots, buckets)


def lay_out_wide_last(rule: BucketRule, numels: Sequence[int], is_wide: Sequence[bool]) -> list[Bucket]:
    """The buckets, in sending order, of tensors in the order of backward, of which the wide ones are sent last."""
    narrow, wide = ([n for n, w in zip(numels, is_wide, strict=True) if w == kind] for kind in (False, True))
    if rule == "cubic" or isinstance(rule, tuple):
        # A rule that counts tensors counts all of them, as Fujitsu's code does (`HOROVOD_FIXED_PAYLOAD=161`): the
        # narrow tensors of a group travel together, and all wide ones in one bucket. A size holds for both kinds alike.
        counts = [is_wide[b.first : b.stop].count(False) for b in lay_out(rule, numels)]
        first, last = group(counts, narrow), group((), wide)
    else:
        first, last = lay_out(rule, narrow), lay_out(rule, wide)
    return [*first, *(bucket.moved(len(narrow)) for bucket in last)]


def lay_out(rule: BucketRule, numels: Sequence[int]) -> list[Bucket]:
    """The buckets of tensors with so many elements each, in sending order.

    A number is a size in MiB. A list has the number of tensors of each bucket, from the network's output on; the rest
    is one more bucket. `cubic` has 3, 21, 57, ... tensors: bucket k ends with tensor 3 (k + 1)^3, as in Fujitsu's
    record (arXiv 1903.12650). `auto` begins with buckets of USUAL_MIB.
    """
    if rule == "cubic":
        return group([3 * (k + 1) ** 3 - 3 * k**3 for k in range(len(numels))], numels)
    if isinstance(rule, tuple):
        return group(rule, numels)
    return plan_buckets(numels, most_elements(rule))


def most_elements(rule: BucketRule) -> int:
    """Most elements of a bucket by a rule that gives its size; the usual number for other rules."""
    mib = rule if isinstance(rule, float | int) else USUAL_MIB
    return max(int(mib * 2**20) // _BYTES, 1)


def plan_buckets(numels: Sequence[int], limit: int) -> list[Bucket]:
    """Groups tensors, in sending order, into runs of at most `limit` elements (a larger tensor stands alone).

    >>> [(b.first, b.stop, b.length) for b in plan_buckets([4, 4, 9, 1], limit=8)]
    [(0, 2, 8), (2, 3, 9), (3, 4, 1)]
    """
    counts: list[int] = []
    length = limit + 1
    for numel in numels:
        if length + numel > limit:
            counts.append(0)
            length = 0
        counts[-1] += 1
        length += numel
    return group(counts, numels)


def group(counts: Sequence[int], numels: Sequence[int]) -> list[Bucket]:
    """Buckets of so many tensors each; the rest is one more bucket."""
    edges = [0, *accumulate(counts), len(numels)]
    cuts = sorted({edge for edge in edges if edge <= len(numels)})
    return [Bucket(first, tuple(numels[first:stop])) for first, stop in pairwise(cuts)]


def best_buckets(profile: Profile, numels: Sequence[int], ready: Sequence[float]) -> list[Bucket]:
    """The buckets with which the last sum ends earliest, each message's work counted; of equals the fewest.

    `ready` is when each tensor, in sending order, may leave, in seconds before (negative) or after the end of backward.
    """
    # Dynamic programming over the number of buckets and the last one's first tensor (ours): an earlier end of the
    # buckets before the last one is never worse, so that only the earliest end for each first tensor need be known.
    many, edges = len(numels), np.cumsum([0, *numels])
    leaves = np.maximum.accumulate(np.asarray(ready, dtype=float))
    took = _seconds_by_length(profile, int(edges[-1]))(edges[None, 1:] - edges[:-1, None])
    took[np.tril_indices(many, -1)] = inf  # [first tensor, last tensor]
    # The part of a message's cost that does not depend on its size: all layouts send the same bytes.
    message = hidden(profile, 1)
    ends = np.array([-inf, *[inf] * (many - 1)])
    best, cut = inf, [0, many]
    begins: list[np.ndarray] = []
    for count in range(1, many + 1):
        # No layout of this many buckets or more can do better than to send the last tensor alone at once.
        if leaves[-1] + took[-1, -1] + count * message >= best:
            break
        # A bucket begins when the one before it has ended and its own last tensor is ready.
        options = np.maximum(ends[:, None], leaves[None, :]) + took
        begins.append(options.argmin(axis=0))
        last = options.min(axis=0)
        ends = np.array([inf, *last[:-1]])
        if last[-1] + count * message < best:
            best, cut = last[-1] + count * message, [many]
            for firsts in reversed(begins):  # back from the last bucket's first tensor
                cut.insert(0, int(firsts[cut[0] - 1]))
    return group([stop - first for first, stop in pairwise(cut)], numels)


def finish(profile: Profile, buckets: Sequence[Bucket], ready: Sequence[float]) -> float:
    """The end of the last sum, in seconds after the end of backward, if the buckets leave one after another."""
    seconds, end = _seconds_by_length(profile, sum(b.length for b in buckets)), -inf
    for bucket in buckets:
        end = max(end, *ready[: bucket.stop]) + float(seconds(np.array(bucket.length)))
    return end


def _seconds_by_length(profile: Profile, largest: int) -> Callable[[np.ndarray], np.ndarray]:
    # Seconds of an all-reduce by its elements: linear between the profile's times at powers of two.
    lengths = [1 << power for power in range(8, max(largest, 256).bit_length() + 1)]
    # A longer message never takes less: noise of a timing is no reason for a larger bucket.
    seconds = list(accumulate((waited(profile, _BYTES * length) for length in lengths), max))
    return lambda elements: np.interp(elements, lengths, seconds)

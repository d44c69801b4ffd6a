"""Gradients leave in buckets while backward still runs: a static order, the wait at the end, and the redo of a step.

One reducer serves every way to spread the work. It sums *slots* (`layout.Slot`): a parameter that all ranks hold over
all ranks, a column block over those that hold it. With shards each rank gets back the sums of one shard of each bucket
only. The three combine: a column block's shards lie on the ranks that hold the block.

A step's life:

    1. `backward` runs the passes of this rank's virtual workers. Each gradient that becomes ready is added to its slot
       (`add`). During the last virtual worker, buckets leave in their order as soon as they are full (`_send_full`).
    2. `reduce` waits for the messages and finds the status, the same on every rank.
    3. A sum out of range is redone: the largest elements are measured over all ranks, and the passes run again.
       Nothing outside the reducer changes until a step is accepted.
    4. `apply_mean` writes the mean into the `grad` of this rank's tensors.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ..comm.allreduce import ShardCollectives
from ..comm.base import AllReduce, Work
from ..comm.groups import Group
from ..comm.monitor import DeviceClock
from ..comm.tuning.profile import Profile
from ..errors import RunError
from .float_sum import FloatGradientSum
from .integer_hash import IntegerHash
from .integer_sum import BucketedSum, GradientSum, IntegerGradientSum, SumReport, runs_of
from .layout import Bucket, BucketRule, ParameterLayout, Slot, Span, best_buckets, finish, group, lay_out_slots

MAX_ATTEMPTS = 3
REBUILD_STEPS = (1, 2, 3)  # steps of this process whose gradient times are used; step 0 warms up

T = TypeVar("T")
MakeSum = Callable[[ParameterLayout], GradientSum]


def exact_sum(
    make: type[IntegerGradientSum], addends: int, device: torch.device, layout: ParameterLayout
) -> IntegerGradientSum:
    """The sum of a layout's gradients over so many virtual workers, of a kind."""
    elements = sum(slot.tensor.numel() for slot in layout.slots)
    return make(layout.buckets, addends, device, layout.places, layout.sections, elements=elements)


class Channel(NamedTuple):
    """How the ranks that hold the same slots sum them: into whole buckets, or with `shards` into one shard each."""

    allreduce: AllReduce
    shards: ShardCollectives | None = None


class Reduced(NamedTuple, Generic[T]):
    """A step whose sums may be used, or hold inf or nan."""

    result: T  # of the last call of `backward`
    report: SumReport
    overflowed: list[str]  # slots whose sum left the range, before the step was redone
    redone: int


class Reducer:
    """Collects the gradients of a step, sums them over virtual workers and ranks, and gives the mean.

    Args:
        slots: All slots, in sending order, the same on every rank but for what each holds; float32, contiguous.
        reduction: `exact`, `float32`, `float16` or `bfloat16`; with column blocks `exact` only.
        addends: The most virtual workers of a step over all ranks.
        channels: By `Slot.parallel`, the ranks that hold the same slots; 1 is all ranks. All have shards or none.
        rule: Of the buckets' sizes, see `layout.lay_out`.
        to_host: Called for a step's status, and by its update for a norm.
        make_sum: Makes the sum of a layout's gradients; None: the usual one of `reduction`.
    """

    def __init__(
        self, slots: Sequence[Slot], reduction: str, addends: int, channels: Mapping[int, Channel],
        maximum_over_ranks: Callable[[Tensor], object], rule: BucketRule,
        to_host: Callable[[Tensor], Tensor] = Tensor.cpu, make_sum: MakeSum | None = None,
    ) -> None:  # fmt: skip
        self.to_host, self._make_sum = to_host, make_sum or self._usual_sum
        self._reduction, self._addends, self._channels = reduction, addends, channels
        self.is_sharded = channels[1].shards is not None  # whether each rank gets back a shard of each bucket only
        self._maximum_over_ranks = maximum_over_ranks
        self._device = slots[0].tensor.device
        self.names = [slot.name for slot in slots]
        self.clock = DeviceClock(self._device)  # of the two marks; to be set between two steps
        self.first_ready = self.last_ready = self.clock.mark()  # when this rank's buckets were ready to leave
        self._maxima = torch.zeros(len(slots), device=self._device)
        self._works: list[Work] = []
        self._trailers: Tensor | None = None
        self.is_measuring = False  # whether passes only look for the largest elements, before a first sum or a redo
        self.is_last = self._is_begun = self._is_hashing_only = False  # `is_last`: of the virtual worker that has begun
        self._hash: IntegerHash | None = None
        self.observe: Callable[[int, Tensor], object] | None = None  # of the virtual worker that has begun
        self.use_layout(lay_out_slots(slots, rule))

    def use_layout(self, layout: ParameterLayout) -> None:
        """Takes other buckets, between two steps and on all ranks; the scales stay. Not with shards."""
        state = self.sum.state() if hasattr(self, "sum") and not self.sum.needs_measure else None
        self.layout = layout
        # When each gradient of the last virtual worker was there (time.perf_counter), or on a GPU was launched.
        self.ready = [0.0] * len(layout.held)
        self.sum: GradientSum = self._make_sum(layout)
        if state is not None:
            self.sum.load_state(state)
        self._missing = [0] * len(layout.buckets)
        # Of each held slot the elements whose mean this rank gets; None: all.
        self.spans: list[Span] | None = [*self._own_spans()] if self.is_sharded else None
        # The held slots, or this rank's shards of them, flat; their `grad` takes the mean.
        self.owned: list[Tensor] = [slot.tensor for slot in layout.held]
        if self.spans is not None:
            self.owned = runs_of([slot.tensor.detach().view(-1) for slot in layout.held], self.spans)
        self.means = [torch.zeros_like(tensor) for tensor in self.owned]  # where `apply_mean` writes them

    def _usual_sum(self, layout: ParameterLayout) -> GradientSum:
        if self._reduction == "exact":
            make = IntegerGradientSum if self._device.type == "cpu" else BucketedSum
            return exact_sum(make, self._addends, self._device, layout)
        wide = [number for number, b in enumerate(layout.buckets) if layout.held[b.first].is_wide]
        return FloatGradientSum(layout.buckets, self._addends, self._device, getattr(torch, self._reduction), wide=wide)

    def _own_spans(self) -> Iterator[Span]:
        for index, bucket in enumerate(self.layout.buckets):
            shards = self.shards(index)
            yield from bucket.spans(*shards.span(shards.rank, bucket.length, bucket.cuts))

    def shards(self, bucket: int) -> ShardCollectives:
        """What cuts a bucket into the shards of the ranks that hold it."""
        shards = self._channels[self.layout.parallel[bucket]].shards
        assert shards is not None, "buckets are summed whole"
        return shards

    def reduce(self, backward: Callable[[], T], check: Callable[[T], object] = lambda result: None) -> Reduced[T]:
        """Sums the gradients of a step, measured and redone as often as a sum leaves its range.

        `backward` runs the passes of this rank's virtual workers, between `begin_worker` and `end_worker` each. `check`
        looks at what it returned once all messages have arrived; what `check` raises ends the step.
        """
        overflowed: list[str] = []
        if self.sum.needs_measure:
            self._measure(backward, check)
        for redone in range(MAX_ATTEMPTS):
            if not self._is_begun:
                self.begin()
            result = backward()
            # Gradient 7: all messages have arrived, and with them the same status on every rank.
            self.wait()
            report = self.sum.finish(self._trailers).read(self.to_host)
            check(result)
            if report.nonfinite or not report.overflow:
                return Reduced(result, report, overflowed, redone)
            overflowed += [self.names[slot] for slot in report.overflow]
            self._measure(backward, check)
        raise RunError(
            f"{overflowed[0]}: the gradient's sum leaves the integer range even at a freshly measured scale; this is a "
            "defect of torusgd, please report it"
        )

    def begin(self, measuring: bool = False) -> None:
        """Begins a step before `reduce`, for gradients that arrive earlier; `reduce` then goes on with them."""
        self.is_measuring, self._is_begun = measuring, not measuring
        self._works, self._trailers = [], None
        if measuring:
            self._maxima.zero_()
        self.sum.clear()
        for tensor in self.owned:
            tensor.grad = None  # the mean of the step before, to which autograd would add

    def begin_worker(
        self, last: bool, hash_into: IntegerHash | None = None, observe: Callable[[int, Tensor], object] | None = None
    ) -> None:
        """Begins a virtual worker's passes; `hash_into` takes its integers too, `observe` its gradients."""
        self._hash, self.observe = hash_into, observe
        self.is_last = last
        # The ranks of a group compute a layer in column blocks for all their virtual workers, one after the other.
        buckets = zip(self.layout.buckets, self.layout.parallel, strict=True)
        self._missing = [(b.stop - b.first) * parallel for b, parallel in buckets]

    def add(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient (float32) of a held slot by one virtual worker."""
        if self.is_measuring:
            most = self._maxima[self.layout.places[slot]]
            # A maximum over ranks treats nan otherwise than one within a rank; the step itself finds nan and inf.
            torch.maximum(most, gradient.abs().max().nan_to_num(0.0, 0.0, 0.0), out=most)
            return
        bucket, now = self.layout.bucket_of[slot], time.perf_counter()
        if self.observe is not None and not self._is_hashing_only:
            self.observe(slot, gradient)
        if self._hash is None:
            self.sum.add(bucket, slot, gradient)
        else:
            assert isinstance(self.sum, IntegerGradientSum), "only integers are hashed"
            if self._is_hashing_only:
                self.sum.only_hash(slot, gradient, self._hash)
                return
            self.sum.add(bucket, slot, gradient, self._hash)
        self.ready[slot] = now
        self._missing[bucket] -= 1
        b = self.layout.buckets[bucket]
        if self._missing[bucket] % (b.stop - b.first) == 0:
            self.sum.end_worker(bucket)
        if self.is_last and not self._missing[bucket]:
            self._send_full()

    def taken(self, after: Callable[[int], AbstractContextManager[object]] | None = None) -> None:
        """All gradients of this virtual worker were added by other means; within `after` buckets of the last leave."""
        self._missing = [0] * len(self._missing)
        if after is not None:
            self._send_full(after)

    def end_worker(self) -> None:
        """Ends a virtual worker: parameters without a gradient count as zero."""
        if self.is_measuring:
            return
        for index, missing in enumerate(self._missing):
            if missing:
                self.sum.end_worker(index)
                self._missing[index] = 0
        if self.is_last:
            self._send_full()

    @contextmanager
    def only_hashing(self, into: IntegerHash) -> Iterator[None]:
        """Gradients that come meanwhile are hashed, not summed; after a step's last virtual worker."""
        self._hash, self._is_hashing_only = into, True
        try:
            yield
        finally:
            self._hash, self._is_hashing_only = None, False

    def apply_mean(self, addends: int) -> None:
        """Puts the mean over `addends` virtual workers into the `grad` of each tensor of `owned`."""
        self.sum.mean(self.means, addends, self.spans)
        self.show_means()

    def show_means(self) -> None:
        """Puts `means` into the `grad` of each tensor of `owned`."""
        for tensor, mean in zip(self.owned, self.means, strict=True):
            tensor.grad = mean

    def _measure(self, backward: Callable[[], T], check: Callable[[T], object]) -> None:
        # Runs the passes once for each gradient's largest element, and takes the scales from it, on all ranks.
        self.begin(measuring=True)
        result = backward()
        self._maximum_over_ranks(self._maxima)
        check(result)
        self.sum.set_maxima(self._maxima)

    def wait(self) -> None:
        """Returns when all messages of a step have arrived, on a GPU before it is there."""
        self._is_begun = False
        for work in self._works:
            work.wait()

    def _send_full(self, after: Callable[[int], AbstractContextManager[object]] = nullcontext) -> None:
        # Sends what is full, in the buckets' order, which is the same on all ranks whatever order autograd takes.
        # Gradient 5: a bucket that is full leaves, unless one before it in the order has not left yet.
        count = len(self.layout.buckets)
        while len(self._works) < count and not self._missing[len(self._works)]:
            with after(len(self._works)):
                self.last_ready = self.clock.mark()
                if not self._works:
                    self.first_ready = self.last_ready
                self._works.append(self._send(len(self._works)))
        # No rank sees every sum whole: what all must know of them travels in a message of its own.
        if len(self._works) == count and self._trailers is None and (self.is_sharded or not self.layout.is_whole):
            self._trailers = self.sum.trailers()
            self._works.append(self._channels[1].allreduce.start(self._trailers))

    def _send(self, index: int) -> Work:
        if self.is_sharded:
            return self.shards(index).start_reduce_scatter(self.sum.payload(index), self.layout.buckets[index].cuts)
        allreduce = self._channels[self.layout.parallel[index]].allreduce
        return allreduce.start(self.sum.message(index) if self.layout.is_whole else self.sum.payload(index))


def parameter_slots(model: nn.Module, *, wide_norms: bool = False) -> list[Slot]:
    """A slot for each trained parameter, in backward's order; with `wide_norms` batch norm's are wide, and last."""
    norms = {id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    slots = [
        Slot(name, name, p, is_wide=wide_norms and id(p) in norms, completed=number)
        for number, (name, p) in enumerate(reversed(named))
    ]
    return sorted(slots, key=lambda slot: slot.is_wide)


def hook_parameters(reducer: Reducer) -> list[RemovableHandle]:
    """Hands each parameter's gradient to the reducer as soon as autograd has it."""

    def take(slot: int, parameter: Tensor) -> None:
        # Gradient 3: autograd has a parameter's gradient; once added it is dropped, so that one copy is in memory.
        assert parameter.grad is not None
        reducer.add(slot, parameter.grad)
        parameter.grad = None

    return [
        slot.tensor.register_post_accumulate_grad_hook(partial(take, number))
        for number, slot in enumerate(reducer.layout.held)
        if slot.layer is None
    ]


class BucketRebuild:
    """Rebuilds a reducer's buckets after its first steps, if there is a profile; those of column blocks stay.

    DistributedDataParallel takes the order in which gradients arrived, this the sizes whose last sum ends earliest.
    """

    # Only on CPUs, since on a GPU the host does not know when a gradient is there; not with shards, which follow the
    # buckets as momentum follows the shards; and not if batch norm's gradients have buckets of their own.
    def __init__(self, reducer: Reducer, profile: Profile | None, world: Group) -> None:
        held = reducer.layout.held
        self._slots = [i for i, slot in enumerate(held) if slot.layer is None]
        can_rebuild = bool(self._slots) and not reducer.is_sharded and held[0].tensor.device.type == "cpu"
        can_rebuild &= not any(slot.is_wide for slot in held)
        self._reducer, self._world, self._profile = reducer, world, profile if can_rebuild else None
        self._steps, self._ready = 0, torch.full((len(self._slots),), torch.inf, dtype=torch.float64)

    def after_step(self) -> str:
        """Called after each step, on every rank; a line if it rebuilt the buckets."""
        step, profile, self._steps = self._steps, self._profile, self._steps + 1
        if profile is None or step > REBUILD_STEPS[-1]:
            return ""
        if step in REBUILD_STEPS:
            ready = torch.tensor([self._reducer.ready[slot] for slot in self._slots], dtype=torch.float64)
            self._ready = torch.minimum(self._ready, ready - ready.max())
        if step < REBUILD_STEPS[-1]:
            return ""
        # The quickest of a rank's steps, which no pause has touched, and of the ranks the slowest, whom all wait for.
        self._world.all_reduce(self._ready, maximum=True)
        times, layout = self._ready.tolist(), self._reducer.layout
        # Buckets of column blocks stay as they are; their slots come first.
        columns = [b for b in layout.buckets if layout.held[b.first].layer is not None]
        offset = len(layout.held) - len(self._slots)
        before = [b.moved(-offset) for b in layout.buckets[len(columns) :]]
        numels = [layout.held[slot].tensor.numel() for slot in self._slots]
        # Rank 0's decision counts: ranks could differ in the last bit of a time, and then in the messages they expect.
        best = best_buckets(profile, numels, times) if self._world.rank == 0 else before
        late, early = (1e3 * finish(profile, cut, times) for cut in (before, best))
        counts, late, early = self._world.broadcast_json(([b.stop - b.first for b in best], late, early))
        buckets = group(counts, numels)
        self._reducer.use_layout(ParameterLayout(layout.slots, (*columns, *(b.moved(offset) for b in buckets))))
        return (
            f"buckets auto: {_sizes(buckets)}, by the profile and the times of the first gradients: expected to be "
            f"summed {early:.0f} ms after backward, where {_sizes(before)} take {late:.0f} ms"
        )


def _sizes(buckets: list[Bucket]) -> str:
    mib = [b.length / 2**18 for b in buckets]
    return f"{len(mib)} of {min(mib):.2g} to {max(mib):.2g} MiB" if len(mib) > 1 else f"1 of {mib[0]:.2g} MiB"

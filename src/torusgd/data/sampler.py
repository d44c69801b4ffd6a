"""The stream of samples for anyone's DataLoader: it goes on in mid-epoch, on any number of ranks."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.data import Sampler
from torch.utils.hooks import RemovableHandle

from ..errors import UserError
from .order import StreamOrder

State = dict[str, int]


class BatchSizeSchedule:
    """Batches that change with the samples consumed, and the rate that goes with them: `batch_size` of a StreamSampler.

    Args:
        batches: Samples of a step over all ranks, by the number of samples consumed from which on they hold; 0 is one.
        rate: `linear` multiplies the rate by batch / first batch, `sqrt` by its root, `constant` not at all.

    >>> schedule = BatchSizeSchedule({0: 256, 500_000: 1024})
    >>> schedule(600_000), schedule.factor(600_000)
    (1024, 4.0)
    """

    def __init__(self, batches: Mapping[int, int], rate: Literal["linear", "sqrt", "constant"] = "linear") -> None:
        whole = all(isinstance(number, Integral) for pair in batches.items() for number in pair)
        if not whole or min(batches, default=1) != 0 or min(batches.values()) < 1:
            wanted = "whole batches of at least 1 by each position, the first of them 0"
            raise UserError(f"batches: {wanted}; got {dict(batches)}")
        if rate not in ("linear", "sqrt", "constant"):
            raise UserError(f"rate: linear, sqrt or constant, got {rate}")
        self._starts, self._rate = sorted(batches), rate
        self._batches = [batches[start] for start in self._starts]
        self.least = min(self._batches)
        self._hooks: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()

    def __call__(self, consumed: int) -> int:
        """The batch of a step before which so many samples were consumed."""
        return self._batches[bisect_right(self._starts, consumed) - 1]

    def factor(self, consumed: int) -> float:
        """The factor on the rate of that step."""
        ratio = 1.0 if self._rate == "constant" else self(consumed) / self._batches[0]
        return math.sqrt(ratio) if self._rate == "sqrt" else ratio

    def follow(self, optimizer: Optimizer, sampler: "StreamSampler") -> None:
        """Multiplies each step's rate from now on: during the step alone, so that torch's schedulers see their own.

        Called once more for an optimizer, it follows the last sampler alone.
        """
        rates: list[Any] = []
        for hook in self._hooks.pop(optimizer, []):
            hook.remove()

        def raise_rates(*_: Any) -> None:
            factor = self.factor(sampler.consumed)
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

        def put_back(*_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        hooks = optimizer.register_step_pre_hook(raise_rates), optimizer.register_step_post_hook(put_back)
        self._hooks[optimizer] = [*hooks]


class StreamSampler(Sampler[list[int]]):
    """A batch sampler over `StreamOrder` whose state is the number of steps that were trained on.

    Step t's global batch holds the same samples on any number of ranks, and is divided into micro-batches in one way,
    so that which rank computes which changes nothing but time. An iteration ends with the step that reaches the end of
    an epoch; the next one goes on where it ended, so no sample is dropped or padded.

    A loader draws batches ahead of the loop, so the sampler can't know what was trained on: call `step` after each
    step of the optimizer, or let `follow` do so. Save `state_dict()` in the same file as the weights.

    >>> sampler = StreamSampler(length=10, batch_size=4, rank=0, world_size=2)
    >>> for indices in sampler:  # a DataLoader(dataset, batch_sampler=sampler) does this
    ...     sampler.step()
    >>> sampler.state_dict()["consumed"], len(indices)
    (12, 2)

    Args:
        length: Samples in an epoch.
        batch_size: Samples of a step over all ranks, or a function that gives it from the number of samples consumed
            before that step (`BatchSizeSchedule`): it must be the same on all ranks.
        seed: Decides the order.
        rank: None: that of torch.distributed if it runs when it is needed, else 0.
        world_size: None: as many ranks as torch.distributed has then, else 1.
        micro_batches: Lists that a step's batch is cut into, over all ranks, as evenly as can be: each rank yields
            several a step, and which samples share a list is the same on any number of ranks. None: one a rank.
        repeats: Copies of each sample in a row.
    """

    def __init__(
        self, length: int, batch_size: int | Callable[[int], int], *, seed: int = 0, rank: int | None = None,
        world_size: int | None = None, micro_batches: int | None = None, repeats: int = 1,
    ) -> None:  # fmt: skip
        self._rank, self._world_size, self._micro_batches = rank, world_size, micro_batches
        self._order = StreamOrder(length, seed, repeats)
        self.batches = batch_size  # as given: a number, or a function of the samples consumed
        # Samples consumed before each step up to the furthest looked at: with a function there is no shorter way.
        self._starts = [0]
        self._steps = 0
        self.epoch_samples = length * repeats
        # The step before which the last iteration began, and that which its samples reach, once all are drawn.
        self._drawn: tuple[int, int] | None = None
        self._stop_following: Callable[[], None] | None = None

    @property
    def rank(self) -> int:
        return self._rank if self._rank is not None else dist.get_rank() if _is_distributed() else 0

    @property
    def world_size(self) -> int:
        return self._world_size if self._world_size is not None else dist.get_world_size() if _is_distributed() else 1

    @property
    def steps(self) -> int:
        """Steps trained on."""
        return self._steps

    @property
    def consumed(self) -> int:
        """Samples trained on, over all ranks."""
        return self.samples_before(self._steps)

    @property
    def epoch(self) -> int:
        """Whole passes over the samples before the next step."""
        return self.consumed // self.epoch_samples

    @property
    def epoch_offset(self) -> int:
        """Lists of this rank from the epoch's first step to the next one: where an iteration begins, of `len`."""
        return (self._steps - self._epoch_first(self._steps)) * len(self.positions())

    def step(self, count: int = 1) -> None:
        """Counts steps as trained on; every rank calls it after the optimizer's step."""
        self.seek(self._steps + count)

    def follow(self, optimizer: Any) -> None:
        """Counts each step of a torch optimizer from now on, of this one only.

        A gradient scaler that skips a step doesn't call the optimizer: with float16 call `step` yourself.
        """
        if self._stop_following is not None:
            self._stop_following()
        self._stop_following = optimizer.register_step_post_hook(lambda *_: self.step()).remove

    def seek(self, steps: int) -> None:
        """Goes on after so many steps, for loops that count them themselves."""
        if not isinstance(steps, Integral) or steps < 0:
            raise ValueError(f"steps: a whole number, at least 0, got {steps!r}")
        self._steps = int(steps)

    def set_epoch(self, epoch: int) -> None:
        """Accepted since libraries call it; the steps trained on decide what comes next, not this."""

    def batch(self, step: int) -> int:
        """Samples of a step, over all ranks."""
        return self.samples_before(step + 1) - self.samples_before(step)

    def positions(self, step: int | None = None) -> list[range]:
        """This rank's micro-batches of a step (None: the present one), as positions in the stream, to key draws by."""
        step = self._steps if step is None else step
        rank, ranks = self.rank, self.world_size
        start, batch = self.samples_before(step), self.batch(step)
        count = ranks if self._micro_batches is None else self._micro_batches
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: ranks count from 0")
        if not ranks <= count <= batch or not isinstance(count, Integral):
            wanted = f"take a whole number, one a rank at least, of {ranks} ranks"
            raise ValueError(f"{count} micro-batches of a batch of {batch}: {wanted}")
        edges = [start + batch * index // count for index in range(count + 1)]
        mine = range(count * rank // ranks, count * (rank + 1) // ranks)
        return [range(edges[index], edges[index + 1]) for index in mine]

    def __iter__(self) -> Iterator[list[int]]:
        if self._drawn is not None and self._steps in range(*self._drawn):
            first, end = self._drawn
            what = (
                f"the samples of {end - first} steps were drawn and {self._steps - first} steps counted as trained on"
            )
            remedy = "call step() after each step of the optimizer, or follow(optimizer) once"
            also = "no library may divide the batches between ranks again, since each rank's are its own already"
            raise RuntimeError(f"{what}: {remedy}; and {also}")
        begin, end = self._steps, self._epoch_end(self._steps)
        for step in range(begin, end):
            for positions in self.positions(step):
                yield self._order.at(positions.start, len(positions))[0].tolist()
        self._drawn = (begin, end)

    def __len__(self) -> int:
        """Lists of this rank in the whole epoch that is being trained on, those before a resume included."""
        return (self._epoch_end(self._steps) - self._epoch_first(self._steps)) * len(self.positions())

    @property
    def batch_size(self) -> int:
        # What divides the batches of a sampler between ranks (Accelerate's prepare) looks here first, and nothing else.
        what = "a library is about to divide the stream's batches between ranks, which are each rank's own already"
        remedy = "take stream_loader of torusgd.integrations.accelerate, and don't give its loader to prepare()"
        raise UserError(f"{what}: with Accelerate {remedy}")

    def state_dict(self) -> State:
        """Plain integers; the same on every rank, and good for any number of ranks."""
        return {"steps": self._steps, "consumed": self.consumed, **self._identity()}

    def load_state_dict(self, state: State) -> None:
        """Goes on from a state of `state_dict`, of any number of ranks.

        ValueError if it is of another stream (samples, seed, repeats, batches up to that step), or older than what this
        sampler has counted.
        """
        if missing := {"steps", "consumed", *self._identity()} - state.keys():
            raise ValueError(f"the state is none of a StreamSampler: it has no {min(missing)}")
        for name, value in {**self._identity(), "consumed": self.samples_before(state["steps"])}.items():
            if state[name] != value:
                raise ValueError(f"the state is of another stream: its {name} is {state[name]}, here it is {value}")
        if state["steps"] < self._steps:
            both = f"of step {state['steps']} and step {self._steps} was loaded or trained on already"
            remedy = "use seek() to go back, and don't restore a loader's own state beside the sampler's"
            raise ValueError(f"the state is {both}: {remedy}")
        self.seek(state["steps"])

    def _identity(self) -> State:
        return {"length": self._order.length, "seed": self._order.seed, "repeats": self._order.repeats}

    def _batch(self, consumed: int) -> int:
        batch = self.batches(consumed) if callable(self.batches) else self.batches
        if not isinstance(batch, Integral) or batch < 1:
            raise ValueError(f"batch_size: a whole number, at least 1, got {batch} after {consumed} samples")
        return batch

    def samples_before(self, step: int) -> int:
        """Samples consumed before a step."""
        if not callable(self.batches):
            return step * self._batch(0)
        while len(self._starts) <= step:
            self._starts.append(self._starts[-1] + self._batch(self._starts[-1]))
        return self._starts[step]

    def _epoch_end(self, step: int) -> int:
        """The first step after the epoch that `step` begins in."""
        stop = (self.samples_before(step) // self.epoch_samples + 1) * self.epoch_samples
        while self.samples_before(step) < stop:
            step += 1
        return step

    def _epoch_first(self, step: int) -> int:
        first = self.samples_before(step) // self.epoch_samples * self.epoch_samples
        while step > 0 and self.samples_before(step - 1) >= first:
            step -= 1
        return step


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()

"""These all-reduces inside anyone's DistributedDataParallel script, by one line."""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..arithmetic import is_portable
from ..comm.allreduce import create
from ..comm.base import Work
from ..comm.exact_sum import FULL, decode, encode
from ..comm.fixed_point import exact_all_reduce
from ..comm.groups import Group, group_of
from ..comm.works import Lane, LaneWork, start_lane
from ..errors import RunError, UserError
from .float_sum import FloatGradientSum, largest
from .integer_sum import IntegerGradientSum
from .layout import group

Wire = Literal["float16", "bfloat16", "exact"]
_Future = torch.futures.Future[Tensor]
_GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
# Backward passes of a step over all ranks that an exact sum has bits for: it decides where its bounds stand.
_MOST_PASSES = 2**16
# Growth of a gradient from one step to the next. DDP can't redo a step, so it is a million, and int64 has the bits:
# 42 for the sum of the largest elements of all passes.
_GROWTH = 2.0**20
# The first step's scale takes the sum of all passes to be so many times what the first one gave.
_FIRST_GUESS = 64.0
# Units of the sum below which a pass's largest element has not all of a float32's bits. Such a pass is kept in limbs
# too, which have them all: if no pass of a step was larger, as after a fall, these travel as well.
_FEW_UNITS = 2.0**24
# A pass that was larger, in the count of a parameter's passes that travels beside its sum; one that was not is 1.
_LARGE = 2 * _MOST_PASSES


def ddp_hook(
    model: DistributedDataParallel, algorithm: str = "auto", wire: Wire | None = None, *,
    micro_batches: int | None = None, grid: tuple[int, int] | None = None, profile: Path | None = None,
) -> "Hook":  # fmt: skip
    """Has a DistributedDataParallel model sum its gradients by one of our algorithms. Every rank calls it once.

    >>> model = DistributedDataParallel(model)  # doctest: +SKIP
    >>> ddp_hook(model)  # doctest: +SKIP

    Args:
        model: Gloo or NCCL; with no_sync, static_graph, gradient_as_bucket_view, unused parameters and join as usual.
        algorithm: See `torusgd.comm.allreduce.create`, as for `grid` and `profile`.
        wire: None sends gradients as they are. `float16` and `bfloat16` halve the bytes, scaled by a power of two a
            bucket so that no sum of ranks overflows. `exact` adds each backward pass, those under `no_sync` too, in
            fixed point of 64 bits: a step's gradient has the same bits however its passes are spread over ranks and
            accumulation, and by any algorithm. It needs 8 bytes an element on the wire and 16 in memory, and 64 each
            for a parameter in a step where its gradient falls 2**18-fold. The first pass decides the scale of a step,
            then the last step does: save `state_dict()` with the weights. Until the last pass `.grad` is zero; all
            passes but the last are under `no_sync`. `zero_grad()` begins a step; with `set_to_none=True`, torch's
            default, it also gives up what an unfinished one has summed. A gradient that is not finite in one pass
            becomes nan on all ranks.
        micro_batches: With `exact`, of a step over all ranks: the gradient is the mean over them, of losses that are
            not divided by the passes of a rank. None: the sum over passes and the mean over ranks, as plain DDP has
            it; if the loss is divided by the passes of a rank, that division is exact only for powers of two, and the
            bits are the same where the numbers of ranks differ by a power of two.

    Returns:
        The hook; its `explanation` is one line about the algorithm.

    Raises:
        UserError: The algorithm doesn't fit, the wire or a parameter's dtype is unknown, an embedding's gradients are
            sparse, `exact` can't work with what DistributedDataParallel was given, or ranks differ in arguments. The
            model is as it was.
        RuntimeError: By backward, in words of torch's around ours: a rank is lost, or with `exact` a sum grew a
            million-fold in a step.
    """
    _check(model, wire, micro_batches)
    ranks = group_of(model.process_group, model.device)
    ranks.require_same("ddp_hook", {"wire": wire, "micro_batches": micro_batches})
    if wire == "exact":
        hook: Hook = _ExactHook(model, ranks, micro_batches or ranks.size)
    else:
        hook = Hook(ranks) if wire is None else _NarrowHook(ranks, getattr(torch, wire))
    hook.allreduce = create(algorithm, grid=grid, profile=profile, group=ranks)
    hook.explanation = hook.allreduce.explanation
    # A compiled function that calls backward has what is called by it compiled too, which these are not made for.
    model.register_comm_hook(hook, torch.compiler.disable(type(hook).send))
    hook.begin(model)
    return hook


def check_wire(wire: str | None) -> None:
    """UserError for one that isn't known, and in portable arithmetic for all but exact."""
    if wire not in (None, *get_args(Wire)):
        raise UserError(f"wire {wire}: unknown; one of {', '.join(get_args(Wire))}, or None")
    if wire != "exact" and is_portable():
        raise UserError("portable arithmetic: a sum of floats over ranks has their order; use wire='exact'")


def _check(model: nn.Module, wire: str | None, micro_batches: int | None) -> None:
    # UserError for what would fail later, or silently.
    check_wire(wire)
    if micro_batches is not None and (wire != "exact" or not 1 <= micro_batches <= _MOST_PASSES):
        raise UserError(f"micro_batches: takes wire='exact', and 1 to {_MOST_PASSES}; got {micro_batches}")
    if not isinstance(model, DistributedDataParallel):
        raise UserError(
            f"ddp_hook: takes a model in DistributedDataParallel, and before torch.compile; got {type(model).__name__}"
        )
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    strange = next((dtype for dtype in dtypes if wire is not None and dtype not in _GRADIENTS), None)
    if strange is not None:
        raise UserError(f"wire {wire}: takes gradients of float32, float16 and bfloat16, not {strange}; use wire=None")
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    if any(embedding.sparse for embedding in embeddings):
        raise UserError("ddp_hook: not with sparse gradients; use Embedding(sparse=False)")
    if wire == "exact":
        # What hands DDP a gradient that didn't pass through the parameter's own, or none at all.
        if model.mixed_precision is not None:
            raise UserError(
                "wire exact: not with DDP's mixed_precision=, whose gradients are of copies; use torch.autocast"
            )
        if getattr(model, "_delay_all_reduce_params", ()) or getattr(model, "skip_all_reduce_unused_params", False):
            raise UserError("wire exact: not with DDP's delay_all_reduce_named_params or skip_all_reduce_unused_params")


class Hook:
    """Buckets on their way: sent from autograd's thread in bucket order, finished in that order on one of its own."""

    explanation: str  # one line: what runs, and why
    _lane: Lane

    def __init__(self, ranks: Group) -> None:
        self.allreduce: Any = None
        self._ranks, self._device = ranks, ranks.device
        self._stream = None if ranks.device.type == "cpu" else torch.cuda.Stream(ranks.device)

    def begin(self, model: DistributedDataParallel) -> None:
        """Once DDP has taken the hook: what is refused leaves the model as it was. Nothing here keeps the model."""
        self._lane, thread = start_lane()
        weakref.finalize(model, _end, self._lane, thread)

    def send(self, bucket: GradBucket) -> _Future:
        """The hook itself, which DDP calls: the future holds the mean over ranks, in the bucket's own buffer."""
        future, buffer = self._future(), bucket.buffer()
        work = self.allreduce.start(buffer.div_(self._ranks.size))

        def finish() -> list[Tensor]:
            work.wait()
            return [buffer]

        self._finish_later([future], finish)
        return future

    def state_dict(self) -> dict[str, Any]:
        """What `exact` needs to go on with the same bits, on any number of ranks: plain numbers, for any file."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def _finish_later(self, futures: list[_Future], finish: Callable[[], list[Tensor]]) -> None:
        # On a GPU what autograd's stream has so far comes before what `finish` does on another.
        event = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        self._lane.put(LaneWork(partial(_finish, futures, finish, event, self._stream)))

    def _future(self) -> _Future:
        return torch.futures.Future(devices=None if self._stream is None else [self._device])


def _finish(
    futures: list[_Future], finish: Callable[[], list[Tensor]], event: torch.cuda.Event | None,
    stream: torch.cuda.Stream | None,
) -> None:  # fmt: skip
    try:
        with torch.no_grad(), torch.cuda.stream(stream):
            if event is not None:
                event.wait()
            for future, result in zip(futures, finish(), strict=True):
                future.set_result(result)
    except Exception as error:
        for future in futures:
            future.set_exception(error)  # type: ignore[arg-type]


def _end(lane: Lane, thread: threading.Thread) -> None:
    # Once the model is freed or the process ends. A thread that comes out of torch's C++ only then, as out of
    # `set_result` after what waited for it has gone on, gets no interpreter any more, and the process aborts.
    lane.put(None)
    if thread is not threading.current_thread():  # where a garbage collection frees the model
        thread.join(5.0)  # seconds: a lost rank may keep a bucket, and the script ends all the same


class _NarrowHook(Hook):
    """Buckets in 16 bits."""

    def __init__(self, ranks: Group, wire: torch.dtype) -> None:
        super().__init__(ranks)
        self._wire = wire
        # Only some steps need a repair. It has a group of its own, since its calls come from the finishing thread, and
        # would meet those of the hook's thread in another order on another rank.
        self._repairs = ranks.duplicate()
        self._sums: dict[tuple[object, ...], FloatGradientSum] = {}

    def send(self, bucket: GradBucket) -> _Future:
        future, buffer = self._future(), bucket.buffer()
        numels = tuple(gradient.numel() for gradient in bucket.gradients())
        # DDP lays its buckets out anew after the first step, which numbers none in a static graph, of one a dtype.
        key = (bucket.index(), buffer.dtype, *numels)
        if key not in self._sums:
            self._sums[key] = FloatGradientSum(group((), numels), self._ranks.size, self._device, self._wire)
        total = self._sums[key]
        sent = None
        if not total.needs_measure:
            total.clear()
            for slot, part in enumerate(buffer.split(numels)):
                total.add(0, slot, part.float())
            total.end_worker(0)
            sent = self.allreduce.start(total.message(0))
        self._finish_later([future], lambda: [self._receive(total, numels, buffer, sent)])
        return future

    def _receive(self, total: FloatGradientSum, numels: tuple[int, ...], buffer: Tensor, sent: Work | None) -> Tensor:
        # Puts the mean into the buffer; sums anew if there was no scale yet, or the sum overflowed.
        if sent is not None:
            sent.wait()
            status = total.finish().read()
            if not status.overflow:
                mean = torch.empty(buffer.shape, dtype=torch.float32, device=buffer.device)
                total.mean(mean.split(numels), self._ranks.size)
                for slot in status.nonfinite:
                    mean.split(numels)[slot].fill_(torch.nan)
                return buffer.copy_(mean)
        # Without a scale from the last step, and ranks agree on one for the next.
        maxima = torch.stack([largest(gradient) for gradient in buffer.split(numels)]).float()
        agreed = maxima.nan_to_num(0.0, 0.0, 0.0).cpu()
        self._repairs.all_reduce(agreed, maximum=True)
        total.set_maxima(agreed.to(buffer.device))
        total.needs_measure = not bool(agreed.any())  # zeros alone say nothing of the next step
        # In float64, since a sum may be beyond the gradients' dtype though the mean is not.
        mean = exact_all_reduce(buffer.double().cpu(), self._repairs) / self._ranks.size
        for gradient in mean.split(numels):
            if not bool(gradient.isfinite().all()):
                gradient.fill_(torch.nan)
        return buffer.copy_(mean)


class _ExactHook(Hook):
    """Takes each pass's gradient out of `.grad` as soon as autograd has it, and adds it to integers.

    So autograd adds no two passes as floats, with bits by who shares a rank. DDP's buckets say when a sum may leave.
    """

    def __init__(self, model: DistributedDataParallel, ranks: Group, divisor: int) -> None:
        super().__init__(ranks)
        parameters = {
            name: parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        self._names, numels = list(parameters), [parameter.numel() for parameter in parameters.values()]
        self._slots = {parameter: slot for slot, parameter in enumerate(parameters.values())}
        # A bucket of the sum for each parameter: a pass may give a parameter nothing, or several gradients.
        self._total = IntegerGradientSum(group([1] * len(numels), numels), _MOST_PASSES, self._device, headroom=_GROWTH)
        self._model: Any = weakref.proxy(model)  # or the two would keep each other
        self._divisor = divisor
        # The scales of the first step come from the first rank's first pass, which is the step's first micro-batch on
        # any number of ranks. They are sent beside whatever DDP sends, by a group of their own.
        self._agreement = ranks.duplicate()
        self._held: list[tuple[int, Tensor]] = []
        self._first: Tensor | None = None  # the largest magnitudes of the first pass that is held, by slot
        self._pass = -1  # of autograd, whose end looks at what is held
        self._arrived: list[_Arrived] = []
        self._sent: list[tuple[Tensor, Work]] = []  # the messages of the first of these
        # By slot, whether the step has had no gradient yet, whether `.grad` held nothing before the one that autograd
        # is about to add to it, and the version of `.grad` that `_take` left. Views of one bucket of DDP's have one
        # version between them: not looked at.
        self._is_first, self._is_fresh = [True] * len(numels), [True] * len(numels)
        self._versions = [0] * len(numels)
        self._small: dict[int, Tensor] = {}  # limbs of the sums of passes below `_FEW_UNITS`, by slot
        self._counts = [0] * len(numels)
        self._is_complete = self._has_sent = False

    def begin(self, model: DistributedDataParallel) -> None:
        super().begin(model)
        for parameter in self._slots:
            if parameter.numel():
                look = parameter.register_hook(torch.compiler.disable(partial(self._look, parameter)))
                take = parameter.register_post_accumulate_grad_hook(torch.compiler.disable(self._take))
                for handle in (look, take):
                    weakref.finalize(model, handle.remove).atexit = False

    def state_dict(self) -> dict[str, Any]:
        return {} if self._total.needs_measure else {"bounds": self._total.state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        bounds = state.get("bounds", [])
        if len(bounds) not in (0, len(self._names)):
            raise UserError(f"the hook's state is of {len(bounds)} parameters, and the model has {len(self._names)}")
        if bounds:
            self._total.load_state(torch.tensor(bounds, dtype=torch.float64))

    def _look(self, parameter: Tensor, _: Tensor) -> None:
        # Of a new step the first `.grad` may be zeros too.
        before, slot = parameter.grad, self._slots[parameter]
        self._is_fresh[slot] = before is None or (self._is_first[slot] and not bool(before.any()))
        is_seen = self._is_first[slot] or self._model.gradient_as_bucket_view
        if before is not None and not is_seen and before._version != self._versions[slot]:
            raise UserError(
                "wire exact: .grad was changed between two passes of a step, where it holds nothing yet: clip and "
                "unscale after the last pass, and begin a step anew by zero_grad(), not zero_grad(set_to_none=False)"
            )

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        # Autograd calls it before DDP's own hook, so that the bucket finds zeros.
        slot, gradient = self._slots[parameter], parameter.grad
        is_fresh = self._is_fresh[slot]
        assert gradient is not None
        if gradient.requires_grad:
            raise UserError("wire exact: not with backward(create_graph=True); take torch.autograd.grad")
        if self._model.static_graph and not self._has_sent and not self._model.require_backward_grad_sync:
            raise UserError(  # in DDP itself an assertion fails
                "static_graph=True: DistributedDataParallel needs its first pass outside no_sync; leave it out to "
                "accumulate gradients"
            )
        if self._is_first[slot] and not is_fresh:
            raise UserError(
                "wire exact: a pass on top of a step's mean: call zero_grad() after each step, and run all passes of a "
                "step but the last under no_sync()"
            )
        self._is_first[slot] = False
        if self._is_complete:
            self._begin_step()
        elif is_fresh:  # the caller has dropped what the step had
            self._forget(slot)
        if self._total.needs_measure:
            # Under no_sync the end of the pass is the first moment at which all are known.
            if self._pass != (now := torch._C._current_graph_task_id()):
                self._pass = now
                Variable._execution_engine.queue_callback(torch.compiler.disable(self._end_pass))
            self._held.append((slot, gradient.clone()))
        else:
            self._add(slot, gradient)
        gradient.zero_()
        self._versions[slot] = gradient._version

    def _begin_step(self) -> None:
        self._total.clear()
        self._small, self._counts = {}, [0] * len(self._counts)
        self._is_complete = False

    def _forget(self, slot: int) -> None:
        # What a step that was given up has of a parameter: perhaps of a pass that failed, whose end has not come.
        self._total.clear_bucket(slot)
        self._small.pop(slot, None)
        self._counts[slot] = 0
        if len(kept := [each for each in self._held if each[0] != slot]) < len(self._held):
            self._held, self._first = kept, None

    def _add(self, slot: int, gradient: Tensor) -> None:
        gradient = gradient.float()
        self._total.add(slot, slot, gradient)
        reach = self._total.reach(slot)
        self._total.end_worker(slot)
        if 0 < reach < _FEW_UNITS:
            limbs = encode(gradient.reshape(-1))
            self._small[slot] = limbs.add_(self._small[slot]) if slot in self._small else limbs
        self._counts[slot] += int(reach > 0) if reach < _FEW_UNITS else _LARGE  # also where it is nan

    def _end_pass(self) -> None:
        # If the pass's last bucket has asked for the scales, the sum may have come back by now, and have left the next
        # step to be measured: only what is still held says that this pass has to ask.
        if self._held and not self._model._join_config.enable:
            self._agree()
        elif self._held and self._first is None:  # in join() a rank without more input knows of the last pass alone
            self._first = self._maxima()

    def _maxima(self) -> Tensor:
        maxima = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
        for slot, gradient in self._held:
            maxima[slot] = torch.maximum(maxima[slot], gradient.abs().max().double().nan_to_num(0.0, 0.0, 0.0))
        return maxima

    @torch.no_grad()
    def _agree(self) -> None:
        # The scales of the first step, by the first rank's first pass; then what has been waiting for them.
        if not self._total.needs_measure:
            return
        small = (self._maxima() if self._first is None else self._first).to(self._agreement.small_device)
        self._agreement.broadcast(small)
        self._total.load_state(_FIRST_GUESS * small)
        for slot, gradient in self._held:
            self._add(slot, gradient)
        self._held, self._first = [], None

    def send(self, bucket: GradBucket) -> _Future:
        self._has_sent = True
        if self._is_complete:  # a pass without a gradient, as DDP's join() has it where a rank has no more input
            self._begin_step()
        future, gradients = self._future(), {}
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # DDP lays a gradient out in memory as its parameter.
            strides = torch.empty_like(parameter, device="meta").stride()
            gradients[self._slots[parameter]] = part.as_strided(parameter.shape, strides)
        self._arrived.append(_Arrived(future, bucket.buffer(), gradients))
        # DDP names none as the last in the first step of a static graph with several dtypes.
        is_last = sum(len(each.gradients) for each in self._arrived) == len(self._names)
        if is_last:
            self._agree()
        for each in self._arrived[len(self._sent) :] if not self._total.needs_measure else ():
            counts = torch.tensor([self._counts[slot] for slot in each.gradients], device=self._device)
            message = torch.cat([*(self._total.message(slot) for slot in each.gradients), counts])
            self._sent.append((message, self.allreduce.start(message)))
        if is_last:
            arrived, sent, self._arrived, self._sent = self._arrived, self._sent, [], []
            self._finish_later([each.future for each in arrived], lambda: self._receive(arrived, sent))
        return future

    def _receive(self, arrived: "list[_Arrived]", sent: list[tuple[Tensor, Work]]) -> list[Tensor]:
        # Puts the means into the buckets' buffers.
        gradients: dict[int, Tensor] = {}
        fallen: list[int] = []
        for each, (message, work) in zip(arrived, sent, strict=True):
            work.wait()
            gradients |= each.gradients
            parts = [self._total.message(slot) for slot in each.gradients]
            *sums, counts = message.split([*(len(part) for part in parts), len(parts)])
            torch._foreach_copy_(parts, sums)
            counted = zip(each.gradients, counts.tolist(), strict=True)
            fallen += [slot for slot, count in counted if 0 < count < _LARGE]
        status = self._total.finish().read()
        self._is_complete, self._is_first = True, [True] * len(self._names)
        if status.overflow and not status.nonfinite:
            raise RunError(
                f"wire exact: the gradient of {self._names[status.overflow[0]]} is a million times as large as in the "
                "step before, beyond the sum's range: clip what makes the loss leap, and go on from a checkpoint"
            )
        means = [torch.empty(g.numel(), device=g.device) for _, g in sorted(gradients.items())]
        self._total.mean(means, self._divisor)
        for slot in fallen:
            means[slot].copy_(self._in_full(slot, means[slot].numel()) / self._divisor)
        for slot, mean in enumerate(means):
            if slot in status.nonfinite or slot in status.overflow:
                mean.fill_(torch.nan)
            gradients[slot].copy_(mean.view(gradients[slot].shape))
        # Nothing of the step was finite, as with a gradient scaler's first scales: the next one is measured anew.
        self._total.needs_measure = not bool(self._total.state().any())
        return [each.buffer for each in arrived]

    def _in_full(self, slot: int, elements: int) -> Tensor:
        # The sum of a parameter's gradient over all passes, float64 [elements], by limbs that every rank sends.
        none = torch.zeros(FULL.rows, elements, dtype=torch.int64, device=self._device)
        limbs = self._small.pop(slot, none).to(self._agreement.small_device)
        self._agreement.all_reduce(limbs)
        return decode(limbs).to(self._device)


class _Arrived(NamedTuple):
    """A bucket of DDP's last pass of a step, all of whose parameters have their gradients."""

    future: _Future
    buffer: Tensor
    gradients: dict[int, Tensor]  # views of the buffer by slot

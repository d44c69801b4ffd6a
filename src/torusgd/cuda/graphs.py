"""Passes captured as CUDA graphs, the CUDA streams on which they run, and all-reduces that leave during the last one.

A ResNet-50's pass launches about 1,900 kernels, which takes the host 24 to 28 ms; an H100 computes one of 32 images in
8, by prediction. So a pass is captured once for each shape of its images: from their look-up to the gradients as one
graph, the sums of gradients and statistics as another. A replay finds images, targets and the loss scale in memory of
the pass's own, weights and sums in memory that never moves. It launches the same kernels, so the bits are those of a
plain pass. A pass is plain that looks for the largest gradients, or whose gradients a watcher looks at, and so are all
of a network that can't be captured, of which a warning says why.

The main stream is the one that is current outside of this file. Events order the streams; the host waits for none.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from ..arithmetic import Bits, is_counting, is_portable
from ..data.pipeline import Batch
from ..data.to_device import arriving, look_up, on_device, pinned, place
from ..data.to_device import parts as message_parts
from ..errors import first_line
from ..gradients.reducer import Reducer
from ..recipe.schedule import Step
from ..step.batchnorm import BatchNormStatistics
from ..step.forward_backward import ForwardBackward, WholeNetwork
from ..step.membership import Membership
from .kernels import operators, register, tables_of_capture
from .sums import DeviceControl

_ROUNDS = 3
# of the GPU's clock, about a millisecond, in which a stream that did not wait would be found out
_CYCLES = 2_000_000


# Torch retains a pool of memory for as long as something lies in it, such as cuBLAS's workspace, but takes no new
# graph into one whose last graph has ended: it would refuse that capture. So each graph holds its pool.
class GraphMemory:
    """What graphs share, no two of which run at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()


# By stream, None being the main one, the memory of its graphs, as long as one of them is there.
_memories = WeakValueDictionary["torch.cuda.Stream | None", GraphMemory]()


class CudaGraph:
    """Work captured on the current GPU, which waits for nothing on the host; RuntimeError says why it can't be."""

    def __init__(self, work: Callable[[], None], memory: GraphMemory, stream: torch.cuda.Stream | None = None) -> None:
        self._graph, self._memory = torch.cuda.CUDAGraph(), memory
        # A node of autograd that an earlier pass has made, and somebody still holds, has that pass's stream; torch
        # refuses to capture it, unless it may move it to the stream that is captured (from torch 2.13 on).
        if hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
            torch.autograd.graph.set_override_stale_capture_stream(True)
        device, before = torch.cuda.current_device(), torch.cuda.current_stream()
        try:
            # Thread-local: the threads that load images may go on to allocate pinned memory.
            with (
                tables_of_capture(torch.device("cuda", device)) as self._tables,
                torch.cuda.graph(self._graph, pool=memory.pool, stream=stream, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError as error:
            # If a capture fails torch leaves its stream the current one, and its allocator in the belief that the
            # capture goes on: then memory that two streams have used would never be free again.
            torch.cuda.set_stream(before)
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(device, memory.pool)
            # If torch's own end of the capture failed too, its error hides the cause.
            raise (error.__context__ if isinstance(error.__context__, RuntimeError) else error) from None
        self._tables.fill()

    def replay(self) -> None:
        self._graph.replay()


class MainStream:
    """Passes one at a time, on the main stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._default = torch.cuda.default_generators[index]
        # A capture that fails leaves its generator in the belief that the capture goes on; torch's own stays whole.
        self._random = self._default.clone_state()
        self._captures_on: torch.cuda.Stream | None = None

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        with self._own_random():
            return CudaGraph(work, _memories.setdefault(self._captures_on, GraphMemory()), self._captures_on)

    def release(self) -> None:
        """Lets the next work begin once all has ended that the main stream has been given until now."""

    def run(self, work: Callable[[], None]) -> None:
        """Gives the stream work, whose random numbers are the stream's own."""
        with self._own_random():
            work()

    def join(self) -> None:
        """Has the main stream go on once the work that this one was given has ended."""

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        # Whatever draws from torch's generator of this GPU, or seeds it, meanwhile has the stream's own.
        usual = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._random)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(usual)


class SideStream(MainStream):
    """Passes on a stream of their own, beside those of other streams (`runtime.cuda_streams`)."""

    # A small pass leaves a GPU half empty (16 images keep 40 % of an H100 busy). Exact sums mind no order, so two
    # virtual workers' passes may run at the same time. What two such passes may not share, and who sees to it:
    #
    #     gradients, activations    a stream's graphs have a pool of memory of their own
    #     images, targets, losses   each captured pass has its own, and batch norm's statistics too
    #     random numbers            a graph reads its seed from memory of the generator with which it was captured,
    #                               which the host fills before a replay: so each stream has a generator of its own
    #     cuBLAS's workspace        torch has one for each stream: so a graph is captured on the stream on which it runs
    #     the sums                  only the main stream adds, pass by pass, each after an event of its stream: so no
    #                               kernel needs atomic additions, and all that follows the sums follows them there; but
    #                               for a last pass that adds by itself, which begins after all others

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device = device
        self._stream = self._captures_on = torch.cuda.Stream(device)
        self._released, self._done = torch.cuda.Event(), torch.cuda.Event()

    def release(self) -> None:
        self._released.record(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None]) -> None:
        self._stream.wait_event(self._released)
        with torch.cuda.stream(self._stream):
            super().run(work)
        self._done.record(self._stream)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


def pass_streams(device: torch.device, count: int) -> list[MainStream]:
    if device.type != "cuda":
        return []
    return [MainStream(device)] if count == 1 else [SideStream(device) for _ in range(count)]


class ReadyEvents:
    """Events of one graph, one a bucket, which is replayed once a step at most, and a stream that waits for them."""

    # A stream that waits for another waits for all of its work, and a graph is one piece of work. But a pass has the
    # gradients of its last layers long before those of its first. So with several ranks the last pass of a step is one
    # graph, in which each bucket is summed as soon as its gradients are there, and then an event is recorded, a node of
    # the graph (torch calls such an event external). Each all-reduce, which is in no graph, waits for that of its
    # bucket. The collectives themselves are not captured: torch's watchdog does not see a captured one
    # (pytorch#103503), and a group can't be destroyed while a graph with its collectives lives.

    def __init__(self, device: torch.device, buckets: int) -> None:
        self._device = device
        self._events = [torch.cuda.Event(external=True) for _ in range(buckets)]
        self._stream = torch.cuda.Stream(device)

    def record(self, bucket: int) -> None:
        """While the graph is captured: here the bucket's sums are whole."""
        self._events[bucket].record(torch.cuda.current_stream(self._device))

    @contextmanager
    def after(self, bucket: int) -> Iterator[None]:
        """After a replay was launched: work that is given meanwhile begins when that replay has come to the bucket."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._events[bucket])
            yield


def ready_events(device: torch.device, buckets: int) -> ReadyEvents | None:
    """Events for a GPU's graphs; None if such an event is unknown, or was not waited for when it was tried."""
    try:
        return ReadyEvents(device, buckets) if _are_waited_for(device) else None
    except (RuntimeError, TypeError, ValueError):  # no GPU, no capture, events that are never external
        return None


def _are_waited_for(device: torch.device) -> bool:
    # Whether a stream sees what a graph did before its event, in each of several replays.
    # Nobody would notice an all-reduce that now and then leaves too early, so the GPU has to show it once a run.
    count, seen = torch.zeros((), device=device), torch.zeros(_ROUNDS, device=device)
    events = ReadyEvents(device, buckets=1)

    def work() -> None:
        torch.cuda._sleep(_CYCLES)
        count.add_(1)
        events.record(0)

    main = torch.cuda.current_stream(device)
    graph = CudaGraph(work, GraphMemory())
    for found in seen:
        graph.replay()
        with events.after(0):
            found.copy_(count)
        main.wait_stream(events._stream)
    return seen.tolist() == list(range(1, _ROUNDS + 1))


class PassParts(NamedTuple):
    """What a captured pass works with."""

    network: WholeNetwork
    reducer: Reducer
    batch_norm: BatchNormStatistics
    device: torch.device

    @property
    def parameters(self) -> list[Tensor]:
        """Of all slots, in order."""
        return [slot.tensor for slot in self.reducer.layout.held]


def _host_generators(device: torch.device) -> tuple[object, ...]:
    # The states of the generators from which a network may draw on the host; a CPU's own may be drawn from.
    of_numpy: Any = np.random.get_state()
    mine = torch.get_rng_state().tolist() if device.type == "cuda" else ()
    return random.getstate(), of_numpy[1].tobytes(), *of_numpy[2:], mine


def _shape(batch: Batch) -> tuple[object, ...]:
    return tuple(batch.images.shape), batch.partners is not None, batch.message is not None


_DRAWS = "the network draws random numbers on the host, which a graph would repeat"


def _warn(why: str) -> None:
    warnings.warn(f"the network's passes run without a CUDA graph, more slowly: {why}", stacklevel=4)


class CapturedPasses(ForwardBackward):
    """Passes through a whole network in a plain step of portable arithmetic, captured for each shape of the images.

    The reducer gets their gradients as it does from autograd, but all at the end of a pass.
    """

    # Its operators are small and many: a ResNet-50's pass launches some 24,000. The rest of a step launches few, and
    # stays as it is: its rules are those of torch's operators.
    def __init__(self, parts: PassParts, stream: MainStream, wait_weights: Callable[[], object]) -> None:
        self._parts, self._stream, self._bits = parts, stream, Bits(parts.device)
        self._wait_weights = wait_weights
        # By shape, after a plain pass: it, and how often it draws; None: it can't be captured.
        self._passes: dict[object, tuple[_Pass, int] | None] = {}
        self._replayed: _Pass | None = None

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        network, shape, self._replayed = self._parts.network, _shape(batch), None
        found, is_known = self._passes.get(shape), shape in self._passes
        if is_counting() or (is_known and found is None):  # the host reads what is counted
            return network.forward(step, worker, batch, membership)
        self._wait_weights()  # of a sharded update, for which modules' hooks wait: a graph calls none of them
        if found is None:
            return self._first(shape, step, worker, batch, membership)
        captured, draws = found
        if not captured.graphs[False]:
            try:
                captured.graphs[False] = (self._stream.capture(partial(self._run, captured)),)
            except RuntimeError as error:
                self._give_up(shape, first_line(error))
                return network.forward(step, worker, batch, membership)
        network.extra_pass(batch)
        captured.take(batch)
        network.begin(step, worker)
        self._bits.draw(draws)
        (graph,) = captured.graphs[False]
        self._stream.run(graph.replay)
        self._replayed, self._parts.batch_norm.batch = captured, captured.statistics
        return captured.loss

    def backward(self) -> None:
        if self._replayed is None:
            self._parts.network.backward()
            return
        for slot, gradient in enumerate(self._replayed.gradients):
            if gradient is not None:
                self._parts.reducer.add(slot, gradient)

    def _first(self, shape: object, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        # Plain; and the same pass as it will be captured, since products of each layout are tried at their first use.
        network, device, coming = self._parts.network, self._parts.device, _Pass(self._parts, batch)
        why_not = ""
        try:
            self._run(coming)
        except RuntimeError as error:
            why_not = first_line(error)
        self._passes[shape] = coming, self._bits.count
        network.begin(step, worker)
        self._bits.draw(self._bits.count)
        expected = _host_generators(device)  # of a pass that draws in no other way
        loss = network.forward(step, worker, batch, membership)
        if why_not or _host_generators(device) != expected:
            self._give_up(shape, why_not or _DRAWS)
        return loss

    def _run(self, coming: "_Pass") -> None:
        with self._bits.given():
            coming.run()

    def _give_up(self, shape: object, why: str) -> None:
        _warn(why)
        self._passes[shape] = None


class GraphedNetwork(ForwardBackward):
    """Passes through a whole network, captured for each shape of the images; the reducer has a `DeviceGradientSum`.

    The `streams` take the passes in turn. With `overlaps`, the same on every rank, all-reduces may leave during the
    last pass, where `ready` has the events of this rank's last passes; None: its all-reduces leave after them.
    """

    def __init__(
        self, parts: PassParts, control: DeviceControl, streams: Sequence[MainStream], overlaps: bool = False,
        ready: ReadyEvents | None = None,
    ) -> None:  # fmt: skip
        self.control_follows, self._ready = overlaps, ready
        self._parts, self._control, self._streams = parts, control, streams
        # by shape and stream: a plain pass was taken, and the next one is captured; None: it can't be
        self._passes: dict[tuple[object, int], _Pass | None] = {}
        self._turn = 0

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """The loss, float32 []; a captured pass goes all the way, and its gradients are in the sums."""
        reducer, network = self._parts.reducer, self._parts.network
        # What this stream's last pass left has been used by now, so that it may take its next one. It must not wait for
        # the pass before, on another stream, to which the main stream is about to be joined.
        self._streams[self._turn].release()
        if not self._control.counts.contributions:  # the first pass of a step, or of one that is taken again
            for each in self._streams:
                each.release()
        self._turn = (self._turn + 1) % len(self._streams)
        shape = _shape(batch)
        ready = self._ready if worker == membership.mine[-1] else None
        # A graph hands no gradient to anybody but the sums.
        is_plain = reducer.is_measuring or reducer.observe is not None
        captured = None if is_plain else self._captured(shape, ready)
        self.is_added = captured is not None
        if captured is not None:
            return self._replay(captured, ready, step, worker, batch)
        if is_plain or (shape, self._turn) in self._passes:
            return network.forward(step, worker, batch, membership)
        # The first pass of a shape warms up what chooses, compiles and allocates, the kernels of its sums included.
        coming = self._passes[shape, self._turn] = _Pass(self._parts, batch)
        network.begin(step, worker)  # as the forward pass will, so that only its draws are seen
        before = _host_generators(self._parts.device)
        with self._parts.batch_norm.aside(coming.statistics):
            loss = network.forward(step, worker, batch, membership)
        if _host_generators(self._parts.device) != before:
            self._give_up(shape, _DRAWS)
        return loss

    def backward(self) -> None:
        if not self.is_added:
            self._parts.network.backward()

    def _captured(self, shape: object, ready: ReadyEvents | None) -> "_Pass | None":
        # The pass that this turn's stream replays for a shape; its second pass captures it. None: a plain one.
        found, capture = self._passes.get((shape, self._turn)), self._streams[self._turn].capture
        if found is None or found.graphs[ready is not None]:
            return found
        try:
            if ready is None:
                found.graphs[False] = (capture(found.run), capture(partial(found.add, self._control)))
            else:
                found.graphs[True] = (capture(partial(found.run_and_add, self._control, ready.record)),)
        except RuntimeError as error:
            self._give_up(shape, first_line(error))
            return None
        found.gradients = ()  # their memory is the graphs' own; other shapes may use it in between
        return found

    def _give_up(self, shape: object, why: str) -> None:
        _warn(why)
        self._passes |= dict.fromkeys((shape, turn) for turn in range(len(self._streams)))

    def _replay(self, captured: "_Pass", ready: ReadyEvents | None, step: Step, worker: int, batch: Batch) -> Tensor:
        parts, stream = self._parts, self._streams[self._turn]
        there, *sums = captured.graphs[ready is not None]

        def work() -> None:
            captured.take(batch)
            parts.network.begin(step, worker)
            there.replay()

        self._control.will_be_added()
        if ready is not None:  # the graph adds to the sums itself, so it begins after all other passes were added
            stream.release()
        stream.run(work)
        stream.join()
        for each in sums:
            each.replay()
        parts.reducer.taken(None if ready is None else ready.after)
        parts.batch_norm.batch = captured.statistics
        return captured.loss


class _Pass:
    """A captured pass for batches of one shape: its work, and the memory that this reads and writes."""

    def __init__(self, parts: PassParts, batch: Batch) -> None:
        self._parts, device = parts, parts.device
        # A copy, since on a CPU these are the loader's own.
        self._images = place(batch, device, parts.network.precision.memory_format).clone()
        self._message = self._pixels = self._table = None
        if batch.message is not None and batch.table is not None:
            self._message, self._table = arriving(batch.message, device).clone(), on_device(batch.table, device)
            self._pixels, targets = message_parts(self._message, batch.images.shape)
            self._batch = replace(batch, targets=targets)
        else:
            copies: dict[str, Any] = {name: each.to(device, copy=True) for name, each in batch.labels().items()}
            self._batch = replace(batch, **copies)
        self._scale, self._scale_there = 1.0, torch.ones((), device=device)
        self.loss = torch.zeros((), device=device)
        self.statistics = torch.zeros_like(parts.batch_norm.running)
        self.gradients: Sequence[Tensor | None] = ()
        # from the images to the gradients, and from those to the sums; of a step's last pass, all in one. Empty before
        # they are captured
        self.graphs: dict[bool, tuple[CudaGraph, ...]] = {False: (), True: ()}

    def take(self, batch: Batch) -> None:
        device, precision = self._parts.device, self._parts.network.precision
        if self._message is not None and batch.message is not None:
            self._message.copy_(arriving(batch.message, device))
        else:
            self._images.copy_(place(batch, device, precision.memory_format))
            mine = self._batch.labels()
            for name, given in batch.labels().items():
                mine[name].copy_(pinned(given, device), non_blocking=True)
        if self._scale != precision.loss_scale:
            self._scale = precision.loss_scale
            self._scale_there.fill_(self._scale)

    def run(self) -> None:
        """The work of the first graph."""
        if self._pixels is not None and self._table is not None:
            (look_up if is_portable() else operators.look_up)(self._pixels, self._table, self._images)
        with self._parts.batch_norm.aside(self.statistics):
            loss = self._parts.network.loss_of_images(self._images, self._batch)
        self.gradients = torch.autograd.grad(loss * self._scale_there, self._parts.parameters, allow_unused=True)
        self.loss.copy_(loss.detach())

    def add(self, control: DeviceControl) -> None:
        """The work of the second graph."""
        total = self._parts.reducer.sum
        for index, bucket in enumerate(self._parts.reducer.layout.buckets):
            for slot in range(bucket.first, bucket.stop):
                gradient = self.gradients[slot]
                if gradient is not None:
                    total.add(index, slot, gradient)
            total.end_worker(index)
        control.add_captured(self.statistics, self.loss)

    def run_and_add(self, control: DeviceControl, ready: Callable[[int], None]) -> None:
        # The work of a last pass' one graph; `ready` is called with each bucket after the work that ends its sums.
        layout, total = self._parts.reducer.layout, self._parts.reducer.sum
        missing = [bucket.stop - bucket.first for bucket in layout.buckets]

        def end(bucket: int) -> None:
            total.end_worker(bucket)
            ready(bucket)

        def take(slot: int, gradient: Tensor) -> None:
            bucket = layout.bucket_of[slot]
            total.add(bucket, slot, gradient)
            missing[bucket] -= 1
            if not missing[bucket]:
                end(bucket)

        with ExitStack() as hooks:
            for slot, parameter in enumerate(self._parts.parameters):
                hooks.enter_context(parameter.register_hook(partial(take, slot)))
            self.run()
        for bucket, count in enumerate(missing):
            if count:  # of parameters that this network does not use
                end(bucket)
        control.add_captured(self.statistics, self.loss)


register(look_up, writes={"out"})

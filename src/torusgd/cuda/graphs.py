"""A virtual worker's pass as CUDA graphs: two calls of the host in place of some thousand.

A ResNet-50's pass launches about 1,900 kernels, which takes the host 24 to 28 ms; an H100 computes one of 32 images in
8 (docs/gpu.md). So a pass is captured once for each shape of its images: the look-up of its images, the forward pass,
the loss and the gradients as one graph, their sums and those of its statistics as another, since passes may run on
several streams and their sums on one (`cuda_streams`). A replay finds everything where it was: images, targets and the
loss scale in memory of the pass's own, weights and sums in memory that never moves. It launches the same kernels, so
the bits are those of a plain pass. Images and targets that come as one message (`upload.parts`) are copied as one.

A rank's last pass of a step is one graph, in which each bucket is summed as soon as its gradients are there, and an
event says so: its all-reduce leaves while the pass goes on (`ready_events`).

A pass that looks for the largest gradients is taken plainly, and so are all passes of a network that can't be captured,
which is told once.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..data.pipeline import Batch
from ..data.to_device import arriving, on_device, parts, pinned, place
from ..errors import first_line
from ..gradients.reducer import Reducer, hook_parameters
from ..precision import Precision
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from ..step.batchnorm import BatchNormStatistics
from ..step.control_vector import ControlMessage
from ..step.forward_backward import WholeNetwork
from ..step.membership import Membership
from .cuda_streams import Graph, PassStream, pass_streams
from .ready_events import ReadyEvents, ready_events
from .shadow import ShadowWeights

_Shape = tuple[tuple[int, ...], bool, bool]


class GraphedNetwork:
    """Passes through a whole network, captured for each shape of the images; see `ForwardBackward`.

    Args:
        network: Takes the passes that are captured, and plain ones.
        reducer: With a `DeviceGradientSum`.
        control: Takes the statistics and the loss of each pass.
        batch_norm: Of the network.
        device: Of the network.
        leaves: Of each slot the tensor by which the network computes, in order.
        streams: Take the passes in turn.
        overlaps: All-reduces may leave during the last pass; the same on every rank.
        ready: For that, the events of this rank's last passes; None: its all-reduces leave after them.
    """

    in_step = False
    is_added = False

    def __init__(
        self,
        network: WholeNetwork,
        reducer: Reducer,
        control: ControlMessage,
        batch_norm: BatchNormStatistics,
        device: torch.device,
        leaves: Sequence[Tensor],
        streams: Sequence[PassStream],
        overlaps: bool = False,
        ready: ReadyEvents | None = None,
    ) -> None:
        self.control_follows, self._ready, self.shadow = overlaps, ready, network.shadow
        self._network, self._reducer, self._batch_norm, self._device = network, reducer, batch_norm, device
        self._control, self._leaves, self._streams = control, leaves, streams
        self._passes: dict[tuple[_Shape, int], _Pass | None] = {}
        self._turn = 0

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """See `ForwardBackward`; a captured pass goes all the way, and its gradients are in the sums."""
        # What the last pass left has been used by now, so that its stream may take the next one.
        self._streams[self._turn].release()
        if not self._control.counts.contributions:  # the first of a step, or of a step that is taken again
            self._network.follow(step)
            for each in self._streams:
                each.release()
        self._turn = (self._turn + 1) % len(self._streams)
        shape = (tuple(batch.images.shape), batch.partners is not None, batch.message is not None)
        ready = self._ready if worker == membership.mine[-1] else None
        captured = None if self._reducer.is_measuring else self._captured(shape, ready)
        self.is_added = captured is not None
        if captured is not None:
            return self._replay(captured, ready, step, worker, batch)
        if self._reducer.is_measuring or (shape, self._turn) in self._passes:
            return self._network.forward(step, worker, batch, membership)
        # The first pass of a shape warms up what chooses, compiles and allocates, the kernels of its sums included.
        coming = _Pass(batch, self._network.precision, self._batch_norm, self._device)
        self._passes[shape, self._turn] = coming
        with self._batch_norm.aside(coming.statistics):
            return self._network.forward(step, worker, batch, membership)

    def backward(self) -> None:
        """See `ForwardBackward`."""
        if not self.is_added:
            self._network.backward()

    def _captured(self, shape: _Shape, ready: ReadyEvents | None) -> "_Pass | None":
        """The pass that this turn's stream replays for a shape; its second pass captures it. None: a plain one.

        With `ready`, for the last pass of a step.
        """
        captured, capture = self._passes.get((shape, self._turn)), self._streams[self._turn].capture
        if captured is None or captured.graphs[ready is not None]:
            return captured
        network = (self._network, self._batch_norm, self._leaves)
        try:
            if ready is None:
                there = capture(partial(captured.run, *network))
                captured.graphs[False] = (there, capture(partial(captured.add, self._reducer, self._control)))
            else:
                work = partial(captured.run_to_sums, *network, self._reducer, self._control, ready.record)
                captured.graphs[True] = (capture(work),)
        except RuntimeError as error:
            warnings.warn(
                f"the network's passes run without a CUDA graph, more slowly: {first_line(error)}", stacklevel=3
            )
            self._passes |= dict.fromkeys((shape, turn) for turn in range(len(self._streams)))
            return None
        captured.gradients = ()  # their memory is the graphs' own; other shapes may use it in between
        return captured

    def _replay(self, captured: "_Pass", ready: ReadyEvents | None, step: Step, worker: int, batch: Batch) -> Tensor:
        stream = self._streams[self._turn]
        there, *sums = captured.graphs[ready is not None]

        def work() -> None:
            captured.take(batch, self._network.precision)
            self._network.begin(step, worker)
            there.replay()

        self._control.will_be_added()
        if ready is not None:  # the graph adds to the sums itself, so all other passes have been added before
            stream.release()
        stream.run(work)
        stream.join()
        for each in sums:
            each.replay()
        self._reducer.taken(None if ready is None else ready.after)
        self._batch_norm.batch = captured.statistics
        return captured.loss


def device_network(
    model: nn.Module,
    recipe: Recipe,
    precision: Precision,
    batch_norm: BatchNormStatistics,
    reducer: Reducer,
    control: ControlMessage,
    device: torch.device,
    streams: int,
    overlaps: bool,
) -> WholeNetwork | GraphedNetwork:
    """A whole network in the form of a GPU: with 16-bit copies of the weights, and on a GPU with captured passes.

    The arguments are those of `WholeNetwork` and of `GraphedNetwork`; so many passes run at a time.
    """
    shadow = None
    if precision.dtype != torch.float32:
        shadow = ShadowWeights(model, precision.dtype, precision.memory_format)
    leaves = [slot.tensor if shadow is None else shadow.leaf(slot.tensor) for slot in reducer.layout.held]
    hook_parameters(reducer, leaves)
    network = WholeNetwork(model, recipe, precision, batch_norm, device, shadow)
    if device.type != "cuda":
        return network
    ready = ready_events(device, len(reducer.layout.buckets)) if overlaps else None
    in_turn = pass_streams(device, streams)
    return GraphedNetwork(network, reducer, control, batch_norm, device, leaves, in_turn, overlaps, ready)


class _Pass:
    """The memory of a captured pass: what it reads, and what it leaves."""

    def __init__(
        self, batch: Batch, precision: Precision, batch_norm: BatchNormStatistics, device: torch.device
    ) -> None:
        self._device = device
        self._images = place(batch, device, precision.memory_format)
        self._message = self._pixels = self._table = None
        if batch.message is not None and batch.table is not None:
            self._message, self._table = arriving(batch.message, device).clone(), on_device(batch.table, device)
            self._pixels, targets = parts(self._message, batch.images.shape)
            self._batch = replace(batch, targets=targets)
        else:
            self._batch = replace(
                batch,
                targets=batch.targets.to(device, copy=True),
                partners=None if batch.partners is None else batch.partners.to(device, copy=True),
                shares=None if batch.shares is None else batch.shares.to(device, copy=True),
            )
        self._scale, self._scale_there = 1.0, torch.ones((), device=device)
        self.loss = torch.zeros((), device=device)
        self.statistics = torch.zeros_like(batch_norm.running)
        self.gradients: Sequence[Tensor | None] = ()
        self.graphs: dict[bool, tuple[Graph, ...]] = {False: (), True: ()}
        """from the images to the gradients, and from those to the sums; of a step's last pass, all in one. Empty before
        they are captured"""

    def take(self, batch: Batch, precision: Precision) -> None:
        """Puts a batch and the loss scale where the graph reads them."""
        if self._message is not None and batch.message is not None:
            self._message.copy_(arriving(batch.message, self._device))
        else:
            self._images.copy_(place(batch, self._device, precision.memory_format))
            for mine, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
                mine.copy_(pinned(given, self._device), non_blocking=True)
        if self._scale != precision.loss_scale:
            self._scale = precision.loss_scale
            self._scale_there.fill_(self._scale)

    def run(self, network: WholeNetwork, batch_norm: BatchNormStatistics, leaves: Sequence[Tensor]) -> None:
        """The work of the first graph."""
        if self._pixels is not None:
            torch.ops.torusgd.look_up(self._pixels, self._table, self._images)
        with batch_norm.aside(self.statistics):
            loss = network.loss_of_images(self._images, self._batch)
        self.gradients = torch.autograd.grad(loss * self._scale_there, leaves, allow_unused=True)
        self.loss.copy_(loss.detach())

    def run_to_sums(
        self,
        network: WholeNetwork,
        batch_norm: BatchNormStatistics,
        leaves: Sequence[Tensor],
        reducer: Reducer,
        control: ControlMessage,
        ready: Callable[[int], None],
    ) -> None:
        """The work of a last pass' one graph; `ready` is called with each bucket after the work that ends its sums."""
        layout = reducer.layout
        missing = [bucket.stop - bucket.first for bucket in layout.buckets]

        def end(bucket: int) -> None:
            reducer.sum.end_worker(bucket)
            ready(bucket)

        def take(slot: int, gradient: Tensor) -> None:
            bucket = layout.bucket_of[slot]
            reducer.sum.add(bucket, slot, gradient)
            missing[bucket] -= 1
            if not missing[bucket]:
                end(bucket)

        hooks = [leaf.register_hook(partial(take, slot)) for slot, leaf in enumerate(leaves)]
        try:
            self.run(network, batch_norm, leaves)
        finally:
            for hook in hooks:
                hook.remove()
        for bucket, count in enumerate(missing):
            if count:  # of parameters that this network does not use
                end(bucket)
        control.add_captured(self.statistics, self.loss)

    def add(self, reducer: Reducer, control: ControlMessage) -> None:
        """The work of the second graph."""
        for index, bucket in enumerate(reducer.layout.buckets):
            for slot in range(bucket.first, bucket.stop):
                gradient = self.gradients[slot]
                if gradient is not None:
                    reducer.sum.add(index, slot, gradient)
            reducer.sum.end_worker(index)
        control.add_captured(self.statistics, self.loss)


def _tensors(batch: Batch) -> list[Tensor]:
    """What a loss asks of a batch."""
    return [each for each in (batch.targets, batch.partners, batch.shares) if each is not None]

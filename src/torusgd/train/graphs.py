"""A virtual worker's pass as a CUDA graph: one call of the host in place of some thousand.

A ResNet-50's pass launches about 1,900 kernels, which takes the host 24 to 28 ms; an H100 computes one of 32 images in
8 (docs/gpu.md). So a pass is captured once for each shape of its images: the forward pass, the loss, the gradients, and
their sums. A replay finds everything where it was: images, targets and the loss scale in memory of the graph's own,
weights and sums in flat memory that never moves. It launches the same kernels, so the bits are those of a plain pass.

A pass that looks for the largest gradients is taken plainly, and so are all passes of a network that can't be captured,
which is told once.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..data.pipeline import Batch
from ..data.upload import place
from ..errors import first_line
from ..gradients.reducer import Reducer, hook_parameters
from ..kernels import fill_tables
from ..precision import Precision
from ..recipe.schedule import Step
from ..recipe.schema import Recipe
from .batchnorm import BatchNormStatistics
from .forward_backward import WholeNetwork
from .membership import Membership
from .shadow import ShadowWeights

_Shape = tuple[tuple[int, ...], bool]


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Does the work again, with what its memory holds now."""


class CudaGraph:
    """Work captured on the current GPU; it is not done meanwhile.

    Args:
        work: Waits for nothing on the host.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # The hooks of plain passes keep autograd's nodes on the stream on which they were made; torch refuses to
        # capture those, unless it may move them to the stream that is captured.
        torch.autograd.graph.set_override_stale_capture_stream(True)
        # The threads that load images may go on to ask for pinned memory.
        with torch.cuda.graph(self._graph, pool=_pool(), capture_error_mode="thread_local"):
            work()
        fill_tables()

    def replay(self) -> None:
        """See `Graph`."""
        self._graph.replay()


@cache
def _pool() -> Any:
    """The memory that all graphs of a process share, since no two of them run at a time."""
    return torch.cuda.graph_pool_handle()


class GraphedNetwork:
    """Passes through a whole network, captured for each shape of the images; see `ForwardBackward`.

    Args:
        network: Takes the passes that are captured, and plain ones.
        reducer: With a `DeviceGradientSum`.
        device: Of the network.
        leaves: Of each slot the tensor by which the network computes, in order.
        capture: Makes a graph of work.
    """

    in_step = False

    def __init__(
        self,
        network: WholeNetwork,
        reducer: Reducer,
        device: torch.device,
        leaves: Sequence[Tensor],
        capture: Callable[[Callable[[], None]], Graph] = CudaGraph,
    ) -> None:
        self._network, self._reducer, self._device, self._capture = network, reducer, device, capture
        self._leaves = leaves
        self._passes: dict[_Shape, _Pass | None] = {}
        self._is_plain = True

    def forward(self, step: Step, worker: int, batch: Batch, membership: Membership) -> Tensor:
        """See `ForwardBackward`; a captured pass goes all the way, and its gradients are in the sums."""
        shape = (tuple(batch.images.shape), batch.partners is not None)
        # The first pass of a shape warms up what chooses and allocates.
        self._is_plain = self._reducer.is_measuring or shape not in self._passes
        if shape not in self._passes:
            self._passes[shape] = _Pass(batch, self._device, self._leaves)
        captured = self._passes[shape]
        if self._is_plain or captured is None:
            self._is_plain = True
            return self._network.forward(step, worker, batch, membership)
        captured.take(batch, self._network)
        if captured.graph is None:
            try:
                captured.graph = self._capture(lambda: captured.run(self._network, self._reducer))
            except RuntimeError as error:
                warnings.warn(
                    f"the network's passes run without a CUDA graph, more slowly: {first_line(error)}", stacklevel=2
                )
                self._passes[shape], self._is_plain = None, True
                return self._network.forward(step, worker, batch, membership)
        self._network.begin(step, worker)
        captured.graph.replay()
        self._reducer.taken()
        return captured.loss

    def backward(self) -> None:
        """See `ForwardBackward`."""
        if self._is_plain:
            self._network.backward()


def device_network(
    model: nn.Module,
    recipe: Recipe,
    precision: Precision,
    batch_norm: BatchNormStatistics,
    reducer: Reducer,
    device: torch.device,
) -> WholeNetwork | GraphedNetwork:
    """A whole network in the form of a GPU: with 16-bit copies of the weights, and on a GPU with captured passes.

    The arguments are those of `WholeNetwork`; the reducer, with a `DeviceGradientSum`, gets the gradients.
    """
    shadow = None
    if precision.dtype != torch.float32:
        shadow = ShadowWeights(model, precision.dtype, precision.memory_format)
    leaves = [slot.tensor if shadow is None else shadow.leaf(slot.tensor) for slot in reducer.layout.held]
    hook_parameters(reducer, leaves)
    network = WholeNetwork(model, recipe, precision, batch_norm, device, shadow)
    return GraphedNetwork(network, reducer, device, leaves) if device.type == "cuda" else network


class _Pass:
    """The memory of a captured pass: what it reads, and its loss."""

    def __init__(self, batch: Batch, device: torch.device, leaves: Sequence[Tensor]) -> None:
        self._device, self._leaves = device, leaves
        self._images = torch.empty(0)
        self._batch = batch
        self.scale = torch.ones((), device=device)
        self._scale = 1.0
        self.loss = torch.zeros((), device=device)
        self.graph: Graph | None = None

    def take(self, batch: Batch, network: WholeNetwork) -> None:
        """Puts a batch and the loss scale where the graph reads them."""
        images = place(batch, self._device, network.precision.memory_format)
        if self.graph is None:
            self._images = images
            self._batch = replace(
                batch,
                targets=batch.targets.to(self._device, copy=True),
                partners=None if batch.partners is None else batch.partners.to(self._device, copy=True),
                shares=None if batch.shares is None else batch.shares.to(self._device, copy=True),
            )
        else:
            self._images.copy_(images)
            for mine, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
                mine.copy_(given, non_blocking=True)
        if self._scale != network.precision.loss_scale:
            self._scale = network.precision.loss_scale
            self.scale.fill_(self._scale)

    def run(self, network: WholeNetwork, reducer: Reducer) -> None:
        """The pass that is captured: from the images to the sums."""
        loss = network.loss_of_images(self._images, self._batch)
        gradients = torch.autograd.grad(loss * self.scale, self._leaves, allow_unused=True)
        for index, bucket in enumerate(reducer.layout.buckets):
            for slot in range(bucket.first, bucket.stop):
                if gradients[slot] is not None:
                    reducer.sum.add(index, slot, gradients[slot])
            reducer.sum.end_worker(index)
        self.loss.copy_(loss.detach())


def _tensors(batch: Batch) -> list[Tensor]:
    """What a loss asks of a batch."""
    return [each for each in (batch.targets, batch.partners, batch.shares) if each is not None]

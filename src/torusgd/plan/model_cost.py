"""The cost of a network, read from a pass on the meta device, and its time on one device, by an additive roofline.

Nothing is computed on the meta device, so that a model of any size is read in a fraction of a second. The time of a
kernel is that of its launch, its operations and its memory traffic; three numbers of the software profile, `math`,
`memory` and `launch`, describe all of a network's kernels on all devices:

    seconds = launch + images * flops / (peak * math) + bytes / (memory_bandwidth * memory)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..errors import UserError, first_line
from ..models import MODELS
from ..recipe.schema import Recipe
from .cluster import Cluster, Device, Software

Array = np.ndarray[Any, np.dtype[np.float64]]

_ELEMENTWISE = frozenset(
    {"relu", "relu_", "threshold_backward", "sigmoid", "sigmoid_", "sigmoid_backward", "add", "add_"}
)
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_NO_KERNEL = frozenset(
    {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "detach", "alias", "as_strided", "unsqueeze"}
    | {"squeeze", "slice", "select", "reshape", "split", "empty", "empty_like"}
)
# Channels, height, width and classes as published; other networks take 3, 224, 224 and 1,000.
_INPUTS = {"alexnet-bn": (3, 227, 227, 1000), "cd-dnn": (1, 11, 39, 9304), "overfeat-fast": (3, 231, 231, 1000)}
_LOCAL_UPDATE_BYTES = 20  # of a weight: SGD with momentum reads three values and writes two
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Kernels:
    """The kernels of one direction in the order in which they run; every field has one value a kernel."""

    flops: Array  # floating-point operations an image (a multiply-add is two)
    values: Array  # tensor elements read and written an image
    fixed: Array  # tensor elements read and written whatever the batch, such as weights
    launches: Array  # number of kernels: 2 if one operator stands for two (both gradients of a convolution)
    elementwise: Array  # 1.0 for activations and additions, which a fused program joins to the kernel before, else 0.0
    linear: Array  # 1.0 for the matrix products of linear layers, else 0.0


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient: `ready` backward kernels have run when it is complete."""

    name: str
    values: int
    norm_or_bias: bool
    ready: int
    needed: int = 0  # number of forward kernels that have run when the layer that uses the parameter begins
    is_norm: bool = False  # true for batch norm's


@dataclass(frozen=True)
class Layer:
    """A convolution or linear layer in the terms of Das et al. (arXiv 1602.06709)."""

    name: str
    linear: bool
    ifm: int  # feature maps in (channels, or inputs of a linear layer)
    ofm: int
    kernel: int  # kh * kw, 1 for a linear layer
    in_area: int  # ih * iw, 1 for a linear layer
    out_area: int
    groups: int = 1

    @property
    def weights(self) -> int:
        return self.ifm * self.ofm * self.kernel // self.groups

    @property
    def macs(self) -> int:
        """Multiply-adds of one image's forward pass; the input gradient and the weight gradient cost the same each."""
        return self.weights * self.out_area


@dataclass(frozen=True)
class ModelCost:
    forward: Kernels
    backward: Kernels
    gradients: tuple[Gradient, ...]  # in the order in which backward completes them
    layers: tuple[Layer, ...]
    norms: int  # number of batch-norm layers
    activations: float  # values an image that forward writes: an upper bound of those that backward needs
    statistics: int = 0  # number of means and variances of all batch-norm layers

    @property
    def parameters(self) -> int:
        return sum(gradient.values for gradient in self.gradients)

    def checkpoint_bytes(self, recipe: Recipe) -> int:
        """Bytes of a light checkpoint, but for some numbers a tensor: weights, optimizer, statistics, average."""
        averaged = self.statistics if recipe.average is not None else 0
        return 4 * (held_values(recipe) * self.parameters + self.statistics + averaged)


def held_values(recipe: Recipe) -> int:
    """float32 values that a rank keeps for each weight from step to step: itself, the optimizer's, their average."""
    return (3 if recipe.optimizer.name in ("adamw", "lamb") else 2) + (recipe.average is not None)


def read_model(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> ModelCost:
    """Reads a network's cost.

    `build` is called under the meta device, so that the network takes no memory and draws no weights; `shape` is that
    of one input, such as (3, 224, 224). UserError if the network can't run there: its forward looks at values.

    >>> cost = read_model(lambda: nn.Linear(1000, 10), (1000,))
    >>> cost.parameters, [gradient.name for gradient in cost.gradients]
    (10010, ['bias', 'weight'])
    """
    try:
        with torch.device("meta"), _WithoutDraws():
            model = build().train()
        # Two runs separate the work of each kernel that grows with the images from that which doesn't (the weights).
        # Two images at least: batch norm refuses one value a channel.
        few, many = _trace(model, 2, shape), _trace(model, 4, shape)
    except (RuntimeError, NotImplementedError) as error:
        raise UserError(f"model: the planner can't trace it on the meta device: {first_line(error)}") from error
    if [row.name for row in few.rows] != [row.name for row in many.rows]:
        raise UserError("model: it runs other kernels for 4 images than for 2; the planner needs one order of work")
    # Per image: half the difference of 4 and 2 images. The rest of 2 images is there whatever the batch.
    work, more = (np.array([[r.flops for r in t.rows], [r.values for r in t.rows]]) for t in (few, many))
    flops, values = (more - work) / 2
    fixed = np.maximum(work[1] - 2 * values, 0.0)  # not below zero, if a kernel's work grows faster than the images
    launches = np.array([2.0 if row.name == "convolution_backward" else 1.0 for row in few.rows])
    elementwise = np.array([float(row.name in _ELEMENTWISE) for row in few.rows])
    linear = np.array([float(row.name in _PRODUCTS) for row in few.rows])
    columns = (flops, values, fixed, launches, elementwise, linear)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    forward, backward = zip(*(np.split(column, [few.middle]) for column in columns), strict=True)
    statistics = sum(2 * norm.num_features for norm in norms)
    kernels = Kernels(*forward), Kernels(*backward)
    return ModelCost(*kernels, tuple(few.gradients), tuple(few.layers), len(norms), few.written / 2, statistics)


# What torch's initialisers write in place: on the meta device without effect, and slower than all else of a network.
_DRAWS = {f"aten::{name}_" for name in ("normal", "uniform", "fill", "zero", "erfinv", "mul", "add", "clamp")}


class _WithoutDraws(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func._schema.name in _DRAWS and args[0].is_meta else func(*args, **(kwargs or {}))


class _Row(NamedTuple):
    name: str
    flops: int
    values: int


class _Trace(TorchDispatchMode):
    """Records every kernel of a pass: its name, operations, and the tensor elements that it reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.gradients, self.layers = list[_Row](), list[Gradient](), list[Layer]()
        self.needed: dict[int, int] = {}  # forward kernels before the first layer that uses a parameter, by its id
        self.middle = 0  # number of rows of the forward pass
        self.written = 0  # number of values that the forward pass wrote

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = _SHAPES.get(func.overloadpacket)
        out = shapes(args) if shapes else func(*args, **(kwargs or {}))
        # Each operator counts as one kernel that reads all of its tensors and writes all of its results.
        name = func._schema.name.removeprefix("aten::")
        read, wrote = _tensors((args, kwargs)), _tensors(out)
        if name not in _NO_KERNEL and any(map(Tensor.is_floating_point, wrote)):  # integers are batch norm's counters
            if name == "convolution_backward":  # torch's own count takes grouped convolutions for full ones
                flops = 2 * args[0].numel() * args[2][0].numel() * sum(args[-1][:2])
            else:
                count = flop_registry.get(func.overloadpacket)
                flops = int(count(*args, **(kwargs or {}), out_val=out)) if count else 0
            self.rows.append(_Row(name, flops, sum(map(Tensor.numel, read + wrote))))
            self.written += sum(map(Tensor.numel, wrote))
        return out


def _norm(args: Any) -> tuple[Tensor, Tensor, Tensor]:
    x = args[0]
    return torch.empty_like(x), x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _norm_backward(args: Any) -> list[Tensor | None]:
    gradients, needed = _norm(args[1:]), args[-1]  # of the input, the weight and the bias: shaped as forward's results
    return [gradient if is_needed else None for gradient, is_needed in zip(gradients, needed, strict=True)]


# On the meta device torch decomposes these into many operators in Python: most of a trace's time.
_SHAPES = {
    torch.ops.aten.native_batch_norm: _norm,
    torch.ops.aten.native_batch_norm_backward: _norm_backward,
    torch.ops.aten.threshold_backward: lambda args: torch.empty_like(args[0]),
}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _trace(model: nn.Module, images: int, shape: tuple[int, ...]) -> _Trace:
    trace = _Trace()
    norms = {id(p) for m in model.modules() if isinstance(m, _BatchNorm) for p in m.parameters(recurse=False)}

    def note_use(module: nn.Module, inputs: object) -> None:
        for parameter in module.parameters(recurse=False):
            trace.needed.setdefault(id(parameter), len(trace.rows))

    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            hooks.append(module.register_forward_hook(partial(_note_layer, trace, name)))
        hooks.append(module.register_forward_pre_hook(note_use))
    for name, parameter in model.named_parameters():
        note = partial(_note_gradient, trace, name, id(parameter) in norms)
        hooks.append(parameter.register_post_accumulate_grad_hook(note))
    try:
        with trace:
            output = model(torch.empty(images, *shape, device="meta"))
            trace.middle, forward_wrote = len(trace.rows), trace.written
            output.sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    trace.written = forward_wrote
    # One kernel completes a convolution's weight and bias; buckets hold them in the reverse of the parameters' order.
    order = {name: -number for number, (name, _) in enumerate(model.named_parameters())}
    trace.gradients.sort(key=lambda gradient: (gradient.ready, order[gradient.name]))
    model.zero_grad()
    return trace


def _note_gradient(trace: _Trace, name: str, is_norm: bool, parameter: Tensor) -> None:
    ready, needed = len(trace.rows) - trace.middle, trace.needed.get(id(parameter), 0)
    light = is_norm or parameter.dim() == 1
    trace.gradients.append(Gradient(name, parameter.numel(), light, ready, needed, is_norm))


def _note_layer(trace: _Trace, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    if isinstance(module, nn.Conv2d):
        kernel, before, after = (math.prod(s) for s in (module.kernel_size, inputs[0].shape[2:], output.shape[2:]))
        layer = Layer(name, False, module.in_channels, module.out_channels, kernel, before, after, module.groups)
    else:
        assert isinstance(module, nn.Linear)
        layer = Layer(name, True, module.in_features, module.out_features, 1, 1, 1)
    trace.layers.append(layer)


@cache
def known_cost(name: str) -> ModelCost:
    """The cost of a built-in network at its published input size; UserError if there is none of that name."""
    if name == "bert-large":  # the layout of its gradients is enough for the published results
        # Devlin et al. (arXiv 1810.04805): 24 layers of width 1,024, 335 M in all.
        width, inner, norm = 1024, 4096, [1024, 1024]
        # Weights and biases: query, key, value and out of the attention, then the two products between its norms.
        layer = [*[width * width, width] * 4, *norm, width * inner, inner, inner * width, width, *norm]
        # Of 30,522 word pieces, 512 positions and 2 types; the last two are the pooler's.
        sizes = [30_522 * width, 512 * width, 2 * width, *norm, *layer * 24, width * width, width]
        nothing = Kernels(*(np.zeros(0) for _ in range(6)))
        gradients = tuple(Gradient("", values, False, 0) for values in reversed(sizes))
        return ModelCost(nothing, nothing, gradients, (), 0, 0.0)
    if name not in MODELS:
        raise UserError(f"model {name}: unknown; there are {', '.join(sorted([*MODELS, 'bert-large']))}")
    *shape, classes = _INPUTS.get(name, (3, 224, 224, 1000))
    return read_model(lambda: MODELS[name](classes=classes, channels=shape[0]), tuple(shape))


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of one virtual worker, in seconds."""

    forward: float
    backward: float
    ready: Array  # end of each gradient after the start of backward, in the order of `ModelCost.gradients`
    needed: Array  # first use of each gradient's parameter after the start of forward, in the same order


def kernel_seconds(
    kernels: Kernels, device: Device, software: Software, images: float, linear_share: float = 1.0
) -> Array:
    """Seconds of each kernel for so many images; this device has the fraction `linear_share` of linear weights."""
    # A fused activation costs neither a launch nor memory traffic; its few operations stay.
    left = 1.0 - kernels.elementwise if software.fused else np.ones_like(kernels.elementwise)
    math_seconds = images * kernels.flops / (device.peak_of(software.precision) * software.math)
    own = 1.0 - kernels.linear * (1.0 - linear_share)
    moved = (images * kernels.values + kernels.fixed * own) * _BYTES[software.precision]
    memory_seconds = moved / (device.memory_bandwidth * software.memory)
    launch = software.launch * kernels.launches
    # The terms add up rather than hide each other: batch norm and activations wait for the convolution before them.
    return (launch + memory_seconds) * left + math_seconds


def pass_seconds(cost: ModelCost, device: Device, software: Software, images: float, linear_share: float = 1.0) -> Pass:
    """A pass over `images` images on one device, which has the fraction `linear_share` of linear weights."""
    # Running sums with a zero in front: index k is the time at which k kernels are done.
    forward = np.concatenate([[0.0], np.cumsum(kernel_seconds(cost.forward, device, software, images, linear_share))])
    needed = forward[np.array([gradient.needed for gradient in cost.gradients], dtype=int)]
    backward = kernel_seconds(cost.backward, device, software, images, linear_share)
    done = np.concatenate([[0.0], np.cumsum(backward)])
    last = np.array([gradient.ready for gradient in cost.gradients], dtype=int)
    ready = done[last]
    if software.weights_first:  # both gradients of a convolution stand as one kernel, the second half is the input's
        ready = ready - np.where(cost.backward.launches[last - 1] > 1, backward[last - 1] / 2, 0.0)
    return Pass(float(forward[-1]), float(done[-1]), ready, needed)


class Routine(NamedTuple):
    """What a virtual worker computes in a step, beside one pass over its images."""

    extra_pass: bool = False  # a forward pass more before it
    local_steps: int = 1  # number of parts of its images, each with a pass and an update of its own copy of the network


ONE_PASS = Routine()


def worker_seconds(
    cost: ModelCost, device: Device, software: Software, images: float, routine: Routine, linear_share: float = 1.0
) -> Pass:
    """Times of a virtual worker's routine, as if it were one pass; arguments as of `pass_seconds`."""
    steps = routine.local_steps
    work = pass_seconds(cost, device, software, images / steps, linear_share)
    forward = work.forward * (1 + routine.extra_pass)
    if steps == 1:
        return replace(work, forward=forward)
    update = cost.parameters * _LOCAL_UPDATE_BYTES / (device.memory_bandwidth * software.memory)
    backward = steps * (work.backward + update)
    # The weights are copied before the first part, and their change leaves after the last one.
    return Pass(steps * forward, backward, np.full_like(work.ready, backward), np.zeros_like(work.needed))


def update_seconds(cost: ModelCost, cluster: Cluster, software: Software, devices: int) -> float:
    """Seconds of the optimiser's memory traffic, once a step on each device, however few virtual workers it has."""
    # The device updates the weights that it holds (of split layers a part), or its shard of all.
    groups = software.communication.linear_groups or devices
    shared = sum(layer.weights for layer in cost.layers if layer.linear) if groups < devices else 0
    weights = cost.parameters - shared * (1 - groups / devices)
    if software.sharded_update:
        weights = cost.parameters / devices
    alone = weights * software.update_bytes / (cluster.device.memory_bandwidth * software.memory)
    return alone * cluster.slowdown(devices)


def memory_bytes(cost: ModelCost, software: Software, images: float) -> float:
    """Memory of training on a device, about: activations of one pass, gradients, their sums, and what stays."""
    size = _BYTES[software.precision]
    stored = 0.6 if software.fused else 1.0  # without the outputs of fused activations and additions
    sums = max(4, software.communication.wire_bits // 8)
    return images * cost.activations * size * stored + cost.parameters * (4 * (software.held_values + 1) + sums)


def matched(
    software: Software, cost: ModelCost, device: Device, images: float, seconds: float, update: float,
    workers: int = 1, routine: Routine = ONE_PASS,
) -> Software:  # fmt: skip
    """The profile scaled so that so many virtual workers of `images` images take `seconds`, and the update `update`."""
    # One factor for all three terms: one measured step can't separate them.
    now = worker_seconds(cost, device, software, images, routine)
    factor = workers * (now.forward + now.backward) / seconds
    memory = software.memory * factor
    update_bytes = update * device.memory_bandwidth * memory / cost.parameters
    scaled = {"math": software.math * factor, "launch": software.launch / factor}
    return software.model_copy(update={**scaled, "memory": memory, "update_bytes": update_bytes})

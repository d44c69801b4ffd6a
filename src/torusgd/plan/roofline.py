"""Time on one device: an additive roofline. A kernel takes its launch, its operations and its memory traffic.

    seconds = launch + images * flops / (peak * math) + bytes / (memory_bandwidth * memory)

Three numbers of the software profile describe all of a network's kernels on all devices: `math`, `memory` and `launch`.
"""

from dataclasses import dataclass

import numpy as np

from .cluster import Cluster, Device, Software
from .model_cost import Array, Kernels, ModelCost

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    peak = device.peak.get(software.precision) or max(device.peak.values())
    math_seconds = images * kernels.flops / (peak * software.math)
    own = 1.0 - kernels.linear * (1.0 - linear_share)
    moved = (images * kernels.values + kernels.fixed * own) * _BYTES[software.precision]
    memory_seconds = moved / (device.memory_bandwidth * software.memory)
    launch = software.launch * device.slowness * kernels.launches
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
    """Memory of training on a device, about: activations of one pass, weights, gradients and momentum."""
    size = _BYTES[software.precision]
    stored = 0.6 if software.fused else 1.0  # without the outputs of fused activations and additions
    sums = max(4, software.communication.wire_bits // 8)
    return images * cost.activations * size * stored + cost.parameters * (12 + sums)


def matched(
    software: Software, cost: ModelCost, device: Device, images: float, seconds: float, update: float, passes: int = 1
) -> Software:
    """The profile scaled so that `passes` passes of `images` images take `seconds` in all, and an update `update`."""
    # One factor for all three terms: one measured step can't separate them.
    now = pass_seconds(cost, device, software, images)
    factor = passes * (now.forward + now.backward) / seconds
    memory = software.memory * factor
    update_bytes = update * device.memory_bandwidth * memory / cost.parameters
    scaled = {"math": software.math * factor, "launch": software.launch / factor}
    return software.model_copy(update={**scaled, "memory": memory, "update_bytes": update_bytes})

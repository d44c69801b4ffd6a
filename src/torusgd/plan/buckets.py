"""Cuts the gradients of a network into buckets, as published systems and torusgd do."""

from collections.abc import Sequence
from typing import NamedTuple

from ..comm.buckets import Bucket as Layout
from ..comm.buckets import best_buckets, lay_out
from ..comm.profile import Profile
from .cluster import Buckets
from .model_cost import Array, Gradient


class Bucket(NamedTuple):
    """Gradients that travel together."""

    ready: float
    """seconds after the start of backward when the last of them is complete"""
    bytes: float
    first: int = 0
    """its first gradient, in the order in which backward completes them"""
    stop: int = 0
    """one more than its last"""


def cut_buckets(gradients: tuple[Gradient, ...], ready: Array, rule: Buckets, wire_bytes: int) -> list[Bucket]:
    """The buckets in the order in which they leave.

    Args:
        gradients: In the order in which backward completes them.
        ready: When each is complete, in seconds.
        rule: How to cut. A tensor that is larger than a bucket is cut itself, except with rules
            layer, cubic and torusgd.
        wire_bytes: Of one value on the network.
    """
    if not gradients:
        return []
    if rule.rule == "cubic":
        return _cubic(gradients, ready, wire_bytes)
    sizes = [gradient.values * wire_bytes for gradient in gradients]
    if rule.rule == "layer":
        return [Bucket(float(ready[i]), float(size), i, i + 1) for i, size in enumerate(sizes)]
    if rule.option is not None:
        return _as_sent(lay_out(rule.option, [gradient.values for gradient in gradients]), ready, wire_bytes)
    total = float(sum(sizes))
    if rule.rule == "one":
        return [Bucket(float(ready[-1]), total, 0, len(sizes))]
    full = total / rule.parts if rule.parts else float((rule.values or 1) * wire_bytes)
    buckets, first, gone, seen = [], 0, 0.0, 0.0
    for number, (when, size) in enumerate(zip(ready, sizes, strict=True)):
        seen += size
        while seen - gone >= full * (1 - 1e-9):
            buckets.append(Bucket(float(when), full, first, number + 1))
            gone += full
            first = number if seen - gone > full * 1e-9 else number + 1
    if seen - gone > total * 1e-9:
        buckets.append(Bucket(float(ready[-1]), seen - gone, first, len(sizes)))
    return buckets


def settled_buckets(
    gradients: tuple[Gradient, ...], ready: Array, backward: float, profile: Profile, wire_bytes: int
) -> list[Bucket]:
    """The buckets that a run with `allreduce: auto` settles on after its first steps, by the same function.

    Args:
        gradients: In the order in which backward completes them.
        ready: When each is complete, in seconds after the start of backward.
        backward: When backward ends.
        profile: The measured network that the run is given.
        wire_bytes: Of one value on the network.
    """
    if not gradients or not profile.timings:
        return cut_buckets(gradients, ready, Buckets(), wire_bytes)
    best = best_buckets(profile, [gradient.values for gradient in gradients], (ready - backward).tolist())
    return _as_sent(best, ready, wire_bytes)


def _as_sent(layout: Sequence[Layout], ready: Array, wire_bytes: int) -> list[Bucket]:
    """Buckets as the reducer lays them out, each of which leaves when the last of its gradients is complete."""
    return [Bucket(float(max(ready[b.first : b.stop])), float(b.length * wire_bytes), b.first, b.stop) for b in layout]


def _cubic(gradients: tuple[Gradient, ...], ready: Array, wire_bytes: int) -> list[Bucket]:
    """Fujitsu's static groups: 3, 21, 57, ... tensors, and batch norm's in 32 bits at the very end."""
    buckets, first, k = [], 0, 0
    while first < len(gradients):
        stop = min(3 * (k + 1) ** 3, len(gradients))
        size = sum(g.values for g in gradients[first:stop] if not g.norm_or_bias) * wire_bytes
        buckets.append(Bucket(float(ready[stop - 1]), float(size), first, stop))
        first, k = stop, k + 1
    small = sum(gradient.values for gradient in gradients if gradient.norm_or_bias) * 4
    return [*buckets, Bucket(float(ready[-1]), float(small), 0, len(gradients))]

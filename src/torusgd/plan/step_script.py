"""The actions of one rank in a step, as a list: compute for so long, start a message, wait for a message.

A plan walks the list with the prices of the network (`timeline`), a rehearsal (`torusgd.rehearse`) with real messages
and timed waits. By symmetry one rank's list stands for all.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from ..gradients.layout import Bucket, best_buckets, lay_out, lay_out_wide_last, plan_buckets
from .cluster import Buckets, Cluster, Software
from .model_cost import Array, Gradient, Layer, ModelCost, Pass, update_seconds

Kind = Literal["sum", "scatter", "gather"]  # of a message: an all-reduce, or its first or second half
Content = Literal["gradients", "weights", "statistics", "activations"]
CONTENTS: tuple[Content, ...] = get_args(Content)
_MASTER_BYTES = 4  # of a weight that a sharded update gathers
_WIDE_BYTES = 4  # of a gradient that travels as float32 beside others in 16 bits
_STATUS_VALUES = 2  # of a tensor, by which the ranks of a sharded update agree on whether its sum may be used


class Compute(NamedTuple):
    """The device works for so many seconds."""

    seconds: float


class Send(NamedTuple):
    """A message leaves: a sum over ranks, or its first or second half (reduce-scatter, all-gather)."""

    name: str  # unique name in the step
    kind: Kind
    content: Content
    bytes: float  # bytes of the whole tensor, before it is cut into shards
    members: int | None = None  # number of ranks of a group that exchange among themselves; None: all
    apart: int = 1  # distance between neighbouring members, in ranks


class Wait(NamedTuple):
    """A wait for that message; none if neither this step nor the one before has sent it."""

    name: str


Action = Compute | Send | Wait


@dataclass
class _Step:
    """A step as it is written: actions with the seconds after the start of their pass, and those between passes."""

    forward: list[tuple[float, Sequence[Action]]] = field(default_factory=list)
    backward: list[tuple[float, Sequence[Action]]] = field(default_factory=list)
    summed: list[Action] = field(default_factory=list)
    gathers: list[tuple[float, Send]] = field(default_factory=list)  # each with the seconds of forward before it


def compose(
    cost: ModelCost, cluster: Cluster, software: Software, devices: int, images: int, passes: int, work: Pass
) -> list[Action]:
    """The script of a step on each device: `passes` virtual workers of `images` images; `work` are a pass's times."""
    # Plan 5: a step as a list; a rehearsal plays the same one.
    step = _Step()
    if devices > 1:
        if software.communication.statistic_bytes:
            size = software.communication.statistic_bytes * (cost.statistics + 1)
            _summed(step, 0.0, Send("statistics", "sum", "statistics", size))
        split = split_layers(cost, software, devices)
        for layer in split:
            _exchange(step, cost, software, devices, images * passes, work, layer)
        _gradients(step, cost, cluster, software, work, {layer.name for layer in split})
    if step.gathers:
        size = _STATUS_VALUES * max(software.communication.wire_bits // 8, _MASTER_BYTES)
        status = Send("status", "sum", "statistics", size * len(cost.gradients))
        step.summed += [status, Wait(status.name)]
    between = (passes - 1) * (work.forward + work.backward)
    # The first forward waits for gathered weights, the last backward sends buckets: all passes between are one stretch.
    # Each rank updates its shards once all its sums are there, and then gathers first what forward needs first.
    return [
        *_spread(step.forward, work.forward),
        *([Compute(between)] if between else []),
        *_spread(step.backward, work.backward),
        *step.summed,
        Compute(update_seconds(cost, cluster, software, devices)),
        *(send for _, send in sorted(step.gathers)),
    ]


def split_layers(cost: ModelCost, software: Software, devices: int) -> list[Layer]:
    """The linear layers that the ranks of a group divide among them."""
    groups = software.communication.linear_groups
    return [layer for layer in cost.layers if layer.linear] if groups is not None and groups < devices else []


def activation_bytes(software: Software) -> int:
    """Bytes of an activation that ranks exchange: those of a gradient's element, but for integers of 64 bits."""
    return min(software.communication.wire_bits // 8, _MASTER_BYTES)


def _gradients(step: _Step, cost: ModelCost, cluster: Cluster, software: Software, work: Pass, split: set[str]) -> None:
    """Buckets of all layers but those split; they leave in one order, the order of the gradients."""
    communication = software.communication
    whole = [i for i, gradient in enumerate(cost.gradients) if gradient.name.rpartition(".")[0] not in split]
    gradients = tuple(cost.gradients[i] for i in whole)
    # The other rules describe programs that don't read a recipe.
    sends_norms_last = communication.wide_norms and communication.buckets.rule == "torusgd"
    is_wide = [sends_norms_last and gradient.is_norm for gradient in gradients]
    needed = work.needed[whole][_sending_order(is_wide)]
    is_ahead = software.sharded_update and communication.gather_ahead
    size = communication.wire_bits // 8
    ready = work.ready[whole]
    # On these conditions a run on CPUs rebuilds its buckets after its first steps (`gradients.reducer`).
    is_auto = communication.algorithm == "auto" and communication.buckets.option == "auto"
    profile = cluster.profile if is_auto and not software.sharded_update and not any(is_wide) else None
    if profile is None or profile.backend != "gloo":
        buckets = cut_buckets(gradients, ready, communication.buckets, size, is_wide)
    elif gradients and profile.timings:
        numels = [gradient.values for gradient in gradients]
        layout = best_buckets(profile, numels, (ready - work.backward).tolist())
        buckets = _departures(layout, numels, ready, size)
    else:
        buckets = cut_buckets(gradients, ready, Buckets(), size)
    for number, bucket in enumerate(buckets):
        when = bucket.ready if communication.overlap else work.backward
        # With `gather_ahead` only shards are summed; the layer that needs the new weights first waits for them.
        _summed(step, when, Send(f"gradients {number}", "scatter" if is_ahead else "sum", "gradients", bucket.bytes))
        if is_ahead:
            first = float(min(needed[bucket.first : bucket.stop]))
            weights = Send(f"weights {number}", "gather", "weights", bucket.values * _MASTER_BYTES)
            step.gathers.append((first, weights))
            step.forward.append((first, [Wait(weights.name)]))


def _exchange(
    step: _Step, cost: ModelCost, software: Software, devices: int, images: int, work: Pass, layer: Layer
) -> None:
    """Activations and their gradients inside the groups, the shards' gradients across them (Das et al., section 5)."""
    communication = software.communication
    groups, size = communication.linear_groups or devices, communication.wire_bits // 8
    members = devices // groups
    last = max(i for i, gradient in enumerate(cost.gradients) if gradient.name.rpartition(".")[0] == layer.name)
    begin, ready = float(work.needed[last]), float(work.ready[last])
    # Each wait follows its message at once: nothing else can be computed before the layer has its inputs.
    whole = activation_bytes(software) * layer.ifm * layer.in_area * images * members
    inputs = Send(f"inputs of {layer.name}", "gather", "activations", whole, members)
    back = Send(f"gradients of the inputs of {layer.name}", "scatter", "activations", whole, members)
    step.forward.append((begin, [inputs, Wait(inputs.name)]))
    step.backward.append((ready, [back, Wait(back.name)]))
    if groups > 1:
        shards = Send(f"gradients of {layer.name}", "sum", "gradients", layer.weights * size / members, groups, members)
        _summed(step, ready if communication.overlap else work.backward, shards)


def _summed(step: _Step, when: float, send: Send) -> None:
    step.backward.append((when, [send]))
    step.summed.append(Wait(send.name))


def _spread(timed: Iterable[tuple[float, Sequence[Action]]], seconds: float) -> list[Action]:
    """A pass of so many seconds, cut at the times of its actions."""
    script: list[Action] = []
    now = 0.0
    for when, actions in sorted(timed, key=lambda pair: pair[0]):
        if when > now:
            script.append(Compute(when - now))
            now = when
        script += actions
    if seconds > now:
        script.append(Compute(seconds - now))
    return script


class Departure(NamedTuple):
    """Gradients that leave together."""

    ready: float  # seconds after the start of backward at which the last of them is complete
    bytes: float
    values: float
    first: int  # index of the first of them in the order of sending: that of backward, but wide ones come last
    stop: int  # index after the last of them


def cut_buckets(
    gradients: tuple[Gradient, ...], ready: Array, rule: Buckets, wire_bytes: int, is_wide: Sequence[bool] = ()
) -> list[Departure]:
    """The buckets as they leave, of gradients in backward's order, whole at `ready`; wide ones last, in 32 bits."""
    if not gradients:
        return []
    numels = [gradient.values for gradient in gradients]
    # `values` and `parts` cut a tensor that is larger than a bucket, as a fusion buffer does; the other rules are a
    # run's own (`gradients.layout`).
    if rule.rule in ("parts", "values"):
        full = sum(numels) / rule.parts if rule.parts else float(rule.values or 1)
        return _fused(numels, ready, full, wire_bytes)
    if rule.rule == "cubic":  # batch norm's gradients leave last, in 32 bits
        small = sum(gradient.values for gradient in gradients if gradient.norm_or_bias)
        last = Departure(float(ready[-1]), float(_WIDE_BYTES * small), small, 0, len(gradients))
        narrow = [0 if gradient.norm_or_bias else gradient.values for gradient in gradients]
        return [*_departures(lay_out("cubic", numels), narrow, ready, wire_bytes), last]
    if rule.option is None:
        buckets = plan_buckets(numels, limit=sum(numels) if rule.rule == "one" else 0)
        return _departures(buckets, numels, ready, wire_bytes)
    is_wide = is_wide or [False] * len(numels)
    order, first_wide = _sending_order(is_wide), list(is_wide).count(False)
    # No bucket of a run leaves before the one before it.
    sent, leaves = [numels[number] for number in order], np.maximum.accumulate(ready[order])
    layout = lay_out_wide_last(rule.option, numels, is_wide)
    return [
        *_departures([bucket for bucket in layout if bucket.first < first_wide], sent, leaves, wire_bytes),
        *_departures([bucket for bucket in layout if bucket.first >= first_wide], sent, leaves, _WIDE_BYTES),
    ]


def _sending_order(is_wide: Sequence[bool]) -> list[int]:
    """Indices of gradients in the order of sending: that of backward, but the wide ones last."""
    return sorted(range(len(is_wide)), key=lambda number: is_wide[number])


def _departures(layout: Sequence[Bucket], numels: Sequence[int], ready: Array, wire_bytes: int) -> list[Departure]:
    """Buckets of whole tensors, each of which leaves when its last gradient is complete."""
    departures = []
    for first, stop in ((bucket.first, bucket.stop) for bucket in layout):
        values = sum(numels[first:stop])
        departures.append(Departure(float(max(ready[first:stop])), float(wire_bytes * values), values, first, stop))
    return departures


def _fused(numels: Sequence[int], ready: Array, full: float, wire_bytes: int) -> list[Departure]:
    """Buffers of `full` values, each of which leaves when it is full; the last one has the rest."""
    # `gone` and `seen` are sums of floats: the tolerances avoid a bucket of a rounding error.
    buckets, first, gone, seen = [], 0, 0.0, 0.0
    for number, (when, size) in enumerate(zip(ready, numels, strict=True)):
        seen += size
        while seen - gone >= full * (1 - 1e-9):
            buckets.append(Departure(float(when), full * wire_bytes, full, first, number + 1))
            gone += full
            first = number if seen - gone > full * 1e-9 else number + 1
    if seen - gone > seen * 1e-9:
        buckets.append(Departure(float(ready[-1]), (seen - gone) * wire_bytes, seen - gone, first, len(numels)))
    return buckets

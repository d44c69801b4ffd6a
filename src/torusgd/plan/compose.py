"""Writes the script of a step: which messages leave when, for replicated and sharded updates and for split layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .buckets import cut_buckets, settled_buckets
from .cluster import Cluster, Software
from .model_cost import Layer, ModelCost
from .roofline import Pass, update_seconds
from .step_script import Action, Compute, Send, Wait

_MASTER_BYTES = 4
"""of a weight, as a sharded update gathers it"""
_VERDICT_BYTES = 8
"""of a tensor, by which the ranks of a sharded update tell each other whether its sum may be used"""


@dataclass
class _Step:
    """A step as it is written: actions with the seconds after the start of their pass, and those between passes."""

    forward: list[tuple[float, Sequence[Action]]] = field(default_factory=list)
    backward: list[tuple[float, Sequence[Action]]] = field(default_factory=list)
    summed: list[Wait] = field(default_factory=list)
    status: list[Action] = field(default_factory=list)
    gathers: list[tuple[float, Send]] = field(default_factory=list)
    """with the seconds after the start of forward at which they are needed"""


def compose(
    cost: ModelCost, cluster: Cluster, software: Software, devices: int, images: int, passes: int, work: Pass
) -> list[Action]:
    """The script of one step on each of `devices` devices.

    Buckets leave while the last virtual worker's backward pass runs. A sharded update with `gather_ahead` sums each
    bucket into shards, updates its own, and gathers the new weights in the order in which the next forward pass needs
    them; the layer that needs them waits. Split layers gather their inputs inside the group before they begin, and
    scatter the gradients of their inputs.

    Args:
        cost: The network.
        cluster: The machine.
        software: The program.
        devices: How many take part.
        images: Of one virtual worker.
        passes: Virtual workers of a device, one after another.
        work: Times of one pass.
    """
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
        status = Send("status", "sum", "statistics", _VERDICT_BYTES * len(cost.gradients))
        step.status += [status, Wait(status.name)]
    between = (passes - 1) * (work.forward + work.backward)
    return [
        *_spread(step.forward, work.forward),
        *([Compute(between)] if between else []),
        *_spread(step.backward, work.backward),
        *step.summed,
        *step.status,
        Compute(update_seconds(cost, cluster, software, devices)),
        *(send for _, send in sorted(step.gathers)),
    ]


def split_layers(cost: ModelCost, software: Software, devices: int) -> list[Layer]:
    """The linear layers that the ranks of a group share."""
    groups = software.communication.linear_groups
    return [layer for layer in cost.layers if layer.linear] if groups is not None and groups < devices else []


def _gradients(step: _Step, cost: ModelCost, cluster: Cluster, software: Software, work: Pass, split: set[str]) -> None:
    """Buckets of all layers but those split; they leave in one order, the order of the gradients."""
    how = software.communication
    whole = [i for i, gradient in enumerate(cost.gradients) if gradient.name.rpartition(".")[0] not in split]
    gradients = tuple(cost.gradients[i] for i in whole)
    needed = work.needed[whole]
    is_ahead = software.sharded_update and how.gather_ahead
    size = how.wire_bits // 8
    ready = work.ready[whole]
    may_settle = how.algorithm == "auto" and how.buckets.option == "auto" and not software.sharded_update
    if (
        cluster.profile is not None and cluster.profile.backend == "gloo" and may_settle
    ):  # as `gradients.bucket_rebuild`: on CPUs
        buckets = settled_buckets(gradients, ready, work.backward, cluster.profile, size)
    else:
        buckets = cut_buckets(gradients, ready, how.buckets, size)
    for number, bucket in enumerate(buckets):
        when = bucket.ready if how.overlap else work.backward
        _summed(step, when, Send(f"gradients {number}", "scatter" if is_ahead else "sum", "gradients", bucket.bytes))
        if is_ahead:
            first = float(min(needed[bucket.first : bucket.stop]))
            weights = Send(f"weights {number}", "gather", "weights", bucket.bytes / size * _MASTER_BYTES)
            step.gathers.append((first, weights))
            step.forward.append((first, [Wait(weights.name)]))


def _exchange(
    step: _Step, cost: ModelCost, software: Software, devices: int, images: int, work: Pass, layer: Layer
) -> None:
    """Activations and their gradients inside the groups, the shards' gradients across them (Das et al., section 5)."""
    how = software.communication
    groups = how.linear_groups or devices
    members = devices // groups
    size = how.wire_bits // 8
    place = max(i for i, gradient in enumerate(cost.gradients) if gradient.name.rpartition(".")[0] == layer.name)
    begin, ready = float(work.needed[place]), float(work.ready[place])
    whole = size * layer.ifm * layer.in_area * images * members
    inputs = Send(f"inputs of {layer.name}", "gather", "activations", whole, members)
    back = Send(f"gradients of the inputs of {layer.name}", "scatter", "activations", whole, members)
    step.forward.append((begin, [inputs, Wait(inputs.name)]))
    step.backward.append((ready, [back, Wait(back.name)]))
    if groups > 1:
        shards = Send(f"gradients of {layer.name}", "sum", "gradients", layer.weights * size / members, groups, members)
        _summed(step, ready if how.overlap else work.backward, shards)


def _summed(step: _Step, when: float, send: Send) -> None:
    step.backward.append((when, [send]))
    step.summed.append(Wait(send.name))


def _spread(timed: Iterable[tuple[float, Sequence[Action]]], seconds: float) -> list[Action]:
    """A pass of so many seconds, cut where something happens."""
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

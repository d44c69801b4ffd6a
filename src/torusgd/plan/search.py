"""Searches: the curve over numbers of devices with its knee, and the quickest settings on a cluster."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from ..comm.tuning.cost import candidates
from .cluster import Buckets, Cluster, Software
from .forecast import Forecast, PlannedStage, Workload, forecast, memory_of, run_time, with_communication

KNEE_EFFICIENCY = 0.8  # fraction of one device's work that one more device still gives at the knee of the curve


def device_counts(limit: int, workers: int) -> list[int]:
    """A few numbers of devices an octave up to `limit`, itself one of them, that divide the virtual workers evenly."""
    counts, last = {limit}, 0.0
    # Divisors of `workers` stand closer than others; of the others up to `workers` only those that leave at most 5 %
    # of the devices' time idle.
    for count in range(1, limit):
        divides = workers % count == 0
        even = count > workers or workers / (count * math.ceil(workers / count)) >= 0.95
        if count >= last * (2**0.125 if divides else 2**0.25) and even:
            counts.add(count)
            last = count
    return sorted(counts)


def fixed_batch(workload: Workload, devices: int) -> Workload:
    """The same batches, cut anew if there are more devices than virtual workers: strong scaling."""
    stages = (stage if stage.workers >= devices else _cut(stage, devices) for stage in workload.stages)
    return replace(workload, stages=tuple(stages))


def _cut(stage: PlannedStage, workers: int) -> PlannedStage:
    images = math.ceil(stage.batch / workers)
    return replace(stage, images=images, workers=workers, spare=images * workers - stage.batch)


class Sweep(NamedTuple):
    """Forecasts over devices; `knee` is the number of devices beyond which more bring little."""

    forecasts: tuple[Forecast, ...]
    knee: int


def sweep(workload: Workload, cluster: Cluster, program: Callable[[int], Software], counts: Sequence[int]) -> Sweep:
    """Forecasts for every number of devices with its program, always of the same batch."""
    forecasts = tuple(forecast(fixed_batch(workload, count), cluster, program(count), count) for count in counts)
    return Sweep(forecasts, knee_of([(f.devices, f.images_per_second) for f in forecasts]))


def knee_of(curve: Sequence[tuple[int, float]]) -> int:
    """The last number of devices up to which every added one had KNEE_EFFICIENCY of the first point's rate a device."""
    # On the curve's upper hull, so that numbers of devices that divide the work badly do not count.
    hull: list[tuple[int, float]] = []
    for point in curve:
        # A point below the line between its neighbours leaves the hull.
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    least = KNEE_EFFICIENCY * hull[0][1] / hull[0][0]
    return next((a[0] for a, b in pairwise(hull) if _slope(a, b) < least), hull[-1][0])


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


Change = Callable[[Software], Software]


@dataclass(frozen=True)
class ChosenSetting:
    setting: str
    value: str
    saves: float  # seconds by which the run is longer with all other choices but without this one


class SearchResult(NamedTuple):
    """The settings that a search chose, and the forecasts before and after."""

    choices: tuple[ChosenSetting, ...]
    before: Forecast
    forecast: Forecast
    workload: Workload
    software: Software


def search_settings(workload: Workload, cluster: Cluster, software: Software, devices: int) -> SearchResult:
    """Chooses all-reduce and grid, buckets, update, groups of split layers, and the cut of the batch."""

    def seconds(chosen: dict[str, tuple[str, Change]], of: Workload = workload) -> float:
        return run_time(of, cluster, _apply(software, chosen), devices).seconds

    before = forecast(workload, cluster, software, devices)
    chosen: dict[str, tuple[str, Change]] = {}
    least, is_better = before.run.seconds, True
    # Coordinate descent: each setting in turn takes its best value with all others as they are, until a whole turn
    # changes none by a thousandth of the run.
    while is_better:
        is_better = False
        for setting, values in _options(workload, cluster, software, devices).items():
            timed = [(seconds({**chosen, setting: value}), value) for value in values]
            time, value = min(timed, key=lambda item: item[0])
            if time < least * (1 - 1e-3):
                chosen[setting], least, is_better = value, time, True
    found = _apply(software, chosen)
    # The cut of the batch comes last, since it alone may change the recipe: batch norm sees other images together.
    cut = min(_cuts(workload, cluster, found, devices), key=partial(seconds, chosen))
    after, choices = forecast(cut, cluster, found, devices), []
    # What a choice saves is counted with all others made, since they depend on each other.
    for setting, (name, _) in chosen.items():
        others = {key: other for key, other in chosen.items() if key != setting}
        choices.append(ChosenSetting(setting, name, seconds(others, cut) - after.run.seconds))
    if after.run.seconds < least * (1 - 1e-3):
        images = " > ".join(str(stage.images) for stage in cut.stages)
        name = f"{images} ({cut.stages[-1].workers} virtual workers)"
        choices.append(ChosenSetting("images a worker", name, least - after.run.seconds))
    return SearchResult(tuple(choices), before, after, cut, found)


def _apply(software: Software, chosen: dict[str, tuple[str, Change]]) -> Software:
    for _, change in chosen.values():
        software = change(software)
    return software


def _options(
    workload: Workload, cluster: Cluster, software: Software, devices: int
) -> dict[str, list[tuple[str, Change]]]:
    grids = [(devices // columns, columns) for columns in range(2, devices) if devices % columns == 0]
    listed = candidates(devices, min(devices, cluster.devices_per_node), tuple(grids))

    def using(**changes: Any) -> Change:
        return partial(with_communication, **changes)

    algorithms = [(str(each), using(algorithm=each.name, grids=(each.grid,))) for each in listed]
    if cluster.in_network_reduction:
        algorithms.append(("in-network", using(algorithm="in-network")))
    sizes = (1, 2, 4, 8, 16, 32)
    if software.communication.buckets.rule == "torusgd":  # as `--buckets`: whole tensors, wide ones by themselves
        rules = {f"{mib} MiB": Buckets(rule="torusgd", option=float(mib)) for mib in (*sizes, 1024)}
    else:
        values = {mib: mib * 2**20 * 8 // software.communication.wire_bits for mib in sizes}
        rules = {"one": Buckets()} | {f"{mib} MiB": Buckets(rule="values", values=n) for mib, n in values.items()}
    sharded = {"sharded_update": True}
    options: dict[str, list[tuple[str, Change]]] = {
        "all-reduce": algorithms,
        "buckets": [(name, using(buckets=rule)) for name, rule in rules.items()],
        # As `--update sharded`.
        "update": [("sharded", lambda s: with_communication(s, gather_ahead=True).model_copy(update=sharded))],
    }
    if sum(layer.weights for layer in workload.cost.layers if layer.linear) > workload.cost.parameters / 2:
        divisors = [groups for groups in range(1, devices) if devices % groups == 0]
        options["linear layers"] = [(f"split, {groups} groups", using(linear_groups=groups)) for groups in divisors]
    return options


def _cuts(workload: Workload, cluster: Cluster, software: Software, devices: int) -> list[Workload]:
    """The workload itself, and with other numbers of virtual workers, as many on each device, if they fit in memory."""
    batches = [stage.batch for stage in workload.stages]
    most = max(stage.workers for stage in workload.stages)
    limit, cuts = cluster.device.memory, [workload]
    for w in range(devices, most + 1, devices):
        if all(batch % w == 0 for batch in batches):
            cut = replace(workload, stages=tuple(_cut(stage, w) for stage in workload.stages))
            if limit is None or memory_of(cut, software) <= limit:
                cuts.append(cut)
    return cuts

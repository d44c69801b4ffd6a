"""The search for the settings that a cluster likes best, and what each of them brings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cluster import Buckets, Cluster, Software
from .forecast import Forecast, Job, forecast, with_communication
from .run_time import Span

Change = Callable[[Software], Software]


@dataclass(frozen=True)
class Choice:
    """One setting that differs from where the search began."""

    setting: str
    value: str
    saves: float
    """seconds of the run: how much longer it takes with all other choices but without this one"""


@dataclass(frozen=True)
class Best:
    """What was found."""

    choices: tuple[Choice, ...]
    before: Forecast
    forecast: Forecast
    job: Job
    software: Software


def best(job: Job, cluster: Cluster, software: Software, devices: int) -> Best:
    """Chooses all-reduce and grid, buckets, update, groups of split layers, and how the batch is cut.

    The software's settings are searched in turn until none changes any more. The cut of the batch (images of a virtual
    worker, with the batch as it is) comes last; where there is batch norm it makes another recipe.
    """
    before = forecast(job, cluster, software, devices)
    options = _options(job, cluster, software, devices)
    chosen: dict[str, tuple[str, Change]] = {}
    seconds = before.run.seconds
    changed = True
    while changed:
        changed = False
        for setting, values in options.items():
            others = {key: value for key, value in chosen.items() if key != setting}
            timed = [(_seconds(job, cluster, software, devices, {**others, setting: v}), v) for v in values]
            time, value = min(timed, key=lambda item: item[0])
            if time < seconds * (1 - 1e-3):
                chosen[setting], seconds, changed = value, time, True
    found = _apply(software, chosen)
    cut = min(_cuts(job, cluster, found, devices), key=lambda item: forecast(item, cluster, found, devices).run.seconds)
    after = forecast(cut, cluster, found, devices)
    choices = []
    for setting, (name, _) in chosen.items():
        others = {key: kept for key, kept in chosen.items() if key != setting}
        choices.append(Choice(setting, name, _seconds(cut, cluster, software, devices, others) - after.run.seconds))
    if after.run.seconds < seconds * (1 - 1e-3):
        images = " > ".join(str(span.images) for span in cut.spans)
        name = f"{images} ({cut.spans[-1].workers} virtual workers)"
        choices.append(Choice("images a worker", name, seconds - after.run.seconds))
    return Best(tuple(choices), before, after, cut, found)


def _apply(software: Software, chosen: dict[str, tuple[str, Change]]) -> Software:
    for _, change in chosen.values():
        software = change(software)
    return software


def _seconds(
    job: Job, cluster: Cluster, software: Software, devices: int, chosen: dict[str, tuple[str, Change]]
) -> float:
    return forecast(job, cluster, _apply(software, chosen), devices).run.seconds


def _options(job: Job, cluster: Cluster, software: Software, devices: int) -> dict[str, list[tuple[str, Change]]]:
    size = software.communication.wire_bits / 8
    flat = ["ring", "halving-doubling", "doubling", *(["in-network"] if cluster.in_network_reduction else [])]
    grids = [(devices // x, x) for x in range(2, devices) if devices % x == 0]
    algorithms = [(name, _with(algorithm=name)) for name in flat]
    for rows, columns in grids:
        for method in ("ring", "halving"):
            change = _with(algorithm="torus", grids=((rows, columns),), methods=(method, "ring"))
            algorithms.append((f"torus {rows}x{columns} ({method} x ring)", change))
    mebibytes = {mib: round(mib * 2**20 / size) for mib in (1, 2, 4, 8, 16, 32)}
    buckets = [("one", _with(buckets=Buckets().model_dump()))]
    for mib, values in mebibytes.items():
        buckets.append((f"{mib} MiB", _with(buckets=Buckets(rule="values", values=values).model_dump())))
    options: dict[str, list[tuple[str, Change]]] = {
        "all-reduce": algorithms,
        "buckets": buckets,
        "update": [("sharded", _sharded)],
    }
    if sum(layer.weights for layer in job.cost.layers if layer.linear) > job.cost.parameters / 2:
        divisors = [groups for groups in range(1, devices) if devices % groups == 0]
        options["linear layers"] = [(f"split, {g} groups", _with(linear_groups=g)) for g in divisors]
    return options


def _with(**changes: Any) -> Change:
    return lambda software: with_communication(software, **changes)


def _sharded(software: Software) -> Software:
    return software.model_copy(update={"sharded_update": True})


def _cuts(job: Job, cluster: Cluster, software: Software, devices: int) -> list[Job]:
    """The job itself, and with other numbers of virtual workers, as many on each device, that fit into its memory."""
    batches = [span.batch for span in job.spans]
    most = max(span.workers for span in job.spans)
    even = [w for w in range(devices, most + 1, devices) if all(batch % w == 0 for batch in batches)]
    jobs = [_recut(job, workers) for workers in even]
    limit = cluster.device.memory
    fitting = [cut for cut in jobs if limit is None or forecast(cut, cluster, software, devices).memory <= limit]
    return [job, *fitting]


def _recut(job: Job, workers: int) -> Job:
    spans = tuple(Span(span.steps, span.batch // workers, workers) for span in job.spans)
    return Job(job.cost, spans, job.train_images, job.eval_images, job.evaluations)

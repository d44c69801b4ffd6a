"""The machine at hand as a cluster: its network from `torusgd tune`, its compute from a run of one worker."""

from pathlib import Path
from statistics import median
from typing import Any

from ..comm.tuning.profile import Link as MeasuredLink
from ..comm.tuning.profile import Profile, ranks_a_host
from ..errors import UserError
from ..untrusted import parse_json, read_text
from .cluster import Cluster, Device, Link, Software
from .forecast import Workload
from .roofline import matched

_NOMINAL = 1e12
"""FLOP/s of a device without a figure; a measured step cancels it"""


def local_cluster(profile: Profile, name: str = "local") -> Cluster:
    """Nodes and links of a measured profile; the device is a nominal one, to be used with `measured_software`."""
    links = [_link(link) for link in (profile.inside, profile.between)]
    known = next((link for link in links if link is not None), Link(alpha=0.0, bandwidth=_NOMINAL))
    inside, between = (link or known for link in links)
    return Cluster(
        name=name,
        source=f"measured by torusgd tune on {len(profile.hosts)} ranks, {profile.backend}",
        device=Device(
            name="one worker here",
            peak={"float32": _NOMINAL, "bfloat16": _NOMINAL, "float16": _NOMINAL},
            memory_bandwidth=_NOMINAL / 25,
        ),
        devices_per_node=ranks_a_host(profile.hosts),
        crowding={crowd.ranks: crowd.slowdown for crowd in profile.crowding},
        inside=inside,
        between=between,
        profile=profile,
    )


def _link(link: MeasuredLink | None) -> Link | None:
    # A latency or slope of zero is below the resolution of tune.
    return None if link is None else Link(alpha=link.latency, bandwidth=1 / max(link.per_byte, 1e-12))


def measured_software(workload: Workload, cluster: Cluster, software: Software, run: Path) -> Software:
    """The profile scaled to the steps of a finished run (a folder) of the same recipe with one worker.

    Its message cost becomes the measured one. UserError if there is no such run, or it had several workers or another
    batch.
    """
    try:
        summary: dict[str, Any] = parse_json(read_text(run / "summary.json"))
        with (run / "events.jsonl").open() as lines:
            events = [parse_json(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UserError(f"measured run {run}: needs the summary.json and events.jsonl of a finished run") from error
    if not all(isinstance(table, dict) for table in (summary, *events)):
        raise UserError(f"measured run {run}: its summary.json or events.jsonl is damaged")
    if summary.get("world_size") != 1:
        raise UserError(
            f"measured run {run}: ran on {summary.get('world_size')} workers; plan from a run of --workers 1"
        )
    first = workload.stages[0]
    batch = first.images * first.workers
    steps = [event for event in events if event.get("batch") == batch and "update_seconds" in event]
    if len(steps) < 2:
        raise UserError(f"measured run {run}: has no 2 steps of batch {batch}; it was another recipe or too short")
    # The first step includes the warm-up.
    passes, update = (median(event[key] for event in steps[1:]) for key in ("step_seconds", "update_seconds"))
    passes -= update
    if cluster.profile is not None:
        communication = software.communication.model_copy(update={"message": cluster.profile.message})
        software = software.model_copy(update={"communication": communication})
    software = software.model_copy(update={"measured_on": (cluster.device.name,)})
    return matched(software, workload.cost_of(first), cluster.device, first.images, passes, update, first.workers)

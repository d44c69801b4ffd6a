"""Buckets rebuilt after a run's first steps, as DistributedDataParallel does, here by measured times.

DDP lays its buckets out anew in the order in which gradients arrived. This one knows from a network profile what each
message costs, and chooses sizes so that the last gradient is summed earliest.
"""

import json

import torch

from ..comm.groups import Group
from ..comm.tuning.profile import Profile
from .layout import Bucket, ParameterLayout, best_buckets, finish, group
from .reducer import Reducer

STEPS = (1, 2, 3)
"""steps of this process whose gradient times are used; step 0 warms up"""


class BucketRebuild:
    """Watches a reducer's first steps and then rebuilds its buckets; those of column blocks stay.

    Only on CPUs, since on a GPU the host does not know when a gradient is there; not with shards, which follow the
    buckets as momentum follows the shards; and not if batch norm's gradients have buckets of their own. Without a
    profile of the network the buckets stay.
    """

    def __init__(self, reducer: Reducer, profile: Profile | None, world: Group) -> None:
        held = reducer.layout.held
        self._slots = [i for i, slot in enumerate(held) if slot.layer is None]
        can_rebuild = bool(self._slots) and not reducer.is_sharded and held[0].tensor.device.type == "cpu"
        can_rebuild &= not any(slot.is_wide for slot in held)
        self._reducer, self._world, self._profile = reducer, world, profile if can_rebuild else None
        self._steps = 0
        self._ready = torch.full((len(self._slots),), torch.inf, dtype=torch.float64)

    def after_step(self) -> str:
        """To be called after each step, on every rank; one line if it rebuilt the buckets, else an empty text."""
        step, profile, self._steps = self._steps, self._profile, self._steps + 1
        if profile is None or step > STEPS[-1]:
            return ""
        if step in STEPS:
            ready = torch.tensor([self._reducer.ready[slot] for slot in self._slots], dtype=torch.float64)
            self._ready = torch.minimum(self._ready, ready - ready.max())
        if step < STEPS[-1]:
            return ""
        # The quickest of a rank's steps, which no pause has touched, and of the ranks the slowest, whom all wait for.
        self._world.all_reduce(self._ready, maximum=True)
        return self._rebuild(profile, self._ready.tolist())

    def _rebuild(self, profile: Profile, times: list[float]) -> str:
        layout = self._reducer.layout
        # Buckets of column blocks stay as they are; their slots come first.
        columns = [b for b in layout.buckets if layout.held[b.first].layer is not None]
        offset = len(layout.held) - len(self._slots)
        before = [_moved(b, -offset) for b in layout.buckets[len(columns) :]]
        numels = [layout.held[slot].tensor.numel() for slot in self._slots]
        decided = ""
        # Rank 0 decides for all: ranks that each computed it could differ in the last bit of a time, and then in the
        # messages that they expect.
        if self._world.rank == 0:
            best = best_buckets(profile, numels, times)
            late, early = (1e3 * finish(profile, cut, times) for cut in (before, best))
            decided = json.dumps([[b.stop - b.first for b in best], late, early])
        counts, late, early = json.loads(self._world.broadcast_text(decided))
        buckets = group(counts, numels)
        moved = (*columns, *(_moved(b, offset) for b in buckets))
        self._reducer.use_layout(ParameterLayout(layout.slots, moved, layout.block))
        return (
            f"buckets auto: {_sizes(buckets)}, by the profile and the times of the first gradients: expected to be "
            f"summed {early:.0f} ms after backward, where {_sizes(before)} take {late:.0f} ms"
        )


def _moved(bucket: Bucket, slots: int) -> Bucket:
    return Bucket(bucket.first + slots, bucket.stop + slots, bucket.offsets, bucket.numels)


def _sizes(buckets: list[Bucket]) -> str:
    mib = [b.length / 2**18 for b in buckets]
    return f"{len(mib)} of {min(mib):.2g} to {max(mib):.2g} MiB" if len(mib) > 1 else f"1 of {mib[0]:.2g} MiB"

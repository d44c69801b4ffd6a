"""Bucket sizes by measurement: decided once, after a run's first steps, by all ranks alike."""

import torch
import torch.distributed as dist

from ..comm.buckets import best_buckets, finish
from ..comm.profile import Profile
from .integer_sum import Bucket
from .reducer import Reducer

STEPS = (1, 2, 3)
"""whose gradients' times count, of those that this process takes; the very first is no measure"""


class BucketRebuild:
    """Watches a reducer's first steps and then lays its buckets out anew, so that the last gradient is summed earliest.

    Gradients' times are each rank's quickest, then the slowest rank's: the same numbers everywhere, and so are the
    buckets. CPU only, since on a GPU the host does not know when a
    gradient is there; and not with a sharded update.

    Args:
        reducer: Every rank's alike.
        profile: Of the network; None: nothing is ever decided.
    """

    def __init__(self, reducer: Reducer, profile: Profile | None) -> None:
        is_cpu = all(p.device.type == "cpu" for p in reducer.parameters)
        # Spans of buckets belong to ranks, and so does the momentum of their weights.
        can_settle = is_cpu and bool(reducer.parameters) and reducer.spans is None
        self._reducer, self._profile = reducer, profile if can_settle else None
        self._taken = 0
        self._ready = torch.full((len(reducer.parameters),), torch.inf, dtype=torch.float64)

    def after_step(self) -> str:
        """To be called after each step, on every rank. One line when the buckets were just decided, else nothing."""
        taken, profile, self._taken = self._taken, self._profile, self._taken + 1
        if profile is None or taken > STEPS[-1]:
            return ""
        if taken in STEPS:
            ready = torch.tensor(self._reducer.ready, dtype=torch.float64)
            self._ready = torch.minimum(self._ready, ready - ready.max())
        if taken < STEPS[-1]:
            return ""
        dist.all_reduce(self._ready, op=dist.ReduceOp.MAX)
        times: list[float] = self._ready.tolist()
        before = self._reducer.buckets
        buckets = best_buckets(profile, self._reducer.numels, times)
        self._reducer.lay_out_anew(buckets)
        late, early = (1e3 * finish(profile, layout, times) for layout in (before, buckets))
        return (
            f"buckets auto: {_sizes(buckets)}, by the profile and the times of the first gradients: expected to be "
            f"summed {early:.0f} ms after backward, where {_sizes(before)} take {late:.0f} ms"
        )


def _sizes(buckets: list[Bucket]) -> str:
    mib = [b.length / 2**18 for b in buckets]
    return f"{len(mib)} of {min(mib):.2g} to {max(mib):.2g} MiB" if len(mib) > 1 else f"1 of {mib[0]:.2g} MiB"

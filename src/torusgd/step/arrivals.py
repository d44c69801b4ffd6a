"""First come, first served: a number for each thing that arrives in a step, in one order over all ranks.

The ranks' common store adds to a counter and answers with its new value, one rank after the other. So the order of the
answers is an order of arrivals that nobody disputes, whatever the ranks' clocks say, and no rank has to wait for
another: a rank that sleeps adds nothing. An answer takes one round trip to the store.
"""

from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm.base import ConnectionLost
from ..comm.groups import Group

_KEPT = 2
"""steps whose counters stay in the store: ranks are at most one step apart"""


class Arrivals:
    """Counts the arrivals of a step over the ranks of a group; all ranks make one at the same time.

    Args:
        group: Its members' store is asked; a rank alone counts by itself.

    >>> from torusgd.comm.groups import alone
    >>> arrivals = Arrivals(alone())
    >>> arrivals.begin(step=7)
    >>> arrivals.add(), arrivals.add(), arrivals.total()
    (1, 2, 2)
    """

    def __init__(self, group: Group) -> None:
        assert group.store is not None or group.size == 1, "ranks without a common store can't count together"
        self._store: Store | None = None
        if group.store is not None:
            # Counters of its own: a store outlives the runs of a group.
            number = group.broadcast_text(str(group.store.add("arrivals", 1)) if group.rank == 0 else "")
            self._store = PrefixStore(f"arrivals{number}", group.store)
        self._deletes = group.rank == 0
        self._step = self._alone = 0

    def begin(self, step: int) -> None:
        """Counts from 0 for a step; every rank calls it with the same steps."""
        self._step, self._alone = step, 0
        if self._store is not None and self._deletes and step >= _KEPT:
            self._ask(lambda store: store.delete_key(str(step - _KEPT)))

    def add(self, count: int = 1) -> int:
        """Adds so many arrivals, and gives the number of the last one, from 1 on over all ranks.

        Raises:
            ConnectionLost: The store is out of reach.
        """
        if self._store is None:
            self._alone += count
            return self._alone
        return self._ask(lambda store: store.add(str(self._step), count))

    def total(self) -> int:
        """How many have arrived so far."""
        return self.add(0)

    def _ask(self, question: Callable[[Store], int]) -> int:
        assert self._store is not None
        try:
            return int(question(self._store))
        except RuntimeError as error:
            raise ConnectionLost(f"the store that all ranks share can't be reached ({error})") from error

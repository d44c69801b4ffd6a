"""Generations: which ranks make up a run by now, announced by the launcher, and the group that they form.

The launcher writes one record into the store of an attempt: the number of the generation and its ranks. When ranks are
lost it writes the next one, and the ranks that are left follow in their living processes: they fail what is under way,
meet under a prefix that no earlier generation has used (addresses of dead ranks would be found under an old one), and
connect anew. A rank may be lost at any moment of that; then the launcher announces another generation, and whoever
waits for ranks of an old one gives it up.
"""

import json
import time
from collections.abc import Sequence

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..comm import groups
from ..comm.base import CommTimeout, ConnectionLost
from ..comm.groups import Group
from ..comm.liveness import Liveness
from .gpus import compare_gpus, tell_gpu

GROUP_SECONDS = 7 * 24 * 3600.0
"""timeout of a run's groups: no message is given up for its age, since liveness knows which ranks are late"""
_KEY = "generation"
_POLL_SECONDS = 0.01
_LOOK_SECONDS = 0.1
"""from one question whether ranks were lost to the next, while a rank computes"""


class Generations:
    """The generations of an attempt, as the launcher announces them and as a rank follows them.

    Args:
        store: Of the attempt, common to the launcher and all ranks; it outlives every rank.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.number = -1
        """of the generation that this process has announced, or has joined"""
        self._looked = 0.0

    def announce(self, ranks: Sequence[int]) -> None:
        """The launcher says which ranks make up the next generation; none: those that are left shall end."""
        self.number += 1
        self._store.set(_KEY, json.dumps([self.number, list(ranks)]))

    def join(self, rank: int, device: torch.device, ranks_per_gpu: int, liveness: Liveness) -> Group:
        """The group of the newest generation, once all of its ranks have come; a later one where some never come.

        Args:
            rank: Of this process.
            device: Where its tensors live, see `gpus.device_of`.
            ranks_per_gpu: Consecutive ranks that share a GPU; above 1 nothing goes by NCCL.
            liveness: Learns that this rank waits for others.

        Raises:
            UserError: Ranks share a GPU without knowing.
            ConnectionLost: The ranks that are left shall end.
        """
        while True:
            self.number, ranks = self._newest()
            if rank not in ranks:
                raise ConnectionLost("ranks were lost, and the others do not go on")
            try:
                return self._meet(rank, ranks, device, ranks_per_gpu, liveness)
            except ConnectionLost:
                if not self.is_followed(liveness):
                    raise

    def is_followed(self, liveness: Liveness, seconds: float = 30.0) -> bool:
        """Whether the launcher announces another generation, which it does as soon as a lost rank is known.

        Args:
            liveness: Learns that this rank waits.
            seconds: For which this rank waits for it.
        """
        end = time.monotonic() + seconds
        while not (is_over := self._is_over()) and time.monotonic() < end and not liveness.late():
            time.sleep(_POLL_SECONDS)
        return is_over

    def check(self) -> None:
        """Asked by a rank between two pieces of its work, which is in vain once ranks of its generation are lost.

        Raises:
            ConnectionLost: They are.
        """
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked = time.monotonic()
            if self._is_over():
                raise ConnectionLost("ranks were lost, says the launcher")

    def _newest(self) -> tuple[int, list[int]]:
        number, ranks = json.loads(self._store.get(_KEY))
        return number, ranks

    def _is_over(self) -> bool:
        return self._newest()[0] > self.number

    def _meet(self, rank: int, ranks: list[int], device: torch.device, ranks_per_gpu: int, liveness: Liveness) -> Group:
        store = PrefixStore(f"{_KEY}-{self.number}", self._store)
        tell_gpu(store, rank, device, ranks_per_gpu)
        # One counter and one key for all: a key for each rank would be asked for N^2 times.
        if store.add("here", 1) == len(ranks):
            store.set("all here", "")
        while not store.check(["all here"]):
            if self._is_over():
                raise ConnectionLost("a rank was lost before it came")
            if late := liveness.late():
                raise CommTimeout("; ".join(map(str, late)), late)
            time.sleep(_POLL_SECONDS)
        compare_gpus(store, len(ranks), device, ranks_per_gpu)
        is_gpu = device.type == "cuda"
        return groups.build(
            PrefixStore("world", store),
            ranks,
            rank,
            device=device,
            timeout=GROUP_SECONDS,
            nccl=is_gpu and ranks_per_gpu == 1,
            # Ranks with GPUs don't go on without the lost ones, so they form no group but the first.
            is_given_up=None if is_gpu else self._is_over,
        )

"""Groups of ranks that exchange messages: the one place where communicators are made, and where they are aborted.

A group is built from a store, a prefix that no earlier group has used, and the ranks that take part, outside torch's
own registry of groups. So it can be built, aborted and built anew with other members inside living processes: nothing
about it depends on how many groups this process has made before. A group that exists already (DistributedDataParallel,
Ray, a script that called `init_process_group`) is wrapped by `group_of`.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

_ABORT_TAG = (1 << 31) - 1
"""a message tag that no sender uses"""
_LONGEST = 1800.0
"""seconds: torch's own timeout of a Gloo group"""


class Group:
    """The ranks of one communicator, this rank's place among them, and collectives on tensors of CPU or GPU.

    Collectives are called by every member in the same order. With one member they return at once.

    Args:
        process_group: torch's group; None for a rank alone.
        ranks: Of each member its rank in the run, in group order.
        rank: This process' place in the group.
        device: Where the tensors of gradients live. CPU tensors are exchanged by Gloo whatever the device.
        store: Where subgroups meet; a group without one can't be split.
        timeout: Seconds after which a collective without an answer fails.
        nccl: CUDA tensors travel by NCCL.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        store: Store | None,
        timeout: float,
        nccl: bool = False,
    ) -> None:
        self.process_group, self.ranks, self.rank, self.device = process_group, tuple(ranks), rank, device
        self.timeout, self.has_nccl = timeout, nccl
        self._store = store
        self._children = 0

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> None:
        """Sums (or takes the maximum of) a tensor over the members, in place."""
        if self.size > 1:
            self.start_all_reduce(tensor, maximum).wait()

    def start_all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> dist.Work:
        """Begins `all_reduce` in a group of several members; the sum is there once the work has been waited for."""
        options = dist.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp(_c10d.ReduceOp.MAX if maximum else _c10d.ReduceOp.SUM)
        return self._torch.allreduce([tensor], options)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Gives every member the tensor of the member at place `source`, in place."""
        if self.size > 1:
            self.start_broadcast(tensor, source).wait()

    def start_broadcast(self, tensor: torch.Tensor, source: int = 0) -> dist.Work:
        """Begins `broadcast` in a group of several members."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._torch.broadcast([tensor], options)

    def broadcast_text(self, text: str, source: int = 0) -> str:
        """The text of the member at place `source`, on every member."""
        if self.size == 1:
            return text
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self.broadcast(length, source)
        if self.rank != source:
            data = torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            self.broadcast(data, source)
        return bytes(data.numpy()).decode()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all members (of one shape), in group order."""
        if self.size == 1:
            return [tensor.clone()]
        gathered = [torch.empty_like(tensor) for _ in self.ranks]
        self._torch.allgather([gathered], [tensor], _c10d.AllgatherOptions()).wait()
        return gathered

    def start_all_gather_single(self, gathered: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """Begins to put the shards (1-D, of one length) of all members one after another into `gathered`."""
        return self._torch._allgather_base(gathered, shard, _c10d.AllgatherOptions())

    def start_reduce_scatter_single(self, shard: torch.Tensor, addends: torch.Tensor) -> dist.Work:
        """Begins to put this member's part of the sum of all `addends` (1-D, cut evenly) into `shard`."""
        return self._torch._reduce_scatter_base(shard, addends, _c10d.ReduceScatterOptions())

    def start_all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> dist.Work:
        """Begins to send each member its run of `sent` (1-D) and to receive from each its run of `received`."""
        return self._torch.alltoall_base(received, sent, received_splits, sent_splits, _c10d.AllToAllOptions())

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Begins to send to the member at place `peer`."""
        return self._torch.send([tensor], peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Begins to receive from the member at place `peer`."""
        return self._torch.recv([tensor], peer, tag)

    def barrier(self) -> None:
        """Returns when every member has called it."""
        # An all-reduce of a CPU tensor, since NCCL's own barrier occupies a GPU that torch must guess.
        self.all_reduce(torch.zeros(1))

    def partition(self, sets: Sequence[Sequence[int]], timeout: float | None = None) -> "Group":
        """The group of that set of places which holds this member, with connections of its own.

        Every member of this group calls it with the same disjoint sets. A member that is in none of them, or in one
        alone, gets a group of itself.
        """
        prefix = f"sub{self._children}"
        self._children += 1
        places = next((places for places in sets if self.rank in places), [self.rank])
        if len(places) == 1:
            return alone(self.device, self.ranks[self.rank])
        assert self._store is not None, "a group without a store can't be split"
        return build(
            PrefixStore(f"{prefix}/{'-'.join(map(str, places))}", self._store),
            [self.ranks[place] for place in places],
            self.ranks[self.rank],
            device=self.device,
            timeout=self.timeout if timeout is None else timeout,
            nccl=self.has_nccl,
        )

    def subgroup(self, places: Sequence[int], timeout: float | None = None) -> "Group":
        """The group of the members at these places; every member calls it, and those not among them are alone in it."""
        return self.partition([places], timeout)

    def duplicate(self, timeout: float | None = None) -> "Group":
        """A group of the same members with connections of its own."""
        return self.subgroup(range(self.size), timeout)

    def abort(self) -> None:
        """Fails, on this rank, all that is under way in this group, within milliseconds; the group is of no more use.

        NCCL has an abort of its own. Gloo has none, but a receive that runs out of time closes all connections of its
        group: all pending operations fail here, and the other members find their connections closed.
        """
        if self.process_group is None or self.size == 1:
            return
        if self.has_nccl:
            self.process_group._get_backend(torch.device("cuda")).abort()
        # A connection that is closed already refuses a receive at once; one that is left closes them all.
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    pending = self.process_group.recv([torch.zeros(1)], peer, _ABORT_TAG)
                    pending.wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def close(self) -> None:
        """Drops the connections; to be called by every member with nothing on its way."""
        self.process_group, self._store = None, None

    @property
    def _torch(self) -> ProcessGroup:
        assert self.process_group is not None, "the group is closed, or has one member"
        return self.process_group


def build(
    store: Store, ranks: Sequence[int], rank: int, *, device: torch.device, timeout: float, nccl: bool | None = None
) -> Group:
    """The group of `ranks`, each of which calls it with a store (or a prefix of one) that no group has used before.

    Args:
        store: Reached by all members; it must outlive them.
        ranks: The members' ranks in the run, in group order.
        rank: This process' rank in the run, one of them.
        device: `cpu`: Gloo alone. `cuda`: NCCL for CUDA tensors, Gloo for CPU tensors.
        timeout: Seconds to meet, and for each collective.
        nccl: Whether CUDA tensors travel by NCCL; None: where the device is a GPU.

    Raises:
        torch.distributed.DistError: The members did not meet in time.
    """
    place, size, limit = list(ranks).index(rank), len(ranks), timedelta(seconds=timeout)
    if size == 1:
        return alone(device, rank)
    group = ProcessGroup(store, place, size)
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), place, size, limit)
    gloo._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    has_nccl = device.type == "cuda" if nccl is None else nccl
    if has_nccl:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit
        by_nccl = c10d.ProcessGroupNCCL(PrefixStore("nccl", store), place, size, options)
        by_nccl._set_sequence_number_for_group()
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, by_nccl)
    return Group(group, ranks, place, device, PrefixStore("groups", store), timeout, has_nccl)


def group_of(process_group: ProcessGroup | None = None, device: torch.device | str = "cpu") -> Group:
    """A group of torch's (None: the default one) as a `Group`; a rank alone where torch.distributed is not initialised.

    >>> group_of().size
    1
    """
    target = torch.device(device)
    if process_group is None:
        if not dist.is_initialized():
            return alone(target)
        process_group = c10d._get_default_group()
    ranks = dist.get_process_group_ranks(process_group)
    place = dist.get_rank(process_group)
    store = c10d._world.pg_map[process_group][1]
    # The store of a group serves its own rendezvous; ours have a prefix that counts what was wrapped before.
    number = _wrapped[process_group.group_name] = _wrapped.get(process_group.group_name, -1) + 1
    nccl = "nccl" in str(dist.get_backend_config(process_group))
    limit: timedelta = process_group._get_backend(torch.device("cuda" if nccl else "cpu")).options._timeout
    prefix = PrefixStore(f"torusgd-{number}", store)
    return Group(process_group, ranks, place, target, prefix, limit.total_seconds(), nccl)


def alone(device: torch.device | str = "cpu", rank: int = 0) -> Group:
    """The group of one rank."""
    return Group(None, (rank,), 0, torch.device(device), None, _LONGEST)


_wrapped: dict[str, int] = {}
"""times that each group of torch's was wrapped; the same on all its members, which wrap it in the same order"""

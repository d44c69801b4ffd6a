"""Groups of ranks that exchange messages: the one place where communicators are made, and where they are aborted.

A group is built from a store, a prefix that no earlier group has used, and the ranks that take part, outside torch's
own registry of groups. So it can be aborted and built anew with other members inside living processes. A group that
exists already (DistributedDataParallel, Ray, a script that called `init_process_group`) is wrapped by `group_of`.

CPU tensors travel by Gloo, which connects each two members of a group. Thousands of ranks would open millions of
connections, a few of which are ever used. So a group of more than `tree.FANOUT` members has a tree for all_reduce,
broadcast and all_gather; connections between two members where an algorithm sends messages (`Group.connect`); and all
of them only once Gloo's own algorithms run, at the first such call.
"""

import itertools
import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UserError
from ..text import plural
from . import store_keys as keys
from .base import CommTimeout, ConnectionLost, Done, Work
from .tree import FANOUT, Tree, meshes_of
from .works import SLACK, PendingCollective, PendingMessage, comm_error, enqueue

T = TypeVar("T")
Messages = Sequence[tuple[torch.Tensor, int]]  # tensors, each to or from the member of this index in the group

# a message tag that no sender uses
_ABORT_TAG = (1 << 31) - 1
# seconds: torch's own timeout of a Gloo group
_LONGEST = 1800.0
# from one question whether the wait for the others is given up to the next
_POLL_SECONDS = 0.02
# Files that a process opens beside a group's sockets while it trains: data, checkpoints, logs, the store.
_SPARE_FILES = 64


class Group:
    """The ranks of one communicator, this rank's index among them, and collectives on tensors of CPU or GPU.

    Collectives are called by every member in the same order. Whatever waits raises CommTimeout or ConnectionLost.

    Args:
        process_group: torch's group; None for a rank alone, and until all are connected where a tree serves.
        ranks: Of each member its rank in the run, in group order; `rank` is this process' index.
        device: Where the tensors of gradients live. CPU tensors are exchanged by Gloo whatever the device.
        store: Where subgroups meet; a group without one can't be split.
        owned: Nobody else holds torch's group: `close` ends it, and NCCL splits its communicator for subgroups.
        splits: Counts the subgroups; shared by all that wrap one group of torch's, since they share its store.
        is_given_up: As in `build`, for subgroups.
        meshes: Those of a tree that takes CPU tensors in place of torch's group, from the leaves to the root.
    """

    def __init__(
        self, process_group: ProcessGroup | None, ranks: Sequence[int], rank: int, device: torch.device,
        store: Store | None, timeout: float, nccl: bool = False, owned: bool = False,
        splits: Iterator[int] | None = None, is_given_up: Callable[[], bool] | None = None,
        meshes: "Sequence[Group]" = (),
    ) -> None:  # fmt: skip
        if device.type == "cuda" and device.index is None:  # all that there is of a GPU is kept by its index
            device = torch.device("cuda", torch.cuda.current_device())
        self.process_group, self.ranks, self.rank, self.device = process_group, tuple(ranks), rank, device
        self.size, self.timeout, self.has_nccl = len(self.ranks), timeout, nccl
        self.store, self._owned = store, owned
        self._splits = itertools.count() if splits is None else splits
        self._is_given_up, self._tree = is_given_up, Tree(meshes, rank, self.size) if meshes else None
        self._has_gloo = self._tree is None or not nccl
        self._parts, self._pairs = list[Group](), dict[int, Group]()
        # In which each two members are connected: this one, or those of the tree, from the leaves to the root.
        self.meshes: Sequence[Group] = meshes or (self,)
        # What the waits of this group's own calls go through, such as `Monitor.watch`, which finds late ranks: else one
        # that waits for another here would count as hung itself.
        self.watch: Callable[[Work], Work] = lambda work: work

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> None:
        """Sums (or takes the maximum of) a tensor over the members, in place; a tree takes sums free of order."""
        self.watch(self.start_all_reduce(tensor, maximum)).wait()

    def start_all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Work:
        if self._tree is not None and tensor.device.type == "cpu":
            return self._tree.start_all_reduce(tensor, maximum)
        return self.start_backend_all_reduce(tensor, maximum)

    def start_backend_all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Work:
        """As `start_all_reduce`, by the algorithm of Gloo or NCCL whatever the number of members."""
        options = dist.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp(_c10d.ReduceOp.MAX if maximum else _c10d.ReduceOp.SUM)
        # A maximum has no order, which torch before 2.13 doesn't say to a mode that looks for sums of floats.
        with _disable_current_modes() if maximum else nullcontext():
            return self._begin([tensor], lambda: self._torch.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Gives every member the tensor of the member of index `source`, in place."""
        self.watch(self.start_broadcast(tensor, source)).wait()

    def start_broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        if self._tree is not None and tensor.device.type == "cpu":
            return self._tree.start_broadcast(tensor, source)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._begin([tensor], lambda: self._torch.broadcast([tensor], options))

    def broadcast_text(self, text: str, source: int = 0) -> str:
        if self.size == 1:
            return text
        device = self.small_device
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
        length = torch.tensor([len(data)], device=device)
        self.broadcast(length, source)
        if self.rank != source:
            data = torch.empty(int(length), dtype=torch.uint8, device=device)
        if int(length):
            self.broadcast(data, source)
        return bytes(data.cpu().numpy()).decode()

    def broadcast_json(self, value: Any, source: int = 0) -> Any:
        """The value of the member of that index, as JSON gives it back; the other members' are not looked at."""
        return json.loads(self.broadcast_text(json.dumps(value) if self.rank == source else "", source))

    def require_same(self, what: str, given: dict[str, Any]) -> None:
        """UserError on every member if what one of them was given, as JSON, is not what the first one was."""
        first: dict[str, Any] = self.broadcast_json(given)
        other = [f"{name} {given[name]} here, {first[name]} on rank 0" for name in given if given[name] != first[name]]
        differs = torch.tensor([int(bool(other))], device=self.small_device)
        self.all_reduce(differs, maximum=True)
        if int(differs):
            raise UserError(
                f"{what}: {', '.join(other) or 'another rank has other arguments'}; give all ranks the same"
            )

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all members (of one shape), in group order: [size, *shape]."""
        if self.size == 1:
            return tensor[None].clone()
        if self._tree is not None and tensor.device.type == "cpu":
            return self._tree.all_gather(tensor, self.watch)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        self.watch(self.start_all_gather_single(gathered.view(-1), tensor.contiguous().view(-1))).wait()
        return gathered

    def start_all_gather_single(self, gathered: torch.Tensor, shard: torch.Tensor) -> Work:
        """Begins to put the shards (1-D, of one length) of all members, two at least, one after another."""
        begin = self._torch._allgather_base
        return self._begin([gathered, shard], lambda: begin(gathered, shard, _c10d.AllgatherOptions()))

    def start_reduce_scatter_single(self, shard: torch.Tensor, addends: torch.Tensor) -> Work:
        """Begins to put this member's shard of the sum of all `addends` (1-D, cut evenly); for two members at least."""
        begin = self._torch._reduce_scatter_base
        return self._begin([shard, addends], lambda: begin(shard, addends, _c10d.ReduceScatterOptions()))

    def start_all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> Work:
        """Begins to send each member its run of `sent` (1-D) and to receive from each its run of `received`."""
        begin, options = self._torch.alltoall_base, _c10d.AllToAllOptions()
        return self._begin([received, sent], lambda: begin(received, sent, received_splits, sent_splits, options))

    def connect(self, peers: Collection[int]) -> None:
        """Connects this member with those it exchanges messages with, before the first CPU tensor; they do likewise."""
        missing = set() if self._tree is None else set(peers) - self._pairs.keys()
        if not missing:
            return
        assert self.store is not None

        def meet(peer: int, store: Store) -> Group:
            low, high = sorted((self.rank, peer))
            prefix = PrefixStore(keys.PAIR.format(low=low, high=high), store)
            ranks, mine, cpu = (self.ranks[low], self.ranks[high]), self.ranks[self.rank], torch.device("cpu")
            return build(prefix, ranks, mine, device=cpu, timeout=self.timeout, is_given_up=self._is_given_up)

        # All at once: in turns a ring would connect one rank after the other.
        stores = [self.store.clone() for _ in missing]  # type: ignore[attr-defined]
        with ThreadPoolExecutor(len(missing)) as threads:
            self._pairs.update(zip(missing, threads.map(meet, missing, stores), strict=True))

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Begins to send to the member of index `peer`."""
        return self._begin_message("send", tensor, peer, tag)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Begins to receive from the member of index `peer`."""
        return self._begin_message("recv", tensor, peer, tag)

    def start_exchange(self, sends: Messages, receives: Messages, tag: int = 0) -> list[Work]:
        """Begins a batch of messages that none of its members can hold up by their order; wait for all of them."""
        # Two members list what they exchange in one order: NCCL matches their messages by that order, Gloo by `tag`
        # plus the number of the message among those of the two. NCCL runs the batch as one kernel; each other member
        # with which this one exchanges nothing need not take part.
        if not sends and not receives:
            return []
        tensors = [tensor for tensor, _ in (*sends, *receives)]
        device = tensors[0].device
        if device.type == "cpu" or not self.has_nccl:
            works = [self.receive(each, peer, tag + n) for (each, peer), n in numbered(receives, lambda each: each[1])]
            return works + [self.send(each, peer, tag + n) for (each, peer), n in numbered(sends, lambda each: each[1])]

        def batch() -> dist.Work:
            self._torch._start_coalescing(device)
            for tensor, peer in sends:
                self._torch.send([tensor], peer, tag)
            for tensor, peer in receives:
                self._torch.recv([tensor], peer, tag)
            return self._torch._end_coalescing(device)

        return [self._begin(tensors, batch)]

    def barrier(self) -> None:
        """Returns when every member has called it."""
        # An all-reduce, on the CPU where it can be: NCCL's own barrier occupies a GPU that torch must guess.
        flag = torch.zeros(1, dtype=torch.int32, device=self.small_device)
        self.all_reduce(flag)
        flag.item()

    def partition(
        self, sets: Sequence[Sequence[int]], timeout: float | None = None, device: torch.device | None = None
    ) -> "Group":
        """The group of that set of members which holds this one, with connections of its own.

        Every member of this group calls it with the same disjoint sets of indices, in the order of the new groups, and
        with nothing on its way. A member that is in none, or alone in one, gets a group of itself.
        """
        number, device = next(self._splits), self.device if device is None else device
        nccl = self.has_nccl and device.type == "cuda"
        color = next((color for color, members in enumerate(sets) if self.rank in members and len(members) > 1), None)
        parent = self._nccl if nccl and self._owned and any(len(members) > 1 for members in sets) else None
        if parent is not None:
            torch.cuda.synchronize(device)  # ncclCommSplit takes a communicator that has nothing under way
            if color is None:  # every member of the parent takes part in a split
                parent.perform_nocolor_split(device)
        if color is None:
            return alone(device, self.ranks[self.rank])
        assert self.store is not None, "a group without a store can't be split"
        store = PrefixStore(keys.SUBGROUP.format(number=number, members="-".join(map(str, sets[color]))), self.store)
        part = build(
            store, [self.ranks[index] for index in sets[color]], self.ranks[self.rank], device=device,
            timeout=self.timeout if timeout is None else timeout, nccl=nccl,
            split=None if parent is None else (parent, color), is_given_up=self._is_given_up,
        )  # fmt: skip
        self._parts.append(part)
        return part

    def duplicate(self, timeout: float | None = None, device: torch.device | None = None) -> "Group":
        return self.partition([range(self.size)], timeout, device)

    def abort(self) -> None:
        """Fails, on this rank, all that is under way here and in groups split from this; none is of use any more."""
        for part in (*self._parts, *self._pairs.values()):
            part.abort()
        if self._tree is not None:
            self._tree.abort()
        if self.process_group is None or self.size == 1:
            return
        if self.has_nccl:
            self._nccl.abort()
        # Gloo has no abort. But a receive that runs out of time closes all connections of its group, so that all
        # pending operations fail; a connection that is closed already refuses the receive at once.
        for peer in range(self.size if self._has_gloo else 0):
            if peer != self.rank:
                with suppress(RuntimeError):
                    self.process_group.recv([torch.zeros(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Drops the connections, if the group is ours; every member calls it, with nothing on its way."""
        if self.process_group is not None and self._owned and self.has_nccl:
            self._nccl.shutdown()  # Gloo's connections end with the last reference to its group
        if self._tree is not None:
            self._tree.close()
        for pair in self._pairs.values():
            pair.close()
        self.process_group, self.store = None, None
        self._pairs.clear()

    @property
    def _torch(self) -> ProcessGroup:
        if self.process_group is None and self._tree is not None and self.store is not None:
            self.process_group = self._connect(PrefixStore(keys.ALL_CONNECTED, self.store))
        assert self.process_group is not None, "the group is closed, or has one member"
        return self.process_group

    @property
    def _nccl(self) -> Any:
        # NCCL's part of torch's group; torch's stubs lack some of its methods.
        return self._torch._get_backend(torch.device("cuda"))

    @property
    def small_device(self) -> torch.device:
        """Where a few numbers for all members live: the CPU, but in a group of torch's that has NCCL alone."""
        if self.process_group is None or self._tree is not None:
            return torch.device("cpu")
        types = {each.type for each in self.process_group._device_types}
        return torch.device("cpu") if "cpu" in types else torch.device("cuda", torch.cuda.current_device())

    def _begin(self, tensors: Sequence[torch.Tensor], operation: Callable[[], dist.Work]) -> Work:
        # Begins a collective that reads and writes tensors of one device; a member alone has nothing to exchange.
        if self.size == 1:
            return Done()
        device, begin = tensors[0].device, time.perf_counter()
        try:
            if self.has_nccl and device.type == "cuda":
                return enqueue(device, tensors, lambda: operation().wait())
            return PendingCollective(operation(), self.timeout)
        except RuntimeError as error:
            raise comm_error(error, "the group", begin, self.timeout) from error

    def _begin_message(self, direction: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        if peer in self._pairs and tensor.device.type == "cpu":
            return self._pairs[peer]._begin_message(direction, tensor, int(self.rank < peer), tag)
        where, begin = f"rank {self.ranks[peer]}", time.perf_counter()
        try:
            return PendingMessage(getattr(self._torch, direction)([tensor], peer, tag), where, self.timeout)
        except RuntimeError as error:
            raise comm_error(error, where, begin, self.timeout) from error

    def _connect(self, store: Store, split: tuple[Any, int] | None = None) -> ProcessGroup:
        # As `connected`, with errors that are ours, until the wait is given up.
        allow_files(self.size if self._has_gloo else 0)
        begin, answer = time.perf_counter(), Future[ProcessGroup]()

        def run(store: Store) -> None:
            try:
                answer.set_result(self.connected(store, split))
            except RuntimeError as error:
                answer.set_exception(error)

        try:
            if self._is_given_up is None:
                return self.connected(store, split)
            own: Store = store.clone()  # type: ignore[attr-defined]  # whoever waits in a store holds up all its users
            # Nothing interrupts torch's rendezvous, so it runs in a thread that may be left behind, with its store.
            threading.Thread(target=run, args=(own,), daemon=True, name="torusgd-connect").start()
            while not wait_for([answer], _POLL_SECONDS).done:
                if self._is_given_up():
                    raise ConnectionLost("a rank was lost while a group was formed")
            return answer.result()
        except RuntimeError as error:
            if isinstance(error, dist.DistStoreError) or time.perf_counter() - begin >= self.timeout - SLACK:
                raise CommTimeout(f"the {self.size} ranks of a group did not meet within {self.timeout:g} s") from error
            raise comm_error(error, "the store or a rank", begin, self.timeout) from error

    def connected(self, store: Store, split: tuple[Any, int] | None = None) -> ProcessGroup:
        """A process group outside torch's registry; every member calls it. Beside a tree NCCL has no Gloo with it."""
        gpu, limit = torch.device("cuda"), timedelta(seconds=self.timeout)
        group = ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(ProcessGroup.BackendType.GLOO if self._has_gloo else ProcessGroup.BackendType.NCCL)
        if self._has_gloo:
            gloo = ProcessGroupGloo(PrefixStore(keys.GLOO, store), self.rank, self.size, limit)
            group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        if self.has_nccl:
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout, options.global_ranks_in_group = limit, list(self.ranks)
            if split is not None:
                options.split_from, options.split_color = split
            backend = c10d.ProcessGroupNCCL(PrefixStore(keys.NCCL, store), self.rank, self.size, options)
            group._register_backend(gpu, ProcessGroup.BackendType.NCCL, backend)
            # At once, for a split needs all members of the parent, and a first batch of messages has not all of them.
            backend.eager_connect_single_device(self.device)
        elif self.device.type == "cuda":
            group._register_backend(gpu, ProcessGroup.BackendType.GLOO, gloo)
        return group


AnyGroup = Group | ProcessGroup  # ours or torch's


def numbered(messages: Iterable[T], peer_of: Callable[[T], int]) -> Iterator[tuple[T, int]]:
    """Each message with its number among those of its peer, from 0 on."""
    seen = Counter[int]()
    for message in messages:
        yield message, seen[peer_of(message)]
        seen[peer_of(message)] += 1


def build(
    store: Store, ranks: Sequence[int], rank: int, *, device: torch.device, timeout: float, nccl: bool | None = None,
    split: tuple[Any, int] | None = None, is_given_up: Callable[[], bool] | None = None,
) -> Group:  # fmt: skip
    """The group of `ranks`, each of which calls it with a store (or a prefix of one) that no group has used before.

    Args:
        store: Reached by all members; it must outlive them.
        ranks: The members' ranks in the run, in group order; `rank` is this process'.
        timeout: Seconds to meet, and for each collective.
        nccl: Whether CUDA tensors travel by NCCL, or by Gloo by way of the host; None: by NCCL.
        split: torch's ProcessGroupNCCL whose members all take part, and the number of its new communicator that this
            rank joins: ncclCommSplit is quicker than a rendezvous, and takes fewer connections. None: made anew.
        is_given_up: Called while the members connect; true ends this rank's wait. None: it lasts `timeout` seconds.

    CommTimeout if the members did not meet in time, ConnectionLost if the store is out of reach or a member has left.
    """
    if len(ranks) == 1:
        return alone(device, rank)
    index, meshes, cpu = list(ranks).index(rank), list[Group](), torch.device("cpu")
    for members in meshes_of(index, len(ranks)) if len(ranks) > FANOUT else ():
        own = PrefixStore(keys.MESH.format(first=members.start, apart=members.step), store)
        its = [ranks[member] for member in members]
        meshes.append(build(own, its, rank, device=cpu, timeout=timeout, is_given_up=is_given_up))
    under, nccl = PrefixStore(keys.SUBGROUPS, store), device.type == "cuda" if nccl is None else nccl
    group = Group(None, ranks, index, device, under, timeout, nccl, owned=True, is_given_up=is_given_up, meshes=meshes)
    if nccl or not meshes:
        group.process_group = group._connect(store, split)
    return group


def allow_files(size: int, each: int = 1, spare: int = _SPARE_FILES) -> None:
    """Lets this process open the files of a group of `size` ranks, `each` to every one; UserError if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + each * size + spare
    if hard != resource.RLIM_INFINITY and needed > hard:
        what = f"this process may open {hard:,} files and needs {needed:,} for a group of {plural(size, 'rank')}"
        remedy = f"raise the limit of the service or container that starts it to {needed}"
        raise UserError(f"ulimit -n: {what}; {remedy}")
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def group_of(group: AnyGroup | None = None, device: torch.device | str = "cpu") -> Group:
    """A group of torch's (None: the default one) as a `Group`; a rank alone where torch.distributed is not initialised.

    A `Group` is returned as it is, with the device that it has.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if not dist.is_initialized():
            return alone(device)
        group = c10d._get_default_group()
    if group not in c10d._world.pg_map:
        raise UserError("group: this rank is not one of it, or it was destroyed; only its own ranks make the call")
    meeting = PrefixStore(keys.FOREIGN_SUBGROUPS, c10d._world.pg_map[group][1])
    splits = _splits.setdefault(group.group_name, itertools.count())
    nccl = "nccl" in str(dist.get_backend_config(group))
    limit: timedelta = group._get_backend(torch.device("cuda" if nccl else "cpu")).options._timeout
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    return Group(group, ranks, rank, torch.device(device), meeting, limit.total_seconds(), nccl, splits=splits)


def alone(device: torch.device | str = "cpu", rank: int = 0) -> Group:
    return Group(None, (rank,), 0, torch.device(device), None, _LONGEST)


# by group of torch's, counts the subgroups made of it; all its members make them in the same order
_splits: dict[str, Iterator[int]] = {}

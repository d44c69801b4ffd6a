"""Groups of ranks that exchange messages: the one place where communicators are made, and where they are aborted.

A group is built from a store, a prefix that no earlier group has used, and the ranks that take part, outside torch's
own registry of groups. So it can be built, aborted and built anew with other members inside living processes: nothing
about it depends on how many groups this process has made before. A group that exists already (DistributedDataParallel,
Ray, a script that called `init_process_group`) is wrapped by `group_of`.

What Gloo and NCCL have under way is a `Work` whose errors are ours. On a GPU there is one order for all that NCCL has
under way, whatever communicator it belongs to (`LaunchOrder`).
"""

import itertools
import json
import os
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch._C._distributed_c10d as _c10d
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import UserError
from . import store_keys as keys
from .base import CommError, CommTimeout, ConnectionLost, Done, Work

T = TypeVar("T")
Messages = Sequence[tuple[torch.Tensor, int]]
"""tensors, each to or from the member of this index in the group"""

# a message tag that no sender uses
_ABORT_TAG = (1 << 31) - 1
# seconds: torch's own timeout of a Gloo group
_LONGEST = 1800.0
# from one question whether the wait for the others is given up to the next
_POLL_SECONDS = 0.02
# Files that a process opens beside a group's sockets while it trains: data, checkpoints, logs, the store.
_SPARE_FILES = 64


# seconds by which a backend's clock may end a wait before ours: it takes whole milliseconds
_SLACK = 2e-3
# file and line of the backend's source, before its message
_SOURCE_LINE = re.compile(r"^\[[^]]*] ")


def _comm_error(error: RuntimeError, where: str, begin: float, limit: float) -> CommError:
    # An error of the backend as one of ours, by when it came and not by its text.
    # After `limit` seconds since `begin` nobody has answered; an error that comes sooner is a connection that was
    # closed.
    if isinstance(error, CommError):
        return error
    if time.perf_counter() - begin >= limit - _SLACK:
        return CommTimeout(f"no answer within {limit:.3g} s")
    reason = _SOURCE_LINE.sub("", (str(error).splitlines() or [""])[0]).split(". ")[0]
    # SIGKILL 5: the kernel has closed the dead rank's connections, so whoever waits for its message comes here.
    return ConnectionLost(f"the connection to {where} is lost: {reason}")


class _Message:
    """A message between two members on its way. A wait with a limit that runs out closes the whole group."""

    def __init__(self, work: dist.Work, peer: str, timeout: float) -> None:
        self._work, self._peer, self._timeout = work, peer, timeout
        self._ended: float | None = None

    def wait(self, limit: float | None = None) -> None:
        begin = time.perf_counter()
        try:
            # Torch takes whole milliseconds, and 0 as the group's own timeout.
            self._work.wait(timedelta(milliseconds=0 if limit is None else max(1, round(1e3 * limit))))
        except RuntimeError as error:
            raise _comm_error(error, self._peer, *self._patience(begin, limit)) from error
        self._note_end()

    def done(self) -> bool:
        return self._work.is_completed()

    def ended(self) -> float | None:
        return self._ended

    def _patience(self, begin: float, limit: float | None) -> tuple[float, float]:
        # Since when the backend has waited, and how many seconds it does.
        return begin, self._timeout if limit is None else limit

    def _note_end(self, _: object = None) -> None:
        if self._ended is None:
            self._ended = time.perf_counter()


class _Collective(_Message):
    """A collective of Gloo on its way; those of NCCL are enqueued."""

    def __init__(self, work: dist.Work, timeout: float) -> None:
        super().__init__(work, "the group", timeout)
        self._begin = time.perf_counter()
        with suppress(RuntimeError):  # Gloo's reduce-scatter has no future: it ended when it was waited for
            work.get_future().add_done_callback(self._note_end)

    def _patience(self, begin: float, limit: float | None) -> tuple[float, float]:
        # The backend counts its timeout from when it began the collective, and our limit from when we wait.
        if limit is None or time.perf_counter() - self._begin >= self._timeout:
            return self._begin, self._timeout
        return begin, limit


class LaunchOrder:
    """The order of NCCL's work on one GPU."""

    # A kernel of NCCL occupies a part of its GPU until every rank of its communicator has come. If two ranks launch the
    # kernels of two communicators in different orders, and neither GPU has room for both, they wait for each other for
    # ever (NCCL's user guide, "Using multiple NCCL communicators concurrently"). So whatever a process gives to NCCL is
    # launched on one stream of the GPU, each operation after the end of the one before. The ranks make their calls in
    # one order, and so do their GPUs. Operations that could overlap do not; in return no setting of NCCL decides
    # whether a run stands still.
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def enqueue(self, tensors: Sequence[torch.Tensor], function: Callable[[], object]) -> Work:
        """Runs `function`, which reads and writes `tensors`, with the order's stream current; the host does not wait.

        It enqueues work on that stream, or waits there for work on other streams; what it begins by way of a `Group` is
        a part of the same work. On the GPU it begins after all that the caller has enqueued.
        """
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)
            for tensor in tensors:
                tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            function()
        return _Enqueued(self._stream.record_event())


class _Enqueued(Work):
    """Work that a GPU has been given: `wait` makes the current stream wait for it, and never the host."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, limit: float | None = None) -> None:
        self._event.wait()

    def done(self) -> bool:
        return self._event.query()


@cache
def launch_order(device: torch.device) -> LaunchOrder:
    return LaunchOrder(device)


class Group:
    """The ranks of one communicator, this rank's index among them, and collectives on tensors of CPU or GPU.

    Collectives are called by every member in the same order. Whatever waits raises CommTimeout or ConnectionLost.

    Args:
        process_group: torch's group; None for a rank alone.
        ranks: Of each member its rank in the run, in group order.
        rank: This process' index in the group.
        device: Where the tensors of gradients live. CPU tensors are exchanged by Gloo whatever the device.
        store: Where subgroups meet; a group without one can't be split.
        timeout: Seconds after which a collective without an answer fails.
        nccl: CUDA tensors travel by NCCL.
        owned: Nobody else holds torch's group: `close` ends it, and NCCL splits its communicator for subgroups.
        splits: Counts the subgroups; shared by all that wrap one group of torch's, since they share its store.
        is_given_up: As in `build`, for subgroups.
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
        owned: bool = False,
        splits: Iterator[int] | None = None,
        is_given_up: Callable[[], bool] | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:  # all that there is of a GPU is kept by its index
            device = torch.device("cuda", torch.cuda.current_device())
        self.process_group, self.ranks, self.rank, self.device = process_group, tuple(ranks), rank, device
        self.size, self.timeout, self.has_nccl = len(self.ranks), timeout, nccl
        self.store, self._owned = store, owned
        self._splits = itertools.count() if splits is None else splits
        self._is_given_up = is_given_up
        self._parts: list[Group] = []

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> None:
        """Sums (or takes the maximum of) a tensor over the members, in place."""
        self.start_all_reduce(tensor, maximum).wait()

    def start_all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Work:
        options = dist.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp(_c10d.ReduceOp.MAX if maximum else _c10d.ReduceOp.SUM)
        return self._begin([tensor], lambda: self._torch.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """Gives every member the tensor of the member of index `source`, in place."""
        self.start_broadcast(tensor, source).wait()

    def start_broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
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

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all members (of one shape), in group order."""
        if self.size == 1:
            return [tensor.clone()]
        gathered, begin = [torch.empty_like(tensor) for _ in self.ranks], self._torch.allgather
        self._begin([tensor, *gathered], lambda: begin([gathered], [tensor], _c10d.AllgatherOptions())).wait()
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

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Begins to send to the member of index `peer`."""
        return self._begin_message(peer, lambda: self._torch.send([tensor], peer, tag))

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        """Begins to receive from the member of index `peer`."""
        return self._begin_message(peer, lambda: self._torch.recv([tensor], peer, tag))

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
        flag.tolist()

    def partition(
        self, sets: Sequence[Sequence[int]], timeout: float | None = None, device: torch.device | None = None
    ) -> "Group":
        """The group of that set of members which holds this one, with connections of its own.

        Every member of this group calls it with the same disjoint sets, and with nothing on its way. A member that is
        in none of them, or in one alone, gets a group of itself.

        Args:
            sets: Indices in this group; the order in a set is that of the new group.
            timeout: Of the new group, seconds; None: as here.
            device: Of the new group, such as the CPU for one that needs no NCCL; None: as here.
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
        part = build(
            PrefixStore(keys.SUBGROUP.format(number=number, members="-".join(map(str, sets[color]))), self.store),
            [self.ranks[index] for index in sets[color]],
            self.ranks[self.rank],
            device=device,
            timeout=self.timeout if timeout is None else timeout,
            nccl=nccl,
            split=None if parent is None else (parent, color),
            is_given_up=self._is_given_up,
        )
        self._parts.append(part)
        return part

    def duplicate(self, timeout: float | None = None, device: torch.device | None = None) -> "Group":
        return self.partition([range(self.size)], timeout, device)

    def abort(self) -> None:
        """Fails, on this rank, all that is under way in this group and in the groups that were split from it.

        It takes milliseconds; the groups are of no more use, and the other members find their connections closed.
        """
        for part in self._parts:
            part.abort()
        if self.process_group is None or self.size == 1:
            return
        if self.has_nccl:
            self._nccl.abort()
        # Gloo has no abort. But a receive that runs out of time closes all connections of its group, so that all
        # pending operations fail; a connection that is closed already refuses the receive at once.
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    pending = self.process_group.recv([torch.zeros(1)], peer, _ABORT_TAG)
                    pending.wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def close(self) -> None:
        """Drops the connections; to be called by every member with nothing on its way.

        A group that was wrapped stays open for those who made it.
        """
        if self.process_group is not None and self._owned and self.has_nccl:
            self._nccl.shutdown()  # Gloo's connections end with the last reference to its group
        self.process_group, self.store = None, None

    @property
    def _torch(self) -> ProcessGroup:
        assert self.process_group is not None, "the group is closed, or has one member"
        return self.process_group

    @property
    def _nccl(self) -> Any:
        # NCCL's part of torch's group; torch's stubs lack some of its methods.
        return self._torch._get_backend(torch.device("cuda"))

    @property
    def small_device(self) -> torch.device:
        """Where a few numbers for all members live: the CPU, but in a group of torch's that has NCCL alone."""
        types = {"cpu"} if self.process_group is None else {each.type for each in self.process_group._device_types}
        return torch.device("cpu") if "cpu" in types else torch.device("cuda", torch.cuda.current_device())

    def _begin(self, tensors: Sequence[torch.Tensor], operation: Callable[[], dist.Work]) -> Work:
        # Begins a collective that reads and writes tensors of one device; a member alone has nothing to exchange.
        if self.size == 1:
            return Done()
        device, begin = tensors[0].device, time.perf_counter()
        try:
            if self.has_nccl and device.type == "cuda":
                return launch_order(device).enqueue(tensors, lambda: operation().wait())
            work = operation()
        except RuntimeError as error:
            raise _comm_error(error, "the group", begin, self.timeout) from error
        return _Collective(work, self.timeout)

    def _begin_message(self, peer: int, operation: Callable[[], dist.Work]) -> Work:
        where, begin = f"rank {self.ranks[peer]}", time.perf_counter()
        try:
            work = operation()
        except RuntimeError as error:
            raise _comm_error(error, where, begin, self.timeout) from error
        return _Message(work, where, self.timeout)


def numbered(messages: Iterable[T], peer_of: Callable[[T], int]) -> Iterator[tuple[T, int]]:
    """Each message with its number among those of its peer, from 0 on."""
    seen = Counter[int]()
    for message in messages:
        yield message, seen[peer_of(message)]
        seen[peer_of(message)] += 1


def build(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    *,
    device: torch.device,
    timeout: float,
    nccl: bool | None = None,
    split: tuple[Any, int] | None = None,
    is_given_up: Callable[[], bool] | None = None,
) -> Group:
    """The group of `ranks`, each of which calls it with a store (or a prefix of one) that no group has used before.

    Args:
        store: Reached by all members; it must outlive them.
        ranks: The members' ranks in the run, in group order.
        rank: This process' rank in the run, one of them.
        device: Where the members' tensors live, beside CPU tensors, which travel by Gloo.
        timeout: Seconds to meet, and for each collective.
        nccl: Whether CUDA tensors travel by NCCL, or by Gloo by way of the host; None: by NCCL.
        split: torch's ProcessGroupNCCL whose members all take part, and the number of its new communicator that this
            rank joins: ncclCommSplit is quicker than a rendezvous, and takes fewer connections. None: made anew.
        is_given_up: Called while the members connect; true ends this rank's wait. None: it lasts `timeout` seconds.

    Raises:
        CommTimeout: The members did not meet in time.
        ConnectionLost: The store is out of reach, or a member has left.
    """
    nccl = device.type == "cuda" if nccl is None else nccl
    if len(ranks) == 1:
        return alone(device, rank)
    allow_files(len(ranks))
    index, begin = list(ranks).index(rank), time.perf_counter()
    try:
        if is_given_up is None:
            group = connected(store, ranks, index, device, timeout, nccl, split)
        else:
            own: Store = store.clone()  # type: ignore[attr-defined]  # whoever waits in a store holds up all its users
            connect = partial(connected, own, ranks, index, device, timeout, nccl, split)
            group = _unless(is_given_up, connect)
    except RuntimeError as error:
        if isinstance(error, dist.DistStoreError) or time.perf_counter() - begin >= timeout - _SLACK:
            raise CommTimeout(f"the {len(ranks)} ranks of a group did not meet within {timeout:g} s") from error
        raise _comm_error(error, "the store or a rank", begin, timeout) from error
    meeting = PrefixStore(keys.SUBGROUPS, store)
    return Group(group, ranks, index, device, meeting, timeout, nccl, owned=True, is_given_up=is_given_up)


def _unless(is_given_up: Callable[[], bool], connect: Callable[[], ProcessGroup]) -> ProcessGroup:
    # The result of `connect()`, or ConnectionLost once `is_given_up()`.
    # Nothing interrupts torch's rendezvous, so it runs in a thread that may be left behind, with its store.
    answer: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            answer.set_result(connect())
        except RuntimeError as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="torusgd-connect").start()
    while not wait_for([answer], _POLL_SECONDS).done:
        if is_given_up():
            raise ConnectionLost("a rank was lost while a group was formed")
    return answer.result()


def connected(
    store: Store,
    ranks: Sequence[int],
    group_rank: int,
    device: torch.device,
    timeout: float,
    nccl: bool,
    split: tuple[Any, int] | None = None,
) -> ProcessGroup:
    """A process group outside torch's registry; every member calls it, and returns when all have. See `build`."""
    size, gpu, limit = len(ranks), torch.device("cuda"), timedelta(seconds=timeout)
    group = ProcessGroup(store, group_rank, size)
    gloo = ProcessGroupGloo(PrefixStore(keys.GLOO, store), group_rank, size, limit)
    # As torch's own `new_group` does: its debug modes compare these numbers among ranks.
    gloo._set_sequence_number_for_group()
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if nccl:
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout, options.global_ranks_in_group = limit, list(ranks)
        if split is not None:
            options.split_from, options.split_color = split
        backend = c10d.ProcessGroupNCCL(PrefixStore(keys.NCCL, store), group_rank, size, options)
        backend._set_sequence_number_for_group()
        group._register_backend(gpu, ProcessGroup.BackendType.NCCL, backend)
        # At once, for a split needs all members of the parent, and a first batch of messages has not all of them.
        backend.eager_connect_single_device(device)
    elif device.type == "cuda":
        group._register_backend(gpu, ProcessGroup.BackendType.GLOO, gloo)
    return group


def allow_files(size: int) -> None:
    """Lets this process open the files of a group of `size` ranks; UserError if it may not open as many.

    Gloo connects each two members at once: a socket to every other one, on NCCL too, where the control messages and
    a run's small sums go over Gloo.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + size + _SPARE_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UserError(
            f"ulimit -n: this process may open {hard:,} files and needs {needed:,} for a group of {size:,} ranks; "
            f"raise the limit of the service or container that starts it to {needed}"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def group_of(group: Group | ProcessGroup | None = None, device: torch.device | str = "cpu") -> Group:
    """A group of torch's (None: the default one) as a `Group`; a rank alone where torch.distributed is not initialised.

    A `Group` is returned as it is, with the device that it has.

    >>> group_of().size
    1
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if not dist.is_initialized():
            return alone(device)
        group = c10d._get_default_group()
    store = c10d._world.pg_map[group][1]
    splits = _splits.setdefault(group.group_name, itertools.count())
    nccl = "nccl" in str(dist.get_backend_config(group))
    limit: timedelta = group._get_backend(torch.device("cuda" if nccl else "cpu")).options._timeout
    return Group(
        group,
        dist.get_process_group_ranks(group),
        dist.get_rank(group),
        torch.device(device),
        PrefixStore(keys.FOREIGN_SUBGROUPS, store),
        limit.total_seconds(),
        nccl,
        splits=splits,
    )


def alone(device: torch.device | str = "cpu", rank: int = 0) -> Group:
    return Group(None, (rank,), 0, torch.device(device), None, _LONGEST)


# by group of torch's, counts the subgroups made of it; all its members make them in the same order
_splits: dict[str, Iterator[int]] = {}

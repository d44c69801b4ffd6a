"""Groups: collectives, groups of some members, abort of what is under way, and new groups in the same processes."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks
from tests.messages import refuses
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from torusgd.comm import groups
from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.base import CommTimeout, ConnectionLost
from torusgd.comm.connection import Clock
from torusgd.comm.gloo import GlooEngine
from torusgd.comm.tree import FANOUT
from torusgd.ranks.rank import serve_store

CPU = torch.device("cpu")


def summed(group: groups.Group, value: float = 1.0) -> float:
    total = torch.tensor([value])
    group.all_reduce(total)
    return total.item()


def small_collectives(group: groups.Group) -> None:
    rank, size = group.rank, group.size
    largest = torch.tensor([-1.0, float(rank)])
    group.all_reduce(largest, maximum=True)
    assert (summed(group, rank), largest.tolist()) == (size * (size - 1) // 2, [-1.0, size - 1.0])
    for source in (0, size // 2, size // 2 + 1, size - 1):
        word = torch.tensor([rank])
        group.broadcast(word, source)
        assert word.item() == source
    assert group.broadcast_json([rank], size - 1) == [size - 1]
    for kind in (torch.float64, torch.int32):
        rows = group.all_gather(torch.tensor([[rank, -rank]], dtype=kind))
        assert torch.equal(rows.squeeze(1), torch.tensor([[each, -each] for each in range(size)], dtype=kind))
    group.barrier()
    assert abs(Clock(group).offset) < 60.0


@on_ranks(3)
def test_collectives_and_batches_of_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = groups.group_of()
    small_collectives(world)
    assert world.broadcast_text("h\u00e9" if rank == 1 else "", source=1) == "h\u00e9"
    assert world.broadcast_text("") == ""
    received = torch.zeros(size)
    world.start_all_to_all(received, torch.full((size,), float(rank)), [1] * size, [1] * size).wait()
    assert received.tolist() == list(map(float, range(size)))
    work = world.receive(received, (rank - 1) % size, tag=3)
    world.send(torch.full((size,), float(rank)), (rank + 1) % size, tag=3).wait()
    work.wait()
    assert received.tolist() == [float((rank - 1) % size)] * size
    shard = torch.zeros(2)
    world.start_reduce_scatter_single(shard, torch.arange(2.0 * size)).wait()
    assert shard.tolist() == [2.0 * size * rank, (2.0 * rank + 1) * size]
    gathered = torch.zeros(2 * size)
    world.start_all_gather_single(gathered, shard).wait()
    assert gathered.tolist() == [size * i for i in range(2 * size)]
    world.barrier()
    # Two messages to the next rank and one to every other; in the next batch rank 0 has nothing to send or receive.
    after, before = (rank + 1) % size, (rank - 1) % size
    first, second, third = torch.zeros(2), torch.zeros(3), torch.zeros(1)
    sends = [(torch.full((2,), 10.0 + rank), after), (torch.full((3,), 20.0 + rank), after)]
    sends.append((torch.full((1,), 30.0 + rank), before))
    for work in world.start_exchange(sends, [(first, before), (second, before), (third, after)], tag=8):
        work.wait()
    assert (first[0].item(), second[0].item(), third[0].item()) == (10 + before, 20 + before, 30 + after)
    assert world.start_exchange([], []) == []
    if rank:
        for work in world.start_exchange([(first, 3 - rank)], [(second[:2], 3 - rank)]):
            work.wait()
        assert second[0] == 10 + (3 - rank - 1) % size


@on_ranks(3)
def test_what_waits_raises_by_type() -> None:
    """No answer in time, a member that has left, members that don't meet."""
    world = groups.group_of()
    impatient = world.duplicate(timeout=1.0)
    if world.rank == 1:
        store = dist.distributed_c10d._get_default_store()
        with pytest.raises(CommTimeout, match=r"^the 2 ranks of a group did not meet within 0\.5 s$"):
            groups.build(PrefixStore("nobody", store), [0, 1], 1, device=CPU, timeout=0.5)
    if world.rank == 0:
        work = impatient.start_all_reduce(torch.ones(1))
        with pytest.raises(CommTimeout):
            work.wait(limit=0.05)
        assert not work.done()
        for wait in (work.wait, lambda: work.wait(limit=30.0)):
            with pytest.raises(CommTimeout, match=r"^no answer within 1 s$"):
                wait()
    world.barrier()
    # The group is closed by its timeout: on the others, nothing will ever come.
    with pytest.raises((ConnectionLost, CommTimeout)):
        impatient.receive(torch.ones(1), (world.rank + 1) % world.size).wait()
    with pytest.raises((ConnectionLost, CommTimeout)):
        impatient.all_reduce(torch.ones(1))
    world.barrier()


@on_ranks(3)
def test_groups_of_some_members() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Ranks may wrap the default group as often as they like: only groups that are split off count.
    world, *_ = (groups.group_of() for _ in range(1 + rank))
    # Two pairs at once, of which each member sees its own; the same pair again; one member; the whole in another order.
    for places in ([0, 1], [1, 2], [0, 1], [2], [2, 1, 0]):
        group = world.partition([places])
        assert summed(group) == (len(places) if rank in places else 1)
        assert group.ranks[group.rank] == rank
        group.close()
    copy = world.duplicate(timeout=7.0)
    assert (copy.ranks, copy.timeout) == (world.ranks, 7.0)
    assert groups.group_of(copy) is copy
    # A group of torch's that is wrapped twice gives groups that don't meet each other's messages.
    first, second = groups.group_of().duplicate(), groups.group_of().duplicate()
    one, two = torch.ones(1), torch.full((1,), 2.0)
    for work in [first.start_all_reduce(one), second.start_all_reduce(two)]:
        work.wait()
    assert (one.item(), two.item()) == (size, 2 * size)


@on_ranks(3)
def test_an_abort_and_a_new_group_of_the_others() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    first = groups.build(PrefixStore("generation-0", store), range(size), rank, device=CPU, timeout=240)
    assert summed(first) == size
    message = first.receive(torch.ones(1), (rank + 1) % size)
    first.barrier()  # else a rank that begins to receive late would find its peer gone already
    if rank == size - 1:
        first.abort()  # as if it had gone away while the others wait
    else:
        pending = first.start_all_reduce(torch.ones(1))
        first.abort()
        for wait in (pending.wait, message.wait, lambda: summed(first)):
            with pytest.raises(ConnectionLost):
                wait()
    if rank == size - 1:
        return
    second = groups.build(PrefixStore("generation-1", store), range(size - 1), rank, device=CPU, timeout=240)
    assert summed(second) == size - 1


def test_a_rank_alone_exchanges_nothing():
    group, value = groups.alone(CPU, rank=5), torch.ones(2)
    assert summed(group) == 1.0
    group.broadcast(value)
    group.barrier()
    group.abort()
    assert value.tolist() == [1.0, 1.0]
    assert group.all_gather(value)[0].tolist() == [1.0, 1.0]
    assert group.broadcast_text("x") == "x"
    assert (group.rank, group.size, group.ranks) == (0, 1, (5,))
    assert group.partition([[0]]).size == 1
    assert groups.build(HashStore(), [7], 7, device=CPU, timeout=1.0).size == 1


def test_a_gpu_has_its_index_in_whatever_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are kept by GPU: one without its index would get a second order of NCCL's work."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert groups.group_of(device="cuda").device == torch.device("cuda", 3)
    assert groups.group_of(device="cuda:1").device == torch.device("cuda", 1)


def open_sockets() -> int:
    found = 0
    for file in os.listdir("/dev/fd"):
        with suppress(OSError):
            found += os.readlink(f"/dev/fd/{file}").startswith("socket:")
    return found


def ring(group: groups.Group) -> None:
    engine, values = GlooEngine(group), torch.arange(100, dtype=torch.int32)
    engine.run(values, parse_algorithm("ring", group.size)).wait()
    engine.close()
    assert torch.equal(values, torch.arange(100, dtype=torch.int32) * group.size)


def own_algorithm(group: groups.Group) -> None:
    total = torch.ones(1)
    group.start_backend_all_reduce(total).wait()
    assert total.item() == group.size


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", [33, pytest.param(64, marks=pytest.mark.slow)])
def test_a_group_of_many_ranks_opens_no_more_sockets_than_its_algorithm_needs(size: int) -> None:
    """What `allow_files` counts with; ranks are threads here, so that one process has the sockets of all."""
    groups.allow_files(size * size)
    server = serve_store()
    stores = [TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(size)]
    opened = [open_sockets()]

    def build(rank: int) -> groups.Group:
        return groups.build(PrefixStore("many", stores[rank]), range(size), rank, device=CPU, timeout=60.0)

    with ThreadPoolExecutor(size) as threads:
        made = list(threads.map(build, range(size)))
        for use in (small_collectives, ring):
            list(threads.map(use, made))
            opened.append(open_sockets())
        if size < 64:  # thousands of connections in one process take half a minute
            list(threads.map(own_algorithm, made))
            assert (open_sockets() - opened[0]) / size >= size - 1
        list(threads.map(groups.Group.close, made))
    few, with_ring = ((each - opened[0]) / size for each in opened[1:])
    assert few <= FANOUT + 2
    assert with_ring <= few + 10


def test_a_limit_of_open_files_is_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, raised = [64, 1000], []
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair))
    monkeypatch.setattr(os, "listdir", lambda path: [""] * 10)
    groups.allow_files(500)
    assert raised == [(574, 1000)]
    refuses("a group of more ranks than open files", groups.allow_files, 3456, about="ulimit -n")
    limits[:] = [resource.RLIM_INFINITY] * 2
    groups.allow_files(3456)
    assert len(raised) == 1

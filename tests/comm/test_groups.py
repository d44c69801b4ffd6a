"""Groups: collectives, groups of some members, abort of what is under way, and new groups in the same processes."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from torusgd.comm import groups

from .gloo_world import run_ranks

CPU = torch.device("cpu")


def exchange() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = groups.group_of()
    value = torch.tensor([float(rank)])
    world.all_reduce(value)
    assert value.item() == sum(range(size))
    largest = torch.tensor([rank])
    world.all_reduce(largest, maximum=True)
    assert largest.item() == size - 1
    assert [int(t) for t in world.all_gather(torch.tensor([rank]))] == list(range(size))
    assert world.broadcast_text("h\u00e9" if rank == 1 else "", source=1) == "h\u00e9"
    assert world.broadcast_text("") == ""
    received = torch.zeros(size)
    world.start_all_to_all(received, torch.full((size,), float(rank)), [1] * size, [1] * size).wait()
    assert received.tolist() == list(map(float, range(size)))
    gathered = torch.zeros(2 * size)
    world.start_all_gather_single(gathered, torch.full((2,), float(rank))).wait()
    assert gathered.tolist() == [float(r) for r in range(size) for _ in range(2)]
    work = world.receive(received, (rank - 1) % size, tag=3)
    world.send(torch.full((size,), float(rank)), (rank + 1) % size, tag=3).wait()
    work.wait()
    assert received.tolist() == [float((rank - 1) % size)] * size
    world.barrier()


def split() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = groups.group_of()
    # Two pairs at once, of which each member sees its own; the same pair again; one member; the whole in another order.
    for places in ([0, 1], [1, 2], [0, 1], [2], [2, 1, 0]):
        group = world.subgroup(places)
        total = torch.ones(1)
        group.all_reduce(total)
        assert total.item() == (len(places) if rank in places else 1)
        assert group.ranks[group.rank] == rank
        group.close()
    copy = world.duplicate(timeout=7.0)
    assert (copy.ranks, copy.timeout) == (world.ranks, 7.0)
    # A group of torch's that is wrapped twice gives groups that don't meet each other's messages.
    first, second = groups.group_of().duplicate(), groups.group_of().duplicate()
    one, two = torch.ones(1), torch.full((1,), 2.0)
    works = [first.start_all_reduce(one), second.start_all_reduce(two)]
    for work in works:
        work.wait()
    assert (one.item(), two.item()) == (size, 2 * size)


def rebuild() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    first = groups.build(PrefixStore("generation-0", store), range(size), rank, device=CPU, timeout=60.0)
    total = torch.ones(1)
    first.all_reduce(total)
    assert total.item() == size
    if rank == size - 1:
        first.abort()  # as if it had gone away while the others wait
    else:
        pending = first.start_all_reduce(torch.ones(1))
        time.sleep(0.2)
        first.abort()
        with pytest.raises(RuntimeError):
            pending.wait()
        with pytest.raises(RuntimeError):
            first.all_reduce(torch.ones(1))
    if rank == size - 1:
        return
    second = groups.build(PrefixStore("generation-1", store), range(size - 1), rank, device=CPU, timeout=60.0)
    total = torch.ones(1)
    second.all_reduce(total)
    assert total.item() == size - 1


@pytest.mark.parametrize("check", [exchange, split, rebuild])
def test_on_ranks(check):
    run_ranks(3, check)


def test_a_rank_alone_exchanges_nothing():
    group = groups.alone(CPU, rank=5)
    value = torch.ones(2)
    group.all_reduce(value)
    group.broadcast(value)
    group.barrier()
    group.abort()
    assert value.tolist() == [1.0, 1.0]
    assert group.all_gather(value)[0].tolist() == [1.0, 1.0]
    assert group.broadcast_text("x") == "x"
    assert (group.rank, group.size, group.ranks) == (0, 1, (5,))
    assert group.subgroup([0]).size == 1
    assert groups.build(dist.HashStore(), [7], 7, device=CPU, timeout=1.0).size == 1

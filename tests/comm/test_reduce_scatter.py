"""Reduce-scatter and all-gather against the backend's own all_reduce, on any ranks, grid, stops and dtype."""

from functools import reduce
from operator import add
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks, write_profile

from torusgd.comm.algorithms import NAMES
from torusgd.comm.allreduce import AlgorithmAllReduce, NativeAllReduce, ShardCollectives, create
from torusgd.comm.groups import group_of

WORLD = 6
LENGTHS = (0, 1, 5, 64, 1009)
STOPS = (None, (), (3, 4, 50, 64, 500, 996), tuple(range(0, 1009, 16)))
DTYPES = (torch.float32, torch.int32, torch.int64)


def addend(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (length,), generator=generator).to(dtype)


def try_every_case(allreduce: AlgorithmAllReduce | NativeAllReduce, ranks: list[int]) -> None:
    """Scatters all tensors at once, then gathers them at once, an all-reduce between."""
    shards = ShardCollectives(allreduce)
    pairs = [(length, stops) for length in LENGTHS for stops in STOPS]
    # A dtype has no part in where a tensor is cut: each pair meets one of them.
    cases = [(*pair, DTYPES[number % len(DTYPES)]) for number, pair in enumerate(pairs)]
    tensors = [addend(dist.get_rank(), length, dtype) for length, _, dtype in cases]
    sums = [reduce(add, [addend(rank, length, dtype) for rank in ranks]) for length, _, dtype in cases]
    works = [shards.start_reduce_scatter(tensor, stops) for tensor, (_, stops, _) in zip(tensors, cases, strict=True)]
    whole = addend(dist.get_rank(), 1009, torch.int64)
    works.append(allreduce.start(whole))
    for work in works:
        work.wait()
        assert work.done()
    assert whole.equal(sums[-1])
    for (length, stops, _), tensor, total in zip(cases, tensors, sums, strict=True):
        spans = [shards.span(rank, length, stops) for rank in range(shards.size)]
        assert sorted(i for span in spans for i in range(*span)) == list(range(length))
        assert stops is None or {edge for span in spans for edge in span} <= {0, length, *stops}
        low, high = spans[shards.rank]
        assert tensor[low:high].equal(total[low:high])
        tensor[:low], tensor[high:] = -7, -7
    for work in [shards.start_all_gather(tensor, stops) for tensor, (_, stops, _) in zip(tensors, cases, strict=True)]:
        work.wait()
    assert all(map(torch.equal, tensors, sums))
    allreduce.close()


def try_every_name(profile: Path) -> None:
    """All names on all ranks, grids, and two groups of ranks at a time."""
    for name in NAMES:
        profile_of_auto = profile if name == "auto" else None
        try_every_case(create(name, timeout=240, profile=profile_of_auto), list(range(WORLD)))
    for name, grid in (("torus", (3, 2)), ("torus:doubling/direct", (2, 3)), ("hierarchical", (2, 3))):
        try_every_case(create(name, grid=grid, timeout=240), list(range(WORLD)))
    for size, name in ((3, "halving-doubling"), (3, "ring"), (2, "native")):
        halves = [list(range(size)), list(range(size, WORLD))]
        groups = [group_of().partition([half]) for half in halves]
        mine = int(dist.get_rank() >= size)
        try_every_case(create(name, group=groups[mine], timeout=240), halves[mine])


def test_strips_hold_the_sums_and_are_gathered(tmp_path):
    run_ranks(WORLD, try_every_name, write_profile(tmp_path, WORLD))


@pytest.mark.parametrize("name", ["auto", "native", "torus"])
def test_alone_the_strip_is_the_whole(name):
    shards = ShardCollectives(create(name))
    tensor = torch.arange(5)
    assert shards.span(0, 5) == (0, 5)
    for work in (shards.start_reduce_scatter(tensor), shards.start_all_gather(tensor, (2,))):
        work.wait()
        assert work.done()
    assert tensor.equal(torch.arange(5))

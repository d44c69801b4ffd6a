"""All-reduces by name, over real ranks, and their halves: what each says of itself, and its sums."""

from contextlib import closing
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import alike, error_of, on_ranks, run_ranks, write_profile
from tests.messages import refuses

from torusgd.comm import allreduce as module
from torusgd.comm.algorithms import NAMES
from torusgd.comm.allreduce import AlgorithmAllReduce, NativeAllReduce, ShardCollectives, create
from torusgd.comm.base import AllReduce
from torusgd.comm.connection import connect
from torusgd.comm.fixed_point import exact_all_reduce
from torusgd.comm.groups import alone, group_of
from torusgd.comm.tuning import tune


def sums_are_right(allreduce: AllReduce) -> bool:
    ranks = dist.get_world_size()
    tensors = [torch.arange(length) + dist.get_rank() for length in (0, 1, 1000, 30_001)]
    for work in [allreduce.start(tensor) for tensor in tensors]:
        work.wait()
    return all(t.equal(torch.arange(len(t)) * ranks + ranks * (ranks - 1) // 2) for t in tensors)


@on_ranks(4)
def test_every_name_on_four_ranks(tmp_path):
    """What each says of itself is the same on all ranks, and so are the errors of mistakes."""
    seen = []
    profile = tmp_path / "profile.json" if dist.get_rank() else write_profile(tmp_path, 4)
    dist.barrier()  # till it is written
    for name, grid in [*((name, None) for name in (*NAMES, "torus:halving/direct")), ("torus", (2, 2))]:
        allreduce = create(name, grid=grid, timeout=240, profile=profile if name == "auto" else None)
        assert allreduce.name == name
        assert sums_are_right(allreduce)
        seen.append(allreduce.explanation)
        allreduce.close()
    assert seen[0].startswith("allreduce auto: 4 ranks on 1 host;")
    missing = tmp_path / "missing.json"
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("allreduce tree:", "tree", {}), ("grid 3x3:", "torus", {"grid": (3, 3)}),
        ("grid 2x2:", "ring", {"grid": (2, 2)}), (f"profile {missing}", "auto", {"profile": missing}),
    ]  # fmt: skip
    for about, name, options in wrong:
        seen.append(error_of(create, name, **options))
        assert seen[-1].startswith(about)
    alike(seen)


@on_ranks(2)
def test_auto_measures_by_itself():
    timed = patch.object(tune, "_rivals", wraps=tune._rivals)
    with patch.object(module, "_PROBE_SECONDS", 0.1), timed as told, closing(create("auto", timeout=240)) as allreduce:
        assert sums_are_right(allreduce)
    alike([call.args[5] for call in told.call_args_list])  # else a rank may stop a turn before others
    assert alike(allreduce.explanation).startswith("allreduce auto: 2 ranks on 1 host;")


def explained_with(path: Path, streams: int = 1) -> str:
    if not path.exists():
        with closing(connect(group_of())) as connection:
            profile = tune.measure(connection, seconds=1, short=True)
        if dist.get_rank() == 0:
            path.write_text(profile.dump())
    with closing(create("auto", profile=path, streams=streams)) as allreduce:
        assert sums_are_right(allreduce)
    return allreduce.explanation


@pytest.mark.slow
def test_auto_uses_a_profile_from_a_file(tmp_path):
    path = tmp_path / "profile.json"
    (explained,) = set(run_ranks(3, explained_with, path))
    assert f"(from {path}" in explained  # then perhaps that timings are doubtful
    (told,) = set(run_ranks(2, explained_with, path))
    assert "of other ranks" in told
    assert all("of other ranks, streams or backend" in told for told in run_ranks(3, explained_with, path, 2))
    path.write_text(path.read_text().replace('"gloo"', '"nccl"'))
    assert all("of other ranks, streams or backend" in told for told in run_ranks(3, explained_with, path))


def test_one_group_and_tensors_of_one_dimension_also_where_python_skips_assertions():
    made = AlgorithmAllReduce("ring", Mock(), lambda size: None, "")
    refuses("a group beside an all-reduce", exact_all_reduce, torch.ones(2), alone(), made, about="group")
    for tensor in (torch.ones(4)[::2], torch.ones(2, 2)):
        refuses("an all-reduce of more than a run of elements", made.start, tensor, about="start")


def test_several_streams_are_for_our_algorithms():
    refuses("streams of the backend's own all-reduce", create, "native", streams=2, about="streams = 2")


@pytest.mark.parametrize("name", ["auto", "native", "torus"])
def test_alone_it_does_nothing_and_the_strip_is_the_whole(name):
    allreduce, tensor = create(name), torch.arange(5)
    shards = ShardCollectives(allreduce)
    assert shards.span(0, 5) == (0, 5)
    for work in (allreduce.start(tensor), shards.start_reduce_scatter(tensor), shards.start_all_gather(tensor, (2,))):
        assert work.done()
        work.wait()
    assert tensor.equal(torch.arange(5))
    allreduce.close()


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
    for size, name in ((3, "halving-doubling"), (2, "torus"), (2, "native")):
        halves = [list(range(size)), list(range(size, WORLD))]
        groups: list[Any] = [
            dist.new_group(half) if name == "torus" else group_of().partition([half]) for half in halves
        ]
        mine = int(dist.get_rank() >= size)
        try_every_case(create(name, group=groups[mine], timeout=240), halves[mine])


def test_strips_hold_the_sums_and_are_gathered(tmp_path):
    run_ranks(WORLD, try_every_name, write_profile(tmp_path, WORLD))

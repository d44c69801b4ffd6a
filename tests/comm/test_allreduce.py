"""All-reduces by name, over real ranks: what each says of itself, and that all ranks agree."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks
from tests.messages import refused

from torusgd.comm import allreduce as module
from torusgd.comm.algorithms import NAMES
from torusgd.comm.allreduce import NativeAllReduce, create
from torusgd.comm.base import AllReduce
from torusgd.comm.connection import connect
from torusgd.comm.groups import group_of
from torusgd.comm.tuning.tune import measure
from torusgd.errors import UserError


def sums_are_right(allreduce: AllReduce) -> bool:
    ranks = dist.get_world_size()
    tensors = [torch.arange(length) + dist.get_rank() for length in (0, 1, 1000, 300_001)]
    for work in [allreduce.start(tensor) for tensor in tensors]:
        work.wait()
    return all(t.equal(torch.arange(len(t)) * ranks + ranks * (ranks - 1) // 2) for t in tensors)


def every_name(folder: str) -> list[str]:
    """Makes and tries every algorithm, and every mistake; returns what each rank saw."""
    seen = []
    patch.object(module, "_PROBE_SECONDS", 0.5).start()  # `auto` measures so long, in a process that ends with the test
    for name in (*NAMES, "torus:halving/direct"):
        allreduce = create(name, timeout=240)
        assert isinstance(allreduce, AllReduce)
        assert allreduce.name == name
        seen.append(f"{getattr(allreduce, 'explanation', name)}: {sums_are_right(allreduce)}")
        allreduce.close()
    grid = create("torus", grid=(2, 2))
    seen.append(f"{grid.explanation}: {sums_are_right(grid)}")
    grid.close()
    for options in (
        {"name": "tree"},
        {"name": "torus", "grid": (3, 3)},
        {"name": "ring", "grid": (2, 2)},
        {"name": "auto", "profile": Path(folder, "missing.json")},
    ):
        try:
            create(**options)
        except UserError as error:
            seen.append(str(error))
    return seen


def test_every_name_on_four_ranks(tmp_path):
    first, *others = run_ranks(4, every_name, str(tmp_path))
    assert others == [first] * 3
    assert len(first) == len(NAMES) + 2 + 4
    assert first[0].startswith("allreduce auto: 4 ranks on 1 host;")
    assert all(line.endswith(": True") for line in first[:-4])
    assert [line.split(":")[0] for line in first[-4:-1]] == ["allreduce tree", "grid 3x3", "grid 2x2"]
    assert "missing.json" in first[-1]


def with_a_profile(path: str) -> str:
    connection = connect(group_of())
    profile = measure(connection, seconds=1, short=True)
    connection.close()
    if dist.get_rank() == 0:
        Path(path).write_text(profile.dump())
    dist.barrier()
    allreduce = create("auto", profile=Path(path))
    assert sums_are_right(allreduce)
    allreduce.close()
    return allreduce.explanation


@pytest.mark.slow
def test_auto_uses_a_profile_from_a_file(tmp_path):
    path = tmp_path / "profile.json"
    explained = set(run_ranks(3, with_a_profile, str(path)))
    assert len(explained) == 1
    assert explained.pop().endswith(f"(from {path})")
    told = run_ranks(2, explained_with, str(path))
    assert told[0] == told[1]
    assert "of other ranks" in told[0]
    assert all("of other ranks or streams" in told for told in run_ranks(3, explained_with, str(path), 2))


def test_several_streams_are_for_our_algorithms():
    with refused("streams of the backend's own all-reduce", "streams = 2"):
        create("native", streams=2)


def explained_with(path: str, streams: int = 1) -> str:
    allreduce = create("auto", profile=Path(path), streams=streams)
    allreduce.close()
    return allreduce.explanation


@pytest.mark.parametrize("name", ["auto", "native", "torus"])
def test_alone_it_does_nothing(name):
    allreduce = create(name)
    tensor = torch.arange(5)
    work = allreduce.start(tensor)
    assert work.done()
    work.wait()
    assert tensor.equal(torch.arange(5))
    allreduce.close()
    NativeAllReduce().start(tensor).wait()


def a_part_of_the_ranks() -> bool:
    """Two groups of two ranks sum on their own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    allreduce = create("torus", group=groups[dist.get_rank() // 2])
    tensor = torch.full((7,), dist.get_rank())
    allreduce.start(tensor).wait()
    allreduce.close()
    return bool((tensor == (1 if dist.get_rank() < 2 else 5)).all())


def test_a_part_of_the_ranks():
    assert run_ranks(4, a_part_of_the_ranks) == [True] * 4

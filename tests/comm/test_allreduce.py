"""All-reduces by name, over real ranks: what each says of itself, and that all ranks agree."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import alike, on_ranks, run_ranks
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


@on_ranks(4)
def test_every_name_on_four_ranks(tmp_path):
    """What each says of itself is the same on all ranks, and so are the errors of mistakes."""
    seen = []
    for name, grid in [*((name, None) for name in (*NAMES, "torus:halving/direct")), ("torus", (2, 2))]:
        with patch.object(module, "_PROBE_SECONDS", 0.5):  # `auto` measures so long
            allreduce = create(name, grid=grid, timeout=240)
        assert isinstance(allreduce, AllReduce)
        assert allreduce.name == name
        assert sums_are_right(allreduce)
        seen.append(getattr(allreduce, "explanation", name))
        allreduce.close()
    assert seen[0].startswith("allreduce auto: 4 ranks on 1 host;")
    wrong: dict[str, dict[str, Any]] = {
        "allreduce tree:": {"name": "tree"},
        "grid 3x3:": {"name": "torus", "grid": (3, 3)},
        "grid 2x2:": {"name": "ring", "grid": (2, 2)},
        f"profile {tmp_path}/missing.json": {"name": "auto", "profile": tmp_path / "missing.json"},
    }
    for about, options in wrong.items():
        with pytest.raises(UserError, match=f"^{about}") as caught:
            create(**options)
        seen.append(str(caught.value))
    alike(seen)


def with_a_profile(path: Path) -> str:
    connection = connect(group_of())
    profile = measure(connection, seconds=1, short=True)
    connection.close()
    if dist.get_rank() == 0:
        path.write_text(profile.dump())
    dist.barrier()
    allreduce = create("auto", profile=path)
    assert sums_are_right(allreduce)
    allreduce.close()
    return allreduce.explanation


def explained_with(path: Path, streams: int = 1) -> str:
    allreduce = create("auto", profile=path, streams=streams)
    allreduce.close()
    return allreduce.explanation


@pytest.mark.slow
def test_auto_uses_a_profile_from_a_file(tmp_path):
    path = tmp_path / "profile.json"
    (explained,) = set(run_ranks(3, with_a_profile, path))
    assert explained.endswith(f"(from {path})")
    (told,) = set(run_ranks(2, explained_with, path))
    assert "of other ranks" in told
    assert all("of other ranks or streams" in told for told in run_ranks(3, explained_with, path, 2))


def test_several_streams_are_for_our_algorithms():
    with refused("streams of the backend's own all-reduce", "streams = 2"):
        create("native", streams=2)


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


@on_ranks(4)
def test_two_groups_of_two_ranks_sum_on_their_own():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    allreduce = create("torus", group=groups[dist.get_rank() // 2])
    tensor = torch.full((7,), dist.get_rank())
    allreduce.start(tensor).wait()
    allreduce.close()
    assert (tensor == (1 if dist.get_rank() < 2 else 5)).all()

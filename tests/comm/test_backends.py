"""How NCCL's communicators are made, split and ended: by a backend that is Gloo and notes what NCCL would be asked."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.comm.fake_cuda import fake_cuda
from tests.comm.gloo_world import on_ranks
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from torusgd.comm import groups

GPU = torch.device("cuda", 0)
NOTES: list[str] = []
MADE: list[ProcessGroupGloo] = []


class FakeNccl(ProcessGroupGloo):
    """Takes the arguments of torch's ProcessGroupNCCL."""

    Options: Any = SimpleNamespace

    def __init__(self, store: PrefixStore, place: int, size: int, options: SimpleNamespace) -> None:
        super().__init__(store, place, size, options._timeout)
        ranks, parent = options.global_ranks_in_group, getattr(options, "split_from", None)
        came = "anew" if parent is None else f"from {MADE.index(parent)} by color {options.split_color}"
        NOTES.append(f"{len(MADE)}: {ranks} {came}, {options._timeout.total_seconds():g} s")
        MADE.append(self)

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        NOTES.append(f"connects on {device}")

    def perform_nocolor_split(self, device: torch.device) -> None:
        NOTES.append(f"looks on while {MADE.index(self)} is split")

    def shutdown(self) -> None:
        NOTES.append(f"{MADE.index(self)} ends")


@on_ranks(3)
def test_communicators_are_made_at_once_split_and_ended() -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    with patch.object(c10d, "ProcessGroupNCCL", FakeNccl, create=True), fake_cuda():
        world = groups.build(PrefixStore("run", store), range(3), rank, device=GPU, timeout=600.0)
        pair = world.partition([[0, 1], [2]])
        everyone = world.duplicate(timeout=7.0)
        on_host = world.duplicate(device=torch.device("cpu"))
        for group in (world, pair, everyone, on_host):
            count = torch.ones(1)
            group.all_reduce(count)
            assert count.item() == group.size
        everyone.close()
        world.barrier()
    connects = "connects on cuda:0"
    of_pair = ["1: [0, 1] from 0 by color 0, 600 s", connects] if rank < 2 else ["looks on while 0 is split"]
    last = 2 if rank < 2 else 1
    assert [
        *("0: [0, 1, 2] anew, 600 s", connects, *of_pair),
        *(f"{last}: [0, 1, 2] from 0 by color 0, 7 s", connects, f"{last} ends"),
    ] == NOTES


@pytest.mark.gpu
@on_ranks(2)
def test_two_ranks_on_one_gpu_which_nccl_refuses_sum_by_gloo() -> None:
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    world = groups.build(PrefixStore("run", store), range(2), rank, device=GPU, timeout=240, nccl=False)
    value = torch.full((1000,), rank + 1, device=GPU, dtype=torch.int32)
    world.all_reduce(value)
    assert value.float().mean().item() == 3.0


@pytest.mark.gpu
@on_ranks(1)
def test_a_communicator_of_nccl() -> None:
    store = dist.distributed_c10d._get_default_store()
    world = groups.build(PrefixStore("run", store), [0], 0, device=GPU, timeout=240)
    group = groups.Group(None, (0,), 0, GPU, None, 60.0, nccl=True, owned=True)
    group.process_group = group.connected(PrefixStore("alone", store))
    value = torch.ones(1000, device=GPU, dtype=torch.int32)
    group.start_all_reduce(value).wait()
    world.close()
    assert value.float().mean().item() == 1.0

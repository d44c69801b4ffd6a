"""NCCL's engine and communicators: over Gloo, which notes what NCCL would be asked; and with a GPU, themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks
from tests.plan import measured
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from torusgd.comm import groups
from torusgd.comm.algorithms import parse_algorithm
from torusgd.comm.allreduce import create
from torusgd.comm.connection import Clock, Span
from torusgd.comm.groups import Group, alone, group_of
from torusgd.comm.nccl import NcclEngine
from torusgd.comm.tuning import tune
from torusgd.comm.works import enqueue, nccl_stream


def fake_stream(name: str) -> SimpleNamespace:
    event = SimpleNamespace(wait=lambda: None, query=lambda: True)
    return SimpleNamespace(name=name, wait_stream=lambda other: None, record_event=lambda: event)


@contextmanager
def fake_cuda() -> Iterator[list[SimpleNamespace]]:
    """`torch.cuda` has streams whose work is done when its call returns; yields those in use, the current one last."""
    current, made = [fake_stream("caller")], iter(range(100))

    @contextmanager
    def use(stream: SimpleNamespace) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    fakes: dict[str, Any] = {
        "Stream": lambda device: fake_stream(f"order {next(made)}"), "current_stream": lambda device: current[-1],
        "stream": use, "synchronize": lambda device: None,
    }  # fmt: skip
    with patch.multiple(torch.cuda, **fakes), patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
        yield current


def sum_of_ranks(length: int, ranks: int) -> torch.Tensor:
    return torch.arange(length) * ranks + ranks * (ranks - 1) // 2


FLAT = ("ring", "halving-doubling", "doubling", "direct", "hierarchical")


@on_ranks(7)
def test_engines_sum_by_every_algorithm_and_leave_their_groups_and_the_world() -> None:
    """An engine closes what it has made, and neither its group nor the world, whatever grids it has run."""
    world = group_of()
    for places in (*(range(size) for size in (1, 2, 3, 5, 6, 7)), range(1, 5)):
        group, size = world.partition([places]), len(places)
        for rows in [rows for rows in range(1, size + 1) if size % rows == 0 and world.rank in places]:
            with fake_cuda():
                nccl_stream.cache_clear()
                engine = NcclEngine(group)
                for name in ("torus:halving/ring", *(FLAT if rows == 1 else ())):
                    grid = (rows, size // rows) if name not in FLAT else None
                    algorithm = parse_algorithm(name, size, grid, chunks=4)
                    for length in (1, 5, 101):
                        tensor = torch.arange(length) + group.rank
                        engine.run(tensor, algorithm).wait()
                        assert tensor.equal(sum_of_ranks(length, size)), algorithm
                engine.close()
            group.barrier()
        group.close()
        world.barrier()
    world.close()
    dist.barrier()  # the default group is not ours to close


def test_all_that_nccl_is_given_is_launched_on_one_stream_whichever_communicator_it_belongs_to():
    """Or two GPUs without room for two kernels could each run the one that the other waits for."""
    gpu, seen = torch.device("cuda", 0), list[tuple[str, str]]()
    tensor: Any = SimpleNamespace(device=gpu, record_stream=lambda stream: None)

    def group(name: str) -> Group:
        def begin(*arguments: object) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: seen.append((name, current[-1].name)))

        fake: Any = SimpleNamespace(allreduce=begin, broadcast=begin, _reduce_scatter_base=begin)
        return Group(fake, (0, 1), 0, gpu, None, 60.0, nccl=True)

    nccl_stream.cache_clear()
    with fake_cuda() as current:
        rows, columns = group("rows"), group("columns")
        work = rows.start_all_reduce(tensor)
        columns.start_broadcast(tensor)

        def both() -> None:
            rows.start_reduce_scatter_single(tensor, tensor).wait()
            columns.start_all_reduce(tensor).wait()

        enqueue(gpu, [tensor], both)  # as an engine's
    nccl_stream.cache_clear()
    assert seen == [(name, "order 0") for name in ("rows", "columns", "rows", "columns")]
    assert work.done()
    assert work.ended() is None


def test_all_methods_of_a_torus_are_one_over_nccl():
    engine = object.__new__(NcclEngine)
    asked = [parse_algorithm(f"torus:{a}/{b}", 8, (2, 4), 4) for a in ("ring", "halving") for b in ("ring", "direct")]
    assert {str(engine.effective(algorithm)) for algorithm in asked} == {"torus 2x4"}
    assert str(engine.effective(parse_algorithm("doubling", 8, chunks=2))) == "doubling"


@pytest.mark.gpu
@on_ranks(1)
def test_one_rank_over_nccl() -> None:
    device = torch.device("cuda", 0)
    dist.destroy_process_group()
    dist.init_process_group("nccl", device_id=device)
    engine = NcclEngine(group_of(device=device))
    for name in ("torus", "ring", "hierarchical"):
        for length in (1, 100_001):
            tensor = torch.arange(length, device=device)
            work = engine.run(tensor, parse_algorithm(name, 1, chunks=3))
            work.wait()
            torch.cuda.synchronize()
            assert work.done()
            assert tensor.cpu().equal(torch.arange(length))
    engine.close()


@pytest.mark.gpu
@on_ranks(3)
def test_several_ranks_over_gloo_with_cuda_tensors() -> None:
    device = torch.device("cuda", 0)
    for name in ("auto", "torus", "halving-doubling"):
        allreduce = create(name, device=device)
        # The values are still being made on the current stream when the sum starts.
        tensors = [(torch.arange(n) + dist.get_rank()).to(device, non_blocking=True) * 1 for n in (1, 1000, 300_001)]
        for work in [allreduce.start(tensor) for tensor in tensors]:
            work.wait()
        for tensor in tensors:
            assert (tensor * 1).cpu().equal(sum_of_ranks(tensor.numel(), 3))
        allreduce.close()


def test_auto_probes_over_nccl_what_differs_there(monkeypatch):
    """Of each grid one torus, and nothing in chunks; the backend's own beside them."""
    probed = []

    def timed(connection: Any, size: int, plan: Any) -> Span:
        probed.append(plan)
        return Span(1.0, 1.001)

    monkeypatch.setattr(tune, "_time_sum", timed)
    connection: Any = SimpleNamespace(
        engine=object.__new__(NcclEngine), group=SimpleNamespace(size=8), clock=Clock(alone())
    )
    link = measured.link(1e-5, 1e-10)
    profile = measured.network((0, 0, 0, 0, 1, 1, 1, 1), backend="nccl", message=0.0, inside=link, between=link)
    timings = tune._rivals(connection, profile, 1 << 24, rivals=20, repetitions=2, seconds=0.0, known=set())
    names = [(timing.algorithm, timing.grid) for timing in timings]
    assert len(names) == len(set(names))
    assert ("native", None) in names
    assert {timing.chunks for timing in timings} == {1}
    assert {name for name, _ in names if name.startswith("torus")} == {"torus"}
    assert set(probed) == {timing.as_algorithm(8) for timing in timings}


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
    assert (value == 3).all()


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
    assert (value == 1).all()

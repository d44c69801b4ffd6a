"""The engine against the backend's own all_reduce: any number of ranks, any length, any dtype, many at a time."""

import os
import re
from functools import reduce
from operator import add

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import run_ranks

from torusgd.comm import gloo
from torusgd.comm.algorithms import Algorithm, parse_algorithm
from torusgd.comm.base import CommTimeout, ConnectionLost, Work
from torusgd.comm.gloo import GlooEngine
from torusgd.comm.groups import Group, group_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
LENGTHS = (0, 1, 2, 5, 64, 1009)
WORLD = 8


def plans(ranks: int) -> list[Algorithm]:
    grids = [(y, ranks // y) for y in range(1, ranks + 1) if ranks % y == 0]
    methods = ["ring", "halving/ring", "doubling/halving", "direct", "ring/direct"]
    return [
        *[
            parse_algorithm(name, ranks, chunks=chunks)
            for name in ("ring", "halving-doubling", "doubling")
            for chunks in (1, 3)
        ],
        parse_algorithm("direct", ranks),
        *[parse_algorithm(f"torus:{methods[i % 5]}", ranks, grid, chunks=1 + i % 3) for i, grid in enumerate(grids)],
        parse_algorithm("torus:halving", ranks, grids[-1], chunks=2),
        *[
            parse_algorithm(f"hierarchical:{methods[i % 2]}", ranks, grid, chunks=1 + i % 2)
            for i, grid in enumerate(grids)
        ],
    ]


def addend(rank: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (length,), generator=generator, dtype=dtype)


def compare_on_worlds(sizes: tuple[int, ...]) -> list[str]:
    """Runs on each of 8 ranks; the smaller worlds are made of the first of them. Returns what went wrong."""
    wrong, world = [], group_of()
    for size in sizes:
        group, own = world.partition([range(size)]), world.partition([range(size)])
        if world.rank >= size:
            continue
        engine = GlooEngine(own)
        ranks = range(size)
        for seed, algorithm in enumerate(plans(size)):
            cases = [(dtype, length) for dtype in DTYPES for length in LENGTHS]
            sums = [addend(dist.get_rank(), length, dtype, seed) for dtype, length in cases]
            exact = [
                reduce(add, [addend(r, n, t, seed).to(torch.float64 if t.is_floating_point else t) for r in ranks])
                for t, n in cases
            ]
            gloo.AHEAD = (1, 4, 128)[seed % 3]  # receives posted late, as those of a ring of thousands of ranks are
            works = [engine.run(tensor, algorithm) for tensor in sums]
            for work in works:
                work.wait()
            for (dtype, length), work, got, want in zip(cases, works, sums, exact, strict=True):
                close = (
                    got.equal(want)
                    if not dtype.is_floating_point
                    else torch.allclose(got.double(), want, rtol=0, atol=8 * size * torch.finfo(dtype).eps)
                )
                if not (close and work.done()):
                    wrong.append(f"{algorithm}, {dtype}, {length}")
            bits = torch.cat([got.view(torch.uint8) for got in sums])
            first = bits.clone()
            group.broadcast(first)
            if not first.equal(bits):
                wrong.append(f"{algorithm}: bits differ between ranks")
        engine.close()
    return wrong


@pytest.mark.parametrize("sizes", [(1, 2, 3, 5, 8), pytest.param((4, 6, 7), marks=pytest.mark.slow)])
def test_sums_equal_the_exact_ones_and_have_the_same_bits_on_every_rank(sizes):
    assert run_ranks(WORLD, compare_on_worlds, sizes) == [[]] * WORLD


def lose_a_rank() -> str:
    """Rank 2 leaves in the middle; the others must find out."""
    engine = GlooEngine(group_of().duplicate(timeout=5.0))
    engine.run(torch.ones(10), parse_algorithm("ring", 3)).wait()
    if dist.get_rank() == 2:
        os._exit(0)
    try:
        engine.run(torch.ones(10), parse_algorithm("ring", 3)).wait()
    except (CommTimeout, ConnectionLost) as error:
        return str(error)
    return "no error"


def test_a_lost_rank_is_an_error_on_the_others_and_not_a_hang():
    for line in run_ranks(3, lose_a_rank, expected=2, timeout=240):
        assert re.match(r"the connection to rank \d is lost: |no answer within 5 s", line)


def long_messages_while_computing() -> bool:
    engine, algorithm = GlooEngine(group_of().duplicate()), parse_algorithm("torus", 4, (2, 2), chunks=4)
    sums = [torch.full((300_001,), float(i + dist.get_rank())) for i in range(4)]
    works = [engine.run(tensor, algorithm) for tensor in sums]
    square = torch.eye(200)
    for _ in range(50):
        square = square @ square
    for work in works:
        work.wait()
    return all(bool((tensor == 4 * i + 6).all()) for i, tensor in enumerate(sums))


def test_long_messages_in_chunks_while_the_ranks_compute():
    assert run_ranks(4, long_messages_while_computing) == [True] * 4


STREAMED = 3 * gloo.STREAM_BYTES // 4
"""float32 elements of a message that three streams share"""


class Counted(Group):
    """A group that notes the bytes of each message that it sends."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        self.__dict__.setdefault("sent", []).append(tensor.nbytes)
        return super().send(tensor, peer, tag)


def sums_in_streams() -> tuple[list[str], list[list[int]]]:
    """What went wrong with sums over three streams, and what each stream sent of a long message."""
    world, wrong = group_of(), []
    groups = [world.duplicate() for _ in range(3)]
    for group in groups:
        group.__class__ = Counted
    engine = GlooEngine(groups[0], groups[1:])
    for name, length in (("ring", 3 * STREAMED), ("direct", 3 * STREAMED - 5), ("doubling", STREAMED), ("ring", 7)):
        algorithm = parse_algorithm(name, 3)
        addends = [addend(rank, length, torch.int32, seed=length) for rank in range(3)]
        tensor = addends[world.rank].clone()
        sent = [len(getattr(group, "sent", [])) for group in groups]
        engine.run(tensor, algorithm).wait()
        if not tensor.equal(addends[0] + addends[1] + addends[2]):
            wrong.append(f"{name} of {length}")
        if length == 7 and [len(getattr(group, "sent", [])) for group in groups[1:]] != sent[1:]:
            wrong.append("a short message was cut")
    first = [group.__dict__["sent"][0] for group in groups]
    engine.close()
    return wrong, first


def test_large_messages_are_cut_over_several_streams():
    for wrong, first in run_ranks(3, sums_in_streams):
        assert wrong == []
        assert first == [gloo.STREAM_BYTES] * 3

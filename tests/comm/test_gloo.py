"""The engine against the backend's own all_reduce: any number of ranks, any length, any dtype, many at a time."""

import os
from functools import reduce
from operator import add

import pytest
import torch
import torch.distributed as dist
from tests.comm.gloo_world import on_ranks

from torusgd.comm import gloo
from torusgd.comm.algorithms import Algorithm, parse_algorithm
from torusgd.comm.base import CommTimeout, ConnectionLost, Work
from torusgd.comm.gloo import GlooEngine
from torusgd.comm.groups import Group, group_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
LENGTHS = (0, 1, 2, 5, 64, 1009)


def plans(ranks: int) -> list[Algorithm]:
    grids = [(y, ranks // y) for y in range(1, ranks + 1) if ranks % y == 0]
    methods = ["ring", "halving/ring", "doubling/halving", "direct", "ring/direct"]
    rows: list[tuple[str, tuple[int, int] | None, int]] = [
        *((name, None, chunks) for name in ("ring", "halving-doubling", "doubling") for chunks in (1, 3)),
        ("direct", None, 1),
        *((f"torus:{methods[i % 5]}", grid, 1 + i % 3) for i, grid in enumerate(grids)),
        ("torus:halving", grids[-1], 2),
        *((f"hierarchical:{methods[i % 2]}", grid, 1 + i % 2) for i, grid in enumerate(grids)),
    ]
    return [parse_algorithm(name, ranks, grid, chunks=chunks) for name, grid, chunks in rows]


def addend(rank: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, (length,), generator=generator, dtype=dtype)


@on_ranks(4)
def test_sums_equal_the_exact_ones_and_have_the_same_bits_on_every_rank() -> None:
    """The smaller worlds are made of the first ranks."""
    world = group_of()
    for size in (1, 2, 3, 4):
        group, own = world.partition([range(size)]), world.partition([range(size)])
        if world.rank >= size:
            continue
        engine = GlooEngine(own)
        for seed, algorithm in enumerate(plans(size)):
            cases = [(dtype, length) for dtype in DTYPES for length in LENGTHS]
            sums = [addend(world.rank, length, dtype, seed) for dtype, length in cases]
            gloo.AHEAD = (1, 4, 128)[seed % 3]  # receives posted late, as those of a ring of thousands of ranks are
            for work in [engine.run(tensor, algorithm) for tensor in sums]:
                work.wait()
                assert work.done()
            for (dtype, length), got in zip(cases, sums, strict=True):
                wide = torch.float64 if dtype.is_floating_point else dtype
                want = reduce(add, [addend(rank, length, dtype, seed).to(wide) for rank in range(size)])
                off = 8 * size * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
                torch.testing.assert_close(got.to(wide), want, rtol=0, atol=off, msg=f"{algorithm}, {dtype}, {length}")
            bits = torch.cat([got.view(torch.uint8) for got in sums])
            first = bits.clone()
            group.broadcast(first)
            assert first.equal(bits), algorithm
        engine.close()


@on_ranks(3, expected=2)
def test_a_lost_rank_is_an_error_on_the_others_and_not_a_hang() -> None:
    """Rank 2 leaves in the middle; the others must find out."""
    engine = GlooEngine(group_of().duplicate(timeout=5.0))
    engine.run(torch.ones(10), parse_algorithm("ring", 3)).wait()
    if dist.get_rank() == 2:
        os._exit(0)
    kinds = CommTimeout, ConnectionLost
    with pytest.raises(kinds, match=r"^(the connection to rank \d is lost: |no answer within 5 s)"):
        engine.run(torch.ones(10), parse_algorithm("ring", 3)).wait()


STREAMED = 3 * gloo.STREAM_BYTES // 4
"""float32 elements of a message that three streams share"""


class Counted(Group):
    """A group that notes the bytes of each message that it sends."""

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        self.__dict__.setdefault("sent", []).append(tensor.nbytes)
        return super().send(tensor, peer, tag)


@on_ranks(3)
def test_large_messages_are_cut_over_several_streams() -> None:
    world = group_of()
    groups = [world.duplicate() for _ in range(3)]
    for group in groups:
        group.__class__ = Counted
    engine = GlooEngine(groups[0], groups[1:])
    for name, chunks, length in (
        ("ring", 1, 3 * STREAMED), ("direct", 1, 3 * STREAMED - 5), ("doubling", 1, STREAMED),
        ("torus", 4, 4 * STREAMED), ("ring", 1, 7),
    ):  # fmt: skip
        addends = [addend(rank, length, torch.int32, seed=length) for rank in range(3)]
        tensor = addends[world.rank].clone()
        sent = [len(getattr(group, "sent", [])) for group in groups]
        engine.run(tensor, parse_algorithm(name, 3, chunks=chunks)).wait()
        assert tensor.equal(addends[0] + addends[1] + addends[2]), name
        if length == 7:
            assert [len(group.__dict__["sent"]) for group in groups[1:]] == sent[1:], "a short message was cut"
    assert [group.__dict__["sent"][0] for group in groups] == [gloo.STREAM_BYTES] * 3
    engine.close()

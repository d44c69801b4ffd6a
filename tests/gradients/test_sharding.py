"""Norms of parameters that lie in column blocks and shards on several ranks: the bits of one rank that has them all."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from torusgd.gradients.layout import Slot, Span, lay_out_slots
from torusgd.gradients.update import BlockNorms
from torusgd.optim import BLOCK, layer_norms

ROWS, INPUTS, BLOCKS = 8, 3000, 4  # a row is no multiple of 4,096


def drawn(seed: int) -> dict[str, Tensor]:
    """Two matrices and a vector."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) for name, shape in
            {"0": (ROWS, INPUTS), "1": (ROWS, INPUTS), "vector": (5000,)}.items()}  # fmt: skip


def slots_of(tensors: dict[str, Tensor], rank: int, parallel: int) -> list[Slot]:
    """The matrices in column blocks, which `parallel` ranks divide, and the vector."""
    each = BLOCKS // parallel
    mine = range(rank % parallel * each, (rank % parallel + 1) * each)
    return [
        *(
            Slot(name, name, rows, parallel, layer=int(name), held=block in mine, is_owner=rank < parallel)
            for name in ("0", "1")
            for block, rows in enumerate(tensors[name].split(ROWS // BLOCKS))
        ),
        Slot("vector", "vector", tensors["vector"]),
    ]


def span_of(slot: Slot, rank: int, ranks: int, parallel: int) -> Span:
    """Those that hold the same columns share these out, and all ranks the vector; cut at the norms' blocks."""
    place, places = (rank, ranks) if slot.layer is None else (rank // parallel, ranks // parallel)
    blocks = -(-slot.tensor.numel() // BLOCK)
    low, high = (min(blocks * p // places * BLOCK, slot.tensor.numel()) for p in (place, place + 1))
    return low, high


def _add_tables(tables: list[Tensor], ranks: int, table: Tensor) -> None:
    """The all-reduce of a rank's table: the sum, once each rank has brought its own."""
    if len(tables) < ranks:
        tables.append(table.clone())
    else:
        table.copy_(torch.stack(tables).sum(0))


def norms_on_ranks(ranks: int, parallel: int, sharded: bool) -> list[tuple[list[str], Tensor]]:
    """Of each rank the parameters that it has elements of, and the norms of these and of their gradients."""
    calls, tables = [], list[Tensor]()
    for rank in range(ranks):
        weights, gradients = ([slot for slot in slots_of(drawn(seed), rank, parallel) if slot.held] for seed in (1, 2))
        layout = lay_out_slots(slots_of(drawn(1), rank, parallel), 4.0)
        spans = [span_of(slot, rank, ranks, parallel) for slot in weights] if sharded else None
        ends = spans or [(0, slot.tensor.numel()) for slot in weights]
        owned, grads = (
            [slot.tensor.reshape(-1)[low:high] for slot, (low, high) in zip(slots, ends, strict=True)]
            for slots in (weights, gradients)
        )
        # What all ranks have brought is known once each has been called: so each is called twice.
        reducer: Any = SimpleNamespace(layout=layout, owned=owned, spans=spans)
        norms = BlockNorms(reducer, partial(_add_tables, tables, ranks))
        norms([*owned, *grads])
        calls.append(([slot.parameter for slot in weights], norms, [*owned, *grads]))
    return [(names, norms(tensors)) for names, norms, tensors in calls]


@pytest.mark.parametrize(("ranks", "parallel", "sharded"), [
    (2, 2, False), (4, 4, False), (4, 2, False), (2, 1, True), (4, 2, True), (4, 4, True),
])  # fmt: skip
def test_norms_of_blocks_and_shards_on_ranks_have_the_bits_of_one(ranks: int, parallel: int, sharded: bool) -> None:
    ((names, alone),) = norms_on_ranks(1, 1, False)
    want = dict(zip(names, alone.view(2, -1).T, strict=True))
    for names, found in norms_on_ranks(ranks, parallel, sharded):
        assert torch.equal(found.view(2, -1).T, torch.stack([want[name] for name in names]))


def test_the_norm_is_that_of_the_whole_parameter() -> None:
    whole, other = torch.randn(8, 2048), torch.randn(777)
    aligned = list(whole.split(2))  # 4,096 elements each
    slots = [Slot("w", "w", rows, layer=0) for rows in aligned] + [Slot("other", "other", other)]
    layout = lay_out_slots(slots, 4.0)
    owned = [slot.tensor for slot in layout.held]
    reducer: Any = SimpleNamespace(layout=layout, owned=owned, spans=None)
    norms = BlockNorms(reducer, lambda table: None)
    expected = torch.cat([layer_norms([whole]).expand(4), layer_norms([other])])
    assert torch.equal(norms([*aligned, other, *aligned, other]), expected.repeat(2))

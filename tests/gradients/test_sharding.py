"""LARS over column blocks and shards on several ranks (threads here): the bits of one rank that holds them all."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from torusgd.gradients.layout import Slot, lay_out_slots
from torusgd.gradients.update import BlockNorms, over_tensors
from torusgd.optim import BLOCK, Lars, layer_norms

ROWS, INPUTS = 8, 3000  # a row is no multiple of 4,096


class Sum:
    """Adds up what the threads bring, in place."""

    def __init__(self, size: int) -> None:
        self._barrier, self._brought = threading.Barrier(size, timeout=240), [torch.zeros(0)] * size

    def of(self, rank: int):
        def complete(tensor: Tensor) -> None:
            self._brought[rank] = tensor.clone()
            self._barrier.wait()
            tensor.copy_(sum(self._brought))
            self._barrier.wait()

        return complete


def reducer_of(slots: list[Slot], shards: tuple[int, int] | None = None) -> SimpleNamespace:
    """What `BlockNorms` reads of a reducer; with `shards` (place, ranks) each slot is cut at the norms' blocks."""
    layout = lay_out_slots(slots, 4.0)
    owned, spans = [slot.tensor for slot in layout.held], None
    if shards is not None:
        place, ranks = shards
        spans = []
        for slot in layout.held:
            blocks = -(-slot.tensor.numel() // BLOCK)
            low, high = (min(blocks * p // ranks * BLOCK, slot.tensor.numel()) for p in (place, place + 1))
            spans.append((low, high))
        owned = [slot.tensor.view(-1)[low:high] for slot, (low, high) in zip(layout.held, spans, strict=True)]
    return SimpleNamespace(layout=layout, owned=owned, spans=spans)


def after_two_steps(ranks: int, blocks: int, parallel: int, sharded: bool) -> dict[str, Tensor]:
    """The weights after two steps of LARS: two matrices in column blocks, shared by `parallel` ranks, and a vector."""
    wholes = [
        [torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(n)) for n in (1, 2)] for _ in range(ranks)
    ]
    vectors = [torch.ones(5000) for _ in range(ranks)]
    total = Sum(ranks)

    def run(rank: int) -> None:
        each = blocks // parallel
        mine = range(rank % parallel * each, (rank % parallel + 1) * each)
        slots = [
            Slot(f"{n}", f"{n}", rows, parallel, layer=n, held=block in mine, is_owner=rank < parallel)
            for n, whole in enumerate(wholes[rank])
            for block, rows in enumerate(whole.split(ROWS // blocks))
        ]
        slots.append(Slot("vector", "vector", vectors[rank]))
        # The ranks that hold the same columns share these out; so do all ranks the vector.
        reducer = reducer_of(slots, (rank // parallel, ranks // parallel) if sharded else None)
        vector = len(reducer.owned) - 1
        if sharded:
            edges = [min(2 * p // ranks * BLOCK, 5000) for p in range(ranks + 1)]
            edges[-1] = 5000
            reducer.spans[vector] = (edges[rank], edges[rank + 1])
            reducer.owned[vector] = vectors[rank][edges[rank] : edges[rank + 1]]
        optimizer = Lars(
            [{"params": reducer.owned, "trust": 0.001}], lr=0.5, weight_decay=1e-3,
            norms=BlockNorms(reducer, total.of(rank)),
        )  # fmt: skip
        for step in range(2):
            gradients = {}
            for n in range(2):
                draw = torch.Generator().manual_seed(10 + 2 * step + n)
                gradients[str(n)] = torch.randn(ROWS, INPUTS, generator=draw).split(ROWS // blocks)
            matrices = zip(reducer.layout.held[:-1], reducer.layout.places[:-1], strict=True)
            held = [gradients[slot.parameter][place % blocks] for slot, place in matrices]
            held.append(torch.full((5000,), 0.1))
            for number, (tensor, gradient) in enumerate(zip(reducer.owned, held, strict=True)):
                low, high = reducer.spans[number] if sharded else (0, gradient.numel())
                tensor.grad = gradient.reshape(-1)[low:high].clone().view(tensor.shape)
            optimizer.step()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    found = {"vector": changed([torch.ones(5000)], vectors)}
    for n in range(2):
        start = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(n + 1))
        found[str(n)] = changed([start], [whole[n] for whole in wholes])
    return found


def changed(start: list[Tensor], copies: list[Tensor]) -> Tensor:
    """Each element as a rank that updated it has it; those that did agree."""
    result = start[0].clone()
    for copy in copies:
        is_new = copy != start[0]
        assert torch.equal(result[is_new & (result != start[0])], copy[is_new & (result != start[0])])
        result = torch.where(is_new, copy, result)
    return result


@pytest.mark.parametrize(
    ("ranks", "parallel", "sharded"),
    [(2, 2, False), (4, 4, False), (4, 2, False), (2, 1, True), (4, 2, True), (4, 4, True)],
)
def test_blocks_and_shards_on_several_ranks_have_the_bits_of_one(ranks: int, parallel: int, sharded: bool) -> None:
    want = after_two_steps(1, blocks=4, parallel=1, sharded=False)
    found = after_two_steps(ranks, blocks=4, parallel=parallel, sharded=sharded)
    assert want.keys() == found.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name]), name


def test_the_norm_is_that_of_the_whole_parameter() -> None:
    whole, other = torch.randn(8, 2048), torch.randn(777)
    aligned = list(whole.split(2))  # 4,096 elements each
    slots = [Slot("w", "w", rows, layer=0) for rows in aligned] + [Slot("other", "other", other)]
    norms = BlockNorms(reducer_of(slots), lambda table: None)
    gradients = [torch.randn_like(tensor) for tensor in (*aligned, other)]
    found = norms([*aligned, other, *gradients])
    assert torch.equal(found[:4], layer_norms([whole]).expand(4))
    assert torch.equal(found[4:5], layer_norms([other]))
    assert torch.equal(found[5:9], layer_norms([torch.cat(gradients[:4])]).expand(4))
    assert torch.equal(found[9:], layer_norms([gradients[4]]))


def test_shards_keep_the_trust_of_the_parameters_that_they_are_of() -> None:
    """A shard is flat; whether LARS scales it depends on the dimensions of its parameter."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    whole = Lars(model.parameters(), lr=1.0, trust=0.5)
    flat = {p: nn.Parameter(p.detach().clone().flatten()) for p in model.parameters()}
    sharded = over_tensors(whole, flat, layer_norms)
    for param, shard in flat.items():
        param.grad, shard.grad = torch.ones_like(param), torch.ones_like(shard)
    whole.step()
    sharded.step()
    for param, shard in flat.items():
        assert torch.equal(shard, param.flatten())

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torusgd.optim import BLOCK, VARIANTS, Lars, Sgd, lars, layer_norms
from torusgd.optim.sgd import momentum_step

HYPER: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}


@settings(deadline=None, max_examples=30)
@given(
    shape=st.sampled_from([(), (1,), (19,), (4, 3, 3, 3)]),
    momentum=st.sampled_from([0.0, 0.9]),
    nesterov=st.booleans(),
    channels_last=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_is_torchs_sgd(shape: tuple[int, ...], momentum: float, nesterov: bool, channels_last: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=generator)
    if channels_last and len(shape) == 4:
        start = start.contiguous(memory_format=torch.channels_last)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    hyper = {**HYPER, "momentum": momentum, "nesterov": nesterov and momentum > 0}
    first, second = Sgd([ours], **hyper), torch.optim.SGD([theirs], **hyper, foreach=False)
    for _ in range(4):
        # Logical order, whatever the parameter's format: what a reduced gradient looks like.
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        first.step()
        second.step()
        torch.testing.assert_close(ours, theirs)


UPDATES: dict[str, Callable[..., None]] = {
    "sgd": partial(momentum_step, **HYPER),
    "nesterov": partial(momentum_step, **HYPER, nesterov=True),
    **{each: partial(lars, **HYPER, trust=0.02, variant=each, peak_lr=13.0) for each in VARIANTS},
}


@pytest.mark.parametrize("name", UPDATES)
@settings(deadline=None, max_examples=15)
@given(size=st.integers(1, 5 * BLOCK), cuts=st.lists(st.integers(1, 5), max_size=3), offset=st.integers(0, 15))
def test_shards_at_block_edges_end_with_the_bits_of_the_whole(
    name: str, size: int, cuts: list[int], offset: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = [torch.randn(size, generator=generator) for _ in range(3)]
    moved = [torch.empty(size + offset)[offset:].copy_(tensor) for tensor in whole]
    seen: list[Tensor] = []

    def whole_norms(tensors: Sequence[Tensor]) -> Tensor:
        seen.append(layer_norms(tensors))
        return seen[0]

    how = {"norms": whole_norms} if name in VARIANTS else {}
    UPDATES[name](*([tensor] for tensor in whole), **how)
    edges = sorted({0, size, *(min(cut * BLOCK, size) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        UPDATES[name](*([tensor[start:stop]] for tensor in moved), **how)
    assert torch.equal(moved[0], whole[0])
    assert torch.equal(moved[2], whole[2])


@pytest.mark.parametrize("name", ["sgd", "paper"])
@pytest.mark.parametrize("shape", [(16, 4, 3, 3), (5, 3, 3, 3)])
@pytest.mark.parametrize("grad_format", [torch.channels_last, torch.contiguous_format])
def test_a_memory_format_changes_nothing(name: str, shape: tuple[int, ...], grad_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(shape, generator=generator) for _ in range(3)]
    other = [tensor.clone(memory_format=torch.channels_last) for tensor in plain]
    other[1] = plain[1].contiguous(memory_format=grad_format)
    for tensors in (plain, other):
        UPDATES[name](*([tensor] for tensor in tensors))
    assert torch.equal(other[0], plain[0])
    assert torch.equal(other[2], plain[2])


@pytest.mark.parametrize("kind", [Sgd, Lars])
def test_making_one_does_not_import_the_compiler(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo takes two seconds, which every rank of every run would pay."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import then fails
    optimizer = kind(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 2

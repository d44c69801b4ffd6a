"""SGD, AdamW and LAMB: torch's formulas, the same bits in slices and memory formats, and torch's own state."""

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import refuses
from torch import Tensor, nn

from torusgd.optim import BLOCK, VARIANTS, AdamW, Lamb, Lars, Sgd, lars, layer_norms
from torusgd.optim.sgd import momentum_step

SEEDS = st.integers(0, 2**31)
HYPER: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([(), (1,), (19,), (4, 3, 3, 3)]), st.sampled_from([0.0, 0.9]), *[st.booleans()] * 3, SEEDS)
def test_it_is_torchs_sgd(shape, momentum: float, nesterov: bool, maximize: bool, channels_last: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=generator)
    if channels_last and len(shape) == 4:
        start = start.contiguous(memory_format=torch.channels_last)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    hyper = {**HYPER, "momentum": momentum, "nesterov": nesterov and momentum > 0, "maximize": maximize}
    first, second = Sgd([ours], **hyper, fused=True), torch.optim.SGD([theirs], **hyper, foreach=False)
    assert not first._step_supports_amp_scaling, "a gradient scaler would leave its scale in"
    for _ in range(4):
        # Logical order, whatever the parameter's format: what a reduced gradient looks like.
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        first.step()
        second.step()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [Sgd, partial(Lars, trust=0.5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_updated_as_those_of_float64(kind: Callable[..., Any], dtype: torch.dtype):
    """torch's fused kernel gives them other values where a vector is full."""
    generator = torch.Generator().manual_seed(1)
    narrow = nn.Parameter(torch.randn(40, 2, generator=generator).to(dtype))
    wide = nn.Parameter(narrow.detach().double())
    first, second = kind([narrow], **HYPER), kind([wide], **HYPER)
    for _ in range(3):
        narrow.grad = torch.randn(40, 2, generator=generator).to(dtype)
        wide.grad = narrow.grad.double()
        first.step()
        second.step()
    assert (narrow.double() - wide).abs().max() < 0.03


UPDATES: dict[str, Callable[..., None]] = {
    "sgd": partial(momentum_step, **HYPER),
    "nesterov": partial(momentum_step, **HYPER, nesterov=True),
    **{each: partial(lars, **HYPER, trust=0.02, variant=each, peak_lr=13.0) for each in VARIANTS},
}


@pytest.mark.parametrize("name", UPDATES)
@settings(deadline=None, max_examples=15)
@given(size=st.integers(1, 5 * BLOCK), cuts=st.lists(st.integers(1, 5), max_size=3), offset=st.integers(0, 15))
def test_shards_at_block_edges_end_with_the_bits_of_the_whole(name: str, size: int, cuts: list[int], offset: int):
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
    assert all(torch.equal(moved[i], whole[i]) for i in (0, 2))


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
    assert all(torch.equal(other[i], plain[i]) for i in (0, 2))


@pytest.mark.parametrize("kind", [Sgd, Lars])
def test_making_one_does_not_import_the_compiler(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo takes two seconds, which every rank of every run would pay."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import then fails
    assert len(kind(torch.nn.Linear(3, 2).parameters(), lr=0.1).param_groups[0]["params"]) == 2


def weights(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)))


def gradient(like: Tensor, step: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(step + 1))


def take(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


def test_adamw_is_torchs_but_for_rounding_and_loads_its_state() -> None:
    ours, theirs = weights(40, 30), weights(40, 30)
    values: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-8}
    reference = torch.optim.AdamW([theirs], betas=(0.8, 0.99), **values)
    optimizer = AdamW([ours], momentum=0.8, beta2=0.99, **values)
    for step in range(5):
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        if step == 4:
            reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        take(optimizer, [ours], [gradient(ours, step)])
        take(reference, [theirs], [gradient(theirs, step)])
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lamb_by_hand_and_without_trust_at_the_plain_rate() -> None:
    param = weights(3, 2)
    start, grad = param.detach().double(), gradient(param, 0)
    param, optimizer = copy.deepcopy((param, Lamb([param], lr=0.1, eps=1e-6, weight_decay=0.01)))
    take(optimizer, [param], [grad])
    # After one step both moments, with their corrections, are the gradient and its square.
    direction = grad.double() / (grad.double().abs() + 1e-6) + 0.01 * start
    expected = start - 0.1 * start.norm() / direction.norm() * direction
    assert torch.allclose(param.double(), expected, rtol=1e-5, atol=1e-6)
    scaled, plain = weights(5), weights(5)
    grad = gradient(scaled, 0)
    take(Lamb([{"params": [plain], "trust": False}], lr=0.1), [plain], [grad])
    take(Lamb([scaled], lr=0.1), [scaled], [grad])
    assert not torch.equal(scaled, plain)
    assert torch.allclose(plain, weights(5) - 0.1 * grad / (grad.abs() + 1e-6), atol=1e-6)


@pytest.mark.parametrize("kind", [AdamW, Lamb])
def test_an_element_that_never_has_a_gradient_stays(kind: type[AdamW]) -> None:
    param = weights(4, 4)
    start = param.detach().clone()
    optimizer = kind([param], lr=0.1)
    for step in range(3):
        take(optimizer, [param], [gradient(param, step).index_fill(0, torch.tensor([1]), 0.0)])
    assert torch.equal(param[1], start[1])
    assert not torch.equal(param[0], start[0])


def test_values_out_of_range_are_refused() -> None:
    for key, value in {"eps": 0.0, "beta2": 1.0, "momentum": -0.1, "lr": -1.0}.items():
        refuses(f"AdamW with {key} = {value}", AdamW, [weights(2)], **{"lr": 0.1, key: value}, about=f"{key} = ")

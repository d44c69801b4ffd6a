"""AdamW and LAMB: torch's formula, the same bits in slices, zeros where there is no gradient, and torch's own state."""

import copy
from typing import Any

import pytest
import torch
from tests.messages import refused
from torch import Tensor

from torusgd.optim import BLOCK, AdamW, Lamb


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
            state = copy.deepcopy(reference.state_dict()["state"])
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        take(optimizer, [ours], [gradient(ours, step)])
        take(reference, [theirs], [gradient(theirs, step)])
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lamb_by_hand_and_without_trust_at_the_plain_rate() -> None:
    param = weights(3, 2)
    start, grad = param.detach().double(), gradient(param, 0)
    take(Lamb([param], lr=0.1, eps=1e-6, weight_decay=0.01), [param], [grad])
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


def test_a_slice_is_updated_as_the_whole_is() -> None:
    whole = weights(BLOCK + 1003)
    cut = [torch.nn.Parameter(each.clone()) for each in whole.detach().tensor_split([BLOCK, BLOCK + 7])]
    optimizers = [AdamW(params, lr=0.01, weight_decay=0.1) for params in ([whole], cut)]
    for step in range(4):
        grad = gradient(whole, step)
        take(optimizers[0], [whole], [grad])
        take(optimizers[1], cut, list(grad.tensor_split([BLOCK, BLOCK + 7])))
    assert torch.equal(whole, torch.cat(list(cut)))


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
        with refused(f"AdamW with {key} = {value}", f"{key} = "):
            AdamW([weights(2)], **{"lr": 0.1, key: value})

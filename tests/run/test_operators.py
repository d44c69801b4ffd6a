"""The operators of a network's passes: another torch, or another network, that computes by others is found out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.run.runs import run_here
from torusgd.arithmetic import operators_of
from torusgd.errors import UserError
from torusgd.run import fingerprint as operators


def names(words: tuple[str, ...]) -> list[str]:
    return [word.partition(".")[0] for word in words]


def test_the_order_in_which_gradients_of_three_uses_are_added_is_found() -> None:
    def added(*factors: float) -> tuple[str, ...]:
        def passes() -> None:
            x = torch.ones(3, requires_grad=True) * 1.5
            parts = [x * factor for factor in factors]
            (parts[0] + parts[1] + parts[2]).sum().backward()

        return operators_of(passes)

    first, again, other = added(2.0, 3.0, 4.0), added(2.0, 3.0, 4.0), added(3.0, 4.0, 2.0)
    assert first == again
    assert names(first) == names(other)
    assert first[-1] != other[-1], "the last one works on the gradient of x"


def test_views_and_copies_are_no_operators() -> None:
    x = torch.ones(2, 3)

    def plain() -> Tensor:
        return (x * 2).sum()

    def moved() -> Tensor:
        return (x.t().clone().t().detach() * 2).sum()

    assert operators_of(plain) == operators_of(moved)


def test_attention_is_recorded_by_its_parts() -> None:
    x = torch.ones(1, 2, 3, 4)
    assert names(operators_of(lambda: F.scaled_dot_product_attention(x, x, x))).count("bmm") == 2


@pytest.mark.parametrize("name", ["digits-net", "fashion-net", "resnet18"])
def test_this_torch_computes_built_in_networks_by_the_stored_operators(name: str) -> None:
    operators.check_stored(name)


def test_a_torch_with_other_operators_is_refused_and_the_first_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_parts(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        return F.nll_loss((logits - logits.logsumexp(1, True)), targets)

    monkeypatch.setattr(F, "cross_entropy", by_parts)
    with pytest.raises(UserError, match=r"digits-net otherwise than .* from operator 21 of \d+ on, logsumexp:"):
        operators.check_stored("digits-net")


class Thrice(nn.Module):
    """A tensor that is used three times, whose gradients are added in an order."""

    order = (0, 1, 2)

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1))
        parts = [x.relu(), x * 0.5, x.abs()]
        a, b, c = (parts[place] for place in self.order)
        return self.last(a + b + c)


def thrice(classes: int, channels: int) -> nn.Module:
    return Thrice(classes)


NETWORK = (
    "precision=portable",
    "data={source: digits, train_images: 60, eval_images: 20, image_size: 8, channels: 1, mean: [0.3], std: [0.4]}",
    "virtual_workers=2",
    "model={name: 'tests.run.test_operators:thrice', options: {}}",
    "label_smoothing=0.0",
)


def test_a_run_does_not_go_on_with_other_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_here(tmp_path, *NETWORK, max_steps=2)
    monkeypatch.setattr(Thrice, "order", (1, 2, 0))
    with pytest.raises(UserError, match=r"the checkpoint of step 2 was trained with other operators .*add\."):
        run_here(tmp_path, *NETWORK, max_steps=4)
    monkeypatch.undo()
    run_here(tmp_path, *NETWORK, max_steps=4)

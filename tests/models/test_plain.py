"""The networks of Das et al.: shapes at their own and at other sizes, and weights to begin with that can learn."""

import pytest
import torch

from torusgd.errors import UserError
from torusgd.models import MODELS


@pytest.mark.parametrize(
    ("name", "pixels"), [("vgg-a", 224), ("vgg-a", 64), ("overfeat-fast", 231), ("overfeat-fast", 96)]
)
def test_logits_at_any_size(name: str, pixels: int) -> None:
    with torch.device("meta"):
        network = MODELS[name](classes=7, channels=1)
        assert network(torch.empty(2, 1, pixels, pixels)).shape == (2, 7)


def test_dropout_must_be_a_probability() -> None:
    with torch.device("meta"), pytest.raises(UserError, match=r"model\.options\.dropout"):
        MODELS["vgg-a"](classes=7, channels=1, dropout=1.5)


def test_the_speech_network_lets_gradients_through_seven_sigmoids() -> None:
    torch.manual_seed(0)
    network = MODELS["cd-dnn"](classes=50, channels=1, inputs=441, width=256)
    out = network(torch.randn(64, 1, 21, 21))
    torch.nn.functional.cross_entropy(out, torch.randint(50, (64,))).backward()
    first, last = network[1].weight.grad, network[13].weight.grad
    assert first.norm() > 0.05 * last.norm()

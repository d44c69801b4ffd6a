"""The small nets learn the digits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from torusgd.models import MODELS


def test_width_scales_the_channels() -> None:
    narrow, wide = (MODELS["fashion-net"](classes=10, channels=1, width=width) for width in (8, 16))
    for name, value in wide.state_dict().items():
        if name.endswith("conv2.weight"):
            assert [2 * n for n in narrow.state_dict()[name].shape[:2]] == list(value.shape[:2])


def test_dropout_acts_in_training_only_and_on_request() -> None:
    images = torch.rand(4, 1, 8, 8)
    default, dropping = (MODELS["digits-net"](classes=10, channels=1, **each) for each in ({}, {"dropout": 0.5}))
    assert torch.equal(default(images), default(images))
    assert not torch.equal(dropping(images), dropping(images))
    dropping.eval()
    assert torch.equal(dropping(images), dropping(images))


def test_digits_net_learns_the_digits() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.305) / 0.376
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = MODELS["digits-net"](classes=10, channels=1, zero_gamma=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
    for _ in range(5):
        for batch in torch.randperm(1437).split(48):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        top1 = float((model(images[1437:]).argmax(1) == labels[1437:]).float().mean())
    assert top1 > 0.9

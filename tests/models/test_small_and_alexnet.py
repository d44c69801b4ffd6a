"""The small nets learn the digits and take any size; AlexNet-BN has the published cost at both of its sizes."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from torusgd.errors import UserError
from torusgd.models import MODELS


@pytest.mark.parametrize("name", ["digits-net", "fashion-net"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 33)])
def test_small_nets_take_any_size(name: str, channels: int, size: int) -> None:
    model = MODELS[name](classes=10, channels=channels)
    assert model(torch.rand(2, channels, size, size)).shape == (2, 10)


def test_width_scales_the_channels() -> None:
    narrow, wide = (MODELS["fashion-net"](classes=10, channels=1, width=width) for width in (8, 16))
    for name, value in wide.state_dict().items():
        if name.endswith("conv2.weight"):
            assert [2 * n for n in narrow.state_dict()[name].shape[:2]] == list(value.shape[:2])


def test_dropout_acts_in_training_only() -> None:
    model = MODELS["digits-net"](classes=10, channels=1, dropout=0.5)
    x = torch.rand(4, 1, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_no_dropout_is_the_default() -> None:
    model = MODELS["digits-net"](classes=10, channels=1)
    x = torch.rand(4, 1, 8, 8)
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("digits-net", {"dropout": 1.0}, "model.options.dropout"),
        ("fashion-net", {"dropout": -0.1}, "model.options.dropout"),
        ("fashion-net", {"width": 0}, "model.options.width"),
        ("alexnet-bn", {"dropout": 1.5}, "model.options.dropout"),
    ],
)
def test_impossible_options_are_named(name: str, options: dict[str, float], key: str) -> None:
    with pytest.raises(UserError, match=key):
        MODELS[name](classes=10, channels=1, **options)


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
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        top1 = float((model(images[1437:]).argmax(1) == labels[1437:]).float().mean())
    assert top1 > 0.9


def alexnet() -> nn.Module:
    with torch.device("meta"):
        return MODELS["alexnet-bn"](classes=1000, channels=3)


def test_alexnet_has_61_million_parameters() -> None:
    # Convolutions 2,332,704, batch norms 2,752, linear layers 58,631,144.
    assert sum(p.numel() for p in alexnet().parameters()) == 60_966_600


def test_alexnet_forward_cost_at_227_pixels() -> None:
    # conv1 105.4, conv2 223.9, conv3 149.5, conv4 112.1, conv5 74.8, fc 58.6 million: 1.45 GFLOP an image.
    with FlopCounterMode(display=False) as counter:
        assert alexnet()(torch.empty(1, 3, 227, 227, device="meta")).shape == (1, 1000)
    assert counter.get_total_flops() / 2 == pytest.approx(724.4e6, rel=1e-3)


@pytest.mark.parametrize(("size", "pooled"), [(227, False), (224, False), (64, True), (300, True)])
def test_alexnet_pools_to_its_classifier_at_unusual_sizes_only(size: int, pooled: bool) -> None:
    model = alexnet()
    calls: list[nn.Module] = []
    model.get_submodule("to_pixels").register_forward_hook(lambda module, args, output: calls.append(module))
    assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, 1000)
    assert bool(calls) == pooled

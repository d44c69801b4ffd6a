"""All networks but the large ResNets: sizes, widths, weights that can learn; tests/plan/test_design.py has costs."""

from typing import Any

import pytest
import torch
from tests.messages import refused
from torch import nn
from torch.nn import functional as F

from torusgd.models import MODELS
from torusgd.models.networks import OrderedMaxPool


def on_meta(name: str, classes: int = 1000, channels: int = 3, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name](classes=classes, channels=channels, **options)


SIZES = {
    **{name: [(1, 8), (1, 28), (3, 33)] for name in ("digits-net", "fashion-net")},
    **{name: [(1, 32), (3, 64), (3, 65)] for name in ("resnet18", "resnet50")},
    "vgg-a": [(1, 224), (1, 64), (1, 32)],
    "overfeat-fast": [(1, 231), (1, 96)],
}


@pytest.mark.parametrize("name", SIZES)
def test_logits_for_any_channels_and_size(name: str) -> None:
    for channels, pixels in SIZES[name]:
        network = on_meta(name, classes=7, channels=channels)
        assert network(torch.empty(2, channels, pixels, pixels, device="meta")).shape == (2, 7)


WIDTHS = {"vgg-a": 64, "overfeat-fast": 96, "digits-net": 16, "fashion-net": 16}


@pytest.mark.parametrize(("name", "published"), WIDTHS.items())
def test_width_is_in_proportion_in_every_layer(name: str, published: int) -> None:
    networks = (on_meta(name), on_meta(name, width=published), on_meta(name, width=published // 4))
    whole, given, quarter = ([p.shape for p in network.parameters()] for network in networks)
    assert whole == given
    assert [shape[0] for shape in whole[:-2]] == [4 * shape[0] for shape in quarter[:-2]]
    assert quarter[-1] == (1000,)  # the classes stay


@pytest.mark.parametrize("name", ["vgg-a", "overfeat-fast", "digits-net", "fashion-net"])
def test_impossible_options_are_named(name: str) -> None:
    wrong: Any = (("dropout", 1.0), ("dropout", -0.1), ("width", 0))
    for option, value in wrong:
        with refused(f"a network with {option}={value}", f"model.options.{option}: "):
            on_meta(name, **{option: value})


def test_the_speech_network_begins_in_the_middle_of_its_sigmoids_and_lets_gradients_through_seven() -> None:
    torch.manual_seed(0)
    network: Any = MODELS["cd-dnn"](classes=50, channels=1, width=256)
    last = network[:-1](torch.randn(64, 1, 11, 39))
    assert (last.mean(0) - 0.5).abs().mean() < 0.1
    assert last.std(0).mean() > 0.1  # windows can be told apart
    F.cross_entropy(network[-1](last), torch.randint(50, (64,))).backward()
    linear: list[Any] = [module for module in network.modules() if isinstance(module, nn.Linear)]
    assert linear[0].weight.grad.norm() > 0.25 * linear[-2].weight.grad.norm()


@pytest.mark.parametrize(("size", "pooled"), [(227, False), (224, False), (64, True), (300, True)])
def test_alexnet_pools_to_its_classifier_at_unusual_sizes_only(size: int, pooled: bool) -> None:
    model = on_meta("alexnet-bn")
    calls: list[nn.Module] = []
    model.get_submodule("to_pixels").register_forward_hook(lambda module, args, output: calls.append(module))
    assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, 1000)
    assert bool(calls) == pooled


def test_dropout_acts_in_training_only_and_on_request() -> None:
    images = torch.rand(4, 1, 8, 8)
    default, dropping = (MODELS["digits-net"](classes=10, channels=1, **each) for each in ({}, {"dropout": 0.5}))
    assert torch.equal(default(images), default(images))
    assert not torch.equal(dropping(images), dropping(images))
    dropping.eval()
    assert torch.equal(dropping(images), dropping(images))


def test_digits_net_learns_the_digits() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = (torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16 - 0.305) / 0.376
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = MODELS["digits-net"](classes=10, channels=1, zero_gamma=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=5)
    for _ in range(5):
        for batch in torch.randperm(1437).split(48):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    found = model.eval()(images[1437:]).argmax(1)
    assert (found == labels[1437:]).float().mean() > 0.9


@pytest.mark.parametrize(("window", "stride", "padding"), [(3, 2, 1), (3, 2, 0), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("size", [(7, 9), (8, 8), (13, 6)])
def test_the_ordered_gradient_of_max_pooling_is_torchs(window: int, stride: int, padding: int, ceil_mode, size) -> None:
    generator = torch.Generator().manual_seed(0)
    # Few distinct values, so that ties are common.
    x = torch.randint(0, 4, (2, 3, *size), generator=generator).double().requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours = OrderedMaxPool.apply(x, window, stride, padding, ceil_mode)
    theirs = F.max_pool2d(y, window, stride, padding, ceil_mode=ceil_mode)
    assert torch.equal(ours, theirs)
    weights = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)

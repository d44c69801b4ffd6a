"""Networks: sizes, widths, parameters and costs, weights that can learn; tests/plan/test_design.py has layers."""

import hashlib
import math
from typing import Any

import pytest
import torch
from tests.messages import refuses
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from torusgd.models import MODELS
from torusgd.models.networks import BasicBlock, Blur2d, Bottleneck


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
        refuses(f"a network with {option}={value}", on_meta, name, **{option: value}, about=f"model.options.{option}: ")


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
    assert (model.eval()(images[1437:]).argmax(1) == labels[1437:]).float().mean() > 0.9


@pytest.mark.parametrize(("name", "pixels", "elements", "tensors", "gmac", "sha256"), [
    ("resnet18", 224, 11_689_512, 62, 1.814, "84fb10d9c6905a1c"),
    ("resnet34", 224, 21_797_672, 110, 3.664, "28f9096d51307499"),
    ("resnet50", 224, 25_557_032, 161, 4.089, "d7e4f8bb0a536344"),
    ("resnet101", 224, 44_549_160, 314, 7.801, "02c0f34f4842751f"),
    ("alexnet-bn", 227, 60_966_600, 21, 0.7244, "b2387d4f0faacc25"),
])  # fmt: skip
def test_parameters_cost_and_the_state_of_resnets_are_the_published_ones(name, pixels, elements, tensors, gmac, sha256):
    """The hash is of names and shapes, in torchvision's order."""
    model = on_meta(name)
    numels = [parameter.numel() for parameter in model.parameters()]
    assert (sum(numels), len(numels)) == (elements, tensors)
    state = "\n".join(f"{key} {tuple(value.shape)}" for key, value in model.state_dict().items())
    assert hashlib.sha256(state.encode()).hexdigest().startswith(sha256)
    # 4.09 GMAC is v1.5; v1, with the stride in the first 1x1 convolution, would have 3.8.
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, pixels, pixels, device="meta"))
    assert counter.get_total_flops() / 2 == pytest.approx(gmac * 1e9, rel=1e-3)


def drawn(**options: bool) -> tuple[nn.Module, list[float]]:
    """A network, and the mean square of its weights of 64 to 128 channels, 3 x 3, in units of 2 / (9 * channels)."""
    torch.manual_seed(0)
    model = MODELS["resnet18"](classes=1000, channels=3, **options)
    square = model.get_parameter("layer2.0.conv1.weight").square().mean().item()
    return model, [square * 9 * channels / 2 for channels in (64, 128)]


def test_initial_weights_follow_he_and_the_records() -> None:
    model, (_, by_outputs) = drawn()
    _, (by_inputs, _) = drawn(fan_in=True)
    assert (by_outputs, by_inputs) == pytest.approx((1, 1), rel=0.03)
    assert model.get_parameter("fc.weight").std().item() == pytest.approx(0.01, rel=0.02)
    assert not model.get_parameter("fc.bias").any()
    mosaicml, _ = drawn(uniform_gamma=True, rare=True)
    assert torch.allclose(mosaicml.get_parameter("fc.bias"), torch.full((1000,), -math.log(1000)))
    gammas = torch.cat([m.weight.detach() for m in mosaicml.modules() if isinstance(m, nn.BatchNorm2d)])
    assert 0 <= gammas.min() < 0.01
    assert 0.99 < gammas.max() <= 1
    assert gammas.mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(("name", "block", "last"), [("resnet18", BasicBlock, "bn2"), ("resnet50", Bottleneck, "bn3")])
def test_zero_gamma_makes_each_block_its_shortcut(name: str, block: type[BasicBlock | Bottleneck], last: str) -> None:
    model = MODELS[name](classes=4, channels=3, zero_gamma=True)
    blocks = [(path, module) for path, module in model.named_modules() if isinstance(module, block)]
    norms = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert {path for path, norm in norms if not norm.weight.any()} == {f"{path}.{last}" for path, _ in blocks}
    x = torch.rand(2, 64 * block.expansion, 4, 4)
    torch.testing.assert_close(model.get_submodule("layer1.1")(x), x)


@pytest.mark.parametrize("blur", ["strides", "strides+pool"])
def test_a_blur_goes_before_strides_and_leaves_the_names_of_weights(blur: str) -> None:
    plain, blurred = on_meta("resnet50"), on_meta("resnet50", blur=blur)
    assert list(blurred.state_dict()) == list(plain.state_dict())
    kinds = [type(module).__name__ for module in blurred.modules()]
    assert (kinds.count("_BlurredConv2d"), kinds.count("Blur2d")) == (6, 6 + (blur == "strides+pool"))
    images = torch.zeros(2, 3, 64, 64, device="meta")
    for name in ("conv1", "maxpool", "layer1"):
        images = blurred.get_submodule(name)(images)
    assert images.shape == (2, 256, 16, 16)
    refuses("a blur of no known name", on_meta, "resnet50", blur="all")
    # It is a convolution with binomial weights.
    image = torch.zeros(1, 2, 5, 5)
    image[0, 1, 2, 2] = 16.0
    expected = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]])
    assert torch.equal(Blur2d(2)(image)[0, 1, 1:4, 1:4], expected)
    assert not Blur2d(2)(image)[0, 0].any()
    assert torch.equal(Blur2d(2, stride=2)(image)[0, 1], torch.tensor([[0.0, 0, 0], [0, 4, 0], [0, 0, 0]]))

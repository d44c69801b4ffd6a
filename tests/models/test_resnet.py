"""The ResNets are torchvision's in names, order and shapes, and v1.5 in their cost."""

import hashlib
import math

import pytest
import torch
from tests.messages import refused
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from torusgd.models import MODELS
from torusgd.models.networks import BasicBlock, Blur2d, Bottleneck


def build(name: str, **options: bool | str) -> nn.Module:
    """Only shapes matter in most tests here, so no memory is taken."""
    with torch.device("meta"):
        return MODELS[name](classes=1000, channels=3, **options)


@pytest.mark.parametrize(
    ("name", "pixels", "elements", "tensors", "gmac", "sha256"),
    [
        ("resnet18", 224, 11_689_512, 62, 1.814, "84fb10d9c6905a1c"),
        ("resnet34", 224, 21_797_672, 110, 3.664, "28f9096d51307499"),
        ("resnet50", 224, 25_557_032, 161, 4.089, "d7e4f8bb0a536344"),
        ("resnet101", 224, 44_549_160, 314, 7.801, "02c0f34f4842751f"),
        ("alexnet-bn", 227, 60_966_600, 21, 0.7244, "b2387d4f0faacc25"),
    ],
)
def test_parameters_cost_and_the_state_of_resnets_are_the_published_ones(name, pixels, elements, tensors, gmac, sha256):
    """The hash is of names and shapes, in torchvision's order."""
    model = build(name)
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
    zero = {path for path, norm in norms if not norm.weight.any()}
    assert zero == {f"{path}.{last}" for path, _ in blocks}
    x = torch.rand(2, 64 * block.expansion, 4, 4)
    torch.testing.assert_close(model.get_submodule("layer1.1")(x), x)


@pytest.mark.parametrize("blur", ["strides", "strides+pool"])
def test_a_blur_goes_before_strides_and_leaves_the_names_of_weights(blur: str) -> None:
    plain, blurred = build("resnet50"), build("resnet50", blur=blur)
    assert list(blurred.state_dict()) == list(plain.state_dict())
    kinds = [type(module).__name__ for module in blurred.modules()]
    assert kinds.count("_BlurredConv2d") == 6
    assert kinds.count("Blur2d") == 6 + (blur == "strides+pool")
    images = torch.zeros(2, 3, 64, 64, device="meta")
    for name in ("conv1", "maxpool", "layer1"):
        images = blurred.get_submodule(name)(images)
    assert images.shape == (2, 256, 16, 16)
    with refused("a blur of no known name"):
        build("resnet50", blur="all")
    # It is a convolution with binomial weights.
    image = torch.zeros(1, 2, 5, 5)
    image[0, 1, 2, 2] = 16.0
    expected = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]])
    assert torch.equal(Blur2d(2)(image)[0, 1, 1:4, 1:4], expected)
    assert not Blur2d(2)(image)[0, 0].any()
    assert torch.equal(Blur2d(2, stride=2)(image)[0, 1], torch.tensor([[0.0, 0, 0], [0, 4, 0], [0, 0, 0]]))

"""The built-in networks: AlexNet, OverFeat and VGG-A, a network of speech, ResNets, and two small residual nets.

ResNet-18/34/50/101 (He et al., arXiv 1512.03385) have their v1.5 form: the stride is in the 3x3 convolution. Names,
order and shapes of their parameters and buffers are torchvision's, so that weights can be exchanged both ways. The
small nets (ours) are for images of 8x8 and 28x28 pixels, or of any other size, and train on a CPU in minutes.

A builder takes `classes`, `channels` and its options by keyword, and draws its weights from torch's default generator.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..scalars import logarithm


class Blur2d(nn.Module):
    """A small low-pass filter for each channel, so that a stride after it skips less (Zhang, arXiv 1904.11486)."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        # With a border of one zero, as in MosaicML's Composer and in FFCV's ResNets.
        row = torch.tensor([1.0, 2.0, 1.0])
        kernel = (torch.outer(row, row) / 16).expand(channels, 1, 3, 3).contiguous()
        # No part of the state: files of weights stay those of a network without a blur.
        self.register_buffer("kernel", kernel, persistent=False)
        self.kernel: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, stride=self.stride, padding=1, groups=x.shape[1])


class PlainNet(nn.Module):
    """Float images (N, channels, H, W) to logits (N, classes).

    `features` gives `maps` channels of `pixels` x `pixels` at the published image size; other sizes are averaged to
    that. Three linear layers follow, with `widths` and `classes` outputs, and dropout after the first two.
    """

    def __init__(
        self, features: list[nn.Module], maps: int, pixels: int, widths: tuple[int, int], classes: int, dropout: float
    ) -> None:
        super().__init__()
        _check_dropout(dropout)
        self.features = nn.Sequential(*features)
        self.pixels = pixels
        self.to_pixels = nn.AdaptiveAvgPool2d(pixels)
        self.fc6 = nn.Linear(maps * pixels * pixels, widths[0])
        self.fc7 = nn.Linear(*widths)
        self.fc8 = nn.Linear(widths[1], classes)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def front(self, x: Tensor) -> Tensor:
        """The inputs of the linear layers: (N, maps * pixels * pixels)."""
        x = self.features(x)
        if x.shape[2:] != (self.pixels, self.pixels):  # on CUDA this pooling has no deterministic gradient
            x = self.to_pixels(x)
        return x.flatten(1)

    def tail(self) -> list[nn.Module]:
        """The linear layers with what is between them (`torusgd.tensor_parallel.tail`)."""
        return [self.fc6, self.relu, self.dropout, self.fc7, self.relu, self.dropout, self.fc8]

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for module in self.tail():
            x = module(x)
        return x


def alexnet_bn(*, classes: int, channels: int, dropout: float = 0.5) -> PlainNet:
    """AlexNet with batch norm in place of local response normalisation, which LARS was made for.

    61.0 M parameters with 1,000 classes; images of 227 or 224 px. The network of You, Gitman and Ginsburg (arXiv
    1708.03888); layers, groups and initial weights are those of `alexnet_bn` in Ginsburg's NVCaffe: a batch norm after
    each of the five convolutions, two of three linear layers with dropout.
    """
    normalised = partial(_convolution, norm=True)
    # Caffe rounds the size up: 55 and 54 pixels (from 227 and 224) both become 27.
    pool = partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True)
    features = [
        *normalised(channels, 96, 11, stride=4), pool(),
        *normalised(96, 256, 5, padding=2, groups=2), pool(),
        *normalised(256, 384, 3, padding=1),
        *normalised(384, 384, 3, padding=1, groups=2),
        *normalised(384, 256, 3, padding=1, groups=2), pool(),
    ]  # fmt: skip
    net = PlainNet(features, 256, 6, (4096, 4096), classes, dropout)
    for module in features:
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
    for linear, std, bias in ((net.fc6, 0.005, 0.1), (net.fc7, 0.005, 0.1), (net.fc8, 0.01, 0.0)):
        nn.init.normal_(linear.weight, std=std)
        nn.init.constant_(linear.bias, bias)
    return net


def overfeat_fast(*, classes: int, channels: int, width: int = 96, dropout: float = 0.5) -> PlainNet:
    """OverFeat, the fast model (Sermanet et al., arXiv 1312.6229, table 1): 5 convolutions, 3 linear layers.

    145.9 M parameters, 2.8 GMAC at 231 px (1,000 classes). `width` is the number of channels of the first convolution,
    96 as published; all other layers are in proportion, rounded down.
    """
    _check_width(width)
    first, second, third, fourth = (published * width // 96 for published in (96, 256, 512, 1024))
    features = [
        *_convolution(channels, first, 11, stride=4), nn.MaxPool2d(2),
        *_convolution(first, second, 5), nn.MaxPool2d(2),
        *_convolution(second, third, 3, padding=1),
        *_convolution(third, fourth, 3, padding=1),
        *_convolution(fourth, fourth, 3, padding=1), nn.MaxPool2d(2),
    ]  # fmt: skip
    return PlainNet(features, fourth, 6, (3072 * width // 96, 4096 * width // 96), classes, dropout)


# Channels of VGG-A's 3x3 convolutions in turn, as multiples of the first one's; None is a 2x2 pooling.
_VGG_A: tuple[int | None, ...] = (1, None, 2, None, 4, 4, None, 8, 8, None, 8, 8, None)


def vgg_a(*, classes: int, channels: int, width: int = 64, dropout: float = 0.5) -> PlainNet:
    """VGG-A: 8 convolutions and 3 linear layers (Simonyan and Zisserman, arXiv 1409.1556, configuration A).

    132.9 M parameters, 7.6 GMAC at 224 px (1,000 classes). `width` is the number of channels of the first convolution,
    of which those of all other layers are multiples.
    """
    _check_width(width)
    features: list[nn.Module] = []
    for multiple in _VGG_A:
        if multiple is None:
            features.append(nn.MaxPool2d(2))
        else:
            features += _convolution(channels, multiple * width, 3, padding=1)
            channels = multiple * width
    return PlainNet(features, 8 * width, 7, (64 * width, 64 * width), classes, dropout)


def _check_width(width: int) -> None:
    if width < 1:
        raise UserError(f"model.options.width: needs at least 1 channel, got {width}")


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"model.options.dropout: a probability from 0 up to but not 1, got {dropout}")


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1, norm: bool = False
) -> list[nn.Module]:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=not norm)
    return [layer, *([nn.BatchNorm2d(outputs, eps=1e-4)] if norm else []), nn.ReLU(inplace=True)]


def cd_dnn(*, classes: int, channels: int, inputs: int = 429, hidden: int = 7, width: int = 2048) -> nn.Sequential:
    """The speech network of Das et al. (arXiv 1602.06709): a window of frames in, thousands of tied states out.

    Linear and sigmoid layers, from windows (N, channels, H, W) to logits (N, classes), in the sizes of the
    context-dependent network of Seide, Li and Yu (Interspeech 2011): 7 hidden layers of 2,048 units, 9,304 states.
    `inputs` is channels * H * W; as published a window of 11 frames (H) of 39 coefficients (W).
    """
    sizes = [inputs, *[width] * hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (before, after) in enumerate(pairwise(sizes)):
        layers += [_sigmoid_linear(before, after, gain=4.0, centre=0.5 if number else 0.0), nn.Sigmoid()]
    return nn.Sequential(*layers, _sigmoid_linear(sizes[-1], classes, gain=1.0, centre=0.5))


def _sigmoid_linear(inputs: int, outputs: int, gain: float, centre: float) -> nn.Linear:
    # A sigmoid's slope is at most 1/4, so Glorot's bound times 4 (`gain`) keeps the variance through seven layers. That
    # holds round a sigmoid's middle only: the bias takes away what inputs of mean `centre` would add.
    layer = nn.Linear(inputs, outputs)
    bound = gain * math.sqrt(6 / (inputs + outputs))
    nn.init.uniform_(layer.weight, -bound, bound)
    with torch.no_grad():
        layer.bias.copy_(layer.weight.sum(1) * -centre)
    return layer


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, (N, inputs, H, W) -> (N, width, H / stride, W / stride)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions and a shortcut, to 4 * width channels."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


Block = type[BasicBlock] | type[Bottleneck]


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """A 1x1 projection if the shape changes, else None (the identity)."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


_BLURS = ("none", "strides", "strides+pool")
# Fewest input channels of a strided convolution that gets a blur; the first one, which sees the image, has fewer.
_BLURRED_FROM = 16


def blur_before_strides(model: "ResNet", *, pool: bool) -> None:
    """Puts a blur before each strided convolution of 16 input channels or more, with `pool` also into max pooling."""
    # Lists, since the loop replaces children of the modules that it walks over.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Conv2d and child.stride[0] > 1 and child.in_channels >= _BLURRED_FROM:
                setattr(module, name, _BlurredConv2d(child))
    if pool:  # the maximum is taken at every pixel, and the blur has the stride (MosaicML)
        model.maxpool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), Blur2d(model.conv1.out_channels, stride=2))


class _BlurredConv2d(nn.Conv2d):
    """A convolution with a blur of its input; the weight is that of the convolution in whose place it stands."""

    def __init__(self, plain: nn.Conv2d) -> None:
        sizes = (plain.in_channels, plain.out_channels, plain.kernel_size, plain.stride, plain.padding)
        super().__init__(*sizes, bias=False)  # type: ignore[arg-type]
        self.weight = plain.weight
        self.blur = Blur2d(plain.in_channels)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blur(x))


def init_residual(
    model: nn.Module, *, zero_gamma: bool, fan_in: bool = False, uniform_gamma: bool = False, rare: bool = False
) -> None:
    """Draws the weights anew: He's normal rule (arXiv 1502.01852) for convolutions, N(0, 0.01) for linear layers."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # The variance is 2 over the inputs of an output (Fujitsu's MLPerf v0.6 code), or over the outputs of an
            # input (torchvision, and most of the records).
            nn.init.kaiming_normal_(module.weight, mode="fan_in" if fan_in else "fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            # The deviation of the large-batch records (Goyal et al., arXiv 1706.02677, section 5.1). A bias of
            # -ln(classes), as MosaicML's, starts a sigmoid at a probability of about 1 / classes, 0 at one half.
            nn.init.normal_(module.weight, std=0.01)
            nn.init.constant_(module.bias, -logarithm(module.out_features) if rare else 0.0)
        elif isinstance(module, nn.BatchNorm2d) and uniform_gamma:
            nn.init.uniform_(module.weight)  # MosaicML's
    # So each residual block begins as its shortcut. After the loop above, which may have drawn these gammas.
    for module in model.modules() if zero_gamma else ():
        if isinstance(module, BasicBlock | Bottleneck):
            nn.init.zeros_((module.bn2 if isinstance(module, BasicBlock) else module.bn3).weight)


class ResNet(nn.Module):
    """A residual network for float images (N, channels, H, W); gives logits (N, classes).

    `depths` are the numbers of blocks in each of the four layers; the options are those of `init_residual` and
    `blur_before_strides`.
    """

    def __init__(
        self, block: Block, depths: Sequence[int], *, classes: int, channels: int, zero_gamma: bool = False,
        fan_in: bool = False, uniform_gamma: bool = False, rare: bool = False, blur: str = "none",
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(block, 64, 64, depths[0], stride=1)
        self.layer2 = _layer(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _layer(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _layer(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)
        init_residual(self, zero_gamma=zero_gamma, fan_in=fan_in, uniform_gamma=uniform_gamma, rare=rare)
        if blur not in _BLURS:
            raise UserError(f"model.options.blur: {blur!r} is not one of {', '.join(_BLURS)}")
        if blur != "none":
            blur_before_strides(self, pool=blur == "strides+pool")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _layer(block: Block, inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width) for _ in range(depth - 1)))


# 11.7 M parameters, 1.8 GMAC at 224 px (1,000 classes); takes ResNet's keywords, as those below do.
resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))  # 21.8 M parameters, 3.7 GMAC at 224 px
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))  # 25.6 M parameters, 4.1 GMAC at 224 px
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))  # 44.5 M parameters, 7.8 GMAC at 224 px


class SmallResNet(nn.Module):
    """A 3x3 convolution, residual blocks, global average pooling, dropout, a linear classifier.

    From float images (N, channels, H, W) to logits (N, classes). `multiples` of the `width` of the first convolution
    are the channels of each residual block.
    """

    def __init__(
        self, multiples: Sequence[int], strides: Sequence[int], *, classes: int, channels: int, width: int = 16,
        dropout: float = 0.0, zero_gamma: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_width(width)
        _check_dropout(dropout)
        widths = [width, *(multiple * width for multiple in multiples)]
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        shapes = zip(widths[:-1], widths[1:], strides, strict=True)
        self.blocks = nn.Sequential(*(BasicBlock(*shape) for shape in shapes))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(widths[-1], classes)
        init_residual(self, zero_gamma=zero_gamma)

    def front(self, x: Tensor) -> Tensor:
        """The inputs of the classifier: (N, width)."""
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.dropout(self.avgpool(x).flatten(1))

    def tail(self) -> list[nn.Module]:
        """The classifier (`torusgd.tensor_parallel.tail`)."""
        return [self.fc]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.front(x))


# For 8x8 images: two residual blocks, at 8x8 and at 4x4; takes SmallResNet's keywords, as the next one does.
digits_net = partial(SmallResNet, (1, 2), (1, 2))
fashion_net = partial(SmallResNet, (2, 4), (2, 2))  # for 28x28 images: two residual blocks, at 14x14 and at 7x7

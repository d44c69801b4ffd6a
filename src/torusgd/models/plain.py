"""The plain networks from before ResNet: AlexNet, OverFeat and VGG-A for images, and a network of speech.

A builder takes `classes`, `channels` and its options by keyword, and draws its weights from torch's default generator.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..errors import UserError
from .pooling import MaxPool2d


class PlainNet(nn.Module):
    """Float images (N, channels, H, W) to logits (N, classes).

    `features` gives `maps` channels of `pixels` x `pixels` at the published image size; other sizes are averaged to
    that. Three linear layers follow, with `widths` and `classes` outputs, and dropout after the first two.
    """

    def __init__(
        self, features: list[nn.Module], maps: int, pixels: int, widths: tuple[int, int], classes: int, dropout: float
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise UserError(f"model.options.dropout: a probability from 0 up to but not 1, got {dropout}")
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
    features = [
        *_normalised(channels, 96, 11, stride=4),
        _caffe_pool(),
        *_normalised(96, 256, 5, padding=2, groups=2),
        _caffe_pool(),
        *_normalised(256, 384, 3, padding=1),
        *_normalised(384, 384, 3, padding=1, groups=2),
        *_normalised(384, 256, 3, padding=1, groups=2),
        _caffe_pool(),
    ]
    net = PlainNet(features, 256, 6, (4096, 4096), classes, dropout)
    for module in features:
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
    for linear, std, bias in ((net.fc6, 0.005, 0.1), (net.fc7, 0.005, 0.1), (net.fc8, 0.01, 0.0)):
        nn.init.normal_(linear.weight, std=std)
        nn.init.constant_(linear.bias, bias)
    return net


def _normalised(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-4),
        nn.ReLU(inplace=True),
    ]


def _caffe_pool() -> nn.MaxPool2d:
    # Caffe rounds the size up: 55 and 54 pixels (from 227 and 224) both become 27.
    return MaxPool2d(3, stride=2, ceil_mode=True)


def overfeat_fast(*, classes: int, channels: int, width: int = 96, dropout: float = 0.5) -> PlainNet:
    """OverFeat, the fast model (Sermanet et al., arXiv 1312.6229, table 1): 5 convolutions, 3 linear layers.

    145.9 M parameters, 2.8 GMAC at 231 px (1,000 classes). `width` is the number of channels of the first convolution,
    96 as published; all other layers are in proportion, rounded down.
    """
    _check_width(width)
    first, second, third, fourth = (published * width // 96 for published in (96, 256, 512, 1024))
    features = [
        *_convolution(channels, first, 11, stride=4),
        MaxPool2d(2),
        *_convolution(first, second, 5),
        MaxPool2d(2),
        *_convolution(second, third, 3, padding=1),
        *_convolution(third, fourth, 3, padding=1),
        *_convolution(fourth, fourth, 3, padding=1),
        MaxPool2d(2),
    ]
    linear = (3072 * width // 96, 4096 * width // 96)
    return PlainNet(features, maps=fourth, pixels=6, widths=linear, classes=classes, dropout=dropout)


# Channels of VGG-A's 3x3 convolutions in turn, as multiples of the first one's; None is a 2x2 pooling.
_VGG_A: tuple[int | None, ...] = (1, None, 2, None, 4, 4, None, 8, 8, None, 8, 8, None)


def vgg_a(*, classes: int, channels: int, width: int = 64, dropout: float = 0.5) -> PlainNet:
    """VGG-A: 8 convolutions and 3 linear layers (Simonyan and Zisserman, arXiv 1409.1556, configuration A).

    132.9 M parameters, 7.6 GMAC at 224 px (1,000 classes). `width` is the number of channels of the first convolution;
    all other layers are multiples of it, as in the published network.
    """
    _check_width(width)
    features: list[nn.Module] = []
    for multiple in _VGG_A:
        if multiple is None:
            features.append(MaxPool2d(2))
        else:
            features += _convolution(channels, multiple * width, 3, padding=1)
            channels = multiple * width
    linear = (64 * width, 64 * width)
    return PlainNet(features, maps=8 * width, pixels=7, widths=linear, classes=classes, dropout=dropout)


def _check_width(width: int) -> None:
    if width < 1:
        raise UserError(f"model.options.width: needs at least 1 channel, got {width}")


def _convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]


def cd_dnn(*, classes: int, channels: int, inputs: int = 429, hidden: int = 7, width: int = 2048) -> nn.Sequential:
    """The speech network of Das et al. (arXiv 1602.06709): a window of frames in, thousands of tied states out.

    Linear and sigmoid layers, from windows (N, channels, H, W) to logits (N, classes). The sizes are those of the
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

"""AlexNet with batch norm in place of local response normalisation, which LARS was made for.

You, Gitman and Ginsburg (arXiv 1708.03888); the layers, groups and initial weights are those of the model `alexnet_bn`
in Ginsburg's NVCaffe: a batch norm after each of the five convolutions, two of three linear layers with dropout.
"""

from torch import nn

from .plain import PlainNet
from .pooling import MaxPool2d


def alexnet_bn(*, classes: int, channels: int, dropout: float = 0.5) -> PlainNet:
    """AlexNet with batch norm, 61.0 M parameters with 1,000 classes; images of 227 or 224 px."""
    features = [
        *_convolution(channels, 96, 11, stride=4),
        _pool(),
        *_convolution(96, 256, 5, padding=2, groups=2),
        _pool(),
        *_convolution(256, 384, 3, padding=1),
        *_convolution(384, 384, 3, padding=1, groups=2),
        *_convolution(384, 256, 3, padding=1, groups=2),
        _pool(),
    ]
    net = PlainNet(features, 256, 6, (4096, 4096), classes, dropout)
    for module in features:
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
    for linear, std, bias in ((net.fc6, 0.005, 0.1), (net.fc7, 0.005, 0.1), (net.fc8, 0.01, 0.0)):
        nn.init.normal_(linear.weight, std=std)
        nn.init.constant_(linear.bias, bias)
    return net


def _convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-4),
        nn.ReLU(inplace=True),
    )


def _pool() -> nn.MaxPool2d:
    # Caffe rounds up: 55 and 54 pixels (from 227 and 224) both become 27.
    return MaxPool2d(3, stride=2, ceil_mode=True)

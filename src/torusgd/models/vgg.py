"""VGG-A: 8 convolutions and 3 linear layers (Simonyan and Zisserman, arXiv 1409.1556, configuration A)."""

from torch import nn

from .plain import PlainNet, convolution
from .pooling import MaxPool2d

_WIDTHS: tuple[int | None, ...] = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)
"""channels of the 3x3 convolutions in turn; None: a 2x2 pooling"""


def vgg_a(*, classes: int, channels: int, dropout: float = 0.5) -> PlainNet:
    """132.9 M parameters, 7.6 GMAC at 224 px (1,000 classes)."""
    features: list[nn.Module] = []
    for width in _WIDTHS:
        if width is None:
            features.append(MaxPool2d(2))
        else:
            features += convolution(channels, width, 3, padding=1)
            channels = width
    return PlainNet(features, maps=512, pixels=7, widths=(4096, 4096), classes=classes, dropout=dropout)

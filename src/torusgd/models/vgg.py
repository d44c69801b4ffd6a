"""VGG-A: 8 convolutions and 3 linear layers (Simonyan and Zisserman, arXiv 1409.1556, configuration A)."""

from torch import nn

from .plain import PlainNet, check_width, convolution
from .pooling import MaxPool2d

_MULTIPLES: tuple[int | None, ...] = (1, None, 2, None, 4, 4, None, 8, 8, None, 8, 8, None)
"""channels of the 3x3 convolutions in turn, in those of the first; None: a 2x2 pooling"""


def vgg_a(*, classes: int, channels: int, width: int = 64, dropout: float = 0.5) -> PlainNet:
    """132.9 M parameters, 7.6 GMAC at 224 px (1,000 classes).

    Args:
        width: Channels of the first convolution; all other layers are multiples of it, as in the published network.
        dropout: Probability, after each of the first two linear layers.
    """
    check_width(width)
    features: list[nn.Module] = []
    for multiple in _MULTIPLES:
        if multiple is None:
            features.append(MaxPool2d(2))
        else:
            features += convolution(channels, multiple * width, 3, padding=1)
            channels = multiple * width
    linear = (64 * width, 64 * width)
    return PlainNet(features, maps=8 * width, pixels=7, widths=linear, classes=classes, dropout=dropout)

"""OverFeat, the fast model (Sermanet et al., arXiv 1312.6229, table 1): 5 convolutions, 3 linear layers, 231 px."""

from .plain import PlainNet, check_width, convolution
from .pooling import MaxPool2d


def overfeat_fast(*, classes: int, channels: int, width: int = 96, dropout: float = 0.5) -> PlainNet:
    """145.9 M parameters, 2.8 GMAC at 231 px (1,000 classes).

    Args:
        width: Channels of the first convolution, 96 as published; all other layers are in proportion, rounded down.
        dropout: Probability, after each of the first two linear layers.
    """
    check_width(width)
    first, second, third, fourth = (published * width // 96 for published in (96, 256, 512, 1024))
    features = [
        *convolution(channels, first, 11, stride=4),
        MaxPool2d(2),
        *convolution(first, second, 5),
        MaxPool2d(2),
        *convolution(second, third, 3, padding=1),
        *convolution(third, fourth, 3, padding=1),
        *convolution(fourth, fourth, 3, padding=1),
        MaxPool2d(2),
    ]
    linear = (3072 * width // 96, 4096 * width // 96)
    return PlainNet(features, maps=fourth, pixels=6, widths=linear, classes=classes, dropout=dropout)

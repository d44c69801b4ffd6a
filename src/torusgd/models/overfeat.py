"""OverFeat, the fast model (Sermanet et al., arXiv 1312.6229, table 1): 5 convolutions, 3 linear layers, 231 px."""

from .plain import PlainNet, convolution
from .pooling import MaxPool2d


def overfeat_fast(*, classes: int, channels: int, dropout: float = 0.5) -> PlainNet:
    """145.9 M parameters, 2.8 GMAC at 231 px (1,000 classes)."""
    features = [
        *convolution(channels, 96, 11, stride=4),
        MaxPool2d(2),
        *convolution(96, 256, 5),
        MaxPool2d(2),
        *convolution(256, 512, 3, padding=1),
        *convolution(512, 1024, 3, padding=1),
        *convolution(1024, 1024, 3, padding=1),
        MaxPool2d(2),
    ]
    return PlainNet(features, maps=1024, pixels=6, widths=(3072, 4096), classes=classes, dropout=dropout)

"""Small residual nets (ours) for images of 8x8 and 28x28 pixels, which train on a CPU in seconds and minutes.

Both pool over all positions before the classifier, so other image sizes pass too.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from ..errors import UserError
from .resnet import BasicBlock, init_residual


class SmallResNet(nn.Module):
    """A 3x3 convolution, residual blocks, global average pooling, dropout, a linear classifier.

    Args:
        widths: Channels of the first convolution, then of each residual block.
        strides: Stride of each residual block.
        classes: Size of the output (N, classes).
        channels: Channels of the input, float images (N, channels, H, W).
        dropout: Probability with which a pooled feature is dropped in training.
        zero_gamma: Begin with every residual block as its shortcut.
    """

    def __init__(
        self,
        widths: Sequence[int],
        strides: Sequence[int],
        *,
        classes: int,
        channels: int,
        dropout: float,
        zero_gamma: bool,
    ) -> None:
        super().__init__()
        if min(widths) < 1:
            raise UserError(f"model.options.width: needs at least 1 channel, got {widths[0]}")
        if not 0 <= dropout < 1:
            raise UserError(f"model.options.dropout: a probability from 0 up to but not 1, got {dropout}")
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        shapes = zip(widths[:-1], widths[1:], strides, strict=True)
        self.blocks = nn.Sequential(*(BasicBlock(inputs, width, stride) for inputs, width, stride in shapes))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(widths[-1], classes)
        init_residual(self, zero_gamma=zero_gamma)

    def front(self, x: Tensor) -> Tensor:
        """What the classifier takes: (N, width)."""
        x = self.blocks(self.relu(self.bn1(self.conv1(x))))
        return self.dropout(self.avgpool(x).flatten(1))

    def tail(self) -> list[nn.Module]:
        """The classifier (`torusgd.tensor_parallel.tail`)."""
        return [self.fc]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.front(x))


def digits_net(
    *, classes: int, channels: int, width: int = 16, dropout: float = 0.0, zero_gamma: bool = False
) -> SmallResNet:
    """For 8x8 images: two residual blocks, at 8x8 and at 4x4."""
    return SmallResNet(
        (width, width, 2 * width), (1, 2), classes=classes, channels=channels, dropout=dropout, zero_gamma=zero_gamma
    )


def fashion_net(
    *, classes: int, channels: int, width: int = 16, dropout: float = 0.0, zero_gamma: bool = False
) -> SmallResNet:
    """For 28x28 images: two residual blocks, at 14x14 and at 7x7; six layers in all."""
    return SmallResNet(
        (width, 2 * width, 4 * width),
        (2, 2),
        classes=classes,
        channels=channels,
        dropout=dropout,
        zero_gamma=zero_gamma,
    )

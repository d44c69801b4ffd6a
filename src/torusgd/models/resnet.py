"""ResNet-18/34/50/101 (He et al., arXiv 1512.03385) in their v1.5 form: the stride is in the 3x3 convolution.

Names, order and shapes of parameters and buffers are torchvision's, so that weights can be exchanged both ways.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from .pooling import MaxPool2d


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
    """A 1x1 projection where the shape changes, else None (the identity)."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def init_residual(model: nn.Module, *, zero_gamma: bool, fan_in: bool = False) -> None:
    """Draws the weights anew: He's normal rule for convolutions, N(0, 0.01) and no bias for linear layers.

    He's variance (arXiv 1502.01852) is 2 over the inputs of an output with `fan_in` (Fujitsu's MLPerf v0.6 code), else
    over the outputs of an input (torchvision, and most of the records).

    The linear layers' deviation is that of the large-batch records (Goyal et al., arXiv 1706.02677, section 5.1).
    With `zero_gamma` each residual block begins as its shortcut: the gamma of its last batch norm is zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in" if fan_in else "fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
    if zero_gamma:
        for module in model.modules():
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)


class ResNet(nn.Module):
    """A residual network for float images (N, channels, H, W); gives logits (N, classes).

    Args:
        block: The kind of all residual blocks.
        depths: Blocks in each of the four layers.
        classes: Size of the output.
        channels: Channels of the input.
        zero_gamma: Begin with every residual block as the identity (`init_residual`).
        fan_in: By what convolutions' first weights are scaled (`init_residual`).
    """

    def __init__(
        self,
        block: Block,
        depths: Sequence[int],
        *,
        classes: int,
        channels: int,
        zero_gamma: bool = False,
        fan_in: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(block, 64, 64, depths[0], stride=1)
        self.layer2 = _layer(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _layer(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _layer(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, classes)
        init_residual(self, zero_gamma=zero_gamma, fan_in=fan_in)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _layer(block: Block, inputs: int, width: int, depth: int, stride: int) -> nn.Sequential:
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width) for _ in range(depth - 1)))


def resnet18(*, classes: int, channels: int, zero_gamma: bool = False, fan_in: bool = False) -> ResNet:
    """11.7 M parameters, 1.8 GMAC at 224 px (1,000 classes)."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, channels=channels, zero_gamma=zero_gamma, fan_in=fan_in)


def resnet34(*, classes: int, channels: int, zero_gamma: bool = False, fan_in: bool = False) -> ResNet:
    """21.8 M parameters, 3.7 GMAC at 224 px."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes=classes, channels=channels, zero_gamma=zero_gamma, fan_in=fan_in)


def resnet50(*, classes: int, channels: int, zero_gamma: bool = False, fan_in: bool = False) -> ResNet:
    """25.6 M parameters, 4.1 GMAC at 224 px."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, channels=channels, zero_gamma=zero_gamma, fan_in=fan_in)


def resnet101(*, classes: int, channels: int, zero_gamma: bool = False, fan_in: bool = False) -> ResNet:
    """44.5 M parameters, 7.8 GMAC at 224 px."""
    return ResNet(Bottleneck, (3, 4, 23, 3), classes=classes, channels=channels, zero_gamma=zero_gamma, fan_in=fan_in)

"""ResNet-18/34/50/101 (He et al., arXiv 1512.03385) in their v1.5 form: the stride is in the 3x3 convolution.

Names, order and shapes of parameters and buffers are torchvision's, so that weights can be exchanged both ways. Two
small residual nets (ours) for images of 8x8 and 28x28 pixels, or of any other size, train on a CPU in minutes.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from ..errors import UserError
from ..scalars import logarithm
from .pooling import Blur2d, MaxPool2d


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
    """Puts a blur before each strided convolution of 16 input channels or more, and with `pool` into the max pooling.

    With `pool` the maximum is taken at every pixel and the blur has the stride (MosaicML); without it the max pooling
    stays (FFCV). Names of parameters stay: a convolution becomes its own subclass.
    """
    # Lists, since the loop replaces children of the modules that it walks over.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Conv2d and child.stride[0] > 1 and child.in_channels >= _BLURRED_FROM:
                setattr(module, name, _BlurredConv2d(child))
    if pool:
        blurred = Blur2d(model.conv1.out_channels, stride=2)
        model.maxpool = nn.Sequential(MaxPool2d(3, stride=1, padding=1), blurred)


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
    """Draws the weights anew: He's normal rule (arXiv 1502.01852) for convolutions, N(0, 0.01) for linear layers.

    With `zero_gamma` each residual block begins as its shortcut: the gamma of its last batch norm is zero.
    """
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
    # After the loop above, which may have drawn these gammas.
    for module in model.modules() if zero_gamma else ():
        if isinstance(module, BasicBlock | Bottleneck):
            last = module.bn2 if isinstance(module, BasicBlock) else module.bn3
            nn.init.zeros_(last.weight)


class ResNet(nn.Module):
    """A residual network for float images (N, channels, H, W); gives logits (N, classes).

    `depths` are the numbers of blocks in each of the four layers; the options are those of `init_residual` and
    `blur_before_strides`.
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
        uniform_gamma: bool = False,
        rare: bool = False,
        blur: str = "none",
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = MaxPool2d(3, stride=2, padding=1)
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


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
"""11.7 M parameters, 1.8 GMAC at 224 px (1,000 classes); takes ResNet's keywords, as those below do"""
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))  # 21.8 M parameters, 3.7 GMAC at 224 px
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))  # 25.6 M parameters, 4.1 GMAC at 224 px
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))  # 44.5 M parameters, 7.8 GMAC at 224 px


class SmallResNet(nn.Module):
    """A 3x3 convolution, residual blocks, global average pooling, dropout, a linear classifier.

    From float images (N, channels, H, W) to logits (N, classes). `widths` are the channels of the first convolution,
    then of each residual block.
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
        """The inputs of the classifier: (N, width)."""
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
    widths = (width, 2 * width, 4 * width)
    return SmallResNet(widths, (2, 2), classes=classes, channels=channels, dropout=dropout, zero_gamma=zero_gamma)

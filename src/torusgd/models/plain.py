"""The plain shape of the networks before ResNet: convolutions, then three linear layers with dropout between them."""

from torch import Tensor, nn

from ..errors import UserError


class PlainNet(nn.Module):
    """Float images (N, channels, H, W) to logits (N, classes).

    Args:
        features: Convolutions and poolings, in order.
        maps: Channels that `features` gives.
        pixels: Side of its output at the published image size; other sizes are averaged to it.
        widths: Outputs of the first two linear layers.
        classes: Outputs of the third.
        dropout: Probability, after each of the first two.
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
        """What the linear layers take: (N, maps * pixels * pixels)."""
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


def check_width(width: int) -> None:
    """UserError for a network without channels."""
    if width < 1:
        raise UserError(f"model.options.width: needs at least 1 channel, got {width}")


def convolution(inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> list[nn.Module]:
    """A convolution with bias and its activation."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True)]

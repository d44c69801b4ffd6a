"""AlexNet with batch norm in place of local response normalisation, which LARS was made for.

You, Gitman and Ginsburg (arXiv 1708.03888); the layers, groups and initial weights are those of the model `alexnet_bn`
in Ginsburg's NVCaffe: a batch norm after each of the five convolutions, two of three linear layers with dropout.
"""

from torch import Tensor, nn

from ..errors import UserError
from .pooling import MaxPool2d


class AlexNetBN(nn.Module):
    """61.0 M parameters with 1,000 classes; float images (N, channels, H, W), 227 or 224 px, to logits (N, classes)."""

    def __init__(self, *, classes: int, channels: int, dropout: float) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise UserError(f"model.options.dropout: a probability from 0 up to but not 1, got {dropout}")
        self.features = nn.Sequential(
            *_convolution(channels, 96, 11, stride=4),
            _pool(),
            *_convolution(96, 256, 5, padding=2, groups=2),
            _pool(),
            *_convolution(256, 384, 3, padding=1),
            *_convolution(384, 384, 3, padding=1, groups=2),
            *_convolution(384, 256, 3, padding=1, groups=2),
            _pool(),
        )
        self.to6x6 = nn.AdaptiveAvgPool2d(6)
        self.fc6 = nn.Linear(256 * 6 * 6, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.fc8 = nn.Linear(4096, classes)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout)
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
        for linear, std, bias in ((self.fc6, 0.005, 0.1), (self.fc7, 0.005, 0.1), (self.fc8, 0.01, 0.0)):
            nn.init.normal_(linear.weight, std=std)
            nn.init.constant_(linear.bias, bias)

    def front(self, x: Tensor) -> Tensor:
        """What the linear layers take: (N, 9216)."""
        x = self.features(x)
        if x.shape[2:] != (6, 6):  # neither 227 nor 224 px; on CUDA this pooling has no deterministic gradient
            x = self.to6x6(x)
        return x.flatten(1)

    def tail(self) -> list[nn.Module]:
        """The linear layers with what is between them (`torusgd.models.columns`)."""
        return [self.fc6, self.relu, self.dropout, self.fc7, self.relu, self.dropout, self.fc8]

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for module in self.tail():
            x = module(x)
        return x


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


def alexnet_bn(*, classes: int, channels: int, dropout: float = 0.5) -> AlexNetBN:
    """AlexNet with batch norm; `dropout` after each of the first two linear layers."""
    return AlexNetBN(classes=classes, channels=channels, dropout=dropout)

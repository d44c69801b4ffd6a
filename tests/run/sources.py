"""Sources and networks for tests, given to recipes by import path."""

from typing import Any

import numpy as np
import torch
from torch import nn

from torusgd.data.types import CorruptImage
from torusgd.models.networks import SmallResNet


class Half:
    """Images of one class dark in the upper half, of the other in the lower."""

    classes = ("up", "down", "left", "right")
    shape = (8, 8, 1)

    def __init__(self, path: object, split: str, **options: object) -> None:
        self.labels = np.arange(96 if split == "train" else 24, dtype=np.int64) % 4

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        image = np.full((8, 8, 1), 40 + index, np.uint8)
        image[slice(0, 4) if self.labels[index] % 2 else slice(4, 8)] = 200 if self.labels[index] < 2 else 150
        return image


class Torn(Half):
    """Every seventh image can't be decoded."""

    def read(self, index: int) -> np.ndarray:
        if index % 7 == 3:
            raise CorruptImage(index, "torn on purpose")
        return super().read(index)


class Counting(nn.Module):
    """A network whose logits follow the number of images that it is given together."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.head = nn.Linear(channels * 64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(x.flatten(1))
        return logits * len(x)


def small_net(classes: int, channels: int, width: int = 16, **options: Any) -> SmallResNet:
    """`digits-net` of a single block, in half the time: it lacks a stride, and the convolution of a shortcut."""
    return SmallResNet((1,), (1,), classes=classes, channels=channels, width=width, **options)

"""Networks that portable arithmetic is measured with, each with a batch, and the arithmetics beside it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torusgd.arithmetic import portable
from torusgd.models.networks import digits_net, fashion_net, resnet18, resnet50


class SmallViT(nn.Module):
    """Six layers of width 192 over patches of 8 x 8 pixels, as torch has its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 8, 8)
        self.positions = nn.Parameter(torch.randn(64, 192) * 0.02)
        layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, nn.LayerNorm(192), enable_nested_tensor=False)
        self.head = nn.Linear(192, 100)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int, int]]] = {
    "digits": (lambda: digits_net(classes=10, channels=1), (32, 1, 8, 8)),
    "fashion": (lambda: fashion_net(classes=10, channels=1), (32, 1, 28, 28)),
    "resnet18": (lambda: resnet18(classes=100, channels=3), (16, 3, 64, 64)),
    "resnet50": (lambda: resnet50(classes=100, channels=3), (8, 3, 224, 224)),
    "vit": (SmallViT, (16, 3, 64, 64)),
}
"""how to make a network, and the shape of a batch"""

KINDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float32": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "portable": portable,
}


def name_of(model: str) -> str:
    images, _, side, _ = MODELS[model][1]
    return f"{model}, {images} images of {side} px"


def batch_of(shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Blobs of the labels' own colours with noise, so that there is something to learn; a seed is another batch."""
    labels = (torch.arange(shape[0]) + seed) % classes
    means = torch.randn(classes, *shape[1:], generator=torch.Generator().manual_seed(3))
    return means[labels] + torch.randn(shape, generator=torch.Generator().manual_seed(4 + seed)), labels


class Training:
    """A network in channels last with SGD, whose steps go by one arithmetic."""

    def __init__(self, model: str, kind: str, images: int | None = None) -> None:
        make, shape = MODELS[model]
        self._context, self._kind = KINDS[kind], kind
        with portable() if kind == "portable" else nullcontext():
            torch.manual_seed(1)
            self._network = make()
        self._network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch does not declare it
        pictures, self._labels = batch_of((images or shape[0], *shape[1:]))
        self._images = pictures.contiguous(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._network.parameters(), 0.01, 0.9, foreach=False)

    def step(self) -> None:
        """Forward, loss, backward, update."""
        with self._context():
            loss = F.cross_entropy(self._network(self._images), self._labels)
            if self._kind == "portable":
                self._back(loss)
        if self._kind != "portable":
            self._back(loss)

    def _back(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

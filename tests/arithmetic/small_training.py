"""A few steps of a small network with most kinds of layers; run as a file, it prints the weights' hash.

python small_training.py portable|float32 [METHOD]
"""

import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torusgd.arithmetic import portable
from torusgd.rng import keyed_uniform
from torusgd.weights import weights_sha256


class SmallNet(nn.Module):
    """Convolutions with batch norm, a residual block, a depthwise one, attention with layer norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.gn = nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.GroupNorm(2, 8)
        self.norm, self.heads, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.silu(x + self.bn2(self.conv2(x)))
        tokens = F.hardswish(self.gn(self.depthwise(x))).flatten(2).transpose(1, 2)
        query, key, value = self.heads(self.norm(tokens)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        tokens = tokens + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return self.classifier((tokens + self.mlp(tokens)).mean(1))


def train(context: Any, steps: int = 5, device: str = "cpu") -> str:
    """The SHA-256 of the weights after some steps on keyed images."""
    with context:
        torch.manual_seed(1)
        model = SmallNet().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, foreach=False)
        for step in range(steps):
            images = torch.from_numpy(keyed_uniform(step, torch.arange(24 * 64).numpy())).float().view(24, 1, 8, 8)
            labels = torch.arange(24, device=device) % 10
            loss = F.cross_entropy(model(images.to(device)), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return weights_sha256(model.state_dict())


if __name__ == "__main__":
    kind, *methods = sys.argv[1:]
    print(train(portable(methods or None) if kind == "portable" else nullcontext()))

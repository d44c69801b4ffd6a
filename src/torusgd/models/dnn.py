"""The speech network of Das et al. (arXiv 1602.06709): a window of frames in, thousands of tied states out.

The sizes are those of the context-dependent DNN of Seide, Li and Yu (Interspeech 2011): 7 hidden layers of 2,048
sigmoid units, 9,304 states.
"""

import math
from itertools import pairwise

import torch
from torch import nn


def cd_dnn(*, classes: int, channels: int, inputs: int = 429, hidden: int = 7, width: int = 2048) -> nn.Sequential:
    """Linear and sigmoid layers; windows (N, channels, H, W) to logits (N, classes).

    Args:
        inputs: channels * H * W; as published a window of 11 frames (H) of 39 coefficients (W).
        hidden: Hidden layers.
        width: Units of each.
    """
    sizes = [inputs, *[width] * hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (before, after) in enumerate(pairwise(sizes)):
        layers += [_linear(before, after, gain=4.0, centre=0.5 if number else 0.0), nn.Sigmoid()]
    return nn.Sequential(*layers, _linear(sizes[-1], classes, gain=1.0, centre=0.5))


def _linear(inputs: int, outputs: int, gain: float, centre: float) -> nn.Linear:
    # A sigmoid's slope is at most 1/4: Glorot's rule times 4 keeps the variance through seven of them, as long as
    # they are not pushed from their middle by inputs whose mean (`centre`) is a half.
    layer = nn.Linear(inputs, outputs)
    bound = gain * math.sqrt(6 / (inputs + outputs))
    nn.init.uniform_(layer.weight, -bound, bound)
    with torch.no_grad():
        layer.bias.copy_(layer.weight.sum(1) * -centre)
    return layer

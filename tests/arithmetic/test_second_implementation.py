"""The specification says it all: NumPy, from the document alone, trains a network to the same weights, bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.arithmetic.second_implementation import Arithmetic, half_up, train
from torch import Tensor, nn
from torch.nn import functional as F

from torusgd.arithmetic import portable

WIDTH, CLASSES, IMAGES = 8, 10, 16


class Net(nn.Module):
    """The network of `second_implementation.train`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH)
        self.conv2, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, 2, 1, bias=False), nn.BatchNorm2d(WIDTH)
        self.shortcut, self.linear = nn.Conv2d(WIDTH, WIDTH, 1, 2, bias=False), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)) + self.shortcut(x))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def data() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images of multiples of 1/16, as those of `digits` are."""
    numbers = np.arange(IMAGES * 64, dtype=np.int64)
    pixels = (numbers * numbers * 7 + numbers // 5) % 17
    return (pixels.astype(np.float32) / np.float32(16)).reshape(IMAGES, 1, 8, 8), np.arange(IMAGES) % CLASSES


def trained(steps: tuple[int, ...]) -> dict[int, dict[str, np.ndarray[Any, Any]]]:
    """The package's weights after some steps, by the names of the second implementation."""
    images, labels = (torch.from_numpy(array) for array in data())
    found = {}
    with portable():
        net = Net()
        torch.manual_seed(1)
        for layer, std in ((net.conv1, 0.2), (net.conv2, 0.2), (net.shortcut, 0.2), (net.linear, 0.1)):
            nn.init.normal_(layer.weight, std=std)
        nn.init.zeros_(net.linear.bias)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, foreach=False)
        for step in range(1, max(steps) + 1):
            loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in steps:
                named = {name.removesuffix(".weight"): p for name, p in net.named_parameters() if "norm" not in name}
                named = {name.replace("linear.bias", "bias"): p for name, p in named.items()}
                named |= {name: p for name, p in net.named_parameters() if "norm" in name}
                found[step] = {name: p.detach().numpy().copy() for name, p in named.items()}
    return found


def same(a: dict[str, np.ndarray[Any, Any]], b: dict[str, np.ndarray[Any, Any]]) -> bool:
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_the_same_weights_after_steps_1_2_5_and_20() -> None:
    for step, weights in trained((1, 2, 5, 20)).items():
        assert same(weights, train(*data(), step)), step


def bent(numbers: tuple[float, ...], place: int) -> tuple[float, ...]:
    """One coefficient off: a low one by 1e-6 of itself, a high one by half, which float32 can see."""
    return tuple(
        number * (1 + (1e-6 if place < 2 else 0.5)) if n == place else number for n, number in enumerate(numbers)
    )


PLAIN = Arithmetic()
MUTANTS: dict[str, Arithmetic] = {
    "largest": replace(PLAIN, largest=16128),
    "largest up": replace(PLAIN, largest=16384),
    "scale at its end": replace(PLAIN, most_scale=12),
    "finer grid": replace(PLAIN, grid_bits=21),
    "rounding": replace(PLAIN, rne=half_up),
    "scale of all images": replace(PLAIN, images_share_a_scale=True),
    "draws": replace(PLAIN, draw_word=24),
    "log2 e": replace(PLAIN, log2_e=PLAIN.log2_e * (1 + 1e-7)),
    "ln 2": replace(PLAIN, ln_2=PLAIN.ln_2 * (1 + 1e-7)),
    **{f"exp2 {n}": replace(PLAIN, exp2=bent(PLAIN.exp2, n)) for n in range(7)},
    **{f"atanh {n}": replace(PLAIN, atanh=bent(PLAIN.atanh, n)) for n in range(5)},
    **{f"centre {n}": replace(PLAIN, centre=bent(PLAIN.centre, n)) for n in range(9)},
}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray[Any, Any]]:
    return trained((3,))[3]


@pytest.mark.parametrize("name", MUTANTS)
def test_one_changed_constant_or_rounding_is_found(name: str, expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert not same(expected, train(*data(), 3, MUTANTS[name]))

"""Errors of a network's gradient on one batch against float64's: portable, float32 and bfloat16.

    python -m benchmarks portable gradients --model resnet50 --steps 100

After some float32 steps from random weights, on blobs of the labels' own colours. The error is |found - exact| /
|exact| of all gradients together, in the Euclidean norm. Each batch has a seed of its own.

Needs: nothing.
"""

import statistics
from contextlib import nullcontext
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer import Option

from ..record import sample
from .cases import KINDS, MODELS, batch_of
from .rules import error


def gradient(network: nn.Module, state: dict[str, Tensor], kind: str, images: Tensor, labels: Tensor) -> Tensor:
    """All gradients in one row, float64; kind "float64" is exact."""
    dtype = torch.float64 if kind == "float64" else torch.float32
    network.to(dtype).load_state_dict(state)
    network.zero_grad()
    with nullcontext() if kind == "float64" else KINDS[kind]():
        F.cross_entropy(network(images.to(dtype)), labels).backward()
    return torch.cat([p.grad.double().flatten() for p in network.parameters() if p.grad is not None])


def main(
    model: str = "resnet50",
    steps: Annotated[int, Option(help="float32 steps before the gradient is compared")] = 0,
    pixels: Annotated[int, Option(help="a side")] = 96,
    images: int = 16,
    batches: int = 3,
) -> None:
    """Prints and records."""
    torch.set_num_threads(1)
    make, shape = MODELS[model]
    sizes = (images, shape[1], pixels, pixels)
    torch.manual_seed(1)
    network = make()
    optimizer = torch.optim.SGD(network.parameters(), 0.02, 0.9)
    for number in range(steps):
        optimizer.zero_grad()
        pictures, labels = batch_of(sizes, seed=number)
        F.cross_entropy(network(pictures), labels).backward()
        optimizer.step()
    state = {key: value.clone() for key, value in network.state_dict().items()}
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(batches):
        pictures, labels = batch_of(sizes, seed=steps + number)
        exact = gradient(network, state, "float64", pictures, labels)
        for kind, found in errors.items():
            found.append(error(gradient(network, state, kind, pictures, labels), exact))
    for kind, found in errors.items():
        name = f"{model}, {images} images of {pixels} px, after {steps} steps, {kind}, error"
        print(f"{name}: {statistics.median(found):.2e} ({min(found):.2e} to {max(found):.2e}, n = {batches})")
        sample(name, found)

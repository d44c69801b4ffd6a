"""Two steps of networks of torchvision and timm by portable arithmetic: the weights' hash, or why there is none.

    python -m benchmarks portable families

Two images of 64 px (Inception's 96), all drawn inside of the arithmetic. Other kernels have to print the same.

Needs: torchvision and timm.
"""

import torch
from tools.model_families import FAMILIES
from torch.nn import functional as F

from torusgd.arithmetic import portable
from torusgd.errors import UserError, in_one_line
from torusgd.models.registry import construct
from torusgd.recipe.schema import Model
from torusgd.weights import weights_sha256


def family(name: str) -> str:
    side = 96 if "inception_v3" in name else 64
    with portable():
        torch.manual_seed(0)
        network = construct(Model(name=name, options=FAMILIES[name]), classes=10, channels=3)
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, foreach=False)
        images, labels = torch.rand(2, 3, side, side), torch.tensor([1, 7])
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(network(images), labels).backward()
            optimizer.step()
        return weights_sha256(network.state_dict())[:12]


def main() -> None:
    """Prints a line for each."""
    torch.set_num_threads(1)
    for name in FAMILIES:
        try:
            print(name, family(name), flush=True)
        except (UserError, RuntimeError, TypeError, AssertionError) as error:
            print(name, "none:", in_one_line(error), flush=True)

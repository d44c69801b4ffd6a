"""Networks of the published results, each read once; for BERT-large the layout of its gradients is enough."""

from functools import cache

import numpy as np

from ..errors import UserError
from ..models import MODELS
from .model_cost import Gradient, Kernels, ModelCost, read_model

_INPUTS = {
    "alexnet-bn": (3, 227, 227, 1000),
    "cd-dnn": (1, 11, 39, 9304),
    "overfeat-fast": (3, 231, 231, 1000),
    "vgg-a": (3, 224, 224, 1000),
}
"""channels, height, width and classes as published; other networks take 3, 224, 224 and 1,000"""


@cache
def known_cost(name: str) -> ModelCost:
    """The cost of a built-in network at its published input size; UserError names those that there are.

    >>> known_cost("resnet50").parameters
    25557032
    """
    if name == "bert-large":
        return _layout_only(_bert_large())
    if name not in MODELS:
        raise UserError(f"model {name}: unknown; there are {', '.join(sorted([*MODELS, 'bert-large']))}")
    *shape, classes = _INPUTS.get(name, (3, 224, 224, 1000))
    return read_model(lambda: MODELS[name](classes=classes, channels=shape[0]), tuple(shape))


def _layout_only(sizes: list[tuple[str, int]]) -> ModelCost:
    nothing = Kernels(*(np.zeros(0) for _ in range(6)))
    gradients = tuple(Gradient(name, values, False, 0) for name, values in reversed(sizes))
    return ModelCost(nothing, nothing, gradients, (), 0, 0.0)


def _bert_large() -> list[tuple[str, int]]:
    """Devlin et al. (arXiv 1810.04805): 24 layers of width 1,024, 30,522 word pieces, 335 M parameters."""
    width, inner = 1024, 4096
    norm = [("norm.weight", width), ("norm.bias", width)]
    sizes = [("words", 30_522 * width), ("positions", 512 * width), ("types", 2 * width), *norm]
    for layer in range(24):
        for name in ("query", "key", "value", "out"):
            sizes += [(f"{layer}.{name}.weight", width * width), (f"{layer}.{name}.bias", width)]
        sizes += [*norm, (f"{layer}.in.weight", width * inner), (f"{layer}.in.bias", inner)]
        sizes += [(f"{layer}.out.weight", width * inner), (f"{layer}.out.bias", width), *norm]
    return [*sizes, ("pooler.weight", width * width), ("pooler.bias", width)]

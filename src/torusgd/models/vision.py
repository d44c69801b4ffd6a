"""Classifiers of torchvision, which is imported only when a recipe names one of them."""

from typing import Any

import torch
from torch import nn

from ..errors import UserError, suggest


def build_torchvision(name: str, *, classes: int, options: dict[str, Any]) -> nn.Module:
    """`torchvision.models.NAME(num_classes=classes, **options)`, with fresh weights.

    Raises:
        UserError: torchvision is not there or not made for this torch, or it has no such classifier or option.
    """
    try:
        from torchvision import models
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(_remedy(error)) from error
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"model.name: torchvision has no classifier {name!r}{suggest(name, known)}")
    for key in ("weights", "weights_backbone"):
        if key in options:
            raise UserError(f"model.options.{key}: give the file of the weights to begin with as --init FILE")
    try:
        return models.get_model(name, weights=None, num_classes=classes, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"model.options: torchvision's {name} does not take them: {error}") from error


def _remedy(error: Exception) -> str:
    # A torch from PyTorch's own index names its build (2.13.0+cpu); torchvision must be of the same build.
    build = torch.__version__.partition("+")[2]
    source = f"pip install torchvision --index-url https://download.pytorch.org/whl/{build}"
    install = source if build else "pip install 'torusgd[torchvision]'"
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return (
        f"model.name: torchvision can't be imported ({reason}); "
        f"get the one made for torch {torch.__version__}: {install}"
    )

"""Classifiers of torchvision and timm by name, with fresh weights, and timm's own pretrained ones.

A library is imported only when a recipe names it: either takes seconds, and neither is required.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError, as_user_error, first_line, suggest
from ..recipe.section import Options

# Options of the builders that would load weights, which the recipe's hash does not cover.
_WEIGHTS = {
    "torchvision": ("weights", "weights_backbone"),
    "timm": ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"),
}
# Options that follow from `data.classes` and `data.channels`.
_OURS = {"torchvision": ("num_classes",), "timm": ("num_classes", "in_chans")}
# The option of networks that are built for one size of images, most of them transformers.
SIZE_OPTIONS = {"torchvision": "image_size", "timm": "img_size"}


def torchvision_classifier(name: str, *, classes: int, channels: int, options: Options) -> nn.Module:
    """`torchvision.models.NAME(num_classes=classes, **options)`, for images of three channels."""
    if channels != 3:
        raise UserError(f"data.channels: torchvision's networks take 3, not {channels}; timm's take either")
    models = _library("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"model.name: torchvision has no classifier {name!r}{suggest(name, known)}")
    _check_options("torchvision", options)
    with as_user_error(f"model.options: torchvision's {name} does not take them", of=(TypeError, ValueError)):
        return models.get_model(name, weights=None, num_classes=classes, **options)


def timm_classifier(name: str, *, classes: int, channels: int, options: Options) -> nn.Module:
    """`timm.create_model(NAME, num_classes=classes, in_chans=channels, **options)`; NAME may have a tag, as in timm."""
    timm = _timm(name)
    _check_options("timm", options)
    return _create(timm, name, num_classes=classes, in_chans=channels, **options)


def timm_pretrained(name: str, *, channels: int, options: Options) -> dict[str, Tensor]:
    """The tensors of timm's pretrained network of that name, with its own head, from the hub or its cache.

    timm fits position embeddings to `img_size` and the first layer to the channels.
    """
    timm = _timm(name)
    # Before the network is built: without weights timm would return a random one.
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise UserError(f"--init timm: timm has no pretrained weights of {name}")
    try:
        network = _create(timm, name, pretrained=True, in_chans=channels, **options)
    except (OSError, RuntimeError) as error:
        where = config.hf_hub_id or config.url
        raise UserError(
            f"--init timm: can't get the weights of {name} ({where}): {first_line(error)}; without a net set HF_HOME "
            "to a folder that holds them, and HF_HUB_OFFLINE=1"
        ) from error
    return dict(network.state_dict())


def _timm(name: str) -> ModuleType:
    timm = _library("timm")
    architecture = name.partition(".")[0]
    known = timm.list_models()
    if architecture not in known:
        raise UserError(f"model.name: timm has no classifier {architecture!r}{suggest(architecture, known)}")
    with as_user_error(f"model.name: timm has no {name!r}", of=RuntimeError):  # the architecture has no such tag
        timm.get_pretrained_cfg(name)
    return timm


def _create(timm: ModuleType, name: str, **options: Any) -> nn.Module:
    foreign = (TypeError, ValueError, AssertionError, KeyError, AttributeError)
    with as_user_error(f"model.options: timm's {name} does not take them", of=foreign):
        return timm.create_model(name, **options)


def _check_options(library: str, options: Options) -> None:
    for key in options:
        if key in _WEIGHTS[library]:
            raise UserError(f"model.options.{key}: say which weights to begin with as --init, not in the recipe")
        if key in _OURS[library]:
            raise UserError(f"model.options.{key}: follows from data.classes and data.channels; leave it out")


def _library(module: str) -> ModuleType:
    try:
        return import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        # A torch from PyTorch's own index names its build (2.13.0+cpu); torchvision, which timm needs, must match.
        build, library = torch.__version__.partition("+")[2], module.partition(".")[0]
        index = f" --extra-index-url https://download.pytorch.org/whl/{build}" if build else ""
        raise UserError(
            f"model.name: {library} can't be imported ({first_line(error)}); with the torchvision that is made for "
            f"torch {torch.__version__} it comes by: pip install {library}{index} (the extra {library})"
        ) from error

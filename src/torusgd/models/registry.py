"""From a recipe's model section to a network with its initial weights, checked before any worker trains it."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UserError, suggest
from ..importing import import_factory
from ..recipe.schema import Model, Recipe, Sides, sides
from ..rng import INIT, keyed_hash
from .freeze import BODY, freeze
from .libraries import SIZE_OPTIONS, timm_classifier, torchvision_classifier
from .plain import alexnet_bn, cd_dnn, overfeat_fast, vgg_a
from .resnet import resnet18, resnet34, resnet50, resnet101
from .small import digits_net, fashion_net

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet-bn": alexnet_bn,
    "cd-dnn": cd_dnn,
    "digits-net": digits_net,
    "fashion-net": fashion_net,
    "overfeat-fast": overfeat_fast,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet101": resnet101,
    "vgg-a": vgg_a,
}
"""Built-in names; each builder takes `classes`, `channels` and its options by keyword."""

LIBRARIES = {"torchvision": torchvision_classifier, "timm": timm_classifier}
"""What stands before the colon of a library's classifier."""


def build_model(model: Model, *, classes: int, channels: int, image_size: Sides, seed: int) -> nn.Module:
    """The network that a recipe names, on the CPU in float32, with initial weights that depend on the seed alone.

    Args:
        model: Name and options. A name is one of `MODELS`, `torchvision:NAME`, `timm:NAME`, or
            `package.module:factory`; a factory is called like a built-in builder and must draw its weights from
            torch's default generator.
        classes: Size of the output.
        channels: Channels of the images.
        image_size: Pixels a side, or height and width; the network must take float images (N, channels, height,
            width) and give logits (N, classes).
        seed: The recipe's seed. The caller's random state is left as it was.

    Raises:
        UserError: No such name or option; the network does not take these images or give these logits; or it has
            state other than batch norm's that training changes, which can't be merged over virtual workers.

    >>> net = build_model(Model(name="digits-net"), classes=10, channels=1, image_size=8, seed=0)
    >>> net(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(keyed_hash(INIT, seed)))
        network = construct(model, classes=classes, channels=channels)
        _check(model.name, network, torch.randn(2, channels, *sides(image_size)), classes)
    return network


def model_of(recipe: Recipe, classes: int) -> nn.Module:
    """`build_model` by a recipe, with what it freezes; `classes` is the data set's number, where it gives none."""
    network = build_model(
        recipe.model,
        classes=recipe.data.classes or classes,
        channels=recipe.data.channels,
        image_size=recipe.data.image_size,
        seed=recipe.seed,
    )
    freeze(network, recipe.model.freeze, head_of(recipe, classes) if BODY in recipe.model.freeze else ())
    return network


def head_of(recipe: Recipe, classes: int) -> frozenset[str]:
    """Names of the tensors whose shapes depend on the number of classes: what another data set needs anew.

    Found by building the network once more for one class more, so that it holds for anybody's network.

    >>> from torusgd.recipe.load import load_recipe
    >>> sorted(head_of(load_recipe("digits").recipe, classes=10))
    ['fc.bias', 'fc.weight']
    """
    count, channels = recipe.data.classes or classes, recipe.data.channels
    with torch.random.fork_rng(devices=[]):
        one, more = (construct(recipe.model, classes=count + i, channels=channels).state_dict() for i in (0, 1))
    return frozenset(name for name, tensor in one.items() if more[name].shape != tensor.shape)


def construct(model: Model, *, classes: int, channels: int) -> nn.Module:
    """The network of that name with its options, unchecked and with whatever weights its builder draws."""
    library, _, name = model.name.partition(":")
    if library in LIBRARIES:
        return LIBRARIES[library](name, classes=classes, channels=channels, options=model.options)
    if ":" in model.name:
        builder = import_factory(model.name, key="model.name")
    elif model.name in MODELS:
        builder = MODELS[model.name]
    else:
        raise UserError(
            f"model.name: no model {model.name!r}{suggest(model.name, sorted(MODELS))} "
            "(or torchvision:NAME, timm:NAME, or your own as package.module:factory)"
        )
    _check_options(model, builder)
    network = builder(classes=classes, channels=channels, **model.options)
    if not isinstance(network, nn.Module):
        raise UserError(f"model.name: {model.name} gave a {type(network).__name__}, not a torch.nn.Module")
    return network


def _check_options(model: Model, builder: Callable[..., Any]) -> None:
    parameters = inspect.signature(builder).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in ("classes", "channels"):
        if key not in parameters:
            raise UserError(f"model.name: {model.name} must take the keyword {key}")
    allowed = [key for key in parameters if key not in ("classes", "channels")]
    for key, value in model.options.items():
        if key not in allowed:
            raise UserError(
                f"model.options.{key}: {model.name} has no such option; it has {', '.join(allowed) or 'none'}"
            )
        wanted = parameters[key].annotation
        if wanted is float and type(value) is int:
            continue
        if wanted in (bool, int, float, str) and type(value) is not wanted:
            raise UserError(f"model.options.{key}: needs a value of type {wanted.__name__}, got {value!r}")
    for key in allowed:
        if parameters[key].default is inspect.Parameter.empty and key not in model.options:
            raise UserError(f"model.options.{key}: {model.name} needs it")


def _check(name: str, network: nn.Module, images: Tensor, classes: int) -> None:
    """One forward pass in training mode, of a copy: looks at the output and at what else has changed."""
    trial = copy.deepcopy(network).train()
    size = "x".join(map(str, images.shape[1:]))
    try:
        with torch.no_grad():
            logits = trial(images)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        key = SIZE_OPTIONS.get(name.partition(":")[0])
        hint = f"; where it is made for one size, give model.options.{key}" if key else ""
        raise UserError(f"model.name: {name} does not take {size} images (data.image_size): {reason}{hint}") from error
    gave = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if gave != (len(images), classes):
        raise UserError(
            f"model.name: {name} must give logits of shape {(len(images), classes)} for {len(images)} images, "
            f"it gave {gave}"
        )
    before = dict(network.named_modules())
    for path, module in trial.named_modules():
        if isinstance(module, _BatchNorm):
            continue
        for key, value in module.named_buffers(recurse=False):
            if not _same_bits(value, before[path].get_buffer(key)):
                raise UserError(
                    f"model.name: {name} has a module {path or '(the model)'} ({type(module).__name__}) whose buffer "
                    f"{key} changes in training; of such state only batch norm's is merged over virtual workers"
                )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Bits and not values, as NaN is not equal to itself.
    as_bytes = (t.flatten().contiguous().view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)

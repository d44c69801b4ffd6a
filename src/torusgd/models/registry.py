"""From a recipe's model section to a network with its initial weights, checked before any worker trains it."""

import copy
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from ..errors import UserError, as_user_error, first_line, suggest
from ..recipe.load import import_factory
from ..recipe.schema import Model, Recipe
from ..recipe.section import Options, Sides, sides
from ..rng import INIT, keyed_hash
from . import networks

# Builders by built-in name; each takes `classes`, `channels` and its options by keyword.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet-bn": networks.alexnet_bn, "cd-dnn": networks.cd_dnn, "digits-net": networks.digits_net,
    "fashion-net": networks.fashion_net, "overfeat-fast": networks.overfeat_fast, "resnet18": networks.resnet18,
    "resnet34": networks.resnet34, "resnet50": networks.resnet50, "resnet101": networks.resnet101,
    "vgg-a": networks.vgg_a,
}  # fmt: skip
# Options of the builders that would load weights, which the recipe's hash does not cover.
_WEIGHTS = {
    "torchvision": ("weights", "weights_backbone"),
    "timm": ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path"),
}
# Options that follow from `data.classes` and `data.channels`.
_OURS = {"torchvision": ("num_classes",), "timm": ("num_classes", "in_chans")}
# The option of networks that are built for one size of images, most of them transformers.
SIZE_OPTIONS = {"torchvision": "image_size", "timm": "img_size"}

BODY = "body"  # the word of `model.freeze` for all parameters but the head's


# A library is imported only when a recipe names it: either takes seconds, and neither is required.
def torchvision_classifier(name: str, *, classes: int, channels: int, options: Options) -> nn.Module:
    """`torchvision.models.NAME(num_classes=classes, **options)`, for images of three channels."""
    if channels != 3:
        raise UserError(f"data.channels: torchvision's networks take 3, not {channels}; timm's take either")
    models = _library("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"model.name: torchvision has no classifier {name!r}{suggest(name, known)}")
    _check_library_options("torchvision", options)
    with as_user_error(f"model.options: torchvision's {name} does not take them", of=(TypeError, ValueError)):
        return models.get_model(name, weights=None, num_classes=classes, **options)


def timm_classifier(name: str, *, classes: int, channels: int, options: Options) -> nn.Module:
    """`timm.create_model(NAME, num_classes=classes, in_chans=channels, **options)`; NAME may have a tag, as in timm."""
    timm = _timm(name)
    _check_library_options("timm", options)
    return _create(timm, name, num_classes=classes, in_chans=channels, **options)


def timm_pretrained(name: str, *, channels: int, options: Options) -> dict[str, Tensor]:
    """The tensors of timm's pretrained network of that name, with its own head, fitted to `img_size` and channels."""
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


def _check_library_options(library: str, options: Options) -> None:
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


# Builders by the part before the colon of a library's classifier.
LIBRARIES = {"torchvision": torchvision_classifier, "timm": timm_classifier}


def is_built_in(name: str) -> bool:
    """Whether a model's name runs no code but torusgd's, torchvision's and timm's, so that a file may give it.

    >>> is_built_in("resnet50"), is_built_in("timm:vit_tiny_patch16_224"), is_built_in("torch.hub:load")
    (True, True, False)
    """
    library, colon, _ = name.partition(":")
    return name in MODELS or bool(colon and library in LIBRARIES)


def build_model(model: Model, *, classes: int, channels: int, image_size: Sides, seed: int) -> nn.Module:
    """The network that a recipe names, on the CPU in float32, with initial weights that depend on the seed alone.

    A name is one of `MODELS`, `torchvision:NAME`, `timm:NAME`, or `package.module:factory`; a factory is called like a
    built-in builder and must draw its weights from torch's default generator. UserError if there is no such name or
    option, the network takes other images or gives other logits, or training changes state of it that is not batch
    norm's.
    """
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator alone: a network is built on the CPU whatever trains it, with one set of weights.
        torch.default_generator.manual_seed(int(keyed_hash(INIT, seed)))
        network = construct(model, classes=classes, channels=channels)
        _check_parameters(model.name, network)
        for parameter in network.parameters():
            if not parameter.numel():  # without an element there is none to train, and no largest one either
                parameter.requires_grad_(False)
        if (momentum := model.batch_norm_momentum) is not None:
            layers = [module for module in network.modules() if isinstance(module, _BatchNorm)]
            if not layers:
                raise UserError(f"model.batch_norm_momentum = {momentum}: {model.name} has no batch norm")
            for layer in layers:
                layer.momentum = momentum
        _check(model.name, network, torch.randn(2, channels, *sides(image_size)), classes)
    return network


def model_of(recipe: Recipe, classes: int) -> nn.Module:
    """`build_model` by a recipe, with its frozen parameters; `classes` is used if the recipe gives no number."""
    count, channels = recipe.data.classes or classes, recipe.data.channels
    train = recipe.data.image_size
    network = build_model(recipe.model, classes=count, channels=channels, image_size=train, seed=recipe.seed)
    others = {f"stages.{n}.image_size": recipe.training_sizes(s).sides for n, s in enumerate(recipe.stages)}
    others["evaluate.image_size"] = recipe.held_out_data.sizes.sides
    checked = {sides(train)}
    for key, size in others.items():
        if size not in checked:
            _check(recipe.model.name, network, torch.zeros(2, channels, *size), count, size_key=key)
            checked.add(size)
    freeze(network, recipe.model.freeze, head_of(recipe, classes) if BODY in recipe.model.freeze else ())
    if recipe.precision != "portable":  # its convolutions are its own
        _avoid_strided_pointwise(network)
    return network


def _avoid_strided_pointwise(network: nn.Module) -> None:
    """Hands images of the plain layout to strided 1x1 convolutions of few channels."""
    # oneDNN's gradient of their weights writes past its memory where images are channels-last, with fewer than 8
    # channels under AVX2 and 16 under AVX-512 (uxlfoundation/oneDNN issue 6035; seen with torch 2.13): gradients are
    # wrong, or the process dies later.
    for layer in network.modules():
        if not isinstance(layer, nn.Conv2d) or math.prod(layer.kernel_size) > 1 or max(layer.stride) == 1:
            continue
        if layer.in_channels // layer.groups < 16:
            layer.register_forward_pre_hook(_plain_layout)


def _plain_layout(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The hook's input, which is not channels-last on a CPU."""
    return tuple(images.contiguous() if images.is_cpu else images for images in args)


def head_of(recipe: Recipe, classes: int) -> frozenset[str]:
    """Names of the tensors whose shapes depend on the number of classes, which another data set needs anew."""
    count, channels = recipe.data.classes or classes, recipe.data.channels
    # Found by building the network for one class more, which works for anybody's network.
    with torch.random.fork_rng(devices=[]):
        one, more = (construct(recipe.model, classes=count + i, channels=channels).state_dict() for i in (0, 1))
    return frozenset(name for name, tensor in one.items() if more[name].shape != tensor.shape)


def construct(model: Model, *, classes: int, channels: int) -> nn.Module:
    """The network of that name with its options, unchecked; its builder draws the weights."""
    library, colon, name = model.name.partition(":")
    if library in LIBRARIES:
        return LIBRARIES[library](name, classes=classes, channels=channels, options=model.options)
    builder = import_factory(model.name, key="model.name") if colon else MODELS.get(model.name)
    if builder is None:
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
    name = model.name
    try:
        parameters = inspect.signature(builder).parameters
    except ValueError:  # a type written in C, such as dict
        raise UserError(f"model.name: {name} doesn't say which keywords it takes; wrap it in a function") from None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in ("classes", "channels"):
        if key not in parameters:
            raise UserError(f"model.name: {name} must take the keyword {key}")
    allowed = [key for key in parameters if key not in ("classes", "channels")]
    for key, value in model.options.items():
        if key not in allowed:
            raise UserError(f"model.options.{key}: {name} has no such option; it has {', '.join(allowed) or 'none'}")
        # A whole number serves as a float; a bool is no int.
        kind, wanted = type(value), parameters[key].annotation
        if wanted in (bool, int, float, str) and kind is not wanted and (kind, wanted) != (int, float):
            raise UserError(f"model.options.{key}: needs a value of type {wanted.__name__}, got {value!r}")
    for key in allowed:
        if parameters[key].default is inspect.Parameter.empty and key not in model.options:
            raise UserError(f"model.options.{key}: {name} needs it")


def _check_parameters(name: str, network: nn.Module) -> None:
    # Gradients are summed in float32, each in the order of its parameter's memory: other parameters would be summed
    # wrongly without an error.
    memory: dict[int, str] = {}
    trained = [parameter.requires_grad for parameter in network.parameters()]
    if trained and not any(trained):
        raise UserError(f"model.name: {name} has no parameter that requires a gradient, so nothing to train")
    for key, parameter in network.named_parameters():
        what = f"model.name: {name}: the parameter {key}"
        if isinstance(parameter, UninitializedParameter):
            raise UserError(f"{what} has no size yet; give the layer its number of inputs in place of a lazy one")
        if parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"{what} is {dtype}; make it float32, the recipe's precision is that of the passes")
        if not parameter.is_contiguous():
            raise UserError(f"{what} isn't contiguous; the recipe's memory_format is for the activations alone")
        other = memory.setdefault(parameter.data_ptr(), key)
        if parameter.numel() and other != key:
            raise UserError(f"{what} lies in the memory of {other}; use one parameter for both")


def _check_graph(name: str, logits: Tensor) -> None:
    # Re-entrant checkpointing runs backward within backward, where a parameter's gradient comes in parts.
    # A walk without recursion: the graph of a deep network is deeper than Python's stack.
    seen: set[Any] = set()
    nodes = [logits.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UserError(f"model.name: {name} checkpoints re-entrantly; use checkpoint(..., use_reentrant=False)")
        nodes += [before for before, _ in node.next_functions]


def _check(name: str, network: nn.Module, images: Tensor, classes: int, size_key: str = "data.image_size") -> None:
    """One forward pass of a copy in training mode: checks the output, and that only batch norm's state has changed."""
    trial = copy.deepcopy(network).train()
    size = "x".join(map(str, images.shape[1:]))
    try:
        logits = trial(images)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        key = SIZE_OPTIONS.get(name.partition(":")[0])
        why = first_line(error) + (f"; where it is made for one size, give model.options.{key}" if key else "")
        raise UserError(f"model.name: {name} does not take {size} images ({size_key}): {why}") from error
    gave = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    if gave != (len(images), classes):
        raise UserError(
            f"model.name: {name} must give logits of shape {(len(images), classes)} for {len(images)} images, "
            f"it gave {gave}"
        )
    _check_graph(name, logits)
    before = dict(network.named_modules())
    for path, module in trial.named_modules():
        for key, value in () if isinstance(module, _BatchNorm) else module.named_buffers(recurse=False):
            known = before[path].get_buffer(key)
            # Bits and not values, for NaN is not equal to itself.
            bits = (t.flatten().contiguous().view(torch.uint8) for t in (value, known))
            if value.shape != known.shape or value.dtype != known.dtype or not torch.equal(*bits):
                raise UserError(
                    f"model.name: {name} has a module {path or '(the model)'} ({type(module).__name__}) whose buffer "
                    f"{key} changes in training; of such state only batch norm's is merged over virtual workers"
                )


def freeze(model: nn.Module, patterns: Sequence[str], head: Collection[str]) -> None:
    """Turns off the gradient of the parameters that a recipe names, in place.

    Patterns are names of parameters or of modules that hold them, or globs of either; `body` is every parameter whose
    name is not in `head`. UserError if a pattern matches nothing, or nothing is left to train.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> freeze(net, ["0"], head=[])
    >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    ['1.weight', '1.bias']
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if pattern == BODY:
            named = [name for name in parameters if name not in head]
        else:
            # A parameter's own name or that of a module that holds it: a, a.b, a.b.weight.
            owners = {name: accumulate(name.split("."), "{}.{}".format) for name in parameters}
            named = [name for name, names in owners.items() if any(fnmatchcase(each, pattern) for each in names)]
        # A pattern that matches nothing is a typing error, and would train what the user wanted to freeze.
        if not named:
            modules = [name for name, _ in model.named_modules() if name]
            raise UserError(f"model.freeze: no parameter or module {pattern!r}{suggest(pattern, modules)}")
        for name in named:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"model.freeze: {', '.join(patterns)} leave nothing to train")


def is_frozen(layer: _BatchNorm) -> bool:
    """Whether a batch norm's running statistics stay as they are and normalise, in training too."""
    # Frozen weights were trained with those statistics: with others they would mean something else. A batch norm
    # without weights of its own goes on learning.
    return isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad

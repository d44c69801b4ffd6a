"""Trained weights opened for use: of a run's folder, a checkpoint's folder, or a weight file trained elsewhere."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..data.registry import SOURCES, open_sources
from ..data.types import Source
from ..errors import UserError
from ..models import is_built_in, model_of
from ..recipe.load import apply_overrides, load_recipe, validate
from ..recipe.schema import Recipe
from ..rundir.checkpoint import FILES, list_checkpoints
from ..untrusted import parse_json
from ..weights import Tensors, load_weights, match_weights


@dataclass(frozen=True)
class Trained:
    """A model with its weights, and the data that its recipe names."""

    path: Path
    """the weight file"""
    model: nn.Module
    recipe: Recipe
    metadata: dict[str, str]
    train: Source
    held_out: Source


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, without any data."""

    path: Path
    """the weight file"""
    model: nn.Module
    """in evaluation mode, float32"""
    recipe: Recipe
    classes: tuple[str, ...]
    """names, in the order of the outputs"""


def open_model(path: Path, overrides: Sequence[str] = ()) -> TrainedModel:
    """Builds the model of a weight file that a run left, which knows its recipe and classes, and loads the weights.

    Args:
        path: A run's folder, a checkpoint's folder, or a weight file of a run.
        overrides: `key.path=value` on the recipe; code is only run if it is named here, as by `open_trained`.

    Raises:
        UserError: No weights there, not of a run, or naming code that the caller did not.
    """
    file = find_weights(path)
    tensors, metadata = load_weights(file)
    recipe = _recipe(file, metadata, None, overrides)
    classes = tuple(_class_names(file, metadata))
    network = _with_weights(file, tensors, model_of(recipe, len(classes)))
    return TrainedModel(file, network.eval(), recipe, classes)


def open_trained(
    path: Path, data: Path | None, model: str | None, classes: str | None, overrides: Sequence[str] = ()
) -> Trained:
    """Builds the model of a weight file and loads the weights.

    The recipe in the file's metadata is data and never code: whoever opens weights did not choose what it names. Only
    models and data sources that torusgd knows are taken from it; `package.module:factory` must come from the caller.

    Args:
        path: A run's folder, a checkpoint's folder, or a weight file (.safetensors, or a .pth of tensors).
        data: The data set, where the recipe's source needs a path.
        model: The network, for weights trained elsewhere; with it the data is read as the recipe `folder` says, at
            224 pixels from a shorter side of 256.
        classes: File in `data` that lists the class folders in the order of the weights' outputs.
        overrides: `key.path=value` on the recipe.

    Raises:
        UserError: No weights there, of an unknown network, not fitting it, or naming code that the caller did not.
    """
    file = find_weights(path)
    tensors, metadata = load_weights(file)
    listed = [] if classes is None else [f"data.options.classes={json.dumps(classes)}"]
    recipe = _recipe(file, metadata, model, [*listed, *overrides])
    train, held_out = open_sources(recipe.data, data, recipe.seed)
    _check_classes(file, metadata, train)
    network = _with_weights(file, tensors, model_of(recipe, len(train.classes)))
    return Trained(file, network, recipe, metadata, train, held_out)


def find_weights(path: Path) -> Path:
    """The weight file of a run's folder (finished, else its newest checkpoint), of a checkpoint's, or itself."""
    if path.is_file():
        return path
    newest = list_checkpoints(path / "checkpoints") if path.is_dir() else []
    for candidate in (path / FILES[0], *(checkpoint / FILES[0] for checkpoint in newest)):
        if candidate.is_file():
            return candidate
    raise UserError(f"{path}: holds no weights; give a run's folder, a checkpoint's folder or a weight file")


def _with_weights(file: Path, tensors: Tensors, network: nn.Module) -> nn.Module:
    expected = network.state_dict()
    for name in expected.keys() - tensors.keys():
        if name.endswith("num_batches_tracked"):  # files of before torch 0.4.1 lack it, and nothing reads it
            tensors[name] = expected[name]
    match_weights(tensors, expected, str(file))
    network.load_state_dict(tensors)
    return network


def _recipe(file: Path, metadata: dict[str, str], model: str | None, overrides: Sequence[str]) -> Recipe:
    if model is not None:
        plain = ["data.image_size=224", "data.resize=256", "precision=float32", "model.options={}"]
        return load_recipe("folder", [*plain, f"model.name={model}", *overrides]).recipe
    try:
        tree = parse_json(metadata["recipe"])
    except (KeyError, ValueError):
        raise UserError(f"{file}: doesn't say which network it is of; give --model NAME, such as resnet50") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}: its metadata holds no recipe; give --model NAME, such as resnet50")
    apply_overrides(tree, overrides)
    recipe = validate(Recipe, tree, f"{file}: recipe")
    _check_names(file, recipe, {item.partition("=")[0] for item in overrides})
    return recipe


def _check_names(file: Path, recipe: Recipe, given: set[str]) -> None:
    """UserError where the recipe of a weight file names code, unless the key is among those `given` by the user."""
    known = {
        "model.name": (recipe.model.name, is_built_in(recipe.model.name)),
        "data.source": (recipe.data.source, recipe.data.source in SOURCES),
    }
    for key, (name, is_known) in known.items():
        if not is_known and given.isdisjoint({key, key.partition(".")[0]}):
            raise UserError(
                f"{file}: its metadata names {key} {name!r}, which is not torusgd's own, and a file may not choose "
                f"what code runs; if you trust that code, give --set {key}=package.module:factory yourself"
            )


def _class_names(file: Path, metadata: dict[str, str]) -> list[str]:
    """The classes that the weights' metadata names; empty where it names none."""
    try:
        names = parse_json(metadata["classes"])
    except (KeyError, ValueError):
        return []
    if not isinstance(names, list):
        raise UserError(f"{file}: its metadata holds no list of classes; it is damaged")
    return [str(name) for name in names]


def _check_classes(file: Path, metadata: dict[str, str], train: Source) -> None:
    """Weights know their classes by name; other names in the data would give a wrong result without a word."""
    names = _class_names(file, metadata)
    if names and names != list(train.classes):
        differing = next((pair for pair in zip(names, train.classes, strict=False) if pair[0] != pair[1]), None)
        what = (
            f"{differing[0]!r} there, {differing[1]!r} here"
            if differing
            else f"{len(names)}, {len(train.classes)} here"
        )
        raise UserError(f"{file}: was trained on other classes ({what}); give the data set of the same classes")

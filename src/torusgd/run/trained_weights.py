"""Trained weights, of a run's folder, a checkpoint's, or a file trained elsewhere: opened for use, or to start from."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..data.registry import SOURCES, open_sources
from ..data.types import Source
from ..errors import UserError, as_user_error
from ..hub import hub_name, weight_file
from ..models import is_built_in, model_of
from ..models.registry import timm_pretrained
from ..recipe.load import apply_overrides, load_recipe, validate
from ..recipe.schema import Recipe
from ..rundir.checkpoint import FILES, list_checkpoints
from ..rundir.run_dir import RunDir
from ..untrusted import is_there, parse_json
from ..weights import Tensors, load_weights, match_weights

# The end of the names of counts of batch norm, which files of before torch 0.4.1 lack, and which nothing reads.
_COUNTS = "num_batches_tracked"


@dataclass(frozen=True)
class InitialWeights:
    """Weights to start from, and where they come from."""

    source: str  # for people: a file, timm:NAME, or hf:REPO@COMMIT
    tensors: Tensors


@dataclass(frozen=True)
class Fit:
    """What a network takes of initial weights, by the tensors' names."""

    source: str
    taken: list[str]
    left: dict[str, list[int]]  # tensors that are not used, with their shapes
    new: dict[str, list[int]]  # the network's tensors that stay as the seed drew them, with their shapes

    def __str__(self) -> str:
        text = f"initial weights: {len(self.taken)} tensors taken from {self.source}"
        if self.new:
            there = ", ".join(f"{name} {shape}" for name, shape in self.left.items()) or "none"
            here = ", ".join(f"{name} {shape}" for name, shape in self.new.items())
            text += f"; the head is new: {here}, drawn from the seed; left: {there}"
        return text


def read_initial(init: str, recipe: Recipe) -> InitialWeights:
    """Reads what `--init` names; UserError if there is no such thing, it can't be reached, or it holds no weights.

    A weight file; `timm` for the pretrained weights of a recipe's timm network; or `hf:REPO[@REVISION]` for the
    model.safetensors of a repository of the Hugging Face hub, or of its cache.
    """
    check_initial(init, recipe)
    if init == "timm":
        name = recipe.model.name.removeprefix("timm:")
        tensors = timm_pretrained(name, channels=recipe.data.channels, options=recipe.model.options)
        return InitialWeights(recipe.model.name, tensors)
    if (repository := hub_name(init)) is not None:
        path = weight_file(repository, f"--init {init}")
        # A branch may move on; the commit, as which the cache calls the folder, says which weights these were.
        return InitialWeights(f"hf:{repository.repository}@{path.parent.name}", load_weights(path)[0])
    return InitialWeights(init, load_weights(Path(init))[0])


def check_initial(init: str, recipe: Recipe) -> None:
    """UserError if `--init` names a file that isn't there, a network that isn't timm's, or no repository."""
    if init == "timm":
        if not recipe.model.name.startswith("timm:"):
            raise UserError(f"--init timm: needs model.name timm:NAME, not {recipe.model.name}; or give a weight file")
    elif init.startswith("hf:"):
        if hub_name(init) is None:
            raise UserError(f"--init {init}: write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    elif not Path(init).is_file():
        raise UserError(f"--init {init}: no such file")


def fit(initial: InitialWeights, network: Mapping[str, Tensor], head_of: Callable[[], Collection[str]]) -> Fit:
    """What a network, tensors by name, takes of initial weights: the body must fit, the head may be for other classes.

    `head_of` gives the names of the tensors that depend on the number of classes; it is called if not all fit.
    UserError if a tensor of the body is missing or of another shape, or there is one that the network doesn't have.
    """
    # The whole network is drawn first and the body is put over it. So a new head stays as the recipe's seed drew it,
    # wherever the body comes from.
    given = initial.tensors
    fits = [name for name, tensor in network.items() if name in given and given[name].shape == tensor.shape]
    wanted = {name: tensor for name, tensor in network.items() if name in given or not name.endswith(_COUNTS)}
    others = wanted.keys() - set(fits)
    head = set(head_of()) if others else set()
    # A head is new as a whole: half of one would be neither the file's nor the seed's.
    new = head if head and others >= head else set()
    body, expected = ({name: t for name, t in each.items() if name not in new} for each in (given, wanted))
    match_weights(body, expected, f"--init {initial.source}")
    left, drawn = ({name: list(of[name].shape) for name in sorted(new) if name in of} for of in (given, network))
    return Fit(initial.source, sorted(fits), left, drawn)


@dataclass(frozen=True)
class TrainedModel:
    """A model with its weights, without any data."""

    path: Path
    model: nn.Module  # float32; of `open_model` in evaluation mode
    recipe: Recipe
    classes: tuple[str, ...]  # names, in the order of the outputs
    metadata: dict[str, str]  # of the weight file


@dataclass(frozen=True)
class Trained(TrainedModel):
    """A model with its weights, and the data that its recipe names."""

    train: Source
    held_out: Source


def open_model(path: Path, overrides: Sequence[str] = ()) -> TrainedModel:
    """The model of a run's folder, a checkpoint's, or a weight file of a run, with the weights; see `open_trained`."""
    file = find_weights(path)
    tensors, metadata = load_weights(file)
    recipe = _recipe(file, metadata, None, overrides)
    classes = tuple(_class_names(file, metadata))
    network = _with_weights(file, tensors, model_of(recipe, len(classes))).eval()
    return TrainedModel(file, network, recipe, classes, metadata)


def open_trained(
    path: Path, data: Path | None, model: str | None, classes: str | None, overrides: Sequence[str] = ()
) -> Trained:
    """Builds the model of a weight file (see `find_weights`), loads the weights, and opens the recipe's data.

    `data` is the data set, if the source needs a path; `model` the network of weights trained elsewhere, with which the
    data is read as the recipe `folder` says, at 224 pixels from a shorter side of 256; `classes` a file in `data` that
    lists the class folders in the order of the weights' outputs; `overrides` are `key.path=value` on the recipe.
    UserError if no weights are there, or they are of an unknown network, don't fit it, or name code of their own.
    """
    file = find_weights(path)
    tensors, metadata = load_weights(file)
    listed = [] if classes is None else [f"data.options.classes={json.dumps(classes)}"]
    recipe = _recipe(file, metadata, model, [*listed, *overrides])
    train, held_out = open_sources(recipe.data, data, recipe.seed)
    # Weights know their classes by name; other names in the data would give a wrong result without a word.
    names = _class_names(file, metadata)
    if names and names != list(train.classes):
        pairs = [f"{one!r} there, {two!r} here" for one, two in zip(names, train.classes, strict=False) if one != two]
        what = next(iter(pairs), f"{len(names)}, {len(train.classes)} here")
        raise UserError(f"{file}: was trained on other classes ({what}); give the data set of the same classes")
    network = _with_weights(file, tensors, model_of(recipe, len(train.classes)))
    return Trained(file, network, recipe, tuple(train.classes), metadata, train, held_out)


def find_weights(path: Path) -> Path:
    """The weight file of a run's folder (finished, else its newest checkpoint), of a checkpoint's, or itself."""
    if path.is_file():
        return path
    run = RunDir(path)
    if is_there(run.summary) and not is_there(run.model):  # a checkpoint's are not those that the summary names
        remedy = f"the same torusgd train writes it again from a checkpoint, or give one of {run.checkpoints}"
        raise UserError(f"{run.model}: is gone, though the run is finished; {remedy}")
    with as_user_error(f"{path}: can't be read"):
        for folder in (path, *(list_checkpoints(path / "checkpoints") if path.is_dir() else ())):
            if is_there(folder / FILES[0]):
                return folder / FILES[0]
    raise UserError(f"{path}: holds no weights; give a run's folder, a checkpoint's folder or a weight file")


def _with_weights(file: Path, tensors: Tensors, network: nn.Module) -> nn.Module:
    expected = network.state_dict()
    tensors = {name: each for name, each in expected.items() if name.endswith(_COUNTS)} | tensors
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
    check_names(file, recipe, {item.partition("=")[0] for item in overrides})
    return recipe


def check_names(file: Path, recipe: Recipe, given: set[str]) -> None:
    """UserError if the recipe that stands in a stranger's file names code that is not among the keys `given`."""
    # The recipe in a file's metadata is data and never code: whoever opens weights did not choose what it names. So
    # `package.module:factory` counts only if the key is among those that the user has given.
    model, source = recipe.model.name, recipe.data.source
    for key, name, is_known in (("model.name", model, is_built_in(model)), ("data.source", source, source in SOURCES)):
        if not is_known and given.isdisjoint({key, key.partition(".")[0]}):
            why = "which is not torusgd's own, and a file may not choose what code runs"
            remedy = f"if you trust that code, give --set {key}=package.module:factory yourself"
            raise UserError(f"{file}: its metadata names {key} {name!r}, {why}; {remedy}")


def _class_names(file: Path, metadata: dict[str, str]) -> list[str]:
    try:
        names = parse_json(metadata["classes"])
    except (KeyError, ValueError):
        return []
    if not isinstance(names, list):
        raise UserError(f"{file}: its metadata holds no list of classes; it is damaged")
    return [str(name) for name in names]

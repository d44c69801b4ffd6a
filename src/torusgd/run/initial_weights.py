"""The weights that a run starts from, and how they fit its network: the body must fit, the head may be another.

A head that fits is kept. One for another number of classes stays as the recipe's seed drew it: the whole network is
drawn first and the body is put over it, so that the head's values don't depend on where the body comes from.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import UserError
from ..hub import hub_name, weight_file
from ..models.libraries import timm_pretrained
from ..recipe.schema import Recipe
from ..weights import Tensors, load_weights, match_weights

_COUNTS = "num_batches_tracked"


@dataclass(frozen=True)
class InitialWeights:
    """Weights to start from, and where they come from."""

    source: str
    """for people: a file, timm:NAME, or hf:REPO@COMMIT"""
    tensors: Tensors


@dataclass(frozen=True)
class Fit:
    """What a network takes of initial weights, by the tensors' names."""

    source: str
    taken: list[str]
    left: dict[str, list[int]]
    """tensors that are not used, with their shapes"""
    new: dict[str, list[int]]
    """the network's tensors that stay as the seed drew them, with their shapes"""

    def __str__(self) -> str:
        text = f"initial weights: {len(self.taken)} tensors taken from {self.source}"
        if self.new:
            there = ", ".join(f"{name} {shape}" for name, shape in self.left.items()) or "none"
            here = ", ".join(f"{name} {shape}" for name, shape in self.new.items())
            text += f"; the head is new: {here}, drawn from the seed; left: {there}"
        return text


def read_initial(init: str, recipe: Recipe) -> InitialWeights:
    """Reads what `--init` names.

    Args:
        init: A weight file; `timm` for the pretrained weights of a recipe's timm network; or `hf:REPO[@REVISION]` for
            the model.safetensors of a repository of the Hugging Face hub, or of its cache.
        recipe: Of the run.

    Raises:
        UserError: There is no such thing, it can't be reached, or it holds no weights.
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
    """What can be said of `--init` before any rank is started.

    Raises:
        UserError: It names a file that isn't there, a network that isn't timm's, or no repository.
    """
    if init == "timm":
        if not recipe.model.name.startswith("timm:"):
            raise UserError(f"--init timm: needs model.name timm:NAME, not {recipe.model.name}; or give a weight file")
    elif init.startswith("hf:"):
        if hub_name(init) is None:
            raise UserError(f"--init {init}: write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    elif not Path(init).is_file():
        raise UserError(f"--init {init}: no such file")


def fit(initial: InitialWeights, network: Mapping[str, Tensor], head_of: Callable[[], Collection[str]]) -> Fit:
    """What a network takes.

    Args:
        initial: The weights.
        network: Its tensors by name.
        head_of: Names of the tensors that depend on the number of classes; called if not all fit.

    Raises:
        UserError: A tensor of the body is missing or of another shape, or there is one that the network doesn't have.
    """
    given = initial.tensors
    fits = [name for name, tensor in network.items() if name in given and given[name].shape == tensor.shape]
    # Files of before torch 0.4.1 lack the counts of batch norm, which nothing reads.
    others = {name for name in network.keys() - set(fits) if name in given or not name.endswith(_COUNTS)}
    if others:
        head = set(head_of())
        # A head is new as a whole: half of one would be neither the file's nor the seed's.
        new = head if head and others >= head else set()
        body = {name: tensor for name, tensor in network.items() if name not in new}
        expected = {name: t for name, t in body.items() if name in given or not name.endswith(_COUNTS)}
        match_weights({name: t for name, t in given.items() if name not in new}, expected, f"--init {initial.source}")
    else:
        new = set()
        match_weights(given, {name: network[name] for name in fits}, f"--init {initial.source}")
    return Fit(
        initial.source,
        sorted(fits),
        {name: list(given[name].shape) for name in sorted(new) if name in given},
        {name: list(network[name].shape) for name in sorted(new)},
    )

"""Whether this torch takes a network's passes apart as another one does: else portable arithmetic has other bits.

A run's own operators are in its fingerprint, which ranks and checkpoints compare. Those of the built-in networks, and
of families of torchvision and timm, are stored with the torch that gave them (`tools/operator_sequences.py`).
"""

import copy
import json
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..arithmetic import operators_of
from ..data.pipeline import Batch
from ..errors import UserError
from ..models.registry import construct
from ..recipe.schema import Model, Recipe
from ..recipe.section import sides
from ..step.forward_backward import loss_of

_IMAGES = 2
_CLASSES = 10
STORED = "operators.json"


def operators_of_passes(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """The words (`arithmetic.operators_of`) of forward, loss and backward of a copy of the network, on the CPU."""
    trial, settings = copy.deepcopy(model).cpu().train(), recipe.data.augment
    images, labels = torch.zeros(_IMAGES, recipe.data.channels, *recipe.data.sizes.sides), torch.zeros(_IMAGES).long()
    mixed = (labels, torch.ones(_IMAGES)) if settings.mixup or settings.cutmix else (None, None)
    batch = Batch(images, labels, np.arange(_IMAGES), 0, *mixed)
    with torch.random.fork_rng(devices=[]):
        return operators_of(lambda: loss_of(recipe, trial(images), labels, batch).backward())


def words_of(name: str, entry: dict[str, Any]) -> tuple[str, ...]:
    """The words of a network by name, with the options, channels and image size of its stored entry."""
    images = torch.zeros(_IMAGES, entry["channels"], *sides(entry["size"]))
    labels = torch.zeros(_IMAGES, dtype=torch.int64)

    def passes() -> None:
        F.cross_entropy(trial(images), labels, label_smoothing=0.1).backward()

    with torch.random.fork_rng(devices=[]):
        model = Model(name=name, options=entry["options"])
        trial = construct(model, classes=_CLASSES, channels=entry["channels"]).train()
        return operators_of(passes)


def code_of(words: tuple[str, ...]) -> str:
    """A hexadecimal digit for each word: a change reaches nearly all words behind it."""
    return "".join(word[-1] for word in words)


def library_of(name: str) -> str:
    """Name and version of the library that a network is of; empty: torusgd."""
    library, colon, _ = name.partition(":")
    try:
        return f"{library} {version(library)}" if colon else ""
    except PackageNotFoundError:
        return ""


def check_stored(name: str) -> None:
    """UserError if a network whose operators are stored has others by this torch.

    Networks of another version of their library have operators of their own, which say nothing.
    """
    stored = json.loads(files(__package__).joinpath(STORED).read_text())
    entry = stored.get(name)
    if entry is None or entry["library"] != library_of(name):
        return
    words = words_of(name, entry)
    # Sorted: C++ may work out the arguments of a function in any order, and builds for x86 and aarch64 differ in it. A
    # word has the hashes of what made its operands, so the same words are the same computation.
    if sorted(code := code_of(words)) != sorted(entry["code"]):
        pairs = zip(code, entry["code"], strict=False)
        place = next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(words) - 1)
        raise UserError(
            f"portable arithmetic: torch {torch.__version__} computes {name} otherwise than torch {entry['torch']}, "
            f"from operator {place} of {len(words)} on, {words[place].partition('.')[0]}: weights would have other "
            f"bits; use torch {entry['torch']}, or precision: float32"
        )

"""From a recipe's optimizer section and a model to an optimizer whose groups follow the exclusion rules."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ..recipe import schema as recipe
from ..scalars import power
from .adam import AdamW, Lamb
from .lars import Lars
from .sgd import Sgd

Kind = Literal["weight", "norm", "bias"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """The kind of each parameter, by its full name, in the model's order; a shared parameter once.

    `norm`: all of a normalisation module (torch's, or with "norm" in its class name); `bias`: of others, named so.
    """
    kinds: dict[str, Kind] = {}
    for name, _ in model.named_parameters():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, _NORMS) or "norm" in type(module).__name__.lower():
            kinds[name] = "norm"
        else:
            kinds[name] = "bias" if last.endswith("bias") else "weight"
    return kinds


def rate_factors(settings: recipe.Optimizer, model: nn.Module, head: Collection[str]) -> dict[str, float]:
    """The factor on the rate of each parameter by its name: `layer_decay` to the power of its distance to the head.

    A layer is all parameters with the same name up to the first number that is a part of it or ends one after an
    underscore (`blocks.3`, `encoder_layer_3`), or else the module; norms and biases alone belong to the layer before
    them (layer-wise decay as in ELECTRA, Clark et al., arXiv 2003.10555, and BEiT). The head's factor is `head_lr`.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Linear(2, 3))
    >>> rates = recipe.Optimizer(layer_decay=0.5, head_lr=10.0)
    >>> list(rate_factors(rates, net, head=["3.weight", "3.bias"]).values())
    [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 10.0, 10.0]
    """
    kinds = {name: kind for name, kind in parameter_kinds(model).items() if name not in head}
    # Only layers with a weight count: a norm between two layers is no step of its own.
    weighty = {_layer(name) for name, kind in kinds.items() if kind == "weight"}
    layers, last, layer_of = dict[str, int](), 0, dict[str, int]()
    for name in kinds:
        if (layer := _layer(name)) in weighty:
            last = layers.setdefault(layer, len(layers))
        layer_of[name] = last
    factors = {name: power(settings.layer_decay, max(len(layers), 1) - layer) for name, layer in layer_of.items()}
    return {name: factors.get(name, settings.head_lr) for name, _ in model.named_parameters()}


def build_optimizer(
    settings: recipe.Optimizer,
    model: nn.Module,
    lr: float,
    blocks: Mapping[str, Sequence[Tensor]] | None = None,
    head: Collection[str] = (),
) -> Optimizer:
    """The optimizer of a recipe over a model's trainable parameters, in groups by weight decay, trust and rate factor.

    `lr` is the recipe's highest; each step sets its own (`set_hyperparameters`). `blocks` are column blocks, maybe
    none, that this rank updates in place of the parameter of that name; `head` are the tensors that depend on the
    number of classes, for `head_lr` and `layer_decay`.
    """
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    factors = rate_factors(settings, model, head)
    by_layer = settings.name in ("lars", "lamb")
    parameters = dict(model.named_parameters())
    for name, kind in parameter_kinds(model).items():
        given = [parameters[name]] if parameters[name].requires_grad else []
        tensors = given if blocks is None else blocks.get(name, given)
        if tensors:
            factor = factors[name] * (settings.bias_rate if kind == "bias" else 1.0)
            rule = (kind not in settings.no_decay, by_layer and kind not in settings.no_trust, factor)
            groups.setdefault(rule, []).extend(tensors)
    described: list[dict[str, Any]] = []
    for (decays, trusts, factor), params in groups.items():
        decay = settings.weight_decay if decays else 0.0
        trust = {"lars": settings.trust if trusts else None, "lamb": trusts}
        described.append({
            "params": params, "weight_decay": decay, "base_weight_decay": decay, "rate_factor": factor,
            **({"trust": trust[settings.name]} if by_layer else {}),
        })  # fmt: skip
    if settings.name == "sgd":
        return Sgd(described, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov)
    if settings.name == "lars":
        return Lars(described, lr=lr, momentum=settings.momentum, eps=settings.eps, variant=settings.variant)
    if settings.name == "adamw":
        return AdamW(described, lr, settings.momentum, settings.beta2, settings.eps or 1e-8)
    return Lamb(described, lr, settings.momentum, settings.beta2, settings.eps or 1e-6)


def _layer(name: str) -> str:
    numbered = re.match(r"(?:[^.]+\.)*?(?:[^.]*_)?[0-9]+(?=\.)", name)
    return numbered[0] if numbered else name.rpartition(".")[0]

"""From a recipe's optimizer section and a model to an optimizer whose groups follow the exclusion rules."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ..recipe import optimizer_schema as recipe
from .lars import Lars, Norms
from .norms import layer_norms
from .sgd import Sgd

Kind = Literal["weight", "norm", "bias"]

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def parameter_kinds(model: nn.Module) -> dict[str, Kind]:
    """What each parameter is, by its full name, in the model's order; a shared parameter once.

    `norm`: all of a normalisation module (torch's, or a class with "norm" in its name that holds parameters itself);
    `bias`: of any other module, named so; `weight`: the rest.
    """
    kinds: dict[str, Kind] = {}
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters():
        owner, _, last = name.rpartition(".")
        module = modules[owner]
        if isinstance(module, _NORMS) or "norm" in type(module).__name__.lower():
            kinds[name] = "norm"
        else:
            kinds[name] = "bias" if last.endswith("bias") else "weight"
    return kinds


def build_optimizer(
    settings: recipe.Optimizer,
    model: nn.Module,
    lr: float,
    blocks: Mapping[str, Sequence[Tensor]] | None = None,
    norms: Norms = layer_norms,
) -> Optimizer:
    """The optimizer of a recipe over a model's trainable parameters.

    Args:
        settings: The recipe's `optimizer` section.
        model: Its parameters become a few groups, by weight decay, trust and factor on the rate; each group carries
            `base_weight_decay` and `rate_factor`, by which `set_hyperparameters` goes.
        lr: The recipe's highest rate (`rate.lr`); each step sets its own.
        blocks: By name, the column blocks that this rank updates in a parameter's stead, maybe none.
        norms: For LARS: of whole layers, where the groups hold blocks of them.

    Returns:
        `Sgd` or `Lars`.
    """
    groups: dict[tuple[bool, bool, float], list[Tensor]] = {}
    parameters = dict(model.named_parameters())
    for name, kind in parameter_kinds(model).items():
        given = [parameters[name]] if parameters[name].requires_grad else []
        tensors = given if blocks is None else blocks.get(name, given)
        if tensors:
            trusts = settings.name == "lars" and kind not in settings.no_trust
            rule = (kind not in settings.no_decay, trusts, settings.bias_rate if kind == "bias" else 1.0)
            groups.setdefault(rule, []).extend(tensors)
    described = []
    for (decays, trusts, factor), params in groups.items():
        decay = settings.weight_decay if decays else 0.0
        group = {"params": params, "weight_decay": decay, "base_weight_decay": decay, "rate_factor": factor}
        described.append({**group, "trust": settings.trust if trusts else None} if settings.name == "lars" else group)
    if settings.name == "sgd":
        return Sgd(described, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov)
    return Lars(described, lr=lr, momentum=settings.momentum, eps=settings.eps, variant=settings.variant, norms=norms)


def set_hyperparameters(optimizer: Optimizer, *, lr: float, momentum: float, weight_decay_factor: float = 1.0) -> None:
    """Gives every group the values of the coming step, times its own `rate_factor` and `base_weight_decay`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate_factor", 1.0)
        group["momentum"] = momentum
        group["weight_decay"] = group["base_weight_decay"] * weight_decay_factor

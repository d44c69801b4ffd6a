import pytest
import torch
from torch import nn

from torusgd.optim import Lars, Sgd, build_optimizer, parameter_kinds, set_hyperparameters
from torusgd.recipe import schema as recipe


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.groups = nn.GroupNorm(2, 4)
        self.own = ScaleNorm()
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 2)
        self.tied = self.head


def names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    by_id = {id(p): name for name, p in model.named_parameters()}
    return [{by_id[id(p)] for p in group["params"]} for group in optimizer.param_groups]


WEIGHTS = {"conv.weight", "attention.in_proj_weight", "attention.out_proj.weight", "head.weight"}
BIASES = {"attention.in_proj_bias", "attention.out_proj.bias", "head.bias"}
NORMS = {"bn.weight", "bn.bias", "groups.weight", "groups.bias", "own.gain"}


def test_the_settings_of_lars_reach_its_groups() -> None:
    settings = recipe.Optimizer(name="lars", weight_decay=1e-4, trust=0.02, eps=1e-6, variant="mxnet", momentum=0.8)
    optimizer = build_optimizer(settings, Net(), lr=13.0)
    assert isinstance(optimizer, Lars)
    first, second = optimizer.param_groups
    assert (first["trust"], first["weight_decay"], first["eps"], first["variant"]) == (0.02, 1e-4, 1e-6, "mxnet")
    assert (first["lr"], first["peak_lr"], first["momentum"]) == (13.0, 13.0, 0.8)
    assert (second["trust"], second["weight_decay"]) == (None, 0.0)


@pytest.mark.parametrize(("settings", "kind", "expected"), [
    ({"name": "lars"}, Lars, {(True, True): WEIGHTS, (False, False): BIASES | NORMS}),
    ({"name": "lars", "no_decay": ("bias",), "no_trust": ("norm",)}, Lars,
     {(True, True): WEIGHTS, (True, False): NORMS, (False, True): BIASES}),
    ({"name": "sgd", "no_decay": (), "nesterov": True}, Sgd, {(True, False): WEIGHTS | BIASES | NORMS}),
])  # fmt: skip
def test_decay_and_trust_are_for_the_kinds_that_no_rule_excludes(settings, kind: type, expected) -> None:
    model = Net()
    optimizer = build_optimizer(recipe.Optimizer(weight_decay=1e-4, **settings), model, lr=1.0)
    assert isinstance(optimizer, kind)
    assert {group.get("nesterov", False) for group in optimizer.param_groups} == {"nesterov" in settings}
    assert expected == {
        (group["weight_decay"] > 0, group.get("trust") is not None): members
        for group, members in zip(optimizer.param_groups, names(model, optimizer), strict=True)
    }


def test_kinds_and_frozen_parameters_that_are_left_out() -> None:
    kinds = parameter_kinds(Net())
    for expected, kind in ((WEIGHTS, "weight"), (BIASES, "bias"), (NORMS, "norm")):
        assert {name for name, found in kinds.items() if found == kind} == expected
    model = Net()
    model.conv.requires_grad_(False)
    optimizer = build_optimizer(recipe.Optimizer(), model, lr=0.1)
    assert set().union(*names(model, optimizer)) == (WEIGHTS | BIASES | NORMS) - {"conv.weight"}


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_rates_and_values_of_a_step_reach_every_group_and_biases_alone_get_caffes_doubled_rate(name: str) -> None:
    model = Net()
    settings = recipe.Optimizer.model_validate({"name": name, "bias_rate": 2.0})
    optimizer = build_optimizer(settings, model, lr=1.0)
    set_hyperparameters(optimizer, lr=0.3, momentum=0.7)
    found = dict(zip((group["lr"] for group in optimizer.param_groups), names(model, optimizer), strict=True))
    assert found[0.6] == BIASES
    assert set().union(*names(model, optimizer)) - found[0.6] == WEIGHTS | NORMS
    settings = recipe.Optimizer.model_validate({"name": name, "weight_decay": 0.01})
    optimizer = build_optimizer(settings, Net(), lr=1.0)
    for factor in (0.5, 0.25):
        set_hyperparameters(optimizer, lr=0.3, momentum=0.7, weight_decay_factor=factor)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01 * factor, 0.0]
        assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.3, 0.7)}

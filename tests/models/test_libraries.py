"""timm's classifiers by name and its pretrained weights, with a stand-in for timm, which the tests don't install."""

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.messages import INDEX, refused
from torch import nn

from torusgd.models import build_model
from torusgd.models.registry import timm_pretrained
from torusgd.recipe.schema import Model

CONFIGS = {
    "net": SimpleNamespace(has_weights=True, hf_hub_id="timm/net", url=""),
    "net.unreachable": SimpleNamespace(has_weights=True, hf_hub_id="", url="https://example.org/net.pth"),
    "bare": SimpleNamespace(has_weights=False, hf_hub_id="", url=""),
}


def create_model(name: str, pretrained: bool = False, num_classes=1000, in_chans=3, width: int = 2) -> nn.Module:
    """A network of timm's making; pretrained, its weights are ones."""
    if name == "net.unreachable" and pretrained:
        raise OSError("no net\nmore")
    layers = nn.Sequential(nn.Conv2d(in_chans, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = layers.append(nn.Linear(width, num_classes))
    for parameter in network.parameters() if pretrained else ():
        nn.init.ones_(parameter)
    return network


def config_of(name: str) -> Any:
    """timm's answer for a name with or without a tag."""
    if name.endswith(".wrong"):
        raise RuntimeError("Invalid pretrained tag (wrong) for net.")
    return CONFIGS.get(name)


@pytest.fixture(autouse=True)
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"create_model": create_model, "get_pretrained_cfg": config_of}
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(list_models=lambda: ["bare", "net"], **functions))


def build(name: str, channels: int = 1, **options: Any) -> nn.Module:
    model = Model(name=name, options=options)
    return build_model(model, classes=5, channels=channels, image_size=8, seed=0)


def test_a_network_has_the_datas_classes_its_options_and_the_weights_of_the_seed_or_those_it_was_trained_with() -> None:
    network = build("timm:net.some_tag", width=4)
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    assert [len(tensor) for name, tensor in network.named_parameters() if "bias" in name] == [4, 5]
    assert all(torch.equal(*pair) for pair in zip(*(build("timm:net").parameters() for _ in "ab"), strict=True))
    tensors = timm_pretrained("net", channels=1, options={"width": 3})
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"0.weight": [3, 1, 3, 3], "0.bias": [3], "3.weight": [1000, 3], "3.bias": [1000]}
    assert all((tensor == 1).all() for tensor in tensors.values())
    for name in ("bare", "net.unreachable"):
        with refused(f"timm's weights of {name}", "--init timm: "):
            timm_pretrained(name, channels=1, options={})


def test_mistakes_are_one_line_and_without_timm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"pretrained": True}, {"num_classes": 3}, {"depth": 3})
    names = ("timm:nett", "timm:net.wrong", "timm:hf-hub:me/net")
    for name, options in (*((name, {}) for name in names), *(("timm:net", each) for each in wrong)):
        with refused(f"model {name} {options}", "model."):
            build(name, **options)
    monkeypatch.setitem(sys.modules, "timm", None)
    with refused("timm is not installed", INDEX=INDEX, TORCH=torch.__version__, PYTHONS=re.compile(r"\([^()]*\)(?=;)")):
        build("timm:net")

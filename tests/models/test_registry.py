"""build_model: weights from the seed alone, mistakes in one line; timm by a stand-in, which the tests don't install."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.commands import ran
from tests.messages import INDEX, refused, refuses
from torch import nn

from torusgd.models import MODELS, build_model, model_of
from torusgd.models.registry import timm_pretrained
from torusgd.recipe.load import load_recipe
from torusgd.recipe.schema import Model
from torusgd.recipe.section import Options

REASON = re.compile(r"(?<=_size\): )[^;]*")  # torch's
MISSING: dict[str, Any] = {"INDEX": INDEX, "TORCH": torch.__version__, "PYTHONS": re.compile(r"\([^()]*\)(?=;)")}


def build(name: str, options: Options | None = None, *, seed: int = 0) -> nn.Module:
    return build_model(Model(name=name, options=options or {}), classes=10, channels=1, image_size=8, seed=seed)


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in pairs)


def test_the_same_seed_gives_the_same_weights_whatever_the_callers_random_state() -> None:
    torch.manual_seed(1)
    first = build("digits-net", {"dropout": 0.5})
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert equal(first, build("digits-net", {"dropout": 0.5}))
    assert torch.equal(torch.get_rng_state(), before), "and leaves it alone"
    for seed in (1, 2**63 - 1):
        assert not equal(first, build("digits-net", {"dropout": 0.5}, seed=seed))


@pytest.mark.parametrize("name", ["digits-net", "fashion-net", "resnet18", "resnet50", "alexnet-bn"])
def test_built_in_models_pass_the_check_untouched(name: str) -> None:
    model = build_model(Model(name=name), classes=10, channels=3, image_size=64, seed=0)
    for key, value in model.state_dict().items():
        assert value.is_contiguous()
        assert not key.endswith("num_batches_tracked") or value == 0
    assert model(torch.rand(2, 3, 64, 64)).shape == (2, 10)


WRONG: list[tuple[str, Any]] = [
    ("resnet-50", {}), ("x", {}), ("torchvision:resnet18", {}), ("vgg-a", {"width": 4}),
    *(("digits-net", wrong) for wrong in ({"widht": 8}, {"width": 8.5}, {"width": True})),
    *(("digits-net", wrong) for wrong in ({"dropout": "much"}, {"zero_gamma": 1})),
]  # fmt: skip


def test_mistakes_and_a_size_that_a_network_does_not_take_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, options in WRONG:
        refuses(f"model {name} {options}", build, name, options, REASON=REASON)
    build("digits-net", {"dropout": 0})  # a whole number serves as a float
    for name in ("torchvision", "torchvision.models"):  # another test may have imported the second already
        monkeypatch.setitem(sys.modules, name, None)
    with refused("torchvision is not installed", **MISSING):
        build_model(Model(name="torchvision:resnet18"), classes=10, channels=3, image_size=32, seed=0)
    small = ["model.options.width=8", "data.classes=20", "column_blocks=1"]
    assert model_of(load_recipe("intel-cddnn-16", small).recipe, 20) is not None
    other = load_recipe("intel-cddnn-16", [*small, "evaluate={image_size: [9, 39]}"]).recipe
    refuses("images of evaluation that a network does not take", model_of, other, 20, REASON=REASON)


OWN = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
def plain(*, classes, channels, hidden: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, hidden), nn.ReLU(), nn.Linear(hidden, classes))
def anything(**options):
    return plain(classes=options["classes"], channels=options["channels"])
def needs(*, classes, channels, hidden: int):
    return plain(classes=classes, channels=channels, hidden=hidden)
def no_classes(channels):
    return nn.Flatten()
def wrong_shape(*, classes, channels):
    return plain(classes=classes + 1, channels=channels)
def tuple_output(*, classes, channels):
    return nn.MaxPool2d(2, return_indices=True)
def a_number(*, classes, channels):
    return 3
def counting(*, classes, channels):
    return nn.Sequential(plain(classes=classes, channels=channels), Counter(True))
def instance_norm(*, classes, channels):
    norm = nn.InstanceNorm2d(channels, track_running_stats=True)
    return nn.Sequential(norm, plain(classes=classes, channels=channels))
def norm_and_constants(*, classes, channels):
    return nn.Sequential(nn.BatchNorm2d(channels), Counter(False), plain(classes=classes, channels=channels))
class Counter(nn.Module):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts
        self.register_buffer("calls", torch.tensor([float("nan"), 0.0]))
    def forward(self, x):
        self.calls[1] += self.counts
        return x
def double(*, classes, channels):
    return plain(classes=classes, channels=channels).double()
def channels_last(*, classes, channels):
    net = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.Conv2d(4, 4, 3, padding=1), plain(classes=classes, channels=4))
    return net.to(memory_format=torch.channels_last)
def frozen(*, classes, channels):
    return plain(classes=classes, channels=channels).requires_grad_(False)

def lazy(*, classes, channels):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))

def momentum_of_text(*, classes, channels):
    return nn.Sequential(nn.BatchNorm2d(channels, momentum="x"), plain(classes=classes, channels=channels))

def shared(*, classes, channels):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), plain(classes=classes, channels=channels))
    net[1].weight = nn.Parameter(net[0].weight.data)
    return net
class Reentrant(nn.Sequential):
    def __init__(self, classes, channels):
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), plain(classes=classes, channels=channels))
    def forward(self, x):
        return checkpoint(self[1], self[0](x), use_reentrant=True)

def without_elements(*, classes, channels):
    net = plain(classes=classes, channels=channels)
    net.none = nn.Parameter(torch.zeros(0, 5))
    return net
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, in the folder where the command is run."""
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return tmp_path


def test_a_model_of_ones_own_is_found_in_the_current_folder_and_seeded_and_mistakes_in_it_named(own_module: Path):
    for name in ("plain", "anything", "norm_and_constants"):
        model = build(f"own_nets:{name}", seed=5)
        assert model.eval()(torch.rand(3, 1, 8, 8)).shape == (3, 10)
        assert equal(model, build(f"own_nets:{name}", seed=5))
    trained = [name for name, p in build("own_nets:without_elements").named_parameters() if p.requires_grad]
    assert "none" not in trained, "the sum of its gradients would look for the largest one"
    assert build("own_nets:plain", {"hidden": 7}).get_parameter("1.weight").shape == (7, 64)
    refuses("an option of an own model", build, "own_nets:plain", {"width": 7})
    for name in WRONG_OWN:
        refuses(f"a model of one's own: {name}", build, name, OWN=own_module)


WRONG_OWN = (
    "own_nets:", "not there:plain", "nowhere_nets:plain", "own_nets:missing", "own_nets:number", "own_nets:needs",
    "own_nets:no_classes", "own_nets:a_number", "own_nets:wrong_shape", "own_nets:tuple_output", "own_nets:counting",
    "own_nets:instance_norm", "builtins:dict", "own_nets:frozen", "own_nets:lazy", "own_nets:momentum_of_text",
    # What breaks the sums of gradients:
    "own_nets:double", "own_nets:channels_last", "own_nets:shared", "own_nets:Reentrant",
)  # fmt: skip


def test_torchvision_classifier() -> None:
    pytest.importorskip("torchvision", exc_type=ImportError)
    model = build_model(Model(name="torchvision:resnet18"), classes=10, channels=3, image_size=32, seed=0)
    assert list(model.state_dict()) == list(MODELS["resnet18"](classes=10, channels=3).state_dict())
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


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
    """Its answer for a name with or without a tag."""
    if name.endswith(".wrong"):
        raise RuntimeError("Invalid pretrained tag (wrong) for net.")
    return CONFIGS.get(name)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"create_model": create_model, "get_pretrained_cfg": config_of}
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(list_models=lambda: ["bare", "net"], **functions))


@pytest.mark.usefixtures("timm")
def test_a_network_has_the_datas_classes_its_options_and_the_weights_of_the_seed_or_those_it_was_trained_with() -> None:
    network = build("timm:net.some_tag", {"width": 4})
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert [len(tensor) for name, tensor in network.named_parameters() if "bias" in name] == [4, 10]
    assert all(torch.equal(*pair) for pair in zip(*(build("timm:net").parameters() for _ in "ab"), strict=True))
    tensors = timm_pretrained("net", channels=1, options={"width": 3})
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {"0.weight": [3, 1, 3, 3], "0.bias": [3], "3.weight": [1000, 3], "3.bias": [1000]}
    assert all((tensor == 1).all() for tensor in tensors.values())
    for name in ("bare", "net.unreachable"):
        refuses(f"timm's weights of {name}", timm_pretrained, name, channels=1, options={}, about="--init timm: ")


@pytest.mark.usefixtures("timm")
def test_mistakes_are_one_line_and_without_timm_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"pretrained": True}, {"num_classes": 3}, {"depth": 3})
    names = ("timm:nett", "timm:net.wrong", "timm:hf-hub:me/net")
    for name, options in (*((name, {}) for name in names), *(("timm:net", each) for each in wrong)):
        refuses(f"model {name} {options}", build, name, options, about="model.")
    monkeypatch.setitem(sys.modules, "timm", None)
    refuses("timm is not installed", build, "timm:net", **MISSING)


@pytest.mark.timeout(120)
def test_no_gradient_is_written_past_its_memory_with_few_channels() -> None:
    """Under a C library that looks at its heap; where there is none, by the process not dying of it."""
    script = """
import torch
from torusgd.models.registry import model_of
from torusgd.recipe.load import load_recipe
recipe = load_recipe("digits", ["model.options.width=4"]).recipe
network = model_of(recipe, 10).train()
torch.set_num_threads(1)
for _ in range(200):
    network(torch.empty(8, 1, 8, 8, memory_format=torch.channels_last).normal_()).sum().backward()
"""
    heap = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
    ran([sys.executable, "-c", script], env={**os.environ, **heap}, timeout=100)
